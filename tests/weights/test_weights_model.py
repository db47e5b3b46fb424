"""The real small model: every weight as the gguf library has it, and a pack that gives the same."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from kvist.kernels.ops import PackedLinear
from kvist.kernels.packing import unpack
from kvist.weights import open_model
from kvist.weights.gguf import GGUFModel, file_name, halves_from_interleaved
from kvist.weights.hub import resolve_model
from kvist.weights.pack import load_packed, write_packed

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def path() -> Path:
    return resolve_model("smollm2:135m")


def test_shape_and_vocabulary(path: Path) -> None:
    model = open_model(path)
    config = model.config
    assert (config.architecture, config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (
        "llama",
        30,
        9,
        3,
        64,
    )
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (49152, 576, 1536)
    assert (config.rope.theta, config.max_position_embeddings, config.tie_word_embeddings) == (100000.0, 8192, True)
    assert model.fingerprint == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert model.notes == ()
    vocab = model.tokenizer.gguf
    assert vocab is not None
    assert vocab.merges is not None
    assert (vocab.pre, len(vocab.tokens), len(vocab.merges), vocab.tokens[1]) == ("smollm", 49152, 48900, "<|im_start|>")


def test_every_weight_equals_the_librarys(path: Path) -> None:
    model = open_model(path)
    assert isinstance(model, GGUFModel)
    heads = {"q": 9, "k": 3}
    counts = {"w4a8": 0, "w8a8": 0, "f32": 0}
    for name, tensor in model.packed():
        info = model.file.tensors[f"{file_name(name)}.weight"]
        want = gguf.quants.dequantize(model.file.rows(info), gguf.GGMLQuantizationType[info.type_name]).reshape(info.shape)
        part = name.rpartition(".")[2]
        if part in heads:
            want = halves_from_interleaved(want, heads[part], 64)
        got = unpack(tensor) if isinstance(tensor, PackedLinear) else tensor
        assert np.array_equal(got, want), name
        counts[tensor.format if isinstance(tensor, PackedLinear) else "f32"] += 1
    assert counts == {"w4a8": 210, "w8a8": 1, "f32": 61}


def test_the_pack_gives_the_same(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path))
    source = open_model(path)
    write_packed(path, source, None, {"f": b"x"})
    loaded = load_packed(path)
    assert loaded is not None
    assert loaded.config == source.config
    total = 0
    for name, tensor in source.packed():
        if isinstance(tensor, PackedLinear):
            assert loaded.linears[name].data.tobytes() == tensor.data.tobytes()
            total += tensor.data.nbytes
        else:
            assert loaded.vectors[name].tobytes() == tensor.tobytes()
    # 4 bits for each layer weight, 8 for the embedding: what a decode step reads.
    assert total == 30 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576) // 2 + 49152 * 576
