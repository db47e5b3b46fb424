"""Token ids to text, a few at a time: what a stream shows after each step.

It keeps at most the three bytes of an unfinished character and costs the same for the first token and the ten-thousandth. It knows
nothing of stop strings (stop.py).

The rule. Each id stands for fixed bytes (Tokenizer.token_bytes), and the text is the UTF-8 of all bytes so far. A character is
shown when its last byte has come. Bytes that can no longer become a character show as U+FFFD as soon as that is certain, exactly
as `Tokenizer.decode` of all ids shows them (the model really wrote ill-formed text). Bytes that may still become a character are
held, and dropped by `finish`: no U+FFFD is ever shown for a character that the end of the output cut.

Invariant: the texts of all `push` calls joined equal `Tokenizer.decode(all ids, continues=continues)`, less an unfinished tail,
however the ids were portioned.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterable

from kvist.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text of one growing output.

    `continues` says that the output goes on from other text (its prompt), so that a first SentencePiece piece keeps its leading
    space.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continues: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._texts = tokenizer.texts[skip_special_tokens]
        self._held = b""
        self._strip = tokenizer.info.strips_leading_space and not continues

    def push_token(self, token_id: int) -> str:
        """`push` of one; most are whole characters, and show the same each time."""
        if self._held or self._strip:
            return self.push((token_id,))
        text = self._texts.get(token_id)
        if text is None:
            text = self.push((token_id,))
            if not self._held:
                self._texts[token_id] = text
        return text

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids add; empty while a character is unfinished."""
        data = self._held + self._tokenizer.join_bytes(ids, skip_special_tokens=self._skip_special_tokens)
        text, used = utf_8_decode(data, "replace", False)
        held = data[used:]
        if held[:1] == b"\xed" and held[1:] >= b"\xa0":
            # Half a surrogate, which Python keeps for its own encoding of them; no character begins like this.
            text += held.decode("utf-8", "replace")
            held = b""
        self._held = held
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def finish(self) -> str:
        """What is still to show at the end of the output: nothing, for an unfinished character is dropped."""
        self._held = b""
        return ""
