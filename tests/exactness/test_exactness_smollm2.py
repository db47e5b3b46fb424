"""Law L1 and the cost of eight-bit activations, on the real small model through the whole engine.

Exactness is bit for bit against the same request alone, cold and in one chunk. Quality is against the same quantized weights,
computed in float32 without a cache by another library: what is measured is the quantization of activations and the 16-bit KV, not
the cost of the file's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.tiny_engine import ISAS, Collected, Trace, drain, run, run_one, trace_logits
from kvist.config import EngineOptions
from kvist.engine.engine import Engine
from kvist.kernels.packing import unpack
from kvist.request import SamplingParams
from kvist.weights.hub import resolve_model
from kvist.weights.pack import load_packed

pytestmark = pytest.mark.model
ROOT = Path(__file__).parents[2]
NATIVE = ISAS[1:]
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived a clockmaker who could not tell the time. Every morning he asked his "
    "neighbour, and every evening he had forgotten what she said, so that",
    "1, 2, 3, 4,",
)
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def make(isa: str, **options: Any) -> tuple[Engine, Trace]:
    engine = Engine.from_options(EngineOptions(**{"isa": isa, "num_threads": 1, "num_kv_blocks": 100, **options}))
    return engine, trace_logits(engine)


@lru_cache(None)
def alone(isa: str) -> tuple[dict[str, list[int]], dict[str, tuple[list[bytes], str]]]:
    """Prompts by name, and what each gives alone."""
    engine, trace = make(isa, enable_prefix_caching=False)
    prompts = {f"r{i}": engine.tokenizer.encode(text) for i, text in enumerate(TEXTS)}
    results = {}
    for name, prompt in prompts.items():
        trace.rows.clear()
        text = run_one(engine, prompt, GREEDY).text
        results[name] = trace.of("one"), text
    return prompts, results


def assert_as_alone(isa: str, trace: Trace, outputs: dict[str, Collected]) -> None:
    prompts, expected = alone(isa)
    assert sorted(outputs) == sorted(prompts)
    for name in prompts:
        assert (trace.of(name), outputs[name].text) == expected[name]
        assert len(trace.of(name)) == NUM_TOKENS


@pytest.mark.parametrize("isa", NATIVE)
def test_the_model_speaks(isa):
    _, expected = alone(isa)
    assert expected["r0"][1].startswith(" Paris")
    assert expected["r3"][1].startswith(" 5, 6")


@pytest.mark.parametrize("isa", NATIVE)
@pytest.mark.parametrize("budget", [7, 16, 512])
def test_batches_and_chunks(isa, budget):
    engine, trace = make(isa, max_num_batched_tokens=budget)
    assert_as_alone(isa, trace, run(engine, alone(isa)[0], GREEDY))
    assert max(map(sum, trace.steps)) == min(budget, sum(map(len, alone(isa)[0].values())))
    assert max(map(len, trace.steps)) == len(TEXTS)


@pytest.mark.parametrize("isa", NATIVE)
def test_two_threads_and_prefix_hits(isa):
    engine, trace = make(isa, num_threads=2)
    for cached in (0, 42):
        trace.rows.clear()
        outputs = run(engine, alone(isa)[0], GREEDY)
        assert_as_alone(isa, trace, outputs)
        assert outputs["r2"].usage.num_cached_tokens == cached


@pytest.mark.parametrize("isa", NATIVE)
def test_the_beginning_of_a_block_is_copied(isa):
    """Token for token and logprob for logprob, whether or not a part of the last block was found."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    cold, cold_trace = make(isa, enable_prefix_caching=False)
    prompt = cold.tokenizer.encode(TEXTS[2])
    expected = run_one(cold, prompt[:40], params)
    engine, trace = make(isa)
    run_one(engine, prompt, GREEDY)
    for _ in range(2):
        trace.rows.clear()
        output = run_one(engine, prompt[:40], params)
        assert (output.token_ids, output.logprobs) == (expected.token_ids, expected.logprobs)
        assert trace.of("one") == cold_trace.of("one")
        assert output.usage.prompt_tokens_by_source == {"computed": 1, "prefix_hit": 39, "disk_hit": 0}
        assert output.usage.prefix_miss.reason == "last_token"


@pytest.mark.parametrize("isa", NATIVE)
def test_four_choices_hold_one_copy_of_their_prompt(isa):
    params = SamplingParams(n=4, seed=2, temperature=1.0, max_tokens=6, ignore_eos=True, logprobs=3)
    apart, apart_trace = make(isa, enable_prefix_caching=False, max_num_seqs=1)
    prompt = apart.tokenizer.encode(TEXTS[2])
    assert len(prompt) == 43
    expected = run(apart, {"n": prompt}, params)
    engine, trace = make(isa)
    engine.add_request("n", prompt, params)
    outputs: dict[str, Collected] = {}
    live = []
    while engine.has_work:
        for delta in engine.step():
            outputs.setdefault("n" if delta.index == 0 else f"n#{delta.index}", Collected()).add(delta)
        live.append(engine.manager.usage().live)
    # The prompt takes three blocks; then three copy the last, and at 48 tokens each opens one of its own.
    assert live == [3, 6, 6, 6, 6, 0]
    assert trace.forwarded == 43 + 4 * 5
    for choice, (name, one) in enumerate(expected.items()):
        assert (outputs[name].token_ids, outputs[name].logprobs) == (one.token_ids, one.logprobs)
        assert trace.of("n", choice) == apart_trace.of("n", choice)
    assert len({tuple(one.token_ids) for one in expected.values()}) > 1
    engine.check_idle()


