"""A GGUF file's vocabulary (`tokenizer.ggml.*`) as a tokenizer.json, so that GGUF and Hugging Face models meet in one tokenizer.

Two kinds of vocabulary are known: "gpt2" (byte-level BPE; its pre-tokenizers are in pretokenizers.py) and "llama" (SentencePiece
BPE with byte fallback, whose scores become an order of merges). Others are refused by name. This module reads no files: it is
given lists.

Token types are GGUF's: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte. Unknown and control tokens become special
added tokens, user-defined ones added tokens that are not special; both are found in raw text before anything else. Padding rows
(unused tokens that no merge makes) stay out of the vocabulary: they stand for no text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from kvist.errors import ModelFormatError, UnsupportedModelError
from kvist.text.info import SPACE_MARK, TURN_ENDS, TokenizerInfo
from kvist.text.pretokenizers import find_pretokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


class GGUFVocabulary(Protocol):
    """The metadata under `tokenizer.ggml.`; None where the file says nothing."""

    @property
    def model(self) -> str: ...
    @property
    def pre(self) -> str | None: ...
    @property
    def tokens(self) -> Sequence[str]: ...
    @property
    def scores(self) -> Sequence[float] | None: ...
    @property
    def types(self) -> Sequence[int] | None: ...
    @property
    def merges(self) -> Sequence[str] | None: ...
    @property
    def add_bos(self) -> bool | None: ...
    @property
    def add_space_prefix(self) -> bool | None: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def eot_token_id(self) -> int | None: ...
    @property
    def eom_token_id(self) -> int | None: ...
    @property
    def unk_token_id(self) -> int | None: ...
    @property
    def pad_token_id(self) -> int | None: ...


def from_gguf(vocab: GGUFVocabulary) -> tuple[bytes, TokenizerInfo]:
    """The tokenizer.json and the info of a GGUF vocabulary.

    Raises UnsupportedModelError for an unknown kind or pre-tokenizer, ModelFormatError for metadata that contradicts itself.
    """
    if vocab.model not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"The GGUF tokenizer {vocab.model!r} is not supported; kvist knows gpt2 (byte-level BPE) and llama (SentencePiece)."
        )
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(vocab.tokens)]
    _check_lengths(vocab, tokens)
    types = _types(vocab, tokens)
    return _byte_level(vocab, tokens, types) if vocab.model == "gpt2" else _sentencepiece(vocab, tokens, types)


def _check_lengths(vocab: GGUFVocabulary, tokens: list[str]) -> None:
    if not tokens:
        raise ModelFormatError("The GGUF file has an empty tokenizer.ggml.tokens; convert the model again.")
    for name in ("scores", "types"):
        values = getattr(vocab, name)
        if values is not None and len(values) < len(tokens):
            raise ModelFormatError(f"The GGUF file has {len(tokens)} tokens but {len(values)} {name}; convert the model again.")
    seen: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if (first := seen.setdefault(token, i)) != i:
            raise ModelFormatError(f"The GGUF file has the token {token!r} twice, as {first} and {i}; convert the model again.")
    for name in ("bos", "eos", "eot", "eom", "unk", "pad"):
        token_id = getattr(vocab, f"{name}_token_id")
        if token_id is not None and not 0 <= token_id < len(tokens):
            raise ModelFormatError(
                f"The GGUF file's {name} token id {token_id} is not one of its {len(tokens)} tokens; convert the model again."
            )


def _types(vocab: GGUFVocabulary, tokens: list[str]) -> list[int]:
    """Token types, with those made up that the file leaves out: a file without types still has special tokens."""
    if vocab.types is not None:
        types = list(vocab.types[: len(tokens)])
    else:
        spelled_byte = {f"<0x{byte:02X}>" for byte in range(256)} if vocab.model == "llama" else set()
        types = [BYTE if token in spelled_byte else NORMAL for token in tokens]
        for token_id in (vocab.bos_token_id, vocab.eos_token_id, vocab.eot_token_id, vocab.eom_token_id):
            if token_id is not None and tokens[token_id][:1] in "<[":
                types[token_id] = CONTROL
    return [CONTROL if token in TURN_ENDS and kind != CONTROL else kind for token, kind in zip(tokens, types, strict=True)]


def _byte_level(vocab: GGUFVocabulary, tokens: list[str], types: list[int]) -> tuple[bytes, TokenizerInfo]:
    pre = find_pretokenizer(vocab.pre)
    if vocab.merges is None:
        raise ModelFormatError("The GGUF file's gpt2 tokenizer has no tokenizer.ggml.merges; convert the model again.")
    known = set(tokens)
    merges: list[tuple[str, str]] = []
    for line in vocab.merges:
        left, _, right = line[1:].partition(" ")
        left = line[:1] + left
        if left in known and right in known and left + right in known:
            merges.append((left, right))
    made = {left + right for left, right in merges} | {part for merge in merges for part in merge}
    pieces = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED or token in made}
    model = _bpe(pieces, merges, ignore_merges=pre.ignore_merges)
    document = _document(tokens, types, model, normalizer=pre.normalizer, pre_tokenizer=pre.json(), decoder=_BYTE_LEVEL_DECODER)
    bos = vocab.bos_token_id
    add_bos = pre.adds_bos if vocab.add_bos is None else vocab.add_bos
    ends = (vocab.eos_token_id, vocab.eot_token_id, vocab.eom_token_id)
    info = TokenizerInfo(
        vocab_size=len(tokens),
        style="byte_level",
        bos_token_id=bos,
        eos_token_ids=_end_ids(ends, tokens),
        add_bos=add_bos and bos is not None,
        special_tokens=_names(tokens, bos, vocab.eos_token_id, vocab.unk_token_id, vocab.pad_token_id),
    )
    return document, info


def _sentencepiece(vocab: GGUFVocabulary, tokens: list[str], types: list[int]) -> tuple[bytes, TokenizerInfo]:
    if vocab.scores is None:
        raise ModelFormatError("The GGUF file's llama tokenizer has no tokenizer.ggml.scores; convert the model again.")
    # SentencePiece's own ids, for files that leave them out.
    bos = _default(vocab.bos_token_id, 1, tokens)
    eos = _default(vocab.eos_token_id, 2, tokens)
    unk = _default(vocab.unk_token_id, 0, tokens)
    prefix = True if vocab.add_space_prefix is None else vocab.add_space_prefix
    pieces = {token: i for i, token in enumerate(tokens)}
    byte_fallback = all(f"<0x{byte:02X}>" in pieces for byte in range(256))
    model = _bpe(pieces, _merges_by_score(tokens, types, vocab.scores), byte_fallback=byte_fallback)
    model |= {"unk_token": None if unk is None else tokens[unk], "fuse_unk": True}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    normalizers = [{"type": "Prepend", "prepend": SPACE_MARK}, spaces] if prefix else [spaces]
    steps = [
        {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    normalizer = {"type": "Sequence", "normalizers": normalizers}
    decoder = {"type": "Sequence", "decoders": steps}
    document = _document(tokens, types, model, normalizer=normalizer, pre_tokenizer=None, decoder=decoder)
    info = TokenizerInfo(
        vocab_size=len(tokens),
        style="sentencepiece",
        bos_token_id=bos,
        eos_token_ids=_end_ids((eos, vocab.eot_token_id, vocab.eom_token_id), tokens),
        add_bos=(vocab.add_bos is None or vocab.add_bos) and bos is not None,
        strips_leading_space=prefix,
        special_tokens=_names(tokens, bos, eos, unk, vocab.pad_token_id),
    )
    return document, info


def _default(token_id: int | None, usual: int, tokens: list[str]) -> int | None:
    return token_id if token_id is not None else usual if usual < len(tokens) else None


def _merges_by_score(tokens: list[str], types: list[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece merges whichever neighbours make the piece of the best score; as a list of merges, every split of every piece,
    best piece first.

    Equal scores keep the vocabulary's order, and of one piece's splits the one with the longest left part goes first: merging
    from the left, that is the one that SentencePiece meets first (runs of one character have many splits).
    """
    whole = {token for token, kind in zip(tokens, types, strict=True) if kind in (NORMAL, USER_DEFINED, UNUSED)}
    ranked = sorted((i for i, token in enumerate(tokens) if len(token) > 1 and token in whole), key=lambda i: -scores[i])
    merges: list[tuple[str, str]] = []
    for i in ranked:
        token = tokens[i]
        merges += [(token[:at], token[at:]) for at in range(len(token) - 1, 0, -1) if token[:at] in whole and token[at:] in whole]
    return merges


_BYTE_LEVEL_DECODER = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _bpe(
    pieces: dict[str, int], merges: list[tuple[str, str]], *, ignore_merges: bool = False, byte_fallback: bool = False
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": pieces,
        "merges": merges,
    }


def _document(tokens: list[str], types: list[int], model: dict[str, Any], **parts: Any) -> bytes:
    """The tokenizer.json; `parts` are its normalizer, pre_tokenizer and decoder."""
    added = [
        {
            "id": i,
            "content": tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for i, kind in enumerate(types)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    document = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts}
    return json.dumps(document | {"post_processor": None, "model": model}, ensure_ascii=False).encode()


def _end_ids(named: Sequence[int | None], tokens: list[str]) -> tuple[int, ...]:
    return tuple(sorted({i for i in named if i is not None} | {i for i, token in enumerate(tokens) if token in TURN_ENDS}))


def _names(tokens: list[str], bos: int | None, eos: int | None, unk: int | None, pad: int | None) -> dict[str, str]:
    named = {"bos_token": bos, "eos_token": eos, "unk_token": unk, "pad_token": pad}
    return {name: tokens[token_id] for name, token_id in named.items() if token_id is not None}
