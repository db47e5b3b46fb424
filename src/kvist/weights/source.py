"""What an opened model gives, whatever its files look like: `ModelSource`, the canonical tensors and the tokenizer's raw material.

`gguf.py` and `safetensors.py` implement it; `pack.py` consumes it. This module knows no file format and decodes nothing.
Invariants: a source yields every tensor of `tensor_specs`, in that order, each once and of the stated shape, or raises
`ModelFormatError` naming the tensor; `config.tie_word_embeddings` is true exactly when no `head` is yielded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kvist.config import ModelConfig, Quantization
from kvist.errors import ModelFormatError
from kvist.kernels.ops import F32, PackedLinear
from kvist.weights.files import content_files

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class GGUFVocab:
    """The vocabulary of a GGUF file as its metadata has it; None where the file is silent."""

    model: str
    """"gpt2" (byte-level BPE), "llama" (SentencePiece) or another name, which `text` may refuse."""
    pre: str | None
    tokens: list[str]
    scores: list[float] | None = None
    types: list[int] | None = None
    merges: list[str] | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None
    add_space_prefix: bool | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    eot_token_id: int | None = None
    eom_token_id: int | None = None
    unk_token_id: int | None = None
    pad_token_id: int | None = None


@dataclass(frozen=True)
class TokenizerSource:
    """Raw material of a tokenizer; exactly one of `tokenizer_json` and `gguf` is present."""

    tokenizer_json: bytes | None = None
    gguf: GGUFVocab | None = None
    config: dict[str, Any] = field(default_factory=dict)
    """tokenizer_config.json, with special_tokens_map.json's entries where it lacks them; empty for GGUF."""
    chat_template: str | None = None


class ModelSource(Protocol):
    """An opened GGUF file or Hugging Face folder."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def tokenizer(self) -> TokenizerSource: ...
    @property
    def fingerprint(self) -> str:
        """SHA-256 over the content of all files that the model is made of, in hexadecimal, taken before they were opened."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about these files: sentences."""

    def packed(self, quantization: Quantization | None = None, dtype: str = "auto") -> Iterator[tuple[str, PackedLinear | F32]]:
        """The canonical tensors, one at a time. `quantization` and `dtype` as in `quantize.encode`."""


@dataclass(frozen=True)
class TensorSpec:
    """One canonical tensor: a matrix [n, k] (with a bias [n] where the files have one), or a vector [n]."""

    name: str
    shape: tuple[int, ...]
    needs_bias: bool = False

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == 2


def tensor_specs(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a model, in the order of the pack. Lazy: a damaged layer count costs nothing."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield TensorSpec("embed", (config.vocab_size, hidden))
    if not config.tie_word_embeddings:
        yield TensorSpec("head", (config.vocab_size, hidden))
    yield TensorSpec("final_norm", (hidden,))
    biased = config.architecture == "qwen2"
    for i in range(config.num_layers):
        layer = f"layers.{i}."
        yield TensorSpec(layer + "attn_norm", (hidden,))
        yield TensorSpec(layer + "q", (q, hidden), biased)
        yield TensorSpec(layer + "k", (kv, hidden), biased)
        yield TensorSpec(layer + "v", (kv, hidden), biased)
        if config.qk_norm:
            yield TensorSpec(layer + "q_norm", (config.head_dim,))
            yield TensorSpec(layer + "k_norm", (config.head_dim,))
        yield TensorSpec(layer + "o", (hidden, q))
        yield TensorSpec(layer + "mlp_norm", (hidden,))
        yield TensorSpec(layer + "gate", (inner, hidden))
        yield TensorSpec(layer + "up", (inner, hidden))
        yield TensorSpec(layer + "down", (hidden, inner))


def check_shape(config: ModelConfig, path: Path) -> None:
    """Refuse a description that no model can have. Raises ModelFormatError."""

    def require(ok: bool, what: str) -> None:
        if not ok:
            raise ModelFormatError(f"{path} describes an impossible model ({what}); fetch it again or convert it anew.")

    for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
        value = getattr(config, name)
        require(0 < value < 2**31, f"{name} is {value}")
    require(0 < config.max_position_embeddings < 2**40, f"its context length is {config.max_position_embeddings}")
    require(config.num_heads % config.num_kv_heads == 0, f"{config.num_heads} query heads share {config.num_kv_heads} KV heads")
    rotary = config.rope.rotary_dim or config.head_dim
    require(rotary % 2 == 0 and 0 < rotary <= config.head_dim, f"{rotary} of {config.head_dim} elements of a head are rotated")
    require(0 < config.rope.theta < float("inf"), f"its rope base is {config.rope.theta}")
    require(0 < config.rope.factor < float("inf"), f"its rope scaling factor is {config.rope.factor}")
    require(0 <= config.rms_norm_eps < 1, f"its norm epsilon is {config.rms_norm_eps}")
    require(not config.layer_windows or len(config.layer_windows) == config.num_layers, "windows are not one per layer")
    require(all(window is None or window > 0 for window in config.layer_windows), "a window is not positive")


def missing_tensor(name: str, path: Path) -> ModelFormatError:
    return ModelFormatError(f"{path} lacks the tensor {name}; the file is incomplete: fetch it again or convert it anew.")


def open_model(path: str | Path) -> ModelSource:
    """Open a GGUF file, a Hugging Face folder, or a folder with one GGUF file in it.

    Raises ModelNotFoundError, ModelFormatError (damaged, cut, foreign or incomplete) or UnsupportedModelError.
    """
    path = Path(path)
    files = content_files(path)
    if path.is_dir() and files[0].name == "config.json":
        from kvist.weights.safetensors import HFModel

        return HFModel.open(path)
    if path.suffix in (".safetensors", ".json"):
        raise ModelFormatError(f"{path} is one file of a Hugging Face folder; give the folder, which also holds config.json.")
    from kvist.weights.gguf import GGUFModel

    return GGUFModel.open(files[0])
