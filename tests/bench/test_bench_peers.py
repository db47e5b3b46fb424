"""Who takes part in a comparison, the files made for them, and llama.cpp's driver on a stand-in for its server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from helpers.fake_peers import write_llama_server
from helpers.tiny_models import BASE_VOCAB, TinyModel, write_tiny_gguf, write_tiny_hf
from kvist import LLM, SamplingParams
from kvist.bench import model_files, peer_setup
from kvist.bench.compare import compare
from kvist.bench.random_model import Shape, q4_0_rows, write_random_model
from kvist.bench.session import own_python
from kvist.bench.workloads import FRESH_WORKS, Work
from kvist.config import EngineOptions
from kvist.errors import UnsupportedModelError, UsageError

SMALL = Work("small", "output", 2, 8, 4)
DEEP = Work("deep", "decode", 1, 20, 10)


def silent(_: str) -> None:
    """No report."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf", quant="Q8_0")


def enter(model: Path, peers: dict[str, Path]) -> peer_setup.Entry:
    engine = EngineOptions(model=str(model), num_kv_blocks=32, num_threads=1, enable_prefix_caching=False)
    return peer_setup.enter(engine, model, peers, also_4_bit=True, say=silent)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "Name at least one peer"),
        (["llama=/x"], "'llama=/x'"),
        (["vllm"], "NAME=FOLDER"),
        (["vllm="], "NAME=FOLDER"),
        (["vllm=/a", "vllm=/b"], "--peer vllm is given twice"),
    ],
)
def test_peers_are_named_once_with_a_folder(texts: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        peer_setup.parse_peers(texts)


def test_peers_that_are_not_there_are_reasons(tiny: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    (bare / "bin").mkdir(parents=True)
    (bare / "bin" / "python").symlink_to(sys.executable)
    peers = peer_setup.parse_peers([f"vllm={bare}", "openvino=/nowhere", f"llamacpp={tmp_path}"])
    entry = enter(tiny, peers)
    assert [one.name for one in entry.contenders] == ["kvist"]
    assert [(one.contender, one.work, one.reason) for one in entry.failures] == [
        ("vllm", None, f"the package vllm is not installed in {bare}"),
        ("openvino", None, "there is no Python environment in /nowhere"),
        ("llamacpp", None, f"there is no llama-server in {tmp_path}"),
    ]


def test_each_peer_gets_the_files_values_in_the_form_that_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama_server(tmp_path)
    quantizer = tmp_path / "llama-quantize"
    quantizer.write_text('#!/bin/sh\neval "cp \\${$(($# - 2))} \\${$(($# - 1))}"; echo "$@" > "$0.log"\n', encoding="utf-8")
    quantizer.chmod(0o755)
    monkeypatch.setattr(peer_setup, "MODULES", {"openvino": "json", "transformers": "json", "vllm": "json"})
    python = str(Path(sys.executable))
    model = write_tiny_gguf(tmp_path / "tiny.gguf", quant={"default": "Q4_1", "token_embd.weight": "Q8_0"}, vocab=300)
    entry = enter(model, {"llamacpp": tmp_path, "openvino": Path(python), "transformers": Path(python), "vllm": Path(python)})
    kvist, llamacpp, llamacpp_q4, openvino, openvino_q4, transformers, vllm = entry.contenders
    assert not entry.failures
    assert kvist.setup["options"]["model"] == llamacpp.setup["model"] == openvino.setup["model"] == str(model)
    assert kvist.weights.startswith("Q4_1 (")
    assert (Path(transformers.setup["model"]) / "model.safetensors").exists()
    assert [llamacpp_q4.name, openvino_q4.name] == ["llamacpp Q4_0", "openvino Q4_0"]
    assert llamacpp_q4.setup["model"] == openvino_q4.setup["model"] != str(model)
    assert llamacpp_q4.setup["threads"] == openvino.setup["threads"] == 1
    assert (tmp_path / "llama-quantize.log").read_text(encoding="utf-8").split()[:1] == ["--allow-requantize"]
    assert openvino.python == ("env", python, "-I")
    assert vllm.python[-3:] == ("VLLM_CPU_OMP_THREADS_BIND=0-0", python, "-I")
    assert vllm.setup["model"] == transformers.setup["model"]
    assert llamacpp.python == own_python()


def test_without_the_tool_the_4_bit_rows_are_reasons(tmp_path: Path) -> None:
    write_llama_server(tmp_path)
    entry = enter(write_tiny_gguf(tmp_path / "tiny.gguf", quant="Q4_1"), {"llamacpp": tmp_path})
    assert [one.name for one in entry.contenders] == ["kvist", "llamacpp"]
    assert [one.contender for one in entry.failures] == ["llamacpp Q4_0"]
    assert "there is no llama-quantize" in entry.failures[0].reason


@pytest.mark.parametrize("quant", ["Q4_0", "Q8_0"])
def test_a_file_of_that_format_or_of_more_bits_is_compared_as_it_is(quant: str, tmp_path: Path) -> None:
    write_llama_server(tmp_path)
    entry = enter(write_tiny_gguf(tmp_path / "tiny.gguf", quant=quant), {"llamacpp": tmp_path})
    assert [one.name for one in entry.contenders] == ["kvist", "llamacpp"]
    assert not entry.failures


def test_kvist_and_a_server_program_run_the_same_works(tiny: Path, tmp_path: Path) -> None:
    write_llama_server(tmp_path)
    entry = enter(tiny, {"llamacpp": tmp_path})
    start, _ = FRESH_WORKS
    result = compare(entry.contenders, [DEEP, SMALL, start], 1, vocab_size=BASE_VOCAB, report=silent, timeout=120.0)
    assert not result.failures
    assert {name: len(values) for name, values in result.values.items()} == {
        (work, name): 1 for work in ("deep", "small", "start") for name in ("kvist", "llamacpp")
    }
    assert result.values["deep", "llamacpp"] == [pytest.approx(20.0)]
    assert result.facts["llamacpp"] == {"version": "7 (fake)"}
    assert result.facts["kvist"]["threads"] == 1
    asked = [json.loads(line) for line in (tmp_path / "llama-server.log").read_text(encoding="utf-8").splitlines()]
    bodies = [entry["body"] for entry in asked]
    assert all((body["ignore_eos"], body["cache_prompt"], body["temperature"]) == (True, False, 0.0) for body in bodies)
    # A start that does not count; the server's warm-up and ours, the deep work; with two slots a warm-up and both requests;
    # a start that counts.
    assert [(len(body["prompt"]), body["n_predict"]) for body in bodies] == [
        (16, 1), (16, 4), (16, 4), (20, 11), (16, 4), (8, 4), (8, 4), (16, 1),
    ]  # fmt: skip
    slots = [entry["arguments"][entry["arguments"].index("-np") + 1] for entry in asked]
    assert slots == ["1", "1", "1", "1", "2", "2", "2", "1"]
    assert ["--no-warmup" in entry["arguments"] for entry in asked] == [True] + [False] * 6 + [True]


@pytest.mark.parametrize(("arch", "tied"), [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", True)])
def test_the_folder_has_the_files_values(arch: str, tied: bool, tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf", arch=arch, tied=tied, theta=5000.0)
    folder = model_files.hf_folder(model, silent)
    weights = {name: array.astype(ml_dtypes.bfloat16) for name, array in TinyModel(arch=arch, tied=tied).weights().items()}
    written = load_file(folder / "model.safetensors")
    assert written.keys() == weights.keys()
    assert all(np.array_equal(written[name], weights[name]) for name in weights)
    ours = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    theirs = json.loads((write_tiny_hf(tmp_path / "hf", arch=arch, tied=tied, theta=5000.0) / "config.json").read_text())
    same = set(ours) & set(theirs) - {"bos_token_id", "eos_token_id", "torch_dtype", "rms_norm_eps"}
    assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}
    assert {"rope_theta", "num_key_value_heads", "tie_word_embeddings", "model_type"} <= same
    assert model_files.hf_folder(model, lambda _: pytest.fail("made again")) == folder


def test_what_cannot_be_translated_is_refused(tmp_path: Path) -> None:
    scaled = write_tiny_gguf(tmp_path / "tiny.gguf", metadata={"{arch}.rope.scaling.type": "linear"})
    with pytest.raises(UnsupportedModelError, match="scaled rotary"):
        model_files.hf_folder(scaled, silent)
    strange = write_tiny_gguf(tmp_path / "strange.gguf", extra={"blk.0.router.weight": np.ones((2, 64), dtype=np.float32)})
    with pytest.raises(UnsupportedModelError, match=r"tensor blk\.0\.router\.weight"):
        model_files.hf_folder(strange, silent)


def test_random_blocks_are_even_around_zero_and_have_the_spread_of_a_trained_matrix() -> None:
    import gguf

    rows = q4_0_rows(np.random.default_rng(1), 64, 256)
    values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.Q4_0)
    assert values.shape == (64, 256)
    steps = np.unique(values)
    assert len(steps) == 15
    assert np.allclose(steps, -steps[::-1])
    assert abs(values.mean()) < 0.01 / 16
    assert values.std() == pytest.approx(1 / 16, rel=0.02)


def test_a_random_model_loads_and_speaks(tmp_path: Path) -> None:
    shape = Shape("tiny", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, context=256)
    tokenizer = write_tiny_gguf(tmp_path / "tiny.gguf")
    path = write_random_model(tmp_path / "random.gguf", shape, tokenizer)
    again = write_random_model(tmp_path / "again.gguf", shape, tokenizer)
    assert path.read_bytes() == again.read_bytes()
    llm = LLM(path, num_kv_blocks=16, num_threads=1)
    [output] = llm.generate(["hello"], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2))
    assert len(output.outputs[0].token_ids) == 8
    assert output.outputs[0].logprobs is not None
    assert all(np.isfinite(one.logprob) for one in output.outputs[0].logprobs)
    assert llm.config.model.num_kv_heads == 2


def test_a_file_is_made_again_for_a_source_that_changed(tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    first = model_files.hf_folder(model, silent)
    write_tiny_gguf(model, seed=5)
    assert model_files.hf_folder(model, silent) != first


def test_a_requantization_that_fails_says_why(tiny: Path, tmp_path: Path) -> None:
    tool = tmp_path / "llama-quantize"
    tool.write_text("#!/bin/sh\necho no room >&2\nexit 1\n", encoding="utf-8")
    tool.chmod(0o755)
    with pytest.raises(UsageError, match="llama-quantize failed: no room"):
        model_files.requantize(tiny, tool, silent)


def test_the_host_needs_no_package(tmp_path: Path) -> None:
    host = Path(peer_setup.__file__).parent / "peers" / "host.py"
    driver = tmp_path / "driver.py"
    driver.write_text("def load(setup): return (lambda p, n: {'made': [n]}), {'got': setup['x']}\n", encoding="utf-8")
    lines = '{"x": 5}\n{"prompts": [[1]], "new_tokens": 3}\n'
    done = subprocess.run([sys.executable, "-I", "-S", str(host), str(driver)], input=lines, capture_output=True, text=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{"got": 5}, {"made": [3]}]
    assert done.returncode == 0
