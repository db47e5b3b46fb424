"""The real small model: every weight as the gguf library has it, and a pack that gives the same."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from kvist.kernels.packing import unpack
from kvist.weights.gguf import GGUFModel, file_name, halves_from_interleaved
from kvist.weights.hub import resolve_model
from kvist.weights.pack import load_packed, write_packed
from kvist.weights.source import open_model

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


def test_every_packed_weight_equals_the_librarys(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path))
    source = open_model(path)
    assert isinstance(source, GGUFModel)
    write_packed(path, source, None, {"f": b"x"})
    loaded = load_packed(path)
    assert loaded is not None
    assert (loaded.config, dict(loaded.files)) == (source.config, {"f": b"x"})
    heads = {"q": 9, "k": 3}
    for name, got in [*loaded.vectors.items(), *((name, unpack(linear)) for name, linear in loaded.linears.items())]:
        info = source.file.tensors[f"{file_name(name)}.weight"]
        want = gguf.quants.dequantize(source.file.rows(info), gguf.GGMLQuantizationType[info.type_name]).reshape(info.shape)
        part = name.rpartition(".")[2]
        if part in heads:
            want = halves_from_interleaved(want, heads[part], 64)
        assert np.array_equal(got, want), name
    formats = [linear.format for linear in loaded.linears.values()]
    assert (formats.count("w4a8"), formats.count("w8a8"), len(loaded.vectors)) == (210, 1, 61)
    # 4 bits for each layer weight, 8 for the embedding: what a decode step reads.
    total = sum(linear.data.nbytes for linear in loaded.linears.values())
    assert total == 30 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576) // 2 + 49152 * 576
