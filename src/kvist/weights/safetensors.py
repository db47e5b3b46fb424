"""A Hugging Face folder (config.json and safetensors) as a `ModelSource`.

It knows transformers' tensor names for the families that kvist runs; the container is the safetensors library's business.
Invariants: a head that the weights really hold is used, whatever config.json says of tying; one that they lack is tied, with a
note where config.json promised it. Rotation pairs are halves of a head in these files already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvist.config import ModelConfig, Quantization
from kvist.errors import ModelFormatError, UnsupportedModelError
from kvist.kernels.ops import F32, PackedLinear
from kvist.kernels.packing import dense_to_float32
from kvist.weights.files import content_files, weight_files
from kvist.weights.fingerprint import fingerprint_files
from kvist.weights.hf_config import model_config, read_json
from kvist.weights.quantize import encode, require_finite
from kvist.weights.source import TensorSpec, TokenizerSource, missing_tensor, tensor_specs

_NAMES = {
    "embed": "model.embed_tokens", "head": "lm_head", "final_norm": "model.norm", "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm", "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
_DTYPES = ("F32", "F16", "BF16")


def file_name(canonical: str) -> str:
    """`layers.3.up` to `model.layers.3.mlp.up_proj`."""
    *layer, stem = canonical.split(".")
    return f"model.layers.{layer[1]}.{_NAMES[stem]}" if layer else _NAMES[stem]


@dataclass(frozen=True)
class Entry:
    """One tensor's place: the shard's open handle, its dtype name and shape."""

    handle: Any
    dtype: str
    shape: tuple[int, ...]


def _directory(folder: Path) -> dict[str, Entry]:
    from safetensors import SafetensorError, safe_open

    entries: dict[str, Entry] = {}
    for path in weight_files(folder):
        try:
            handle: Any = safe_open(path, framework="np")
            for name in handle.keys():  # noqa: SIM118 (a handle is no mapping)
                view = handle.get_slice(name)
                entries[name] = Entry(handle, view.get_dtype(), tuple(view.get_shape()))
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelFormatError(f"{path} is no sound safetensors file ({error}); fetch it again.") from error
    return entries


@dataclass(frozen=True)
class HFModel:
    """An opened folder."""

    folder: Path
    config: ModelConfig
    tokenizer: TokenizerSource
    notes: tuple[str, ...]
    entries: dict[str, Entry]
    fingerprint: str

    @classmethod
    def open(cls, folder: Path) -> HFModel:
        """Raises ModelFormatError or UnsupportedModelError; checks that every tensor is there, reads none but a disputed head."""
        # Taken first: whatever replaces the files from here on gives them another one.
        fingerprint = fingerprint_files(content_files(folder))
        config = model_config(folder)
        entries = _directory(folder)
        tied, notes = _tying(folder, config, entries)
        config = replace(config, tie_word_embeddings=tied)
        model = cls(folder, config, tokenizer_source(folder), notes, entries, fingerprint)
        expected = {name for spec in tensor_specs(config) for name in model._names(spec) if name is not None}
        extra = sorted(name for name in entries.keys() - expected - {"lm_head.weight"} if not name.endswith("rotary_emb.inv_freq"))
        if extra:
            shown = ", ".join(extra[:3]) + (", ..." if len(extra) > 3 else "")
            notes += (f"{folder} holds {len(extra)} tensors that a {config.architecture} model has no use for ({shown}); ignored.",)
        return replace(model, notes=notes)

    def packed(self, quantization: Quantization | None = None, dtype: str = "auto") -> Iterator[tuple[str, PackedLinear | F32]]:
        for spec in tensor_specs(self.config):
            weight, bias_name = self._names(spec)
            assert weight is not None
            array = _read(self.folder, self.entries, weight)
            if not spec.is_matrix:
                yield spec.name, np.ascontiguousarray(dense_to_float32(array))
                continue
            bias = None if bias_name is None else dense_to_float32(_read(self.folder, self.entries, bias_name))
            yield spec.name, encode(spec.name, array, quantization, dtype, bias)

    def _names(self, spec: TensorSpec) -> tuple[str | None, str | None]:
        """The names of a canonical tensor's weight and, for a matrix that has one, bias; presence, shape and type checked."""
        stem = file_name(spec.name)
        weight, bias = f"{stem}.weight", f"{stem}.bias"
        if weight not in self.entries:
            raise missing_tensor(weight, self.folder)
        if bias not in self.entries and spec.needs_bias:
            raise missing_tensor(bias, self.folder)
        has_bias = spec.is_matrix and bias in self.entries
        for name, shape in ((weight, spec.shape), (bias, spec.shape[:1])):
            if name == bias and not has_bias:
                continue
            entry = self.entries[name]
            if entry.shape != shape:
                raise ModelFormatError(
                    f"{self.folder} gives the tensor {name} the shape {list(entry.shape)} where config.json asks for "
                    f"{list(shape)}; the files do not belong together: fetch them again."
                )
            if entry.dtype not in _DTYPES:
                raise UnsupportedModelError(
                    f"{self.folder} stores the tensor {name} as {entry.dtype}, and kvist reads {', '.join(_DTYPES)}; "
                    "use the unquantized model or a GGUF file."
                )
        return weight, bias if has_bias else None


def _read(folder: Path, entries: dict[str, Entry], name: str) -> npt.NDArray[Any]:
    """A tensor as float32, float16, or bfloat16 bit patterns in uint16."""
    try:
        array: npt.NDArray[Any] = entries[name].handle.get_tensor(name)
    except Exception as error:  # the library's own exceptions are many; all mean that the bytes cannot be had
        raise ModelFormatError(f"{folder} does not give up the tensor {name} ({error}); fetch it again.") from error
    if array.dtype == ml_dtypes.bfloat16:
        array = array.view(np.uint16)
    require_finite(array, name, folder)
    return array


def _tying(folder: Path, config: ModelConfig, entries: dict[str, Entry]) -> tuple[bool, tuple[str, ...]]:
    """Whether the embedding serves as head, by what the weights hold, and a note where config.json says otherwise."""
    if "lm_head.weight" not in entries:
        if config.tie_word_embeddings:
            return True, ()
        return True, (
            f"{folder} holds no lm_head.weight although its config.json says that the head is not tied; the embedding is used.",
        )
    if not config.tie_word_embeddings:
        return False, ()
    embed, head = entries.get("model.embed_tokens.weight"), entries["lm_head.weight"]
    if embed is None:
        raise missing_tensor("model.embed_tokens.weight", folder)
    if embed.shape == head.shape and embed.dtype == head.dtype:
        own, shared = (_read(folder, entries, name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
        if np.array_equal(own, shared):
            return True, ()
    return False, (f"{folder} holds an lm_head.weight of its own although its config.json says that the head is tied; it is used.",)


def tokenizer_source(folder: Path) -> TokenizerSource:
    """The tokenizer's files. Raises ModelFormatError where there is no tokenizer.json."""
    path = folder / "tokenizer.json"
    try:
        tokenizer_json = path.read_bytes()
    except OSError:
        raise ModelFormatError(
            f"{folder} has no tokenizer.json; fetch the whole folder, or save its fast tokenizer there."
        ) from None
    config = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
    return TokenizerSource(tokenizer_json=tokenizer_json, config=config, chat_template=_chat_template(folder, config))


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """From its own file (newer folders), else from tokenizer_config.json; of a list of named ones, "default"."""
    path = folder / "chat_template.jinja"
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if not isinstance(error, FileNotFoundError):
            raise ModelFormatError(f"{path} cannot be read ({error}); fetch it again.") from error
        template = read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
