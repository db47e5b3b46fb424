"""GGUF files give the weights, shape and tokens that they hold, whatever they leave out (field case A18)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.tiny_models import BASE_VOCAB, TinyModel, write_tiny_gguf, write_tiny_hf
from kvist.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError
from kvist.kernels.ops import PackedLinear
from kvist.kernels.packing import unpack, unpack_quants
from kvist.weights.gguf import halves_from_interleaved
from kvist.weights.gguf_quants import UndecodableTypeError, decode_matrix
from kvist.weights.source import ModelSource, open_model

NAMES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj", "gate": "mlp.gate_proj",
    "up": "mlp.up_proj", "down": "mlp.down_proj", "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
}  # fmt: skip
TOP = {"embed": "model.embed_tokens", "head": "lm_head", "final_norm": "model.norm"}


def hf_stem(name: str) -> str:
    *layer, stem = name.split(".")
    return f"model.layers.{layer[1]}.{NAMES[stem]}" if layer else TOP[stem]


def tensors(source: ModelSource, **options: Any) -> dict[str, PackedLinear | np.ndarray]:
    pairs = list(source.packed(**options))
    assert len({name for name, _ in pairs}) == len(pairs)
    return dict(pairs)


def assert_weights(source: ModelSource, weights: dict[str, np.ndarray]) -> None:
    """Every weight and bias, bit for bit, and nothing else."""
    seen = set()
    for name, tensor in source.packed():
        stem = hf_stem(name)
        values = unpack(tensor) if isinstance(tensor, PackedLinear) else tensor
        assert values.dtype == np.float32
        assert values.tobytes() == weights[f"{stem}.weight"].tobytes(), name
        seen.add(f"{stem}.weight")
        if isinstance(tensor, PackedLinear) and tensor.bias is not None:
            assert tensor.bias.tobytes() == weights[f"{stem}.bias"].tobytes(), name
            seen.add(f"{stem}.bias")
    assert seen == weights.keys()


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_weights_are_those_of_the_model_in_halves(tmp_path: Path, arch: str, tied: bool, heads: int, kv_heads: int) -> None:
    tiny: dict[str, Any] = {"arch": arch, "tied": tied, "heads": heads, "kv_heads": kv_heads, "hidden": heads * 16}
    model = open_model(write_tiny_gguf(tmp_path / "m.gguf", **tiny))
    assert_weights(model, TinyModel(**tiny).weights())
    assert model.notes == ()
    folder = open_model(write_tiny_hf(tmp_path / "hf", **tiny))
    assert_weights(folder, TinyModel(**tiny).weights())
    same = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "qk_norm",
            "tie_word_embeddings", "bos_token_id", "eos_token_ids", "max_position_embeddings", "rope", "windows")  # fmt: skip
    assert {name: getattr(model.config, name) for name in same} == {name: getattr(folder.config, name) for name in same}
    assert np.float32(model.config.rms_norm_eps) == np.float32(folder.config.rms_norm_eps)
    assert model.config.tie_word_embeddings is tied


def test_llama_with_biases_turns_them_too(tmp_path: Path) -> None:
    tiny: dict[str, Any] = {"heads": 6, "kv_heads": 2, "hidden": 96, "attention_bias": True}
    assert_weights(open_model(write_tiny_gguf(tmp_path / "m.gguf", **tiny)), TinyModel(**tiny).weights())


def test_head_size_of_its_own(tmp_path: Path) -> None:
    tiny: dict[str, Any] = {"arch": "qwen3", "heads": 4, "kv_heads": 2, "head_dim": 32, "hidden": 64}
    model = open_model(write_tiny_gguf(tmp_path / "m.gguf", **tiny))
    assert (model.config.head_dim, model.config.qk_norm) == (32, True)
    assert_weights(model, TinyModel(**tiny).weights())


@given(heads=st.integers(1, 4), half=st.integers(1, 4), rest=st.integers(0, 3), width=st.integers(1, 3))
def test_turning_rows_pairs_neighbours_as_halves(heads: int, half: int, rest: int, width: int) -> None:
    rows = np.arange(heads * (2 * half + rest) * width).reshape(-1, width)
    turned = halves_from_interleaved(rows, heads, 2 * half).reshape(heads, -1, width)
    by_head = rows.reshape(heads, -1, width)
    for pair in range(half):
        assert (turned[:, pair] == by_head[:, 2 * pair]).all()
        assert (turned[:, pair + half] == by_head[:, 2 * pair + 1]).all()
    assert (turned[:, 2 * half :] == by_head[:, 2 * half :]).all()


def _raw(kind: str, n: int, k: int, seed: int = 0) -> np.ndarray:
    """Random but sane blocks of any type: random bytes, with every float16 level made finite and small."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, size=(n, k // block, size), dtype=np.uint8)
    levels = {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q2_K": [80, 82], "Q3_K": [108], "Q6_K": [208], "TQ1_0": [52], "TQ2_0": [64]}
    for at in levels.get(kind, [0, 2] if kind in ("Q4_1", "Q5_1") else [0]):
        if block == 1:
            break
        raw[:, :, at : at + 2] = rng.normal(scale=0.01, size=(n, k // block, 1)).astype(np.float16).view(np.uint8)
    return raw.reshape(n, -1)


def _theirs(kind: str, raw: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize(
    ("kind", "format", "scale"),
    [("Q4_0", "w4a8", np.float16), ("Q4_1", "w4a8", np.float16), ("Q4_K", "w4a8", np.float32), ("Q8_0", "w8a8", np.float16)],
)
def test_exact_types_equal_the_library_in_every_value(kind: str, format: str, scale: type) -> None:
    raw = _raw(kind, 37, 512)
    packed = decode_matrix(kind, raw, 512, None)
    assert isinstance(packed, PackedLinear)
    assert packed.scale is not None
    assert (packed.format, packed.scale.dtype) == (format, scale)
    theirs = _theirs(kind, raw)
    assert len(np.unique(theirs)) > 1000
    assert np.array_equal(unpack(packed), theirs)


def test_q4_0_scale_whose_minimum_is_beyond_float16() -> None:
    raw = _raw("Q4_0", 4, 64)
    raw[:, :2] = np.full((4, 1), 20000, np.float16).view(np.uint8)
    packed = decode_matrix("Q4_0", raw, 64, None)
    assert isinstance(packed, PackedLinear)
    assert packed.minimum is not None
    assert packed.minimum.dtype == np.float32
    assert np.array_equal(unpack(packed), _theirs("Q4_0", raw))


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "TQ2_0", "IQ4_NL"])
def test_other_types_are_encoded_anew_within_half_a_step(kind: str) -> None:
    raw = _raw(kind, 21, 256)
    packed = decode_matrix(kind, raw, 256, np.arange(21, dtype=np.float32))
    assert isinstance(packed, PackedLinear)
    assert packed.scale is not None
    assert packed.bias is not None
    assert (packed.format, packed.scale.dtype, packed.bias[20]) == ("w8a8", np.float32, 20)
    theirs = _theirs(kind, raw).reshape(21, -1, 32)
    step = np.abs(theirs).max(axis=2, keepdims=True) / 127
    assert (np.abs(unpack(packed).reshape(theirs.shape) - theirs) <= step * 0.5001).all()
    assert int(np.abs(unpack_quants(packed).astype(int)).max()) == 127


def test_every_type_of_the_library_is_decoded_or_refused_by_name() -> None:
    outcomes = {}
    for kind in gguf.GGMLQuantizationType:
        if kind.name in ("F32", "F16", "BF16"):
            continue
        try:
            outcomes[kind.name] = type(decode_matrix(kind.name, _raw(kind.name, 2, 256), 256, None))
        except UndecodableTypeError:
            outcomes[kind.name] = UndecodableTypeError
    assert outcomes["IQ2_XXS"] is PackedLinear
    assert outcomes["I32"] is UndecodableTypeError
    assert set(outcomes.values()) == {PackedLinear, UndecodableTypeError}


def test_quantized_rows_of_odd_length_become_dense() -> None:
    raw = _raw("Q8_0", 5, 32)
    assert isinstance(decode_matrix("Q8_0", raw, 32, None), PackedLinear)
    # No block type of the library has fewer than 32 elements, so only a type of 16 could be odd; the branch is asked directly.
    dense = decode_matrix("NVFP4", _raw("NVFP4", 5, 64), 48, None)
    assert isinstance(dense, np.ndarray)
    assert dense.dtype == np.float32


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "F16", "BF16"])
def test_quantized_files_turn_rows_with_their_scales(tmp_path: Path, kind: str) -> None:
    """q of a llama file: quantizing goes by rows, so turning rows and then decoding equals quantizing the turned weights."""
    tiny: dict[str, Any] = {"heads": 4, "kv_heads": 2, "hidden": 64}
    packed = tensors(open_model(write_tiny_gguf(tmp_path / "m.gguf", quant=kind, **tiny)))
    weights = TinyModel(**tiny).weights()
    qtype = gguf.GGMLQuantizationType[kind]
    for name in ("layers.0.q", "layers.1.k", "layers.1.down", "embed"):
        want = gguf.quants.dequantize(gguf.quants.quantize(weights[f"{hf_stem(name)}.weight"], qtype), qtype)
        got = packed[name]
        assert isinstance(got, PackedLinear)
        if kind == "Q5_0":
            assert np.abs(unpack(got) - want).max() < 0.02
        else:
            assert np.array_equal(unpack(got), want), name


