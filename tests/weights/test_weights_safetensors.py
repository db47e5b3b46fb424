"""Hugging Face folders: shapes from config.json in all its forms, weights bit for bit, and heads as they are (field case A18)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from helpers.tiny_models import DTYPES, TinyModel, write_tiny_hf
from kvist.errors import ModelFormatError, UnsupportedModelError
from kvist.kernels.ops import PackedLinear
from kvist.kernels.packing import unpack
from kvist.weights.source import ModelSource, open_model


def values(source: ModelSource) -> dict[str, np.ndarray]:
    return {name: unpack(tensor) if isinstance(tensor, PackedLinear) else tensor for name, tensor in source.packed()}


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_dense_types_stay_and_are_exact(tmp_path: Path, dtype: str) -> None:
    model = open_model(write_tiny_hf(tmp_path, dtype=dtype, tied=False))
    formats = {tensor.format for _, tensor in model.packed() if isinstance(tensor, PackedLinear)}
    assert formats == {dtype}
    weights = TinyModel(tied=False).weights()
    got = values(model)
    for name, key in [("head", "lm_head"), ("layers.1.down", "model.layers.1.mlp.down_proj"), ("final_norm", "model.norm")]:
        assert np.array_equal(got[name], weights[f"{key}.weight"].astype(DTYPES[dtype]).astype(np.float32))
    assert got["final_norm"].dtype == np.float32


def test_shards_give_what_one_file_gives(tmp_path: Path) -> None:
    one, three = open_model(write_tiny_hf(tmp_path / "one")), open_model(write_tiny_hf(tmp_path / "three", shards=3))
    left, right = values(one), values(three)
    assert left.keys() == right.keys()
    assert all(left[name].tobytes() == right[name].tobytes() for name in left)
    assert one.fingerprint != three.fingerprint


@pytest.mark.parametrize(("arch", "has_norm"), [("llama", False), ("mistral", False), ("qwen2", False), ("qwen3", True)])
def test_families(tmp_path: Path, arch: str, has_norm: bool) -> None:
    model = open_model(write_tiny_hf(tmp_path, arch=arch, heads=4, kv_heads=2))
    assert (model.config.architecture, model.config.qk_norm, model.config.head_dim) == (arch, has_norm, 16)
    packed = dict(model.packed())
    q = packed["layers.0.q"]
    assert isinstance(q, PackedLinear)
    assert (q.bias is not None) is (arch == "qwen2")
    assert ("layers.0.q_norm" in packed) is has_norm
    assert model.notes == ()


def test_tokenizer_material(tmp_path: Path) -> None:
    model = open_model(write_tiny_hf(tmp_path))
    source = model.tokenizer
    assert source.tokenizer_json == (tmp_path / "tokenizer.json").read_bytes()
    assert source.gguf is None
    assert source.config["bos_token"] == "<|im_start|>"
    assert source.chat_template is not None
    (tmp_path / "chat_template.jinja").write_text("from its own file")
    assert open_model(tmp_path).tokenizer.chat_template == "from its own file"
    (tmp_path / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert open_model(tmp_path).tokenizer.chat_template == "yes"
    assert open_model(tmp_path).tokenizer.config["eos_token"] == "<|im_end|>"
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelFormatError, match=r"has no tokenizer\.json"):
        open_model(tmp_path)


def test_end_tokens_of_both_configs(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path, config={"eos_token_id": [2, 0]})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5]}))
    assert open_model(tmp_path).config.eos_token_ids == (2, 0, 5)


def test_a18_5_says_tied_but_has_another_head(tmp_path: Path) -> None:
    head = TinyModel(tied=False).weights()["lm_head.weight"]
    model = open_model(write_tiny_hf(tmp_path, extra={"lm_head.weight": head}))
    assert not model.config.tie_word_embeddings
    assert values(model)["head"].tobytes() == head.tobytes()
    assert len(model.notes) == 1
    assert "lm_head.weight of its own although its config.json says that the head is tied" in model.notes[0]


def test_says_tied_and_repeats_the_embedding(tmp_path: Path) -> None:
    model = open_model(write_tiny_hf(tmp_path, extra={"lm_head.weight": TinyModel().weights()["model.embed_tokens.weight"]}))
    assert model.config.tie_word_embeddings
    assert "head" not in values(model)
    assert model.notes == ()


def test_a18_6_says_untied_without_a_head(tmp_path: Path) -> None:
    model = open_model(write_tiny_hf(tmp_path, tied=False, drop=["lm_head.weight"]))
    assert model.config.tie_word_embeddings
    assert "head" not in values(model)
    assert len(model.notes) == 1
    assert "no lm_head.weight although its config.json says that the head is not tied" in model.notes[0]


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "model.norm.weight"])
def test_a18_7_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelFormatError, match=name):
        open_model(write_tiny_hf(tmp_path, drop=[name]))


def test_missing_bias_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"layers\.0\.self_attn\.v_proj\.bias"):
        open_model(write_tiny_hf(tmp_path, arch="qwen2", drop=["model.layers.0.self_attn.v_proj.bias"]))


def test_config_that_does_not_fit_the_weights(tmp_path: Path) -> None:
    with pytest.raises(
        ModelFormatError, match=r"embed_tokens\.weight the shape \[273, 64\] where config\.json asks for \[274, 64\]"
    ):
        open_model(write_tiny_hf(tmp_path, config={"vocab_size": 274}))


def test_old_inverse_frequencies_are_no_news(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    assert open_model(write_tiny_hf(tmp_path / "a", extra=extra)).notes == ()
    odd = open_model(write_tiny_hf(tmp_path / "b", extra={"model.layers.0.surprise": np.ones(8, np.float32)}))
    assert len(odd.notes) == 1
    assert "model.layers.0.surprise" in odd.notes[0]


ROPE = [
    ({}, {"scaling": "none", "theta": 10000.0}),
    ({"rope_theta": 5e5, "rope_scaling": None}, {"scaling": "none", "theta": 5e5}),
    ({"rope_scaling": {"type": "linear", "factor": 4.0}}, {"scaling": "linear", "factor": 4.0}),
    ({"rope_scaling": {"rope_type": "default"}}, {"scaling": "none"}),
    (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 128}},
        {"scaling": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 128},
    ),
    (
        {"rope_theta": 7.0, "rope_parameters": {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4,
                                                "original_max_position_embeddings": 128, "beta_fast": 16}},
        {"scaling": "yarn", "factor": 4.0, "theta": 5e5, "original_max_position": 128, "attention_factor": None, "beta_fast": 16.0},
    ),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.5}},
     {"attention_factor": 1.5, "original_max_position": 512}),
    ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 128}}, {"scaling": "yarn", "factor": 4.0}),
    ({"rope_parameters": {"rope_theta": 2e4, "rope_type": "default", "partial_rotary_factor": 0.5}},
     {"theta": 2e4, "rotary_dim": 8}),
]  # fmt: skip


@pytest.mark.parametrize(("config", "expected"), ROPE)
def test_rope_forms(tmp_path: Path, config: dict[str, Any], expected: dict[str, Any]) -> None:
    rope = open_model(write_tiny_hf(tmp_path, config=config)).config.rope
    assert {name: getattr(rope, name) for name in expected} == expected


def test_yarn_with_two_scales(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert open_model(write_tiny_hf(tmp_path, config={"rope_scaling": scaling})).config.rope.attention_factor == 1.0


WINDOWS = [
    ("mistral", {"sliding_window": 32}, (32, 32, 32)),
    ("mistral", {"sliding_window": None}, (None,) * 3),
    ("mistral", {}, (None,) * 3),
    ("llama", {"sliding_window": 32}, (None,) * 3),
    ("qwen2", {"sliding_window": 32}, (None,) * 3),
    ("qwen2", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}, (None, 32, 32)),
    ("qwen2", {"sliding_window": 32, "use_sliding_window": True}, (None,) * 3),
    ("qwen3", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 28,
               "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, (32, None, 32)),
    ("qwen3", {"sliding_window": 32, "use_sliding_window": False, "layer_types": ["full_attention"] * 3}, (None,) * 3),
]  # fmt: skip


@pytest.mark.parametrize(("arch", "config", "expected"), WINDOWS)
def test_windows_per_layer(tmp_path: Path, arch: str, config: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    assert open_model(write_tiny_hf(tmp_path, arch=arch, layers=3, config=config)).config.windows == expected


def test_mistrals_window_where_the_config_is_silent(tmp_path: Path) -> None:
    assert open_model(write_tiny_hf(tmp_path, arch="mistral", omit=["sliding_window"])).config.windows == (4096, 4096)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}, r"Gemma3ForCausalLM'; kvist runs LlamaForCausalLM"),
        ({"model_type": "mixtral", "architectures": None}, r"'mixtral'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized for other software"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "different kinds"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "truncate"),
    ],
)
def test_what_kvist_does_not_compute_is_refused_by_name(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        open_model(write_tiny_hf(tmp_path, config=config))


@pytest.mark.parametrize(
    ("config", "omit", "message"),
    [
        ({}, ["hidden_size"], "lacks hidden_size"),
        ({"num_attention_heads": "four"}, [], "num_attention_heads as 'four'"),
        ({"num_attention_heads": 0}, [], "0 heads"),
        ({"num_key_value_heads": 3}, [], "4 query heads share 3 KV heads"),
        ({"rope_scaling": {"type": "linear"}}, [], "without a factor"),
        ({"eos_token_id": ["two"]}, [], "eos_token_id"),
    ],
)
def test_nonsense_in_the_config_is_refused(tmp_path: Path, config: dict[str, Any], omit: list[str], message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        open_model(write_tiny_hf(tmp_path, config=config, omit=omit))


def test_damaged_folders(tmp_path: Path) -> None:
    folder = write_tiny_hf(tmp_path / "m")
    weights = folder / "model.safetensors"
    sound = weights.read_bytes()
    for cut in (0, 4, 100, len(sound) - 1):
        weights.write_bytes(sound[:cut])
        with pytest.raises(ModelFormatError, match=r"model\.safetensors is no sound safetensors file"):
            open_model(folder)
    weights.unlink()
    with pytest.raises(ModelFormatError, match="it holds no weights"):
        open_model(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelFormatError, match="another format than safetensors"):
        open_model(folder)
    for text in (
        "{",
        "[]",
        "[" * 100_000,
        '{"weight_map": 3}',
        '{"weight_map": {"a": "../secret"}}',
        '{"weight_map": {"a": "gone"}}',
    ):
        (folder / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ModelFormatError, match=r"fetch the folder again"):
            open_model(folder)
    (folder / "config.json").write_text("{]")
    weights.write_bytes(sound)
    with pytest.raises(ModelFormatError, match=r"config\.json is no sound JSON"):
        open_model(folder)
    for file in (weights, folder / "config.json"):
        with pytest.raises(ModelFormatError, match="give the folder"):
            open_model(file)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("tokenizer_config.json", b'{"chat_template": "\\ud800"}'),
        ("special_tokens_map.json", b'{"unk_token": "\\udfff"}'),
        ("tokenizer_config.json", b'{"chat_template": "\xff"}'),
        ("chat_template.jinja", b"{{ '\xff' }}"),
    ],
)
def test_what_is_no_text_is_refused_by_file(tmp_path: Path, name: str, data: bytes) -> None:
    folder = write_tiny_hf(tmp_path)
    (folder / name).write_bytes(data)
    with pytest.raises(ModelFormatError, match=name):
        open_model(folder)


def test_numbers_of_another_type_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_hf(tmp_path)
    weights = folder / "model.safetensors"
    raw = weights.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    entry = header["model.layers.0.mlp.up_proj.weight"]
    entry["dtype"] = "I32"
    text = json.dumps(header).encode()
    weights.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
    with pytest.raises(UnsupportedModelError, match=r"up_proj\.weight as I32, and kvist reads F32, F16, BF16"):
        open_model(folder)


def test_infinite_bfloat16_is_refused(tmp_path: Path) -> None:
    bad = TinyModel().weights()["model.layers.0.mlp.up_proj.weight"].copy()
    bad[0, 0] = np.nan
    assert np.isnan(bad.astype(ml_dtypes.bfloat16)[0, 0])
    model = open_model(write_tiny_hf(tmp_path, dtype="bf16", extra={"model.layers.0.mlp.up_proj.weight": bad}))
    with pytest.raises(ModelFormatError, match=r"not finite in the tensor model\.layers\.0\.mlp\.up_proj\.weight"):
        values(model)
