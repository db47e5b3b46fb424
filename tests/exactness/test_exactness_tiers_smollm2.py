"""Law L1 behind the pool on the real small model: what the disk gives back has the bits of the cold run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.tiny_engine import ISAS, Trace, run, run_one, trace_logits
from kvist.config import EngineOptions
from kvist.engine.engine import Engine
from kvist.request import SamplingParams

pytestmark = pytest.mark.model
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TEXT = "Once upon a time, in a village by the sea, there lived a clockmaker who could not tell the time. " * 8


def make(isa: str, **options: Any) -> tuple[Engine, Trace]:
    engine = Engine.from_options(EngineOptions(**{"isa": isa, "num_threads": 1, "num_kv_blocks": 100, **options}))
    return engine, trace_logits(engine)


@pytest.mark.parametrize("isa", ISAS[1:2])
def test_a_restart_hits(isa: str, tmp_path: Path) -> None:
    plain, expected = make(isa, enable_prefix_caching=False)
    tokens = plain.tokenizer.encode(TEXT)
    text = run_one(plain, tokens, GREEDY).text
    plain.close()
    first, trace = make(isa, kv_tiers=f"disk=1GiB:{tmp_path}")
    assert run_one(first, tokens, GREEDY).text == text
    assert trace.of("one") == expected.of("one")
    first.close()
    again, trace = make(isa, kv_tiers=f"disk=1GiB:{tmp_path}")
    output = run_one(again, tokens, GREEDY)
    assert output.text == text
    assert trace.of("one") == expected.of("one")
    assert output.usage.num_disk_tokens == (len(tokens) - 1) // 16 * 16 > 100
    again.close()


@pytest.mark.parametrize("isa", ISAS[1:2])
def test_swap_equals_plain(isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvist.kv.tiers.restore_is_cheaper", lambda *_: True)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    plain, expected = make(isa, enable_prefix_caching=False)
    prompts = {
        f"r{i}": plain.tokenizer.encode(text) for i, text in enumerate(("The capital of France is", "1, 2, 3, 4,", "def f(n):"))
    }
    texts = {}
    for name, tokens in prompts.items():
        texts |= {name: run(plain, {name: tokens}, params)[name].text}
    plain.close()
    engine, trace = make(isa, num_kv_blocks=6, watermark=0.0, kv_tiers=f"disk=1GiB:{tmp_path}")
    outputs = run(engine, prompts, params)
    for name in prompts:
        assert outputs[name].text == texts[name]
        assert trace.of(name) == expected.of(name)
    snapshot = engine.snapshot()
    assert snapshot.tier is not None
    assert snapshot.tier.swaps == snapshot.preemptions > 0
    engine.close()
