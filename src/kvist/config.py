"""Options, resolved: what the user typed becomes frozen configuration here, and nowhere else reads the environment.

`EngineOptions` is what a user can say; `EngineConfig` is what the engine runs with. `ModelConfig` is a model's own description,
read from its files by `weights`. An unsupported combination fails in `resolve` with a sentence that names the options.
What the process may use of the machine is `machine`'s to tell.
This module knows no arrays, no files' formats and no kernels.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvist.errors import ConfigError
from kvist.kv.spec import KVSpec, group_layers
from kvist.machine import available_memory
from kvist.sizes import format_bytes, parse_memory

KVFormat = Literal["bf16", "f16", "f32"]
Isa = Literal["auto", "avx512bf16", "avx512", "avx2", "portable", "numpy"]
SyncPolicy = Literal["always", "segment", "never"]
Quantization = Literal["w8a8", "w4a8"]

KV_FORMATS: tuple[KVFormat, ...] = ("bf16", "f16", "f32")
KV_ALLOCATORS = ("paged", "contiguous", "virtual")
SYNC_POLICIES: tuple[SyncPolicy, ...] = ("always", "segment", "never")
ISAS: tuple[Isa, ...] = ("auto", "avx512bf16", "avx512", "avx2", "portable", "numpy")
QUANTIZATIONS: tuple[Quantization, ...] = ("w8a8", "w4a8")
EVICTION_POLICIES = ("density", "lru")
DTYPES = {"auto": "auto", "f32": "f32", "f16": "f16", "bf16": "bf16", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}
DEFAULT_MODEL = "smollm2:135m"
BLOCK_MULTIPLE, MAX_BLOCK_SIZE = 16, 8192
"""Keys that the kernels keep side by side: block sizes are multiples of it."""
HEAD_MULTIPLE = 16
"""The native kernels read heads in pieces of this many elements."""
MAX_THREADS = 1024
DEFAULT_POOL_SHARE = 0.4
"""Of the free memory: a pool is zero pages until used, but a machine that swaps is worse than a request that waits."""


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
    kv_cache_memory: str | int | float | None = None
    """Bytes ("2GiB", 2147483648) or a share of the free memory ("40%", "0.4")."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True
    kv_allocator: str = "paged"
    eviction_policy: str | None = None
    """None: density, where there is a choice (paged blocks)."""
    kv_pin_budget: float | None = None
    kv_priority_budget: float | None = None
    num_threads: int | None = None
    pin_threads: bool = False
    isa: Isa = "auto"
    seed: int | None = None
    use_cache: bool = True
    watermark: float = 0.01
    kv_tiers: str | None = None
    """Where blocks are kept besides the pool: "disk=20GiB:/path"."""
    kv_tier_fsync: SyncPolicy | None = None
    """When what is written is forced to the disk: after each batch, when a segment is full (the default), or never by kvist."""


@dataclass(frozen=True)
class DiskTier:
    """`quota` bytes of `folder`; `sync`: when what is written is forced to the disk."""

    quota: int
    folder: Path
    sync: SyncPolicy


def require_one_of(value: str, allowed: tuple[str, ...], option: str) -> None:
    if value not in allowed:
        raise ConfigError(f"{option} must be one of {', '.join(allowed)}, not {value!r}.")


def cache_dir() -> Path:
    """Where pulled models and packed weights are kept: $KVIST_CACHE, else $XDG_CACHE_HOME/kvist, else ~/.cache/kvist."""
    if value := os.environ.get("KVIST_CACHE"):
        return Path(value)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvist"


def api_keys_from_environment() -> tuple[str, ...]:
    """The API keys in $KVIST_API_KEY, separated by commas; none where it is unset or empty."""
    return tuple(part.strip() for part in os.environ.get("KVIST_API_KEY", "").split(",") if part.strip())


@dataclass(frozen=True)
class EngineConfig:
    """What an engine runs with: every option resolved, nothing left to decide. Sizes in tokens, blocks and bytes."""

    model: ModelConfig
    spec: KVSpec
    served_model_name: str
    dtype: str
    quantization: Quantization | None
    max_model_len: int
    num_kv_blocks: int
    pool_tokens: int
    """The longest request, up to `max_model_len`, that the pool can hold when it is alone."""
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    kv_allocator: str
    use_cache: bool
    watermark: float
    eviction_policy: str
    kv_pin_budget: float
    kv_priority_budget: float
    isa: str
    profile: str
    num_threads: int
    seed: int | None
    disk_tier: DiskTier | None = None

    @property
    def effective_max_len(self) -> int:
        """The most tokens, prompt and output together, that a request can have."""
        return min(self.max_model_len, self.pool_tokens)

    @property
    def pool_bytes(self) -> int:
        return self.num_kv_blocks * self.spec.block_bytes


