"""A step that goes on makes no array: what it allocates is fewer bytes than one row of anything that the model computes."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from helpers.machines import NATIVE, needs_native
from helpers.tiny_engine import tiny_engine
from kvist.request import SamplingParams

HIDDEN, REQUESTS, STEPS = 2048, 3, 20
ROW_BYTES = 4 * HIDDEN

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=1, max_tokens=64, ignore_eos=True)


@needs_native
@pytest.mark.parametrize("isa", NATIVE or ["none"])
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_step_that_goes_on_makes_no_array(isa: str, params: SamplingParams) -> None:
    """NumPy tells tracemalloc of its arrays; the native side's own buffers are held by tests/native. Tables of blocks
    grow every eighth block, which no step here does."""
    shape = {"hidden": HIDDEN, "heads": 1, "kv_heads": 1, "head_dim": 32, "intermediate": 32, "vocab": HIDDEN, "layers": 1}
    engine = tiny_engine(isa, 2, model=shape, weights="w8a8")
    for number in range(REQUESTS):
        engine.add_request(f"r{number}", [5, 6, 7 + number], params)
    for _ in range(8):
        engine.step()
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        peaks = []
        for _ in range(STEPS):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            engine.step()
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
        gc.enable()
    assert engine.snapshot().generated_tokens >= REQUESTS * (STEPS + 1)
    engine.close()
    assert 0 < max(peaks) < ROW_BYTES