def test_mixed_types_in_one_file(tmp_path: Path) -> None:
    quant = {"default": "Q4_0", "token_embd.weight": "Q8_0", "blk.1.ffn_up.weight": "F16", "blk.0.ffn_up.weight": "BF16"}
    packed = tensors(open_model(write_tiny_gguf(tmp_path / "m.gguf", quant=quant)))
    formats = {name: tensor.format for name, tensor in packed.items() if isinstance(tensor, PackedLinear)}
    assert {formats.pop("embed"), formats.pop("layers.1.up"), formats.pop("layers.0.up")} == {"w8a8", "f16", "bf16"}
    assert set(formats.values()) == {"w4a8"}


# Field case A18: one model, many files.


def test_a18_1_and_2_absent_head_means_the_embedding(tmp_path: Path) -> None:
    with_head = open_model(write_tiny_gguf(tmp_path / "a.gguf", tied=False))
    assert not with_head.config.tie_word_embeddings
    assert "head" in tensors(with_head)
    without = open_model(write_tiny_gguf(tmp_path / "b.gguf", tied=False, drop=["output.weight"]))
    assert without.config.tie_word_embeddings
    assert "head" not in tensors(without)
    assert without.notes == ()


def test_a18_3_rope_factors_come_through(tmp_path: Path) -> None:
    factors = np.array([1, 1, 1.5, 2, 4, 8, 8, 8], np.float32)
    model = open_model(write_tiny_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": factors}))
    assert model.config.rope.freq_factors == (1, 1, 1.5, 2, 4, 8, 8, 8)
    assert model.config.rope.scaling == "none"
    assert model.notes == ()


@pytest.mark.parametrize("factors", [np.ones(7, np.float32), np.zeros(8, np.float32), np.full(8, np.nan, np.float32)])
def test_rope_factors_that_fit_no_head_are_refused(tmp_path: Path, factors: np.ndarray) -> None:
    with pytest.raises(ModelFormatError, match=r"rope_freqs.weight that is not 8 positive numbers"):
        open_model(write_tiny_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": factors}))


A18_4 = [
    ("{arch}.attention.head_count_kv", {"num_kv_heads": 4}),
    ("{arch}.rope.dimension_count", {"head_dim": 16}),
    ("{arch}.attention.key_length", {"head_dim": 16}),
    ("{arch}.attention.value_length", {"head_dim": 16}),
    ("tokenizer.ggml.bos_token_id", {"bos_token_id": None}),
    ("tokenizer.chat_template", {}),
    ("{arch}.vocab_size", {"vocab_size": BASE_VOCAB}),
    ("{arch}.rope.freq_base", {}),
    ("{arch}.attention.layer_norm_rms_epsilon", {}),
    ("tokenizer.ggml.eos_token_id", {"eos_token_ids": ()}),
    ("general.name", {"name": "m"}),
]


@pytest.mark.parametrize(("key", "expected"), A18_4)
def test_a18_4_missing_keys_have_their_usual_defaults(tmp_path: Path, key: str, expected: dict[str, Any]) -> None:
    kv_heads = 4 if key.endswith("head_count_kv") else 2
    model = open_model(write_tiny_gguf(tmp_path / "m.gguf", omit=[key], kv_heads=kv_heads))
    assert {name: getattr(model.config, name) for name in expected} == expected
    assert_weights(model, TinyModel(kv_heads=kv_heads).weights())
    assert model.config.rope.theta == 10000.0
    assert model.config.rope.rotary_dim is None
    assert model.notes == ()
    assert (model.tokenizer.chat_template is None) is (key == "tokenizer.chat_template")


def test_a18_4_missing_context_is_assumed_and_said(tmp_path: Path) -> None:
    model = open_model(write_tiny_gguf(tmp_path / "m.gguf", omit=["{arch}.context_length"]))
    assert model.config.max_position_embeddings == 2048
    assert model.notes == ("m.gguf does not say how long a context it is made for; 2048 tokens are assumed.",)


@pytest.mark.parametrize("name", ["blk.1.ffn_down.weight", "token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight"])
def test_a18_7_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelFormatError, match=name) as caught:
        open_model(write_tiny_gguf(tmp_path / "m.gguf", drop=[name]))
    assert "m.gguf" in str(caught.value)


def test_missing_bias_of_qwen2_and_norm_of_qwen3_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"blk\.1\.attn_k\.bias"):
        open_model(write_tiny_gguf(tmp_path / "a.gguf", arch="qwen2", drop=["blk.1.attn_k.bias"]))
    with pytest.raises(ModelFormatError, match=r"blk\.0\.attn_q_norm\.weight"):
        open_model(write_tiny_gguf(tmp_path / "b.gguf", arch="qwen3", drop=["blk.0.attn_q_norm.weight"]))


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"blk\.0\.ffn_up\.weight the shape \[64, 128\] where .* \[128, 64\]"):
        open_model(write_tiny_gguf(tmp_path / "m.gguf", extra={"blk.0.ffn_up.weight": np.zeros((64, 128), np.float32)}))


