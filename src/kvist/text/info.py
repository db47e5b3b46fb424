"""What a tokenizer must know beyond its tokenizer.json: which ids begin and end a text, and how pieces become bytes.

`TokenizerInfo` is small, frozen and JSON-able, so that a pack can keep it beside the tokenizer.json. This module knows no
vocabulary and no `tokenizers` library. Invariants: `eos_token_ids` is sorted and free of doubles; `add_bos` is true only with a
`bos_token_id`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Style = Literal["byte_level", "sentencepiece"]

SPACE_MARK = "▁"
TURN_ENDS = frozenset(
    [
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<EOT>",
        "<｜end▁of▁sentence｜>",
    ]
)
"""Special tokens that end a turn or a text wherever they exist. Files name one EOS only, while chat models use two or three."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class TokenizerInfo:
    """The facts of one tokenizer that its tokenizer.json does not say, or says in too many ways."""

    vocab_size: int
    """One more than the largest token id; ids may have holes below it."""
    style: Style
    """How a piece spells bytes: GPT-2's printable alphabet, or SentencePiece's ▁ and <0xXX>."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Every id that ends a text or a turn."""
    add_bos: bool = False
    """Raw text gets the BOS id in front."""
    strips_leading_space: bool = False
    """Encoding puts a space before a text (SentencePiece's dummy prefix), so that decoding takes one away."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """What chat templates call by name: bos_token, eos_token, unk_token, pad_token."""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), ensure_ascii=False).encode()

    @classmethod
    def from_json(cls, data: bytes) -> TokenizerInfo:
        """The inverse of `to_json`. Raises ValueError, KeyError or TypeError on foreign bytes."""
        fields: dict[str, Any] = json.loads(data)
        fields["eos_token_ids"] = tuple(fields["eos_token_ids"])
        return cls(**fields)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's reversible spelling of bytes: printable Latin-1 as itself, the 68 others as U+0100 onwards, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()
"""Character of a byte-level piece -> byte."""


def piece_bytes(piece: str, style: Style) -> bytes:
    """The bytes that a piece of the vocabulary (not an added token) stands for.

    A byte-level piece with a character outside the alphabet stands for its own UTF-8, as the reference decoder has it.
    """
    if style == "byte_level":
        values = [BYTE_ALPHABET.get(char) for char in piece]
        return piece.encode() if None in values else bytes(value for value in values if value is not None)
    if match := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    return piece.replace(SPACE_MARK, " ").encode()
