"""Logits against transformers (torch CPU, float32, eager attention) on tiny random models of every family, for each machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from helpers.single import Bench, config_of, pack_weights
from helpers.tiny_models import TinyModel
from kvist.config import RopeConfig
from kvist.kernels.ops import F32, Ops

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
TOKENS = 96
BOUND = 1e-4


@dataclass(frozen=True)
class Case:
    """A tiny model, what transformers calls its peculiarities, and what kvist calls them."""

    tiny: TinyModel
    theirs: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)


def model(arch: str = "llama", *, heads: int = 4, kv_heads: int = 2, head_dim: int = 64, **more: Any) -> TinyModel:
    return TinyModel(arch, hidden=96, heads=heads, kv_heads=kv_heads, head_dim=head_dim, intermediate=160, vocab=300, **more)


def rope(kind: str, theta: float = 10000.0, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **parameters}}


CASES = {
    "llama, one KV head per head": Case(model(heads=3, kv_heads=3)),
    "llama, GQA 3, tied": Case(model(heads=6, kv_heads=2)),
    "llama, GQA 8, untied": Case(model(heads=8, kv_heads=1, tied=False)),
    "llama, heads of 80": Case(model(head_dim=80)),
    "llama, heads of 128, untied": Case(model(heads=2, kv_heads=2, head_dim=128, tied=False)),
    "llama, linear scaling": Case(
        model(), rope("linear", factor=4.0), {"rope": RopeConfig(scaling="linear", factor=4.0)}
    ),
    "llama, llama3 scaling": Case(
        model(context=512),
        rope("llama3", 500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
        {"rope": RopeConfig(500.0, scaling="llama3", factor=8.0, original_max_position=64)},
    ),
    "llama, yarn": Case(
        model(context=512),
        rope("yarn", factor=4.0, original_max_position_embeddings=128),
        {"rope": RopeConfig(scaling="yarn", factor=4.0, original_max_position=128)},
    ),
    "llama, yarn with its own factor": Case(
        model(context=512),
        rope("yarn", factor=4.0, original_max_position_embeddings=128, attention_factor=0.9, beta_fast=16.0, beta_slow=2.0),
        {
            "rope": RopeConfig(
                scaling="yarn", factor=4.0, original_max_position=128, attention_factor=0.9, beta_fast=16.0, beta_slow=2.0
            )
        },
    ),
    "mistral, window 33": Case(model("mistral"), {"sliding_window": 33}, {"layer_windows": (33, 33)}),
    "qwen2, biases": Case(model("qwen2")),
    "qwen2, biases, full then windowed": Case(
        model("qwen2", layers=3),
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {"layer_windows": (None, 8, 8)},
    ),
    "qwen3, q and k norms": Case(model("qwen3", tied=False)),
    "qwen3, q and k norms, heads of 128": Case(model("qwen3", heads=8, kv_heads=1, head_dim=128)),
}  # fmt: skip


def tame(weights: dict[str, F32]) -> dict[str, F32]:
    """Embeddings (and so tied logits) of ordinary size: the bound is absolute."""
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            weights[name] = weights[name] * np.float32(0.1)
    return weights


def expected_logits(case: Case, weights: dict[str, F32], tokens: list[int]) -> F32:
    tiny = case.tiny
    settings = {
        "vocab_size": tiny.size, "hidden_size": tiny.hidden, "intermediate_size": tiny.intermediate,
        "num_hidden_layers": tiny.layers, "num_attention_heads": tiny.heads, "num_key_value_heads": tiny.kv_heads,
        "head_dim": tiny.head, "max_position_embeddings": tiny.context, "rms_norm_eps": tiny.eps,
        "tie_word_embeddings": tiny.tied, "attn_implementation": "eager", "sliding_window": None,
    } | rope("default") | case.theirs  # fmt: skip
    if tiny.arch == "llama":
        del settings["sliding_window"]
    config = getattr(transformers, f"{CLASSES[tiny.arch]}Config")(**settings)
    theirs = getattr(transformers, f"{CLASSES[tiny.arch]}ForCausalLM")(config).to(torch.float32).eval()
    state = {name: torch.from_numpy(array) for name, array in weights.items()}
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    theirs.tie_weights()
    with torch.no_grad():
        result: F32 = theirs(torch.tensor([tokens])).logits[0].numpy()
    return result


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, ops: Ops) -> None:
    case = CASES[name]
    weights = tame(case.tiny.weights())
    tokens = np.random.default_rng(7).integers(0, case.tiny.size, TOKENS).tolist()
    expected = expected_logits(case, weights, tokens)
    bench = Bench(config_of(case.tiny, **case.ours), *pack_weights(weights), ops, kv_format="f32")
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(bench.run(bench.sequence(), tokens, [40, 50, 1, 5]), expected, rtol=0, atol=BOUND)


def test_a_window_changes_the_logits(ops: Ops) -> None:
    """The windowed cases above would not notice a window that is never reached."""
    case = CASES["mistral, window 33"]
    packed = pack_weights(tame(case.tiny.weights()))
    windowed, full = (Bench(config_of(case.tiny, **ours), *packed, ops) for ours in (case.ours, {}))
    tokens = list(range(TOKENS))
    one, other = windowed.run(windowed.sequence(), tokens), full.run(full.sequence(), tokens)
    assert np.array_equal(one[:33], other[:33])
    assert (np.abs(one[33:] - other[33:]).max(axis=1) > 1e-3).all()
