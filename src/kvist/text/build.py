"""From a model's raw tokenizer material, of either kind, to the two things a tokenizer is loaded from.

A pack keeps what `build_tokenizer` returns (in the parts of `tokenizer_parts.py`), so that this runs once for each model.
This module chooses between gguf_vocab.py and hf_vocab.py and knows nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from kvist.errors import ModelFormatError
from kvist.text.gguf_vocab import GGUFVocabulary, from_gguf
from kvist.text.hf_vocab import from_hf
from kvist.text.info import TokenizerInfo


class VocabularySource(Protocol):
    """A GGUF file's vocabulary, or a Hugging Face folder's tokenizer.json with its configuration; one of the two is present."""

    @property
    def tokenizer_json(self) -> bytes | None: ...
    @property
    def gguf(self) -> GGUFVocabulary | None: ...
    @property
    def config(self) -> Mapping[str, Any]: ...


def build_tokenizer(
    source: VocabularySource, *, eos_token_ids: Iterable[int] = (), bos_token_id: int | None = None
) -> tuple[bytes, TokenizerInfo]:
    """The tokenizer.json and info of a model; `load_tokenizer` makes a tokenizer of them.

    `eos_token_ids` and `bos_token_id` are what the model's own configuration says (config.json, generation_config.json); GGUF files
    say it in the vocabulary. Raises UnsupportedModelError or ModelFormatError.
    """
    if source.gguf is not None:
        return from_gguf(source.gguf)
    if source.tokenizer_json is None:
        raise ModelFormatError("The model has no tokenizer: neither a tokenizer.json nor a GGUF vocabulary; fetch it again.")
    return from_hf(source.tokenizer_json, source.config, eos_token_ids=eos_token_ids, bos_token_id=bos_token_id)
