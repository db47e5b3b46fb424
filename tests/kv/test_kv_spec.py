"""How many blocks a request takes: window arithmetic, against row by row computing and against the manager."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.deciders import make_request, make_spec
from kvist.kv.manager import KVManager
from kvist.kv.spec import KVSpec, first_block, group_layers
from kvist.store.arena import Arena


@pytest.mark.parametrize(
    ("position", "window", "expected"),
    [
        (0, None, 0),
        (1000, None, 0),
        (0, 1, 0),
        (16, 1, 1),
        (15, 16, 0),
        (30, 16, 0),
        (31, 16, 1),
        (32, 16, 1),
        (47, 16, 2),
        (32, 17, 1),
    ],
)
def test_first_block_that_a_row_reads(position: int, window: int | None, expected: int) -> None:
    assert first_block(position, window, 16) == expected


@given(st.integers(1, 80), st.one_of(st.none(), st.integers(1, 40)), st.sampled_from([1, 2, 4, 16]))
def test_peak_is_what_row_by_row_computing_holds(num_tokens: int, window: int | None, size: int) -> None:
    held = [position // size + 1 - first_block(position, window, size) for position in range(num_tokens)]
    assert make_spec(window, block_size=size).request_blocks(num_tokens) == max(held)
    for position in range(num_tokens):
        lowest = 0 if window is None else max(0, position - window + 1)
        assert first_block(position, window, size) == lowest // size


@pytest.mark.parametrize(
    ("windows", "num_blocks", "expected"),
    [
        ((None,), 16, 256),
        ((None, None), 16, 128),
        # A window of 32 holds at most 3 blocks a group: 5 x 3 of 20, and 5 for the full group.
        ((None, 32, 32, 32, 32, 32), 20, 80),
        ((None, 32, 32, 32, 32, 32), 19, 64),
        ((None, 32, 32, 32, 32, 32), 17, 32),
        ((None, 32, 32, 32, 32, 32), 5, 0),
        ((32,), 3, 1000),
        ((32,), 2, 32),
    ],
)
def test_what_one_request_can_have(windows: tuple[int | None, ...], num_blocks: int, expected: int) -> None:
    spec = make_spec(*windows)
    assert spec.max_request_tokens(num_blocks, 1000) == expected
    assert spec.request_blocks(expected) <= num_blocks
    assert expected == 1000 or spec.request_blocks(expected + 1) > num_blocks


def test_the_formula_is_what_the_manager_gives() -> None:
    spec = make_spec(None, 32, 32, 32, 32, 32)
    manager = KVManager(spec, 20)
    request = make_request("all", [1] * 1000)
    manager.add(request)
    manager.attach(request, manager.no_match())
    while manager.allocate(request, 1):
        request.num_computed_tokens += 1
        manager.commit(request)
        manager.trim(request)
    assert request.num_computed_tokens == spec.max_request_tokens(20, 1000) == 80


@pytest.mark.parametrize(("kv_format", "dtype"), [("bf16", np.uint16), ("f16", np.float16), ("f32", np.float32)])
@pytest.mark.parametrize("windows", [(None,) * 4, (8, 8, None, 8, 8, None)])
def test_the_byte_formula_is_that_of_real_arrays(kv_format: str, dtype: type, windows: tuple[int | None, ...]) -> None:
    """Law L5: keys and values of 48 tokens, layer by layer, and the blocks of an arena that hold them."""
    spec = KVSpec(3, 64, kv_format, 16, group_layers(windows))
    arrays = [np.zeros((2, 48, 3, 64), dtype) for _ in windows]
    size = sum(array.nbytes for array in arrays)
    assert size == 48 * spec.bytes_per_token
    with Arena(3 * len(spec.groups), spec.block_bytes) as arena:
        assert arena.nbytes == size
