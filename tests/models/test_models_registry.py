"""Choosing a family, refusing what is unknown, incomplete or misshapen, and the memory of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.machines import make_ops
from helpers.single import Bench, config_of, pack_weights
from helpers.tiny_models import TinyModel
from kvist.errors import ModelFormatError, UnsupportedModelError

TINY = TinyModel("qwen3", tied=False)


def bind(config: Any = None, drop: str = "", **changed: Any) -> Bench:
    linears, vectors = pack_weights(TINY.weights())
    everything = {**linears, **vectors} | {name.replace("__", "."): value for name, value in changed.items()}
    assert not drop or everything.pop(drop) is not None
    linears = {name: value for name, value in everything.items() if not isinstance(value, np.ndarray)}
    vectors = {name: value for name, value in everything.items() if isinstance(value, np.ndarray)}
    return Bench(config or config_of(TINY), linears, vectors, make_ops("numpy"), num_blocks=4)


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(
        UnsupportedModelError, match="'gpt_bigcode' is not supported; kvist runs llama, mistral, qwen2, qwen3 models"
    ):
        bind(replace(config_of(TINY), architecture="gpt_bigcode"))


@pytest.mark.parametrize(
    "name",
    ["embed", "final_norm", "layers.0.q", "layers.1.down", "layers.1.attn_norm", "layers.0.mlp_norm", "layers.1.q_norm"],
)
def test_a_missing_tensor_is_named(name: str) -> None:
    with pytest.raises(ModelFormatError, match=f"'{name}'"):
        bind(drop=name)


def test_a_misshapen_tensor_is_named() -> None:
    with pytest.raises(ModelFormatError, match=r"'final_norm' has shape \(63,\) where the model's configuration says \(64,\)"):
        bind(final_norm=np.ones(63, np.float32))
    linears, _ = pack_weights(TINY.weights())
    with pytest.raises(ModelFormatError, match=r"'layers.1.gate' is 64 x 64 where the model's configuration says \(128, 64\)"):
        bind(layers__1__gate=linears["layers.1.q"])


def test_a_model_without_a_head_uses_its_embedding() -> None:
    linears, _ = pack_weights(TINY.weights())
    tokens = [5, 6, 7]
    tied, own = bind(drop="head"), bind()
    logits = tied.run(tied.sequence(), tokens)
    assert np.array_equal(logits, (same := bind(head=linears["embed"])).run(same.sequence(), tokens))
    assert not np.array_equal(logits, own.run(own.sequence(), tokens))


def test_logits_of_other_rows_of_the_same_batch() -> None:
    bench = bind()
    batch = bench.batch([(bench.sequence(), [1, 2, 3]), (bench.sequence(), [4, 5])])
    every = bench.model.forward(batch).copy()
    assert every.shape == (5, TINY.size)
    some = bench.model.logits(batch._replace(logit_rows=np.array([4, 1, 1], np.int32)))
    assert np.array_equal(some, every[[4, 1, 1]])
    assert bench.model.logits(batch._replace(logit_rows=np.empty(0, np.int32))).shape == (0, TINY.size)


def test_steps_reuse_their_memory() -> None:
    bench = bind()
    large = bench.model.forward(bench.batch([(bench.sequence(), [1] * 20)]))
    small = bench.model.forward(bench.batch([(bench.sequence(), [1])]))
    assert (large.shape, small.shape) == ((20, TINY.size), (1, TINY.size))
    assert np.shares_memory(large, small)