def test_tensors_without_use_are_said(tmp_path: Path) -> None:
    model = open_model(write_tiny_gguf(tmp_path / "m.gguf", extra={"blk.0.attn_sub_norm.weight": np.ones(64, np.float32)}))
    assert len(model.notes) == 1
    assert "blk.0.attn_sub_norm.weight" in model.notes[0]


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    bad = TinyModel().weights()["model.norm.weight"].copy()
    bad[3] = np.inf
    model = open_model(write_tiny_gguf(tmp_path / "m.gguf", extra={"output_norm.weight": bad}))
    with pytest.raises(ModelFormatError, match=r"not finite in the tensor output_norm\.weight"):
        tensors(model)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"scaling": "linear", "factor": 4.0}),
        ({"rope.scaling.factor": 2.0}, {"scaling": "linear", "factor": 2.0}),
        ({"rope.scale_linear": 8.0}, {"scaling": "linear", "factor": 8.0}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 2.0}, {"scaling": "none", "factor": 1.0}),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
         {"scaling": "yarn", "factor": 4.0, "original_max_position": 128, "attention_factor": None, "beta_fast": 32.0}),
        ({"rope.scaling.type": "llama3", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 128},
         {"scaling": "llama3", "factor": 8.0, "original_max_position": 128, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    ],
)  # fmt: skip
def test_rope_scaling(tmp_path: Path, metadata: dict[str, Any], expected: dict[str, Any]) -> None:
    model = open_model(write_tiny_gguf(tmp_path / "m.gguf", metadata={"{arch}." + k: v for k, v in metadata.items()}))
    assert {name: getattr(model.config.rope, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gemma3"}, "architecture 'gemma3'; kvist runs llama, mistral, qwen2, qwen3"),
        ({"{arch}.expert_count": 8}, "mixture of experts"),
        ({"{arch}.rope.scaling.type": "longrope", "{arch}.rope.scaling.factor": 4.0}, "'longrope'"),
        ({"{arch}.attention.value_length": 32}, "different lengths"),
        ({"{arch}.feed_forward_length": [128, 256]}, "feed_forward_length"),
        ({"split.count": 3}, "one of 3 parts"),
    ],
)
def test_what_kvist_does_not_compute_is_refused_by_name(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    arch = metadata.pop("general.architecture", "llama")
    path = write_tiny_gguf(tmp_path / "m.gguf", metadata=metadata, arch=arch, kv_heads=2)
    with pytest.raises(UnsupportedModelError, match=message):
        open_model(path)


def test_per_layer_lists_of_one_number_count_as_the_number(tmp_path: Path) -> None:
    model = open_model(write_tiny_gguf(tmp_path / "m.gguf", metadata={"{arch}.attention.head_count_kv": [2, 2]}))
    assert model.config.num_kv_heads == 2


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"{arch}.block_count": "two"}, "block_count"),
        ({"{arch}.rope.freq_base": float("nan")}, "rope.freq_base"),
        ({"{arch}.block_count": 2**31}, "announces 2147483648 layers"),
        ({"{arch}.attention.head_count_kv": 3}, "4 query heads share 3 KV heads"),
        ({"tokenizer.ggml.tokens": ["a"]}, "1 tokens but 273"),
        ({"{arch}.rope.dimension_count": 15}, "15 of 16 elements"),
    ],
)
def test_nonsense_in_the_metadata_is_refused(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        open_model(write_tiny_gguf(tmp_path / "m.gguf", metadata=metadata))


def test_vocabulary_comes_as_stored(tmp_path: Path) -> None:
    model = open_model(
        write_tiny_gguf(tmp_path / "m.gguf", vocab=300, pre="llama-bpe", metadata={"tokenizer.ggml.eot_token_id": 0})
    )
    vocab = model.tokenizer.gguf
    assert vocab is not None
    assert model.tokenizer.tokenizer_json is None
    assert (vocab.model, vocab.pre, len(vocab.tokens), vocab.tokens[2]) == ("gpt2", "llama-bpe", 300, "<|im_end|>")
    assert (vocab.add_bos, vocab.add_eos, vocab.scores, vocab.bos_token_id, vocab.eos_token_id) == (False, None, None, 1, 2)
    assert vocab.types is not None
    assert (vocab.types[0], vocab.types[3], vocab.types[299]) == (3, 1, 5)
    assert vocab.merges is not None
    assert vocab.merges[0] == "h e"
    assert model.config.eos_token_ids == (2, 0)
    assert model.config.vocab_size == 300


def test_folder_with_one_gguf_file_opens_it(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "a.gguf")
    assert open_model(tmp_path).config.num_layers == 2
    write_tiny_gguf(tmp_path / "b.gguf")
    with pytest.raises(ModelNotFoundError, match=r"a\.gguf, b\.gguf"):
        open_model(tmp_path)
    with pytest.raises(ModelNotFoundError, match="no file or folder"):
        open_model(tmp_path / "c.gguf")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match=r"neither config\.json nor a GGUF file"):
        open_model(tmp_path / "empty")
