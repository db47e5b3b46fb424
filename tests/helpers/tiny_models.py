"""Tiny random models, the same float weights as a GGUF file and as a Hugging Face folder, with a small byte-level BPE vocabulary.

    from helpers.tiny_models import TinyModel, write_tiny_gguf, write_tiny_hf

    write_tiny_gguf(path, arch="llama", quant="Q8_0")       # one file
    write_tiny_hf(folder, arch="qwen2", dtype="bf16")       # config.json, model.safetensors, tokenizer files
    TinyModel(layers=3).weights()                           # the float32 weights behind both, by Hugging Face name

Both writers take the fields of `TinyModel` as keywords. The vocabulary: 0 `<|endoftext|>`, 1 `<|im_start|>`, 2 `<|im_end|>`,
3 .. 258 the 256 bytes, then one token per merge; ids beyond are unused fillers. As real converters do, a GGUF file of the llama
architecture has the rows of q and k interleaved, and its tensors of one dimension stay float32.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (
    ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "t"), ("Ġt", "h"), ("Ġth", "e"),
    ("i", "n"), ("in", "g"), ("e", "r"), ("o", "r"), ("a", "n"), ("an", "d"), ("Ġ", "w"),
)  # fmt: skip
BOS, EOS = 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PERMUTED = ("llama", "mistral")
"""Architectures whose GGUF converter interleaves the halves of each head of q and k; both are written as "llama"."""
DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
ST_NAMES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}

_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_BIASED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GLOBAL_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def _byte_chars() -> list[str]:
    """The printable stand-ins of the 256 bytes in byte-level BPE (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(rest)) for byte in range(256)]


def vocabulary(size: int | None = None) -> list[str]:
    """All token strings in order, filled up to `size` with unused ones."""
    tokens = [*SPECIALS, *_byte_chars(), *(left + right for left, right in MERGES)]
    return tokens + [f"<|unused_{i}|>" for i in range(len(tokens), size or 0)]


BASE_VOCAB = len(vocabulary())


@dataclass(frozen=True)
class TinyModel:
    """What both writers take. k must be whole groups of 32 for quantized types (256 for K types)."""

    arch: str = "llama"
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int | None = None
    intermediate: int = 128
    vocab: int | None = None
    seed: int = 0
    tied: bool = True
    """No head of its own (and, in config.json, tie_word_embeddings)."""
    context: int = 512
    theta: float = 10000.0
    eps: float = 1e-5
    attention_bias: bool | None = None
    """None: as the architecture has it (qwen2: q, k and v)."""

    @property
    def size(self) -> int:
        return self.vocab or BASE_VOCAB

    @property
    def head(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def has_bias(self) -> bool:
        return self.arch == "qwen2" if self.attention_bias is None else self.attention_bias

    def weights(self) -> dict[str, np.ndarray]:
        """Float32 weights by Hugging Face name, rotation pairs in halves. The same seed gives the same weights."""
        rng = np.random.default_rng(self.seed)

        def matrix(n: int, k: int) -> np.ndarray:
            return (rng.normal(size=(n, k)) * 1.5 / np.sqrt(k)).astype(np.float32)

        def norm(n: int) -> np.ndarray:
            return (1 + 0.2 * rng.normal(size=n)).astype(np.float32)

        q, kv, h, m = self.heads * self.head, self.kv_heads * self.head, self.hidden, self.intermediate
        out = {"model.embed_tokens.weight": rng.normal(size=(self.size, h)).astype(np.float32)}
        for i in range(self.layers):
            p = f"model.layers.{i}."
            shapes = {
                "self_attn.q_proj": (q, h),
                "self_attn.k_proj": (kv, h),
                "self_attn.v_proj": (kv, h),
                "self_attn.o_proj": (h, q),
            }
            shapes |= {"mlp.gate_proj": (m, h), "mlp.up_proj": (m, h), "mlp.down_proj": (h, m)}
            for name, (n, k) in shapes.items():
                out[f"{p}{name}.weight"] = matrix(n, k)
                if self.has_bias and name in _BIASED:
                    out[f"{p}{name}.bias"] = (0.5 * rng.normal(size=n)).astype(np.float32)
            for name in ("input_layernorm", "post_attention_layernorm"):
                out[f"{p}{name}.weight"] = norm(h)
            if self.arch == "qwen3":
                out[f"{p}self_attn.q_norm.weight"], out[f"{p}self_attn.k_norm.weight"] = norm(self.head), norm(self.head)
        out["model.norm.weight"] = norm(h)
        if not self.tied:
            out["lm_head.weight"] = matrix(self.size, h) * 4
        return out


def _split(keywords: dict[str, Any]) -> TinyModel:
    names = {field.name for field in fields(TinyModel)}
    assert keywords.keys() <= names, f"not a field of TinyModel: {sorted(keywords.keys() - names)}"
    return TinyModel(**keywords)


def gguf_name(name: str) -> str:
    """`model.layers.0.mlp.up_proj.weight` to `blk.0.ffn_up.weight`."""
    stem, _, kind = name.rpartition(".")
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[rest]}.{kind}"


def interleave_heads(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k (or their bias) from pairs in halves to interleaved pairs, as llama's GGUF converter orders them."""
    return np.ascontiguousarray(rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape))


