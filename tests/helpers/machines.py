"""Every `Ops` that this machine can run: the NumPy twin, and the native builds where they exist.

ISAS, NATIVE                     names, for parametrizing
make_ops("avx2", num_threads=2)  one of them, made once and shared
"""

from __future__ import annotations

from functools import cache

import pytest

from kvist.kernels.ops import Ops
from kvist.kernels.reference import make_reference_ops

try:
    from kvist.kernels import cpu
except ImportError:
    NATIVE: tuple[str, ...] = ()
else:
    NATIVE = tuple(cpu.available())

ISAS = ("numpy", *NATIVE)
needs_native = pytest.mark.skipif(not NATIVE, reason="the native modules are not built, or this processor runs none of them")


@cache
def twin_of(isa: str) -> Ops:
    """The definition of what a build computes."""
    return make_reference_ops(bf16_dot=isa == "avx512bf16")


@cache
def make_ops(isa: str, num_threads: int = 1) -> Ops:
    return make_reference_ops(num_threads) if isa == "numpy" else cpu.make_ops(isa, num_threads)
