"""Options, resolved: what the user typed becomes frozen configuration here, and nowhere else reads the environment.

`EngineOptions` is what a user can say; `EngineConfig` is what the engine runs with. `ModelConfig` is a model's own description,
read from its files by `weights`. An unsupported combination fails in `resolve` with a sentence that names the options.
This module knows no arrays, no files' formats and no kernels.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvist.errors import ConfigError

KVFormat = Literal["bf16", "f16", "f32"]
Isa = Literal["auto", "avx512", "avx2", "portable", "numpy"]
Quantization = Literal["w8a8", "w4a8"]

KV_FORMATS: tuple[KVFormat, ...] = ("bf16", "f16", "f32")
ISAS: tuple[Isa, ...] = ("auto", "avx512", "avx2", "portable", "numpy")
QUANTIZATIONS: tuple[Quantization, ...] = ("w8a8", "w4a8")
DEFAULT_MODEL = "smollm2:135m"


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. `freq_factors` (one per rotated pair, GGUF's rope_freqs) divide the frequencies, after `scaling`."""

    theta: float = 10000.0
    rotary_dim: int | None = None
    """None: the whole head."""
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    freq_factors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only model's shape. `layer_windows[i]` is layer i's attention window in tokens, None for full attention:
    a row at position q of a windowed layer sees keys q - window + 1 .. q."""

    architecture: str
    """A family of `models/`: "llama", "mistral", "qwen2" or "qwen3"."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    layer_windows: tuple[int | None, ...] = ()
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    name: str = ""

    @property
    def windows(self) -> tuple[int | None, ...]:
        return self.layer_windows or (None,) * self.num_layers


@dataclass(frozen=True)
class EngineOptions:
    """What a user can ask of an engine; the flags of the command line are the same words with dashes."""

    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    quantization: Quantization | None = None
    kv_cache_dtype: KVFormat = "bf16"
    max_model_len: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory: str | int | None = None
    """Bytes ("2GiB", 2147483648) or a share of the free memory ("40%", "0.4")."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True
    kv_allocator: str = "paged"
    num_threads: int | None = None
    isa: Isa = "auto"
    seed: int | None = None
    use_cache: bool = True
    watermark: float = 0.01


def require_one_of(value: str, allowed: tuple[str, ...], option: str) -> None:
    if value not in allowed:
        raise ConfigError(f"{option} must be one of {', '.join(allowed)}, not {value!r}.")


def cache_dir() -> Path:
    """Where pulled models and packed weights are kept: $KVIST_CACHE, else $XDG_CACHE_HOME/kvist, else ~/.cache/kvist."""
    if value := os.environ.get("KVIST_CACHE"):
        return Path(value)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvist"
