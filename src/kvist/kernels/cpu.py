"""The native kernels: which builds this machine can run, and `Ops` over one of them.

Each instruction set is a module of its own (`_cpu_avx512bf16`, `_cpu_avx512`, `_cpu_avx2`, `_cpu_base`), compiled from the same
sources in `csrc/` and used only if the CPU has all of its flags. This module chooses nothing by itself (`engine/loader` does) and
does no arithmetic.
Invariants: a handle keeps alive every array whose memory the native side reads; arrays cross as plain unsigned views.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvist.errors import ConfigError
from kvist.kernels.native_program import NativeProgram
from kvist.kernels.ops import F32, I32, AttentionParams, ForwardBatch, PackedLinear
from kvist.kernels.program import Array, Call
from kvist.kernels.sampling import ROW, Adjustment, Drawn, Scores
from kvist.kv.spec import KVSpec

_AVX512 = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni")

REQUIRED_FLAGS: dict[str, tuple[str, ...]] = {
    "avx512": _AVX512,
    "avx512bf16": (*_AVX512, "avx512bf16"),
    "avx2": ("avx2", "fma", "f16c"),
    "portable": (),
}
"""Native builds, fastest first where nothing else is known, and the CPU flags that each needs."""

FAST_BF16_DOT = "fast_bf16_dot"
"""What `cpu_features` says of CPUs on which the 16-bit dot product pays; elsewhere avx512bf16 comes after avx512."""

_MODULES = {
    "avx512": "kvist._cpu_avx512",
    "avx512bf16": "kvist._cpu_avx512bf16",
    "avx2": "kvist._cpu_avx2",
    "portable": "kvist._cpu_base",
}

PEAK_MEMORY = 256 << 20
"""Bytes that are read to tell how fast memory is: more than the caches hold."""


class Peaks(NamedTuple):
    """What the machine reaches with a build's own building blocks: bytes a second read from memory, operations a second of f32
    products and of the integer products of the quantized formats (scales left out)."""

    read_bytes: float
    f32: float
    w8a8: float
    w4a8: float


def _import(isa: str) -> ModuleType | None:
    try:
        return importlib.import_module(_MODULES[isa])
    except ImportError:
        return None


def cpu_flags() -> tuple[str, ...] | None:
    """The flags of this CPU that the builds ask for; None when no native module is built (nothing else can tell)."""
    base = _import("portable")
    return None if base is None else tuple(base.cpu_features())


def built() -> tuple[str, ...]:
    """Native builds that are installed, whether or not this CPU can run them, in the order of `REQUIRED_FLAGS`."""
    return tuple(isa for isa, module in _MODULES.items() if importlib.util.find_spec(module) is not None)


def _as_defined(isa: str) -> bool:
    """Whether an instruction that only one build uses gives the bits of its definition on this CPU."""
    if isa != "avx512bf16":
        return True
    module = _import(isa)
    return module is not None and bool(module.bf16_dot_as_defined())


def available() -> tuple[str, ...]:
    """Native builds that are installed and that this CPU can run, fastest first."""
    flags = cpu_flags()
    if flags is None:
        return ()
    usable = [isa for isa in built() if set(REQUIRED_FLAGS[isa]) <= set(flags) and _as_defined(isa)]
    if FAST_BF16_DOT in flags:
        usable.sort(key=lambda isa: isa != "avx512bf16")
    return tuple(usable)


def make_ops(isa: str, num_threads: int, cpus: Sequence[int] = ()) -> CpuOps:
    """`Ops` of one native build; with `cpus`, its threads are bound to them in order, save the first, which is the caller's own.
    Errors: ConfigError when it is not built, the CPU lacks a flag, or the system binds no threads."""
    if isa not in available():
        flags = cpu_flags()
        if flags is None or isa not in built():
            raise ConfigError(f"isa={isa} is not built here; reinstall kvist with a C++ compiler, or use isa=numpy.")
        missing = ", ".join(flag for flag in REQUIRED_FLAGS[isa] if flag not in flags)
        if not missing:
            raise ConfigError(f"isa={isa} relies on a rounding of 16-bit dot products that this CPU does not have; use isa=auto.")
        raise ConfigError(f"isa={isa} needs CPU flags that this machine lacks ({missing}); use isa=auto.")
    module = importlib.import_module(_MODULES[isa])
    machine = module.Machine(num_threads, list(cpus))
    if not machine.bound:
        raise ConfigError("This system does not let kvist bind its threads to CPUs; leave pin_threads out.")
    return CpuOps(isa, module, machine)


def _bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    assert array.flags.c_contiguous
    return array.reshape(-1).view(np.uint8)


class _LinearHandle(NamedTuple):
    native: Any
    n: int
    k: int
    keep: tuple[PackedLinear, ...]

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.keep)

    @property
    def formats(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(segment.format for segment in self.keep))


class _CacheHandle(NamedTuple):
    arena: npt.NDArray[np.uint8]
    spec: KVSpec


class _AttentionHandle(NamedTuple):
    native: Any
    cache: _CacheHandle
    params: AttentionParams

    @property
    def kv_format(self) -> str:
        return self.cache.spec.kv_format

    @property
    def token_bytes(self) -> int:
        return self.cache.spec.bytes_per_token_layer


class _StepHandle(NamedTuple):
    native: Any
    keep: ForwardBatch


@dataclass
class _SamplingHandle:
    native: Any
    rows: npt.NDArray[Any]
    logits: F32 | None = None
    """What the native side draws from: usually the same view at each step."""


class CpuOps:
    """`Ops` over one native module; see `kernels/ops.py` for what each call computes. One caller at a time."""

    def __init__(self, isa: str, module: ModuleType, machine: Any) -> None:
        self.isa = isa
        self.profile = f"{isa}/{module.kernel_version}"
        self._module = module
        self._machine = machine

    @property
    def num_threads(self) -> int:
        return int(self._machine.num_threads)

    def bind_linear(self, *segments: PackedLinear) -> _LinearHandle:
        native = self._module.Linear()
        for part in segments:
            half = part.scale is not None and part.scale.dtype == np.float16
            native.add(
                part.format,
                part.n,
                part.k,
                _bytes(part.data),
                None if part.scale is None else _bytes(part.scale),
                None if part.minimum is None else _bytes(part.minimum),
                half,
                part.bias,
            )
        return _LinearHandle(native, native.n, native.k, segments)

    def bind_cache(self, arena: npt.NDArray[np.uint8], spec: KVSpec) -> _CacheHandle:
        if spec.head_dim % 16 or spec.head_dim > self._module.max_head_dim:
            raise ConfigError(
                f"The native kernels take head sizes that are multiples of 16 up to {self._module.max_head_dim}, "
                f"and this model's is {spec.head_dim}; use isa=numpy."
            )
        assert arena.dtype == np.uint8
        assert arena.shape[1] == spec.block_bytes
        return _CacheHandle(arena, spec)

    def bind_attention(self, cache: _CacheHandle, layer: int, params: AttentionParams) -> _AttentionHandle:
        spec = cache.spec
        group, place = next((g, group.layers.index(layer)) for g, group in enumerate(spec.groups) if layer in group.layers)
        native = self._module.AttentionLayer(
            arena=cache.arena,
            layer_offset=place * spec.block_size * spec.bytes_per_token_layer,
            format=spec.kv_format,
            block_size=spec.block_size,
            group=group,
            heads=params.num_heads,
            kv_heads=params.num_kv_heads,
            dim=params.head_dim,
            scale=params.scale,
            window=params.window or 0,
            cosine=params.cos,
            sine=params.sin,
            q_norm=params.q_norm,
            k_norm=params.k_norm,
            norm_eps=params.norm_eps,
        )
        return _AttentionHandle(native, cache, params)

    def bind_batch(self, batch: ForwardBatch) -> _StepHandle:
        native = self._module.Step(batch.positions, batch.query_start_loc)
        for group in batch.groups:
            native.add_group(group.block_table, group.slot_mapping)
        return _StepHandle(native, batch)

    def embed(self, table: _LinearHandle, token_ids: I32, out: F32) -> None:
        self._machine.embed(table.native, token_ids, out)

    def norm_linear(self, x: F32, norm: F32, eps: float, weight: _LinearHandle, out: F32) -> None:
        self._machine.norm_linear(x, norm, eps, weight.native, out)

    def linear_add(self, x: F32, weight: _LinearHandle, residual: F32) -> None:
        self._machine.linear_add(x, weight.native, residual)

    def gated_mlp(self, x: F32, norm: F32, eps: float, gate_up: _LinearHandle, down: _LinearHandle) -> None:
        self._machine.gated_mlp(x, norm, eps, gate_up.native, down.native)

    def rope_write(self, batch: _StepHandle, attention: _AttentionHandle, qkv: F32) -> None:
        self._machine.rope_write(batch.native, attention.native, qkv)

    def attend(self, batch: _StepHandle, attention: _AttentionHandle, qkv: F32, out: F32) -> None:
        self._machine.attend(batch.native, attention.native, qkv, out)

    def record(self, calls: Sequence[Call], result: Array) -> NativeProgram:
        return NativeProgram(self._module.Program(self._machine), calls, result)

    def bind_sampling(self, rows: npt.NDArray[Any]) -> _SamplingHandle:
        return _SamplingHandle(self._sampling(rows), rows)

    def sample(self, logits: F32, sampling: _SamplingHandle, adjustments: Mapping[int, Adjustment]) -> Drawn:
        if adjustments:
            return self._sample_adjusted(logits, sampling.rows, adjustments)
        if logits is not sampling.logits:
            sampling.native.bind_logits(logits)
            sampling.logits = logits
        drawn: Drawn = sampling.native.draw()
        return drawn

    def _sample_adjusted(self, logits: F32, rows: npt.NDArray[Any], adjustments: Mapping[int, Adjustment]) -> Drawn:
        native = self._sampling(rows)
        for row, change in adjustments.items():
            native.adjust(
                row,
                change.mask,
                change.bias_ids,
                change.bias,
                change.seen,
                change.counts,
                change.repetition,
                change.frequency,
                change.presence,
            )
        native.bind_logits(logits)
        drawn: Drawn = native.draw()
        return drawn

    def _sampling(self, rows: npt.NDArray[Any]) -> Any:
        return self._module.Sampling(self._machine, rows.view(np.uint8).reshape(len(rows), ROW.itemsize))

    def score(self, logits: F32, rows: I32, token_ids: I32, tops: I32) -> Scores:
        scores = Scores.empty(tops)
        self._module.score(
            self._machine,
            logits,
            rows,
            token_ids,
            tops,
            scores.logits,
            scores.peaks,
            scores.totals,
            scores.ranks,
            scores.top_ids,
            scores.top_logits,
        )
        return scores

    def peaks(self) -> Peaks:
        """Measured now, with all threads; about a second."""
        return Peaks(*self._machine.peaks(PEAK_MEMORY))
