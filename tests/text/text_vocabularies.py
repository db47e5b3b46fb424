"""Tiny vocabularies for the tests of `text`: one byte-level, one SentencePiece-style, both as GGUF metadata has them."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvist.text.gguf_vocab import from_gguf
from kvist.text.info import BYTE_ALPHABET
from kvist.text.tokenizer import Tokenizer, load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@dataclass
class Vocabulary:
    """What `weights` reads from a GGUF file, by the same names."""

    model: str
    tokens: list[str]
    types: list[int] | None
    pre: str | None = None
    scores: list[float] | None = None
    merges: list[str] | None = None
    add_bos: bool | None = None
    add_space_prefix: bool | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    eot_token_id: int | None = None
    eom_token_id: int | None = None
    unk_token_id: int | None = None
    pad_token_id: int | None = None


@dataclass
class Source:
    """The other half of what `weights` hands over."""

    gguf: Vocabulary | None = None
    tokenizer_json: bytes | None = None
    config: dict[str, object] = field(default_factory=dict)


BYTES = sorted(BYTE_ALPHABET, key=lambda char: BYTE_ALPHABET[char])
"""Byte-level pieces of the bytes 0 to 255."""

# Ids: 0 <s>, 1 </s>, 2 <|im_end|>, 3 <tool> (user-defined), 4.. the bytes (byte b is id 4 + b), then the merged pieces.
SPECIALS = ["<s>", "</s>", "<|im_end|>", "<tool>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "Ġwor l", "Ġworl d", "Ġ Ġ", "Ã ©"]
FIRST_MERGED = 4 + 256


def byte_id(byte: int) -> int:
    """The byte-level vocabulary's id of one byte."""
    return 4 + byte


def merged_id(piece: str) -> int:
    """The byte-level vocabulary's id of a merged piece."""
    return FIRST_MERGED + [merge.replace(" ", "") for merge in MERGES].index(piece)


def byte_level(**changes: object) -> Vocabulary:
    merged = [merge.replace(" ", "") for merge in MERGES]
    tokens = SPECIALS + BYTES + merged
    types = [CONTROL, CONTROL, CONTROL, USER_DEFINED] + [NORMAL] * (256 + len(merged))
    vocab = Vocabulary("gpt2", tokens, types, pre="gpt-2", merges=list(MERGES), bos_token_id=0, eos_token_id=1)
    for name, value in changes.items():
        setattr(vocab, name, value)
    return vocab


# Ids: 0 <unk>, 1 <s>, 2 </s>, 3.. the bytes (byte b is id 3 + b), then pieces, best score first.
PIECES = ["▁t", "he", "▁the", "in", "▁▁", "▁▁▁▁", "ing", "aa", "aaa", "th", "▁", "e", "t", "h", "i", "n", "g", "a", "é", "日"]
FIRST_PIECE = 3 + 256


def piece_id(piece: str) -> int:
    """The SentencePiece-style vocabulary's id of a piece."""
    return FIRST_PIECE + PIECES.index(piece)


def sentencepiece(**changes: object) -> Vocabulary:
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + PIECES
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(PIECES)
    scores = [0.0] * FIRST_PIECE + [-float(i) for i in range(len(PIECES))]
    vocab = Vocabulary("llama", tokens, types, scores=scores)
    for name, value in changes.items():
        setattr(vocab, name, value)
    return vocab


def make(vocab: Vocabulary) -> Tokenizer:
    return load_tokenizer(*from_gguf(vocab))
