"""The arena: alignment, zeros, physical memory by use alone, a refusal in words, and a clean end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvist.errors import ConfigError
from kvist.kv.spec import KVSpec, group_layers
from kvist.store import Arena

MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_blocks_are_aligned_zeroed_and_writable() -> None:
    with Arena(3, 5 * 64) as arena:
        assert arena.blocks.shape == (3, 320)
        assert arena.blocks.dtype == np.uint8
        assert arena.blocks.ctypes.data % 64 == 0
        assert arena.nbytes == 960
        assert not arena.blocks.any()
        arena.blocks[1] = 7
        assert arena.blocks.sum(axis=1, dtype=int).tolist() == [0, 7 * 320, 0]


def test_a_block_has_the_bytes_of_the_formula() -> None:
    spec = KVSpec(3, 64, "bf16", 16, group_layers((None,) * 30))
    with Arena(2, spec.block_bytes) as arena:
        assert arena.nbytes == 2 * 16 * 30 * 2 * 3 * 64 * 2


def test_memory_is_taken_by_use_alone() -> None:
    before = resident_bytes()
    with Arena(1024, 4 * MIB) as arena:
        assert resident_bytes() - before < 64 * MIB
        arena.blocks[[3, 500]] = 1
        grown = resident_bytes() - before
        assert 8 * MIB <= grown < 72 * MIB
    assert resident_bytes() - before < grown - 4 * MIB


def test_too_much_is_refused_with_both_options_named() -> None:
    with pytest.raises(ConfigError, match=r"1,180,591,620,717,411,303,424 bytes .* lower num_kv_blocks or kv_cache_memory\."):
        Arena(1 << 40, 1 << 30)


def test_closing_twice_is_harmless() -> None:
    arena = Arena(1, 64)
    arena.close()
    arena.close()
    assert arena.blocks.shape == (0, 0)


def test_a_view_outlives_the_arena() -> None:
    arena = Arena(2, 64)
    view = arena.blocks[1]
    view[...] = 9
    arena.close()
    assert view.tolist() == [9] * 64


def test_released_memory_is_given_back_and_reads_as_zeros() -> None:
    with Arena(16, MIB, huge_pages=False) as arena:
        arena.blocks[:] = 1
        before = resident_bytes()
        arena.release([(2 * MIB, 6 * MIB), (8 * MIB, 8 * MIB + 4096)])
        assert before - resident_bytes() >= 4 * MIB
        assert arena.blocks.any(axis=1).tolist() == [block not in range(2, 6) for block in range(16)]
        assert not arena.blocks[8, :4096].any()
        assert arena.blocks[8, 4096:].all()
        arena.blocks[3] = 9
        assert arena.blocks[3].all()


def test_copies_are_made_in_order() -> None:
    with Arena(4, 64) as arena:
        arena.blocks[0] = 5
        arena.copy([(0, 1), (1, 2)])
        assert arena.blocks.sum(axis=1, dtype=int).tolist() == [320, 320, 320, 0]
