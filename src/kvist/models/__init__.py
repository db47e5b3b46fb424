"""Model families by architecture name. A family is one flat file; this module chooses it and knows nothing of how it computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvist.config import ModelConfig
from kvist.errors import UnsupportedModelError
from kvist.kernels.ops import F32, ForwardBatch, Ops, PackedLinear, Program
from kvist.kv.spec import KVSpec
from kvist.models.llama import Llama

FAMILIES = {"llama": Llama, "mistral": Llama, "qwen2": Llama, "qwen3": Llama}


class Model(Protocol):
    """Weights, kernels and cache, bound together."""

    @property
    def program(self) -> Program:
        """What `forward` runs."""

    def forward(self, batch: ForwardBatch) -> F32:
        """Write the rows' keys and values; logits [L, vocab] of `batch.logit_rows`, a view that is valid until the next call."""

    def logits(self, batch: ForwardBatch) -> F32:
        """The logits of `batch.logit_rows`, of the batch that `forward` computed last; a view that is valid until the next call."""


def build_model(
    config: ModelConfig,
    linears: Mapping[str, PackedLinear],
    vectors: Mapping[str, F32],
    ops: Ops,
    arena: npt.NDArray[np.uint8],
    spec: KVSpec,
    *,
    max_model_len: int,
) -> Model:
    """Bind a model to its cache. Rows may have positions below `max_model_len`. A missing or misshapen tensor is a
    ModelFormatError that names it, an architecture of no known family an UnsupportedModelError."""
    family = FAMILIES.get(config.architecture)
    if family is None:
        raise UnsupportedModelError(
            f"Architecture {config.architecture!r} is not supported; kvist runs {', '.join(sorted(FAMILIES))} models."
        )
    return family(config, linears, vectors, ops, arena, spec, max_model_len=max_model_len)
