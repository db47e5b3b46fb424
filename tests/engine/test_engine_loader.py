"""From files to an engine: packed once with its tokenizer, read fast ever after; and which kernels run."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import kvist
from helpers.tiny_engine import ISAS, run_one, tiny_engine, tiny_packed
from helpers.tiny_models import write_tiny_gguf, write_tiny_hf
from kvist.config import EngineOptions
from kvist.engine import loader
from kvist.engine.engine import Engine
from kvist.engine.kernels import NO_NATIVE, select_ops
from kvist.errors import ConfigError, ModelNotFoundError
from kvist.kernels import cpu
from kvist.request import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SMALL = {"num_kv_blocks": 20, "num_threads": 1}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make(path: Path, **options) -> tuple[Engine, list[str]]:
    said: list[str] = []
    return Engine.from_options(EngineOptions(model=str(path), **{**SMALL, **options}), report=said.append), said


@pytest.mark.parametrize("isa", ISAS)
def test_a_file_and_a_folder_of_the_same_weights_say_the_same(isa, tmp_path):
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    folder = write_tiny_hf(tmp_path / "tiny")
    outputs = []
    for path in (file, folder):
        engine, _ = make(path, isa=isa)
        assert engine.config.isa == isa
        ids = engine.render_chat([{"role": "user", "content": "hello the hand"}])
        outputs.append((ids, run_one(engine, ids, GREEDY).token_ids))
        engine.close()
    assert outputs[0] == outputs[1]


def test_packed_once_and_what_is_reported(tmp_path):
    path = write_tiny_gguf(tmp_path / "tiny.gguf", quant="Q8_0")
    first, said = make(path)
    assert said[0] == "Packing tiny.gguf for the kernels, once."
    second, said_again = make(path)
    assert said_again == said[1:]
    assert "20 blocks of 16 tokens" in said[-1]
    assert "A request has room for 320 tokens at most" in said[-1]
    assert run_one(first, [5, 6, 7], GREEDY).token_ids == run_one(second, [5, 6, 7], GREEDY).token_ids
    assert second.tokenizer.encode("hello") == first.tokenizer.encode("hello")
    assert first.config.effective_max_len == 320


def test_a_pack_of_another_text_version_is_made_again(tmp_path, monkeypatch):
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    make(path)
    monkeypatch.setattr(loader, "TEXT_VERSION", b"next")
    assert "once" in make(path)[1][0]
    assert "once" not in make(path)[1][0]


def test_quantization_and_dtype_are_used(tmp_path):
    path = write_tiny_hf(tmp_path / "tiny", dtype="f32")
    kinds = [{}, {"dtype": "bfloat16"}, {"quantization": "w8a8"}, {"quantization": "w4a8"}, {"kv_cache_dtype": "f32"}]
    engines = [make(path, **kind)[0] for kind in kinds]
    assert [engine.config.spec.kv_format for engine in engines] == ["bf16"] * 4 + ["f32"]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0)
    scores = {run_one(engine, list(range(10, 40)), params).logprobs[0].logprob for engine in engines}
    assert len(scores) == len(kinds)


def test_end_ids_are_those_of_the_files(tmp_path):
    path = write_tiny_hf(tmp_path / "tiny", config={"eos_token_id": [2, 77]})
    engine, _ = make(path)
    output = run_one(engine, [5, 6], SamplingParams(temperature=0, max_tokens=6, logit_bias={77: 100.0}))
    assert (output.token_ids, output.finish_reason, output.text) == ([77], "stop", "")


def test_a_start_imports_nothing_that_only_packing_or_serving_needs(tmp_path):
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    make(path)
    unwanted = (
        "fastapi", "pydantic", "huggingface_hub", "gguf", "jinja2", "transformers", "torch", "safetensors", "llguidance",
        "subprocess", "zipfile", "kvist.weights.wheels", "kvist.weights.source", "kvist.text.build", "kvist.text.gguf_vocab",
        "kvist.text.grammar", "kvist.text.tool_parser", "kvist.engine.constraints", "kvist.engine.kv_view", "kvist.engine.tiers",
        "kvist.kv.span_manager", "kvist.kernels.packing", "kvist.kernels.reference",
    )  # fmt: skip
    code = (
        "import sys; from kvist import LLM\n"
        f"out = LLM({str(path)!r}, num_kv_blocks=20, num_threads=1).generate('hello', {{'max_tokens': 1}})\n"
        f"print(len(out), [name for name in {unwanted} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "1 []\n"


@pytest.mark.parametrize("collects", [True, False])
def test_a_load_leaves_the_collector_as_it_was(collects, tmp_path):
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    (gc.enable if collects else gc.disable)()
    try:
        make(path)
        assert gc.isenabled() is collects
    finally:
        gc.enable()


def test_mistakes_come_before_the_model_is_looked_for(tmp_path):
    with pytest.raises(ConfigError, match="block_size"):
        make(tmp_path / "nothing.gguf", block_size=20)
    with pytest.raises(ModelNotFoundError):
        make(tmp_path / "nothing.gguf")
    with pytest.raises(ConfigError, match=r"max_model_len=9999.*512"):
        make(write_tiny_gguf(tmp_path / "tiny.gguf"), max_model_len=9999)


def test_without_native_kernels_there_is_one_warning(tmp_path, monkeypatch):
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(cpu, "available", lambda: ())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        llm = kvist.LLM(str(path), **SMALL)
        llm.generate("hello", GREEDY)
    assert [str(one.message) for one in caught] == [NO_NATIVE]
    assert llm.config.isa == "numpy"
    _, said = make(path)
    assert said.count(NO_NATIVE) == 1
    assert NO_NATIVE not in make(path, isa="numpy")[1]


def test_auto_takes_the_best_there_is():
    said: list[str] = []
    ops = select_ops("auto", 1, warn=said.append)
    assert ops.isa == (*cpu.available(), "numpy")[0]
    assert said == ([] if cpu.available() else [NO_NATIVE])


@pytest.mark.parametrize("isa", sorted({"avx512", "avx2", "portable"} - set(ISAS)) or ["none"])
def test_an_isa_that_this_machine_lacks(isa, monkeypatch):
    if isa == "none":
        isa = ISAS[-1]
        monkeypatch.setattr(cpu, "cpu_flags", lambda: ())
        monkeypatch.setattr(cpu, "available", lambda: ())
    with pytest.raises(ConfigError, match=f"isa={isa}"):
        select_ops(isa, 1, warn=lambda _: None)


def test_threads_default_to_what_this_process_may_use(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "available_cpus", lambda: 3)
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    assert make(path, num_threads=None)[0].config.num_threads == 3
    assert make(path, num_threads=2)[0].config.num_threads == 2


def test_the_profile_and_the_weights_are_part_of_every_block_hash(tmp_path):
    """Engines of other weights or formats must never answer to the same key."""
    path = write_tiny_hf(tmp_path / "tiny")
    keys = [
        make(path, **kind)[0].manager.hashes_of((), "")[0]
        for kind in ({}, {"dtype": "bf16"}, {"quantization": "w8a8"}, {"isa": "numpy"})
    ]
    assert len(set(keys)) == 4
    assert tiny_packed().key != tiny_packed("bf16").key


def test_the_profile_names_build_weight_formats_and_kv_format():
    """Two engines of one model with one profile must compute the same bits, so all that changes them is in it."""

    def profile(**kind):
        return tiny_engine(**kind).config.profile

    build = select_ops("numpy", 1, warn=lambda message: None).profile
    assert profile() == f"{build}/w4a8+w8a8/bf16"
    assert profile(weights="f32", kv_cache_dtype="f16") == f"{build}/f32/f16"
