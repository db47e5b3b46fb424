"""An engine with a disk that fails for a while, or is slow."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from helpers.tiny_engine import run_one, settle, tiny_engine, trace_logits
from kvist.engine.tiers import WRITING_SECONDS
from kvist.request import SamplingParams
from kvist.store.trust import MAX_FAILURES, PAUSE_SECONDS

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
WRITTEN = (100 + 9) // 16
"""Whole blocks of a prompt of 100 tokens and its answer, whose last token is not computed."""
HALF = 1
"""Its last block is kept too, as more than half of it is filled."""


def test_blocks_are_written_again_once_a_disk_that_was_full_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    options: dict[str, Any] = {"num_kv_blocks": 200, "weights": "w4a8"}
    engine, plain = tiny_engine(kv_tiers=f"disk=64MiB:{tmp_path}", **options), tiny_engine(enable_prefix_caching=False, **options)
    trace, expected = trace_logits(engine), trace_logits(plain)
    tiers = engine._tiers
    assert tiers is not None
    store: Any = tiers._transfers._store
    now, write = [0.0], store._files.write
    monkeypatch.setattr(store._trust, "_clock", lambda: now[0])

    def full(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def serve(number: int) -> tuple[int, int, bool]:
        rng = random.Random(number)
        tokens = [rng.randrange(3, 270) for _ in range(100)]
        trace.rows.clear()
        expected.rows.clear()
        assert run_one(engine, tokens, GREEDY).text == run_one(plain, tokens, GREEDY).text
        assert trace.of("one") == expected.of("one")
        settle(engine)
        stats = store.stats()
        return stats.write_errors, stats.stored_blocks, tiers.snapshot(0).is_read_only

    monkeypatch.setattr(store._files, "write", full)
    assert serve(0) == (WRITTEN + HALF, 0, False)
    assert serve(1) == (MAX_FAILURES, 0, True)
    assert serve(2) == (MAX_FAILURES, 0, True), "none is offered"
    now[0] += PAUSE_SECONDS
    monkeypatch.setattr(store._files, "write", write)
    assert serve(3) == (MAX_FAILURES, WRITTEN + HALF, False)
    engine.close()
    assert [str(one.message).removeprefix(f"The disk tier in {tmp_path} ") for one in recwarn] == [
        "keeps no new blocks: No space left on device. It is tried again every 60 seconds.",
        "keeps new blocks again.",
    ]


def test_an_engine_without_work_hears_what_was_written_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(kv_tiers=f"disk=64MiB:{tmp_path}", num_kv_blocks=200, weights="w4a8")
    tiers = engine._tiers
    assert tiers is not None
    store: Any = tiers._transfers._store
    gate, put = Event(), store.put
    monkeypatch.setattr(store, "put", lambda items: put(items) if gate.wait(20) else [])
    run_one(engine, [3 + number for number in range(100)], GREEDY)
    assert engine.rest() == pytest.approx(WRITING_SECONDS)
    assert engine.snapshot().tier.store.stored_blocks == 0
    gate.set()
    while (rest := engine.rest()) is not None:
        assert rest == pytest.approx(WRITING_SECONDS)
        tiers.wait()
    assert engine.snapshot().tier.store.stored_blocks == WRITTEN + HALF
    assert not any(tiers._decider._storing)
    engine.close()