def write_tiny_gguf(
    path: str | Path,
    *,
    quant: str | Mapping[str, str] = "F32",
    omit: Iterable[str] = (),
    metadata: Mapping[str, Any] | None = None,
    drop: Iterable[str] = (),
    extra: Mapping[str, np.ndarray] | None = None,
    pre: str = "gpt-2",
    add_bos: bool | None = False,
    **model: Any,
) -> Path:
    """Write a GGUF file. `quant` is a type's name for all matrices, or a mapping from GGUF tensor name (else "default") to one.

    `omit` leaves out metadata keys and `metadata` adds or replaces some ("{arch}." is filled in); `drop` leaves out tensors by
    GGUF name and `extra` adds or replaces float32 ones (for example `rope_freqs.weight`).
    """
    tiny = _split(model)
    arch = "llama" if tiny.arch in PERMUTED else tiny.arch
    keys: dict[str, Any] = {
        "general.name": "tiny",
        "{arch}.block_count": tiny.layers,
        "{arch}.context_length": tiny.context,
        "{arch}.embedding_length": tiny.hidden,
        "{arch}.feed_forward_length": tiny.intermediate,
        "{arch}.attention.head_count": tiny.heads,
        "{arch}.attention.head_count_kv": tiny.kv_heads,
        "{arch}.attention.key_length": tiny.head,
        "{arch}.attention.value_length": tiny.head,
        "{arch}.attention.layer_norm_rms_epsilon": float(tiny.eps),
        "{arch}.rope.freq_base": float(tiny.theta),
        "{arch}.rope.dimension_count": tiny.head,
        "{arch}.vocab_size": tiny.size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": vocabulary(tiny.size),
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (BASE_VOCAB - 3) + [5] * (tiny.size - BASE_VOCAB),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": EOS,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    if add_bos is not None:
        keys["tokenizer.ggml.add_bos_token"] = add_bos
    keys |= dict(metadata or {})
    keys = {key: value for key, value in keys.items() if key not in set(omit)}
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        _add_value(writer, key.replace("{arch}", arch), value)
    tensors = {gguf_name(name): array for name, array in tiny.weights().items()}
    if arch == "llama":
        for name in tensors:
            if ".attn_q." in name or ".attn_k." in name:
                tensors[name] = interleave_heads(tensors[name], tiny.heads if ".attn_q." in name else tiny.kv_heads)
    tensors |= dict(extra or {})
    for name, array in tensors.items():
        if name in set(drop):
            continue
        kind = (quant if isinstance(quant, str) else quant.get(name, quant.get("default", "F32"))) if array.ndim > 1 else "F32"
        qtype = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(array, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """A safetensors file of float32, float16 or ml_dtypes.bfloat16 arrays."""
    kinds = {np.dtype(DTYPES[name]): ST_NAMES[name] for name in DTYPES}
    header, offset = {}, 0
    for name, array in tensors.items():
        header[name] = {"dtype": kinds[array.dtype], "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join(np.ascontiguousarray(array).tobytes() for array in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def hf_config(tiny: TinyModel, dtype: str = "f32") -> dict[str, Any]:
    """config.json as transformers 4 writes it."""
    classes = {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
    }
    config: dict[str, Any] = {
        "architectures": [classes.get(tiny.arch, "OtherForCausalLM")],
        "model_type": tiny.arch,
        "vocab_size": tiny.size,
        "hidden_size": tiny.hidden,
        "intermediate_size": tiny.intermediate,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.kv_heads,
        "max_position_embeddings": tiny.context,
        "rms_norm_eps": tiny.eps,
        "rope_theta": tiny.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": tiny.tied,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[dtype],
    }
    if tiny.head_dim is not None or tiny.arch == "qwen3":
        config["head_dim"] = tiny.head
    if tiny.arch == "llama":
        config["attention_bias"] = tiny.has_bias
    if tiny.arch == "mistral":
        config["sliding_window"] = None
    return config


def tokenizer_json(tiny: TinyModel, *, add_bos: bool = False) -> str:
    """The vocabulary as a fast tokenizer's tokenizer.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    tokens = vocabulary()[len(SPECIALS) :]
    vocab = {token: i + len(SPECIALS) for i, token in enumerate(tokens)} | {token: i for i, token in enumerate(SPECIALS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{SPECIALS[BOS]} $A", pair=f"{SPECIALS[BOS]} $A {SPECIALS[BOS]} $B", special_tokens=[(SPECIALS[BOS], BOS)]
        )
    return str(tokenizer.to_str())


def write_tiny_hf(
    path: str | Path,
    *,
    dtype: str = "f32",
    shards: int = 1,
    config: Mapping[str, Any] | None = None,
    omit: Iterable[str] = (),
    drop: Iterable[str] = (),
    extra: Mapping[str, np.ndarray] | None = None,
    add_bos: bool = False,
    **model: Any,
) -> Path:
    """Write a folder with config.json, model.safetensors (or `shards` of them with an index) and the tokenizer's files.

    `config` adds or replaces keys of config.json and `omit` leaves some out; `drop` and `extra` do the same to tensors, by name.
    """
    tiny, folder = _split(model), Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    settings = hf_config(tiny, dtype) | dict(config or {})
    (folder / "config.json").write_text(json.dumps({k: v for k, v in settings.items() if k not in set(omit)}, indent=2))
    tensors = {k: v for k, v in (tiny.weights() | dict(extra or {})).items() if k not in set(drop)}
    tensors = {name: array.astype(DTYPES[dtype]) for name, array in tensors.items()}
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
    else:
        names, index = list(tensors), {}
        for shard in range(shards):
            file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            write_safetensors(folder / file, {name: tensors[name] for name in names[shard::shards]})
            index |= dict.fromkeys(names[shard::shards], file)
        total = sum(array.nbytes for array in tensors.values())
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}))
    (folder / "tokenizer.json").write_text(tokenizer_json(tiny, add_bos=add_bos), encoding="utf-8")
    special = {"bos_token": SPECIALS[BOS], "eos_token": SPECIALS[EOS], "pad_token": SPECIALS[EOS], "unk_token": SPECIALS[0]}
    tokenizer_config = special | {
        "add_bos_token": add_bos, "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": tiny.context,
        "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2))
    return folder
