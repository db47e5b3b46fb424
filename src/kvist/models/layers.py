"""What model families share: rotary tables. Knows no family, no weights and no kernels.

Invariant (law L1): a table's bits depend on the model's configuration alone; they are computed once, in float64, and every layer
reads the same float32 arrays, whatever the length of the table.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvist.config import RopeConfig
from kvist.errors import ModelFormatError
from kvist.kernels.ops import F32

F64 = npt.NDArray[np.float64]


def rope_tables(rope: RopeConfig, head_dim: int, length: int) -> tuple[F32, F32]:
    """cos and sin of positions 0 .. length - 1, each [length, rotary_dim / 2] (RoFormer, Su et al. 2021)."""
    angles = np.arange(length, dtype=np.float64)[:, None] * rope_frequencies(rope, head_dim)
    magnitude = _magnitude(rope)
    return (np.cos(angles) * magnitude).astype(np.float32), (np.sin(angles) * magnitude).astype(np.float32)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> F64:
    """Radians per position of each rotated pair, [rotary_dim / 2], after scaling and then `freq_factors`."""
    dim = rope.rotary_dim or head_dim
    if dim % 2 or dim > head_dim:
        raise ModelFormatError(
            f"The model rotates {dim} of {head_dim} dimensions of a head; that must be an even number within it."
        )
    plain = rope.theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    match rope.scaling:
        case "none":
            scaled = plain
        case "linear":
            scaled = plain / rope.factor
        case "llama3":
            scaled = _llama3(plain, rope)
        case "yarn":
            scaled = _yarn(plain, rope, dim)
    if rope.freq_factors is not None:
        if len(rope.freq_factors) != len(scaled):
            raise ModelFormatError(f"The model has {len(rope.freq_factors)} rotary frequency factors for {len(scaled)} pairs.")
        scaled = scaled / np.asarray(rope.freq_factors, np.float64)
    return scaled


def _original_length(rope: RopeConfig) -> int:
    if rope.original_max_position is None:
        raise ModelFormatError(f"Rotary scaling {rope.scaling!r} needs the model's original_max_position_embeddings.")
    return rope.original_max_position


def _llama3(plain: F64, rope: RopeConfig) -> F64:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    turns = _original_length(rope) * plain / (2 * math.pi)
    keep = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return keep * plain + (1 - keep) * plain / rope.factor


def _yarn(plain: F64, rope: RopeConfig, dim: int) -> F64:
    """YaRN (Peng et al. 2023, section 3.2): pairs that turn more than `beta_fast` times within the original length are kept, those
    under `beta_slow` stretched, with a ramp over the pairs between."""
    length = _original_length(rope)

    def pair(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = max(math.floor(pair(rope.beta_fast)), 0), min(math.ceil(pair(rope.beta_slow)), dim - 1)
    stretch = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return stretch * plain / rope.factor + (1 - stretch) * plain


def _magnitude(rope: RopeConfig) -> float:
    """YaRN's temperature (equation 22), unless the model names its own factor."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1 if rope.scaling == "yarn" and rope.factor > 1 else 1.0
