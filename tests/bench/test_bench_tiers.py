"""`kvist bench tiers`: figures come out of what they say, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.tiny_engine import tiny_engine
from kvist import LLM
from kvist.bench import measure, tiers
from kvist.bench.workloads import Work


def test_restoring_is_measured_where_blocks_were_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A tiny model may well compute sooner than a busy disk reads.
    monkeypatch.setattr("kvist.kv.tiers.restore_is_cheaper", lambda *_: True)
    engine = tiny_engine("numpy", num_kv_blocks=60, kv_tiers=f"disk=64MiB:{tmp_path}", kv_tier_fsync="never")
    with LLM.from_engine(engine) as llm:
        reports = list(tiers.measure_restore(llm, measure.generator(llm), tmp_path, 160, 2))
        tier = engine.snapshot().tier
    assert [[len(row.values) for row in report] for report in reports] == [[1] * 3, [2] * 3]
    computed, restored, gain = reports[-1]
    assert gain.values == tuple(cold / warm for cold, warm in zip(computed.values, restored.values, strict=True))
    assert tier is not None
    assert tier.store.loaded_blocks >= 10


def test_decoding_is_measured_side_by_side(tmp_path: Path) -> None:
    work = Work("decode_2", "decode", 2, 20, 40)
    with (
        LLM.from_engine(tiny_engine("numpy")) as plain,
        LLM.from_engine(tiny_engine("numpy", kv_tiers=f"disk=64MiB:{tmp_path}")) as tiered,
    ):
        rows = tiers.measure_decode(measure.generator(plain), measure.generator(tiered), 270, 2, work)
        tiered.close()
    assert [row.name for row in rows] == ["decode_2.plain", "decode_2.tiered", "decode_2.cost"]
    assert rows[2].values == pytest.approx(
        [(1 - slow / fast) * 100 for fast, slow in zip(*(row.values for row in rows[:2]), strict=True)]
    )
    assert any(path.suffix == ".seg" for path in tmp_path.iterdir()), "something was written"
