"""A Llama with random weights in Q4_0, of a given shape: a second shape to measure, that nobody has tuned for.

Blocks are drawn in the file's own format (a scale, 32 values of 4 bits), none is quantized: values are uniform in -7 .. 7 times a
scale that gives a matrix of k inputs the spread 1 / sqrt(k), so that every activation and logit stays finite and ordinary. The
tokenizer is copied from a GGUF file. The same shape and seed give the same file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

GROUP = 32
SPREAD = float(np.sqrt((15**2 - 1) / 12))
"""Standard deviation of whole numbers drawn evenly from -7 .. 7."""
_PAIRS = np.array([(low + 1) | ((high + 1) << 4) for high in range(15) for low in range(15)], dtype=np.uint8)
"""Two values a byte, each stored with 8 added: 1 .. 15."""


@dataclass(frozen=True)
class Shape:
    """A Llama's shape; the vocabulary is the tokenizer's."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    context: int = 8192


SHAPES = {"1b": Shape("1b", layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, intermediate=8192)}


def q4_0_rows(rng: np.random.Generator, n: int, k: int) -> npt.NDArray[np.uint8]:
    """A matrix of n rows and k columns as Q4_0 blocks: [n, k / 32 * 18] bytes."""
    blocks = np.empty((n * k // GROUP, 18), dtype=np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(1 / (SPREAD * np.sqrt(k))).tobytes(), dtype=np.uint8)
    blocks[:, 2:] = _PAIRS[rng.integers(0, len(_PAIRS), size=(len(blocks), GROUP // 2), dtype=np.uint8)]
    return blocks.reshape(n, -1)


def write_random_model(path: Path, shape: Shape, tokenizer: Path, seed: int = 0) -> Path:
    """Write the GGUF file; `tokenizer` is the GGUF file whose vocabulary it takes. The head is the embedding."""
    import gguf

    rng = np.random.default_rng(seed)
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    reader = gguf.GGUFReader(tokenizer)
    vocab_size = _copy_tokenizer(reader, writer)
    writer.add_name(f"random-{shape.name}")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_quantization_version(2)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab_size)

    def matrix(name: str, n: int, k: int) -> None:
        writer.add_tensor(f"{name}.weight", q4_0_rows(rng, n, k), raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(shape.hidden, dtype=np.float32))

    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    matrix("token_embd", vocab_size, shape.hidden)
    for layer in range(shape.layers):
        block = f"blk.{layer}."
        norm(f"{block}attn_norm")
        matrix(f"{block}attn_q", q, shape.hidden)
        matrix(f"{block}attn_k", kv, shape.hidden)
        matrix(f"{block}attn_v", kv, shape.hidden)
        matrix(f"{block}attn_output", shape.hidden, q)
        norm(f"{block}ffn_norm")
        matrix(f"{block}ffn_gate", shape.intermediate, shape.hidden)
        matrix(f"{block}ffn_up", shape.intermediate, shape.hidden)
        matrix(f"{block}ffn_down", shape.hidden, shape.intermediate)
    norm("output_norm")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)
    return path


def _copy_tokenizer(reader: Any, writer: Any) -> int:
    """Copy every `tokenizer.` field; the vocabulary's size."""
    import gguf

    vocab_size = 0
    for key, field in reader.fields.items():
        if not key.startswith("tokenizer."):
            continue
        value, kind = field.contents(), field.types[0]
        item = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, kind, sub_type=item)
        if key == "tokenizer.ggml.tokens":
            vocab_size = len(value)
    return vocab_size
