"""Log probabilities in OpenAI's two forms: chat (`content` entries) and completions (four parallel lists).

Knows tokens' bytes, no requests. A token that is no whole text by itself is labelled with escaped bytes, never with a replacement
character; the raw bytes are in chat's `bytes`. `text_offset` counts characters from the start of the choice's text, with the echoed
prompt where there is one; a token that continues a character has that character's offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvist.request import TokenLogprob
from kvist.server.client import TokenizerClient

LEAST_LOGPROB = -9999.0
"""JSON has no minus infinity; this is OpenAI's word for it."""


@dataclass(frozen=True, slots=True)
class Label:
    text: str
    raw: bytes
    whole: bool
    """The bytes are text by themselves."""
    special: bool
    """The token leaves no trace in text without special tokens."""


class TokenLabels:
    """Labels of tokens, made once each; it grows to the size of the vocabulary at most."""

    def __init__(self, tokenizer: TokenizerClient) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, Label] = {}

    def __getitem__(self, token_id: int) -> Label:
        label = self._known.get(token_id)
        if label is None:
            label = self._known[token_id] = self._make(token_id)
        return label

    def _make(self, token_id: int) -> Label:
        raw = self._tokenizer.token_bytes(token_id)
        text = raw.decode("utf-8", errors="backslashreplace")
        try:
            raw.decode("utf-8")
            whole = True
        except UnicodeDecodeError:
            whole = False
        special = whole and raw != b"" and self._tokenizer.decode([token_id], skip_special_tokens=True) == ""
        return Label(text, raw, whole, special)


def finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


def chat_entries(labels: TokenLabels, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """One `logprobs.content` entry per token."""
    return [
        _chat_token(labels, item.token_id, item.logprob) | {"top_logprobs": [_chat_token(labels, *top) for top in item.top]}
        for item in logprobs
    ]


def _chat_token(labels: TokenLabels, token_id: int, logprob: float) -> dict[str, Any]:
    label = labels[token_id]
    return {"token": label.text, "logprob": finite(logprob), "bytes": list(label.raw)}


class CompletionLogprobs:
    """The four lists of one choice, made piece by piece: each call covers the tokens it is given and remembers the offset."""

    def __init__(self, labels: TokenLabels, *, skip_special_tokens: bool) -> None:
        self._labels = labels
        self._skip_special = skip_special_tokens
        self._offset = 0

    def prompt(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], text: str) -> dict[str, Any]:
        """The echoed prompt, whose offsets follow `text` (a tokenizer may have put a space before it)."""
        shown = [b"" if self._hidden(token_id) else self._labels[token_id].raw for token_id in token_ids]
        joined = b"".join(shown)
        start = -1 if joined[:1] == b" " and joined[1:] == text.encode() else 0
        self._offset = start
        piece = self._piece(token_ids, logprobs)
        piece["text_offset"] = [min(max(offset, 0), len(text)) for offset in piece["text_offset"]]
        self._offset = len(text)
        return piece

    def output(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return self._piece([item.token_id for item in logprobs], logprobs)

    def skip(self, text: str) -> None:
        """Text that comes before the first token: an echoed prompt without logprobs."""
        self._offset += len(text)

    def _piece(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        offsets = [self._advance(token_id) for token_id in token_ids]
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [None if item is None else finite(item.logprob) for item in logprobs],
            "top_logprobs": [None if item is None else self._top(item) for item in logprobs],
            "text_offset": offsets,
        }

    def _hidden(self, token_id: int) -> bool:
        return self._skip_special and self._labels[token_id].special

    def _advance(self, token_id: int) -> int:
        raw = self._labels[token_id].raw
        here = self._offset
        if raw and not self._hidden(token_id):
            self._offset += sum(byte & 0xC0 != 0x80 for byte in raw)
            if raw[0] & 0xC0 == 0x80:
                here = max(here - 1, 0)
        return here

    def _name(self, token_id: int) -> str:
        label = self._labels[token_id]
        return label.text if label.whole else f"bytes:{label.text}"

    def _top(self, item: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and the chosen one; of two with one name the likelier stays."""
        top: dict[str, float] = {}
        for token_id, logprob in (*item.top, (item.token_id, item.logprob)):
            top.setdefault(self._name(token_id), finite(logprob))
        return top


def join_pieces(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One set of lists from the pieces of a choice."""
    return {key: [entry for piece in pieces for entry in piece[key]] for key in pieces[0]}
