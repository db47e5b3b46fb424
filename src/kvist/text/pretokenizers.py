"""How byte-level BPE vocabularies cut a text into words before merging: one row for each supported `tokenizer.ggml.pre`.

A GGUF file names its pre-tokenizer instead of describing it, so that each name's rules have to be known. The rules are those of the
original models' tokenizer.json files. Each step cuts every piece that the step before left into matches and the text between them.
A name that is not here is refused: a tokenizer that is slightly wrong degrades answers without a sign.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvist.errors import UnsupportedModelError


def _split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


_DIGITS = {"type": "Digits", "individual_digits": True}
_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
"""GPT-2's words (Radford et al. 2019), built into the library's ByteLevel step, and the spelling of bytes."""
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
"""The spelling of bytes alone."""

_GPT2_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The same words, for rules with a step after them, which must not see the spelling of bytes."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SYMBOLS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _SYMBOLS_AND_SPACES
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _SYMBOLS_AND_SPACES
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
_THREES = _split("[0-9][0-9][0-9]")
_CJK_AND_HANGUL = "[一-龥ࠀ-一가-\ud7ff]+"


@dataclass(frozen=True)
class PreTokenizer:
    """The rules behind one `tokenizer.ggml.pre`: `steps` in tokenizer.json's form, and what goes with them."""

    steps: tuple[dict[str, Any], ...]
    nfc: bool = False
    """Unicode normalization form C before cutting."""
    ignore_merges: bool = False
    """A word that is a token as it stands is taken whole, whatever the merges would make of it."""
    adds_bos: bool = False
    """What `tokenizer.ggml.add_bos_token` means where it is missing."""

    @property
    def normalizer(self) -> dict[str, Any] | None:
        return {"type": "NFC"} if self.nfc else None

    def json(self) -> dict[str, Any]:
        return {"type": "Sequence", "pretokenizers": list(self.steps)}


_llama3 = PreTokenizer((_split(_CL100K), _BYTES), ignore_merges=True, adds_bos=True)
_gpt2 = PreTokenizer((_GPT2,))
_digits_gpt2 = PreTokenizer((_DIGITS, _GPT2))
_qwen2 = PreTokenizer((_split(_QWEN2), _BYTES), nfc=True)

PRETOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((_split(r"[\p{P}\$\+<=>\^~\|]+"), _split(_GPT2_REGEX), _split(r"\p{N}+"), _THREES, _BYTES)),
    "gpt-2": _gpt2,
    "mpt": PreTokenizer((_GPT2,), nfc=True),
    "olmo": PreTokenizer((_GPT2,), nfc=True),
    "smollm": _digits_gpt2,
    "starcoder": _digits_gpt2,
    "refact": _digits_gpt2,
    "command-r": PreTokenizer((_DIGITS, _GPT2), nfc=True),
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "falcon3": _llama3,
    "pixtral": _llama3,
    "smaug-bpe": PreTokenizer((_split(_CL100K), _BYTES)),
    "dbrx": PreTokenizer((_split(_CL100K), _BYTES)),
    "qwen2": _qwen2,
    "qwen25": _qwen2,
    "megrez": _qwen2,
    "deepseek-r1-qwen": PreTokenizer((_split(_QWEN2), _BYTES)),
    "qwen35": PreTokenizer((_split(_QWEN35), _BYTES)),
    "tekken": PreTokenizer((_split(_TEKKEN), _BYTES), ignore_merges=True, adds_bos=True),
    "falcon": PreTokenizer((_split(_PUNCTUATION), _split(_GPT2_REGEX), _THREES, _BYTES)),
    "deepseek-coder": PreTokenizer(
        (_split(r"[\r\n]"), _split(r"\s?\p{L}+"), _split(r"\s?\p{P}+"), _split(_CJK_AND_HANGUL), _DIGITS, _BYTES)
    ),
}


def find_pretokenizer(name: str | None) -> PreTokenizer:
    """The rules of a `tokenizer.ggml.pre`; a file from before that key existed has the "default" ones.

    Raises UnsupportedModelError for an unknown name, listing the known ones.
    """
    found = PRETOKENIZERS.get("default" if name is None else name)
    if found is None:
        raise UnsupportedModelError(
            f"The GGUF pre-tokenizer {name!r} is not supported; kvist knows {', '.join(sorted(PRETOKENIZERS))}."
        )
    return found
