"""Text to token ids and back: `Tokenizer`, thin over the `tokenizers` library.

Encoding is the library's, save for BOS. Decoding is our own: every id stands for fixed bytes, and a text is the UTF-8 of its ids'
bytes joined, so that decoding piece by piece (detokenizer.py) and at once agree. It knows no model files and no chat templates.

Invariants:

* Special tokens that appear in a text become their ids, wherever they stand.
* Where the tokenizer adds BOS, no text encodes to more than one leading BOS, however many the text itself begins with. A tokenizer
  that adds none leaves a text's own alone (its BOS id may be an everyday token such as <|im_start|>). EOS is never added.
* Invalid UTF-8 decodes to U+FFFD, one for each maximal ill-formed subpart (Unicode 15, section 3.9); the library's byte-fallback
  decoder spoils the whole characters around it too.
* Ids outside the vocabulary, or in a hole of it, stand for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer as Backend

from kvist.errors import InvalidRequestError, ModelFormatError
from kvist.text.info import SPACE_MARK, TokenizerInfo, piece_bytes

__all__ = ["Tokenizer", "TokenizerInfo", "load_tokenizer", "parse_tokenizer_json"]


class Tokenizer:
    """One model's tokenizer. Safe to share between threads: after construction it only fills a cache of constants."""

    def __init__(self, backend: Backend, info: TokenizerInfo) -> None:
        self.info = info
        self._backend = backend
        self._bytes: dict[int, bytes] = {}
        self.texts: dict[bool, dict[int, str]] = {True: {}, False: {}}
        """By `skip_special_tokens`: what tokens of whole characters show, as far as somebody has shown it."""
        self._special_ids: set[int] = set()
        for token_id, token in backend.get_added_tokens_decoder().items():
            if token.special:
                self._special_ids.add(token_id)
                self._bytes[token_id] = token.content.encode()
            elif info.style == "sentencepiece":
                self._bytes[token_id] = token.content.replace(SPACE_MARK, " ").encode()
            else:
                self._bytes[token_id] = token.content.encode()

    @property
    def vocab_size(self) -> int:
        return self.info.vocab_size

    @property
    def bos_token_id(self) -> int | None:
        return self.info.bos_token_id

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(self.info.eos_token_ids)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out of a text."""
        return frozenset(self._special_ids)

    def to_json(self) -> str:
        """The tokenizer.json behind it."""
        return str(self._backend.to_str())

    def special_token_id(self, text: str) -> int | None:
        """The id of the special token of that name; None where the text is none."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self._special_ids else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`, with BOS in front if `add_special_tokens` and the model wants one; never two.

        Raises InvalidRequestError for a text that is not Unicode (a lone surrogate, which JSON can spell).
        """
        if not isinstance(text, str):
            raise InvalidRequestError(f"The text to encode must be a string, not {type(text).__name__}.", param="prompt")
        try:
            # A batch of one: the library lets go of Python's lock for batches alone, and others' streams go on meanwhile.
            ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequestError("The text has an unpaired surrogate; send valid Unicode.", param="prompt") from error
        if self.info.add_bos:
            bos, start = self.info.bos_token_id, 0
            assert bos is not None
            while start < len(ids) and ids[start] == bos:
                start += 1
            if start > 1 or (start == 0 and add_special_tokens):
                ids[:start] = [bos]
        return ids

    def encode_chat(self, text: str) -> list[int]:
        """The ids of a text that a chat template rendered: the template decides about BOS, and one it wrote twice counts once."""
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True, continues: bool = False) -> str:
        """The text of `ids`; an unfinished or ill-formed character shows as U+FFFD.

        `continues` says that other text stands before it, so that a leading SentencePiece space is a real one and stays.
        """
        text = self.join_bytes(ids, skip_special_tokens=skip_special_tokens).decode("utf-8", "replace")
        return text[1:] if self.info.strips_leading_space and not continues and text.startswith(" ") else text

    def join_bytes(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> bytes:
        """The bytes of `ids`, one after another."""
        skipped = self._special_ids if skip_special_tokens else ()
        return b"".join([self.token_bytes(token_id) for token_id in ids if token_id not in skipped])

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one token, which need not be whole characters; a special token's are its name."""
        known = self._bytes.get(token_id)
        if known is None:
            piece = self._backend.id_to_token(token_id) if 0 <= token_id < self.info.vocab_size else None
            known = b"" if piece is None else piece_bytes(piece, self.info.style)
            self._bytes[token_id] = known
        return known


def load_tokenizer(tokenizer_json: bytes, info: TokenizerInfo) -> Tokenizer:
    """A tokenizer from what `build_tokenizer` returned. Raises ModelFormatError if the bytes are no tokenizer.json."""
    return Tokenizer(parse_tokenizer_json(tokenizer_json), info)


def parse_tokenizer_json(tokenizer_json: bytes) -> Backend:
    """The library's tokenizer, with the truncation and padding off that some files carry: they would alter prompts silently."""
    try:
        backend = Backend.from_buffer(tokenizer_json)
    except Exception as error:  # the library raises bare Exception for every defect of the file
        raise ModelFormatError(f"tokenizer.json cannot be read ({error}); fetch the model again.") from error
    backend.no_truncation()
    backend.no_padding()
    return backend
