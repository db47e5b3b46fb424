"""A Hugging Face tokenizer.json, with the JSON files around it, as a tokenizer.json and a `TokenizerInfo`.

The tokenizer.json describes the vocabulary; which ids begin and end a text is spread over tokenizer_config.json,
special_tokens_map.json, config.json and generation_config.json, and is gathered here. This module reads no files: it is given bytes
and dictionaries.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from kvist.errors import ModelFormatError, UnsupportedModelError
from kvist.text.info import SPACE_MARK, TURN_ENDS, Style, TokenizerInfo
from kvist.text.tokenizer import parse_tokenizer_json

NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def from_hf(
    tokenizer_json: bytes, config: Mapping[str, Any], *, eos_token_ids: Iterable[int] = (), bos_token_id: int | None = None
) -> tuple[bytes, TokenizerInfo]:
    """The tokenizer.json (completed by the added tokens that only `config` has) and its info.

    `config` is tokenizer_config.json, with special_tokens_map.json's entries where it lacks them. `eos_token_ids` and
    `bos_token_id` are config.json's and generation_config.json's; the ends of text are those, the tokenizer's own and the special
    tokens that end a turn in every model (info.TURN_ENDS), as from a GGUF file. BOS goes in front of raw text if `config` says so
    (add_bos_token), else if tokenizer.json's post-processor does it.

    Raises ModelFormatError for a damaged file and UnsupportedModelError for a decoder that is neither byte-level nor
    SentencePiece's.
    """
    backend = parse_tokenizer_json(tokenizer_json)
    document: dict[str, Any] = json.loads(tokenizer_json)
    style, strips = _style(document)
    names = {name: text for name in NAMED if (text := _token_text(config.get(name))) is not None}
    if _add_missing(backend, config, names):
        tokenizer_json = backend.to_str().encode()
    vocab = backend.get_vocab(with_added_tokens=True)
    bos = vocab.get(names["bos_token"]) if "bos_token" in names else None
    if bos is None and bos_token_id is not None and (text := backend.id_to_token(bos_token_id)) is not None:
        bos, names["bos_token"] = bos_token_id, text
    ends = set(eos_token_ids)
    if "eos_token" in names and (eos := vocab.get(names["eos_token"])) is not None:
        ends.add(eos)
    elif ends and (text := backend.id_to_token(min(ends))) is not None:
        names["eos_token"] = text
    ends |= {i for i, token in backend.get_added_tokens_decoder().items() if token.special and token.content in TURN_ENDS}
    info = TokenizerInfo(
        vocab_size=max(vocab.values(), default=-1) + 1,
        style=style,
        bos_token_id=bos,
        eos_token_ids=tuple(sorted(ends)),
        add_bos=bos is not None and _adds_bos(backend, config, bos),
        strips_leading_space=strips,
        special_tokens=names,
    )
    return tokenizer_json, info


def _token_text(entry: object) -> str | None:
    """A special token as configuration files write it: its text, or an object around its text."""
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    return entry if isinstance(entry, str) and entry else None


def _adds_bos(backend: Backend, config: Mapping[str, Any], bos: int) -> bool:
    explicit = config.get("add_bos_token")
    if isinstance(explicit, bool):
        return explicit
    around: list[int] = backend.encode("", add_special_tokens=True).ids
    return around[:1] == [bos]


def _add_missing(backend: Backend, config: Mapping[str, Any], names: Mapping[str, str]) -> bool:
    """Add the tokens that tokenizer_config.json declares and tokenizer.json lacks, in the order of their ids; whether any were."""
    declared = config.get("added_tokens_decoder")
    entries = declared if isinstance(declared, Mapping) else {}
    for key, entry in entries.items():
        if not str(key).isdecimal() or not isinstance(entry, Mapping) or _token_text(entry) is None:
            raise ModelFormatError(f"tokenizer_config.json has no token at {key!r} of added_tokens_decoder; fetch the model again.")
    missing = {int(i): entry for i, entry in entries.items() if backend.token_to_id(entry["content"]) is None}
    for token_id, entry in sorted(missing.items()):
        text = entry["content"]
        special = bool(entry.get("special")) or text in names.values()
        flags = {flag: bool(entry.get(flag)) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
        token = AddedToken(text, special=special, **flags)
        (backend.add_special_tokens if special else backend.add_tokens)([token])
        if backend.token_to_id(text) != token_id:
            raise ModelFormatError(
                f"tokenizer_config.json gives the token {text!r} the id {token_id}, which tokenizer.json has no room for; "
                "fetch the model again."
            )
    return bool(missing)


def _style(document: Mapping[str, Any]) -> tuple[Style, bool]:
    """How pieces spell bytes, and whether decoding takes a leading space away."""
    decoder = document.get("decoder") or {}
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = {step.get("type"): step for step in steps}
    if "ByteLevel" in kinds:
        return "byte_level", False
    if "Metaspace" in kinds:
        return "sentencepiece", _metaspace_prefixes(kinds["Metaspace"])
    if any(step.get("type") == "Replace" and step.get("pattern") == {"String": SPACE_MARK} for step in steps):
        strip = kinds.get("Strip", {})
        return "sentencepiece", strip.get("content") == " " and int(strip.get("start", 0)) > 0
    raise UnsupportedModelError(
        f"The tokenizer's decoder {decoder.get('type')!r} is not supported; kvist knows ByteLevel, Metaspace and SentencePiece's."
    )


def _metaspace_prefixes(step: Mapping[str, Any]) -> bool:
    scheme = step.get("prepend_scheme")
    return bool(step.get("add_prefix_space", True)) if scheme is None else scheme != "never"
