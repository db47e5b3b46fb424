"""Model families by architecture name. A family is one flat file; this module chooses it and knows nothing of how it computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvist.config import ModelConfig
from kvist.errors import UnsupportedModelError
from kvist.kernels.ops import F32, ForwardBatch, Ops, PackedLinear
from kvist.kv.spec import KVSpec
from kvist.models.llama import Llama

FAMILIES = {"llama": Llama, "mistral": Llama, "qwen2": Llama, "qwen3": Llama}


class Model(Protocol):
    """Weights, kernels and cache, bound together."""

    def forward(self, batch: ForwardBatch) -> F32:
        """Write the rows' keys and values; hidden states [T, hidden], a view that is valid until the next `forward`."""

    def logits(self, hidden: F32) -> F32:
        """[L, vocab] of chosen rows [L, hidden], a view that is valid until the next `logits`."""


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