def check_options(options: EngineOptions) -> None:
    """Refuse what is wrong whatever the model and the machine, before anything is loaded. Raises ConfigError."""
    if not isinstance(options.model, str):
        raise ConfigError(f"model is a name or a path, not {options.model!r}.")
    require_one_of(options.isa, ISAS, "isa")
    require_one_of(options.kv_cache_dtype, KV_FORMATS, "kv_cache_dtype")
    require_one_of(options.dtype, tuple(DTYPES), "dtype")
    require_one_of(options.kv_allocator, KV_ALLOCATORS, "kv_allocator")
    if options.eviction_policy is not None:
        require_one_of(options.eviction_policy, EVICTION_POLICIES, "eviction_policy")
    _check_keeping(options)
    if options.quantization is not None:
        require_one_of(options.quantization, QUANTIZATIONS, "quantization")
        if options.dtype != "auto":
            raise ConfigError(
                f"quantization={options.quantization} and dtype={options.dtype} both choose the weights' format; give one of them."
            )
    for name in ("max_model_len", "num_kv_blocks", "max_num_seqs", "max_num_batched_tokens", "num_threads", "block_size"):
        value = getattr(options, name)
        if value is None and name in ("max_model_len", "num_kv_blocks", "num_threads"):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}.")
    for name in ("enable_prefix_caching", "use_cache", "pin_threads"):
        if not isinstance(getattr(options, name), bool):
            raise ConfigError(f"{name} is True or False, not {getattr(options, name)!r}.")
    if options.num_threads is not None and options.num_threads > MAX_THREADS:
        raise ConfigError(f"num_threads is at most {MAX_THREADS}, not {options.num_threads}; the number of CPUs serves best.")
    if options.pin_threads and (options.isa == "numpy" or not hasattr(os, "sched_setaffinity")):
        where = "isa=numpy has none of its own" if options.isa == "numpy" else "this system cannot bind them"
        raise ConfigError(f"pin_threads binds the native kernels' threads to CPUs, and {where}; leave it out.")
    if (size := options.block_size) % BLOCK_MULTIPLE or size > MAX_BLOCK_SIZE:
        raise ConfigError(f"block_size must be a multiple of {BLOCK_MULTIPLE}, at most {MAX_BLOCK_SIZE:,}, not {size}.")
    if not (isinstance(options.watermark, (int, float)) and 0.0 <= options.watermark < 1.0):
        raise ConfigError(f"watermark is the share of the pool kept free, in [0, 1), not {options.watermark!r}.")
    if options.seed is not None and (not isinstance(options.seed, int) or isinstance(options.seed, bool)):
        raise ConfigError(f"seed must be a whole number, not {options.seed!r}.")
    if options.kv_allocator == "contiguous" and options.enable_prefix_caching and options.use_cache:
        raise ConfigError("kv_allocator=contiguous shares no prefixes: add --no-enable-prefix-caching, or choose paged or virtual.")
    parse_tiers(options)
    if options.num_kv_blocks is not None and options.kv_cache_memory is not None:
        raise ConfigError("num_kv_blocks and kv_cache_memory both size the pool; give one of them.")
    if options.kv_cache_memory is not None:
        parse_memory(options.kv_cache_memory, free=1 << 40)


def _check_keeping(options: EngineOptions) -> None:
    """The options about what is kept of prefixes; only paged memory has them to choose."""
    for name in ("eviction_policy", "kv_pin_budget", "kv_priority_budget"):
        if getattr(options, name) is None:
            continue
        if options.kv_allocator != "paged":
            raise ConfigError(f"{name} is for paged memory, not kv_allocator={options.kv_allocator}: leave out one of them.")
        if not (options.enable_prefix_caching and options.use_cache):
            raise ConfigError(f"{name} says what is kept of prefixes: it needs enable_prefix_caching and use_cache; leave it out.")
    if (pins := options.kv_pin_budget) is not None and not (isinstance(pins, (int, float)) and 0.0 <= pins < 1.0):
        raise ConfigError(f"kv_pin_budget is the share of the pool that may be pinned, in [0, 1), not {pins!r}.")
    if (raised := options.kv_priority_budget) is not None and not (isinstance(raised, (int, float)) and 0.0 < raised <= 1.0):
        raise ConfigError(f"kv_priority_budget is the share of the pool for raised priorities, in (0, 1], not {raised!r}.")


