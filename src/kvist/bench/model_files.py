"""The files that contenders run, made from one GGUF file and kept in the cache folder: a Hugging Face folder, a Q4_0 version.

Values are the file's own, decoded to float32 by the gguf library and rounded to bfloat16. A file is named after the source's name,
size and date, and written under another name first, so that what is there is whole and is of that source.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvist.config import cache_dir
from kvist.errors import UnsupportedModelError, UsageError

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Architectures whose GGUF names and row order this module translates."""
_INTERLEAVED = ("llama",)
"""Architectures whose GGUF files have the rotation pairs of q and k side by side."""
_LAYER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
Say = Callable[[str], None]


def bench_dir() -> Path:
    """Where the bench keeps what it makes."""
    folder = cache_dir() / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _named_after(source: Path, ending: str) -> Path:
    facts = source.stat()
    return bench_dir() / f"{source.stem}-{facts.st_size:x}-{facts.st_mtime_ns:x}{ending}"


def format_bytes_by_type(path: Path) -> dict[str, int]:
    """Bytes of the file's matrices by GGUF type, the largest share first."""
    import gguf

    sizes: Counter[str] = Counter()
    for tensor in gguf.GGUFReader(path).tensors:
        if len(tensor.shape) > 1:
            sizes[tensor.tensor_type.name] += int(tensor.n_bytes)
    return dict(sizes.most_common())


def read_bytes(path: Path) -> int:
    """Bytes of the matrices that a step reads: all but an embedding that is only looked up."""
    import gguf

    matrices = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors if len(tensor.shape) > 1}
    looked_up = matrices.get("token_embd.weight", 0) if "output.weight" in matrices else 0
    return sum(matrices.values()) - looked_up


def describe_formats(sizes: dict[str, int]) -> str:
    """ "Q4_1 (66 MB), Q8_0 (30 MB)"."""
    return ", ".join(f"{name} ({size / 1e6:.0f} MB)" for name, size in sizes.items())


def requantize(source: Path, tool: Path, say: Say) -> Path:
    """The file with its layers in Q4_0 and its embedding and head in Q8_0, by llama.cpp's `llama-quantize`. Raises UsageError."""
    target = _named_after(source, "-q4_0.gguf")
    if target.exists():
        return target
    say(f"making {target}")
    partial = target.with_suffix(".partial")
    formats = ("--token-embedding-type", "q8_0", "--output-tensor-type", "q8_0")
    command = [str(tool), "--allow-requantize", *formats, str(source), str(partial), "Q4_0"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines() or ["it said nothing"]
        partial.unlink(missing_ok=True)
        raise UsageError(f"{tool.name} failed: {lines[-1].strip()}")
    partial.rename(target)
    return target


def hf_folder(source: Path, say: Say) -> Path:
    """The file's weights as a Hugging Face folder in bfloat16, without a tokenizer. Raises UnsupportedModelError."""
    target = _named_after(source, "-hf")
    if target.exists():
        return target
    import gguf
    import ml_dtypes
    from safetensors.numpy import save_file

    reader = gguf.GGUFReader(source)
    config = _hf_config(reader)
    say(f"making {target}")
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    tensors = {}
    for tensor in reader.tensors:
        values: npt.NDArray[Any] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        name, heads = _hf_name(tensor.name), 0
        if config["model_type"] in _INTERLEAVED and ".attn_q." in tensor.name:
            heads = config["num_attention_heads"]
        elif config["model_type"] in _INTERLEAVED and ".attn_k." in tensor.name:
            heads = config["num_key_value_heads"]
        if heads:
            pairs = values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2)
            values = pairs.reshape(values.shape)
        tensors[name] = np.ascontiguousarray(values).astype(ml_dtypes.bfloat16)
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    (partial / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    partial.rename(target)
    return target


def _hf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    if stem.startswith("blk."):
        _, layer, rest = stem.split(".", 2)
        if rest in _LAYER:
            return f"model.layers.{layer}.{_LAYER[rest]}.{kind}"
    raise UnsupportedModelError(f"no Hugging Face folder can be made of a file with the tensor {name}")


def _hf_config(reader: Any) -> dict[str, Any]:
    values = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("tokenizer.ggml.")}
    architecture = values.get("general.architecture")
    if architecture not in CLASSES:
        raise UnsupportedModelError(f"no Hugging Face folder can be made of the architecture {architecture}")
    if any(key.startswith(f"{architecture}.rope.scaling.") for key in values):
        raise UnsupportedModelError("no Hugging Face folder can be made of a file with scaled rotary embeddings")
    names = {tensor.name for tensor in reader.tensors}
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")

    def value(key: str, default: Any = None) -> Any:
        found = values.get(f"{architecture}.{key}", default)
        if found is None:
            raise UnsupportedModelError(f"the file does not tell {architecture}.{key}")
        return found

    heads, hidden = value("attention.head_count"), value("embedding_length")
    return {
        "architectures": [CLASSES[architecture]],
        "model_type": architecture,
        "vocab_size": int(embedding.shape[1]),
        "hidden_size": hidden,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": value("attention.key_length", hidden // heads),
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_theta": value("rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "bfloat16",
    }
