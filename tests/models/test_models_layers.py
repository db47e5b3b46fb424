"""Rotary tables against closed forms and transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvist.config import RopeConfig
from kvist.errors import ModelFormatError
from kvist.models.layers import rope_frequencies, rope_tables

LLAMA3 = RopeConfig(500000.0, scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
YARN = RopeConfig(10000.0, scaling="yarn", factor=4.0, original_max_position=4096)


def test_plain_tables() -> None:
    cos, sin = rope_tables(RopeConfig(theta=100.0), head_dim=4, length=3)
    angles = np.array([[0, 0], [1, 0.1], [2, 0.2]])
    assert cos.dtype == sin.dtype == np.float32
    assert np.array_equal(cos, np.cos(angles).astype(np.float32))
    assert np.array_equal(sin, np.sin(angles).astype(np.float32))


def test_a_longer_table_begins_with_the_shorter_one() -> None:
    for rope in (RopeConfig(), LLAMA3, YARN):
        (cos, sin), (long_cos, long_sin) = rope_tables(rope, 64, 100), rope_tables(rope, 64, 5000)
        assert np.array_equal(cos, long_cos[:100])
        assert np.array_equal(sin, long_sin[:100])


def test_large_angles_are_reduced_in_float64() -> None:
    _, sin = rope_tables(RopeConfig(), 64, 131072)
    assert sin[131071, 0] == np.float32(math.sin(131071.0))


def test_partial_rotation_and_frequency_factors() -> None:
    plain = rope_frequencies(RopeConfig(rotary_dim=8), head_dim=64)
    assert plain.tolist() == [10000.0 ** (-i / 4) for i in range(4)]
    factors = (1.0, 2.0, 4.0, 8.0)
    divided = rope_frequencies(RopeConfig(rotary_dim=8, scaling="linear", factor=2.0, freq_factors=factors), head_dim=64)
    assert divided.tolist() == [f / 2 / factor for f, factor in zip(plain.tolist(), factors, strict=True)]


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    plain, scaled = rope_frequencies(RopeConfig(500000.0), 128), rope_frequencies(LLAMA3, 128)
    turns = 8192 * plain / (2 * math.pi)
    assert np.array_equal(scaled[turns >= 4], plain[turns >= 4])
    assert np.array_equal(scaled[turns <= 1], plain[turns <= 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.sum() == 6
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


@pytest.mark.parametrize(
    ("rope", "head_dim"),
    [(LLAMA3, 64), (LLAMA3, 128), (YARN, 128), (RopeConfig(1e6, scaling="yarn", factor=40.0, original_max_position=32768), 80)],
)
def test_scaled_frequencies_are_those_of_transformers(rope: RopeConfig, head_dim: int) -> None:
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    parameters = {
        "rope_type": rope.scaling,
        "rope_theta": rope.theta,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_position,
    }
    if rope.scaling == "llama3":
        parameters |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    assert rope.original_max_position is not None
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=int(rope.original_max_position * rope.factor),
        rope_parameters=parameters,
    )
    expected, magnitude = utils.ROPE_INIT_FUNCTIONS[rope.scaling](config, "cpu")
    np.testing.assert_allclose(rope_frequencies(rope, head_dim), expected.numpy(), rtol=2e-6)
    cos, _ = rope_tables(rope, head_dim, 1)
    np.testing.assert_allclose(cos, magnitude, rtol=1e-6)


def test_a_given_attention_factor_replaces_yarns() -> None:
    given = RopeConfig(scaling="yarn", factor=4.0, original_max_position=4096, attention_factor=0.5)
    assert (rope_tables(given, 64, 1)[0] == np.float32(0.5)).all()
    assert (rope_tables(YARN, 64, 1)[0] == np.float32(0.1 * math.log(4) + 1)).all()


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (RopeConfig(scaling="llama3", factor=8.0), "'llama3' needs the model's original_max_position_embeddings"),
        (RopeConfig(scaling="yarn", factor=8.0), "'yarn' needs the model's original_max_position_embeddings"),
        (RopeConfig(rotary_dim=66), "rotates 66 of 64 dimensions"),
        (RopeConfig(rotary_dim=7), "rotates 7 of 64 dimensions"),
        (RopeConfig(freq_factors=(1.0,) * 31), "31 rotary frequency factors for 32 pairs"),
    ],
)
def test_what_cannot_be_is_refused(rope: RopeConfig, message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        rope_frequencies(rope, 64)