def resolve(
    options: EngineOptions,
    model: ModelConfig,
    *,
    isa: str,
    profile: str,
    num_threads: int,
    free_memory: int | None = None,
    served_model_name: str | None = None,
) -> EngineConfig:
    """Options, model and machine to one frozen configuration. `isa` and `num_threads` are those of the kernels chosen, `profile` is
    all that decides the bits besides the weights; `free_memory` (bytes) is measured when it is not given. Raises ConfigError."""
    check_options(options)
    if isa != "numpy" and model.head_dim % HEAD_MULTIPLE:
        raise ConfigError(
            f"isa={isa} reads heads in pieces of {HEAD_MULTIPLE}, and this model's head_dim is {model.head_dim}; use isa=numpy."
        )
    max_model_len = options.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={max_model_len} is beyond the model's own context of {model.max_position_embeddings} tokens."
        )
    spec = KVSpec(model.num_kv_heads, model.head_dim, options.kv_cache_dtype, options.block_size, group_layers(model.windows))
    num_blocks = _pool_blocks(options, spec, max_model_len, free_memory)
    if options.kv_allocator == "paged":
        pool_tokens = spec.max_request_tokens(num_blocks, max_model_len)
    else:
        pool_tokens = spec.max_span_tokens(num_blocks, max_model_len)
    if pool_tokens < 1:
        raise ConfigError(
            f"the pool of {num_blocks} blocks holds not one block of each of the model's {len(spec.groups)} KV groups."
        )
    return EngineConfig(
        model=model,
        spec=spec,
        served_model_name=served_model_name or options.model,
        dtype=DTYPES[options.dtype],
        quantization=options.quantization,
        max_model_len=max_model_len,
        num_kv_blocks=num_blocks,
        pool_tokens=pool_tokens,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        enable_prefix_caching=options.enable_prefix_caching and options.use_cache,
        kv_allocator=options.kv_allocator,
        use_cache=options.use_cache,
        watermark=options.watermark,
        eviction_policy=options.eviction_policy or EVICTION_POLICIES[0],
        kv_pin_budget=0.25 if options.kv_pin_budget is None else options.kv_pin_budget,
        kv_priority_budget=options.kv_priority_budget or 0.5,
        isa=isa,
        profile=profile,
        num_threads=num_threads,
        seed=options.seed,
        disk_tier=parse_tiers(options),
    )


def _pool_blocks(options: EngineOptions, spec: KVSpec, max_model_len: int, free_memory: int | None) -> int:
    free = available_memory() if free_memory is None else free_memory
    if options.num_kv_blocks is not None:
        _require_memory(options.num_kv_blocks * spec.block_bytes, free)
        return options.num_kv_blocks
    wanted = options.max_num_seqs * spec.request_blocks(max_model_len)
    if options.kv_cache_memory is not None:
        size = parse_memory(options.kv_cache_memory, free=free)
        _require_memory(size, free)
        blocks = size // spec.block_bytes
    else:
        size = int(free * DEFAULT_POOL_SHARE)
        blocks = min(size // spec.block_bytes, wanted)
    if blocks < len(spec.groups):
        raise ConfigError(
            f"a pool of {format_bytes(size)} holds not one block of {format_bytes(spec.block_bytes)} for each of "
            f"{len(spec.groups)} KV groups; raise kv_cache_memory."
        )
    return blocks


def _require_memory(size: int, free: int) -> None:
    """Pages are only taken when they are written, so a pool that is too large would fail in the middle of serving."""
    if size > free:
        raise ConfigError(
            f"a KV pool of {format_bytes(size)} is more than the {format_bytes(free)} of memory that are free; lower num_kv_blocks "
            "or kv_cache_memory."
        )


def describe_pool(config: EngineConfig) -> str:
    """One or two sentences: what the pool holds, and the effective limit where the pool sets it."""
    blocks, length = config.spec.request_blocks(config.max_model_len), config.max_model_len
    text = (
        f"KV pool: {config.num_kv_blocks:,} blocks of {config.spec.block_size} tokens ({config.spec.kv_format}), "
        f"{config.num_kv_blocks * length // blocks:,} tokens, {format_bytes(config.pool_bytes)}; "
        f"room for {config.num_kv_blocks * 10 // blocks / 10:g} sequences of {length:,} tokens."
    )
    if config.pool_tokens < config.max_model_len:
        text += f" A request has room for {config.pool_tokens:,} tokens at most: the pool is smaller than max_model_len."
    return text


def parse_tiers(options: EngineOptions) -> DiskTier | None:
    """What `kv_tiers` asks for. Raises ConfigError, also for options that it cannot go with."""
    if options.kv_tier_fsync is not None:
        require_one_of(options.kv_tier_fsync, SYNC_POLICIES, "kv_tier_fsync")
    if options.kv_tiers is None:
        if options.kv_tier_fsync is not None:
            raise ConfigError("kv_tier_fsync says how a disk tier is written, and there is none: add kv_tiers, or leave it out.")
        return None
    match = re.fullmatch(r"disk=([^:]+):(.+)", str(options.kv_tiers).strip())
    if match is None or ",disk=" in match[2]:
        raise ConfigError(f'kv_tiers takes one tier, "disk=SIZE:FOLDER" as in disk=20GiB:/path, not {options.kv_tiers!r}.')
    if not options.enable_prefix_caching or not options.use_cache:
        raise ConfigError("kv_tiers keeps prefixes: it needs enable_prefix_caching and use_cache; leave it out, or turn them on.")
    if options.kv_allocator != "paged":
        raise ConfigError(f"kv_tiers needs kv_allocator=paged: kv_allocator={options.kv_allocator} has no blocks to bring back.")
    try:
        quota = parse_memory(match[1], free=0)
    except ConfigError:
        quota = 0
    if not quota:
        raise ConfigError(f"kv_tiers takes a size in bytes, as in disk=20GiB:/path, not {match[1]!r}.")
    return DiskTier(quota, Path(match[2]).expanduser(), options.kv_tier_fsync or "segment")