@pytest.mark.parametrize("isa", NATIVE)
def test_preempted(isa):
    engine, trace = make(isa, num_kv_blocks=5, watermark=0.0)
    assert_as_alone(isa, trace, run(engine, alone(isa)[0], GREEDY))
    assert engine.snapshot().preemptions > 0


@pytest.mark.parametrize("isa", NATIVE)
def test_without_a_cache(isa):
    engine, trace = make(isa, use_cache=False)
    prompt = alone(isa)[0]["r0"]
    run_one(engine, prompt, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert trace.of("one") == alone(isa)[1]["r0"][0][:5]
    assert trace.forwarded == sum(len(prompt) + new for new in range(5))


def test_the_twin_too():
    """A handful of tokens: the twin is many times slower."""
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engine, trace = make("numpy")
    prompt = engine.tokenizer.encode(TEXTS[2])[:18]
    first = run_one(engine, prompt, params)
    rows = trace.of("one")
    again, trace = make("numpy", num_threads=2, max_num_batched_tokens=7)
    again.add_request("one", prompt, params)
    again.add_request("other", prompt[:3], params)
    outputs = drain(again)
    assert trace.of("one") == rows
    assert outputs["one"].text == first.text
    assert trace.mixed_steps > 0
    trace.rows.clear()
    warm = run_one(again, prompt, params)
    assert warm.usage.num_cached_tokens == 16
    assert trace.of("one") == rows


@pytest.fixture(scope="module")
def reference() -> Iterator[Any]:
    """The model's own quantized values as float32, in transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    make("auto")
    packed = load_packed(resolve_model("smollm2:135m"))
    assert packed is not None
    c = packed.config
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads, head_dim=c.head_dim, rms_norm_eps=c.rms_norm_eps,
        rope_theta=c.rope.theta, max_position_embeddings=c.max_position_embeddings, tie_word_embeddings=c.tie_word_embeddings,
    )  # fmt: skip
    names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"}
    names |= {part: f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    names |= {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    whole = {"embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
    state = {}
    for name, tensor in {**packed.linears, **packed.vectors}.items():
        stem, _, part = name.rpartition(".")
        values = np.array(tensor if isinstance(tensor, np.ndarray) else unpack(tensor))
        state[f"{whole[name] if not stem else f'model.{stem}.{names[part]}'}.weight"] = torch.from_numpy(values)
    model = LlamaForCausalLM(config).eval()
    missing = model.load_state_dict(state, strict=False)
    assert missing.unexpected_keys == []
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    return model


SOURCES = {"prose": ("LICENSE",), "code": ("src/kvist/kv/spec.py", "src/kvist/request.py", "src/kvist/engine/sampler.py")}


@pytest.mark.parametrize("kind", SOURCES)
def test_what_eight_bit_activations_cost(kind, reference):
    """1,024 teacher-forced tokens: mean KL divergence from the float32 model at most 0.006, the same likeliest token on 94 %."""
    import torch

    engine, _ = make("auto", num_threads=None)
    if engine.config.isa == "numpy":
        pytest.skip("1,024 tokens take the NumPy twin too long")
    text = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in SOURCES[kind])
    tokens = engine.tokenizer.encode(text)[:1024]
    assert len(tokens) == 1024
    pieces: list[Any] = []
    inner = engine.runner.prompt_logits

    def recorded(output: Any, hidden: Any) -> Iterator[Any]:
        for scored in inner(output, hidden):
            pieces.append(torch.log_softmax(torch.from_numpy(scored.logits.copy()), -1))
            yield scored

    engine.runner.prompt_logits = recorded  # type: ignore[method-assign]
    run_one(engine, tokens, SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0))
    ours = torch.cat(pieces)
    with torch.no_grad():
        theirs = torch.log_softmax(reference(torch.tensor([tokens])).logits[0], -1)
    assert ours.shape == theirs.shape
    divergence = float((theirs.exp() * (theirs - ours)).sum(-1).mean())
    agreement = float((ours.argmax(-1) == theirs.argmax(-1)).double().mean())
    print(f"{kind}: mean KL {divergence:.4f}, top-1 {agreement:.3f}")
    assert 0 < divergence <= 0.006
    assert agreement >= 0.94
