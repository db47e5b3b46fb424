"""Which format each matrix ends in, and how far encoding moves a value."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from helpers.tiny_models import write_tiny_gguf, write_tiny_hf
from kvist.errors import UnsupportedModelError
from kvist.kernels.ops import PackedLinear
from kvist.kernels.packing import pack_w4, pack_w8, unpack
from kvist.weights.quantize import encode, quantize_w4, quantize_w8
from kvist.weights.source import ModelSource, open_model

TINY = 1e-40
"""Where float32 itself has no steps fine enough."""

matrices = hnp.arrays(np.float32, st.tuples(st.integers(1, 2), st.sampled_from([32, 64])), elements=st.floats(-1e3, 1e3, width=32))


@given(matrices)
def test_w8_moves_a_value_by_half_a_step_at_most(w: np.ndarray) -> None:
    q, scale = quantize_w8(w)
    step = np.repeat(scale, 32, axis=1)
    assert (np.abs(unpack(pack_w8(q, scale)) - w) <= step * 0.50001 + TINY).all()
    assert q.min() >= -127


@given(matrices)
def test_w4_moves_a_value_by_half_a_step_at_most(w: np.ndarray) -> None:
    q, scale, minimum = quantize_w4(w)
    assert q.max() <= 15
    step = np.repeat(scale, 32, axis=1)
    slack = np.abs(np.repeat(minimum, 32, axis=1)) * 1e-6
    assert (np.abs(unpack(pack_w4(q, scale, minimum)) - w) <= step * 0.50001 + slack + TINY).all()


def test_groups_without_spread_are_exact() -> None:
    zeros, same = np.zeros((3, 64), np.float32), np.full((3, 64), 0.3, np.float32)
    assert not unpack(pack_w8(*quantize_w8(zeros))).any()
    assert unpack(pack_w4(*quantize_w4(same))).tobytes() == same.tobytes()


def test_encoding_again_changes_nothing() -> None:
    w = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    once = encode("layers.0.q", w, "w8a8", "auto")
    again = encode("layers.0.q", unpack(once), "w8a8", "auto")
    assert once.data.tobytes() == again.data.tobytes()


def formats(source: ModelSource, **options: str | None) -> dict[str, str]:
    return {name: t.format for name, t in source.packed(**options) if isinstance(t, PackedLinear)}  # type: ignore[arg-type]


@pytest.mark.parametrize("quantization", ["w8a8", "w4a8"])
def test_dense_files_under_quantization(tmp_path: Path, quantization: str) -> None:
    got = formats(open_model(write_tiny_hf(tmp_path, dtype="bf16", tied=False, arch="qwen2")), quantization=quantization)
    assert {got.pop("embed"), got.pop("head")} == {"w8a8"}
    assert set(got.values()) == {quantization}
    assert len(got) == 14


def test_biases_survive_quantization(tmp_path: Path) -> None:
    model = open_model(write_tiny_hf(tmp_path, arch="qwen2"))
    plain, packed = (dict(model.packed(quantization)) for quantization in (None, "w4a8"))  # type: ignore[arg-type]
    for name in ("layers.0.q", "layers.1.k", "layers.1.v"):
        left, right = plain[name], packed[name]
        assert isinstance(left, PackedLinear)
        assert isinstance(right, PackedLinear)
        assert left.bias is not None
        assert right.bias is not None
        assert left.bias.tobytes() == right.bias.tobytes()


def test_quantized_files_are_never_given_more_bits(tmp_path: Path) -> None:
    coarse = open_model(write_tiny_gguf(tmp_path / "q4.gguf", quant={"default": "Q4_1", "token_embd.weight": "Q8_0"}))
    assert formats(coarse, quantization="w8a8") == formats(coarse)
    fine = open_model(write_tiny_gguf(tmp_path / "q8.gguf", quant="Q8_0"))
    got = formats(fine, quantization="w4a8")
    assert got.pop("embed") == "w8a8"
    assert set(got.values()) == {"w4a8"}


def test_odd_rows_stay_dense_under_quantization(tmp_path: Path) -> None:
    got = formats(open_model(write_tiny_hf(tmp_path, hidden=48, heads=3, kv_heads=1)), quantization="w8a8")
    assert {name for name, format in got.items() if format == "w8a8"} == {"layers.0.down", "layers.1.down"}
    assert set(got.values()) == {"w8a8", "f32"}


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_dtype_converts_dense_matrices_only(tmp_path: Path, dtype: str) -> None:
    model = open_model(write_tiny_gguf(tmp_path / "m.gguf", quant={"default": "F16", "blk.0.ffn_up.weight": "Q8_0"}))
    got = formats(model, dtype=dtype)
    assert got.pop("layers.0.up") == "w8a8"
    assert set(got.values()) == {dtype}


def test_float16_that_cannot_hold_the_values_is_refused() -> None:
    w = np.full((4, 32), 70000, np.float32)
    with pytest.raises(UnsupportedModelError, match=r"embed has values beyond float16's range; use dtype bf16"):
        encode("embed", w, None, "f16")
    assert encode("embed", w, None, "bf16").format == "bf16"
