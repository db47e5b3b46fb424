"""A GGUF file as a `ModelSource`: tensor names, row order and tokens' raw material. (Metadata to a shape: `gguf_config.py`.)

It knows llama.cpp's naming and conventions for the architectures that kvist runs, not block layouts (`gguf_quants.py`) nor the
container (`gguf_file.py`). Invariant: rotation pairs leave here as halves of a head, whatever the file's order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvist.config import ModelConfig, Quantization
from kvist.errors import ModelFormatError, UnsupportedModelError
from kvist.kernels.ops import F32, PackedLinear
from kvist.weights.fingerprint import fingerprint_files
from kvist.weights.gguf_config import INTERLEAVED, model_config, vocabulary
from kvist.weights.gguf_file import GGUFFile, TensorInfo, read_gguf
from kvist.weights.gguf_quants import UndecodableTypeError, decode_matrix, decode_vector
from kvist.weights.quantize import encode, require_finite
from kvist.weights.source import TensorSpec, TokenizerSource, missing_tensor, tensor_specs

_NAMES = {
    "embed": "token_embd", "head": "output", "final_norm": "output_norm", "attn_norm": "attn_norm", "q": "attn_q", "k": "attn_k",
    "v": "attn_v", "o": "attn_output", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "mlp_norm": "ffn_norm",
    "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
}  # fmt: skip
_KNOWN_EXTRAS = ("rope_freqs.weight",)


def file_name(canonical: str) -> str:
    """`layers.3.up` to `blk.3.ffn_up`."""
    *layer, stem = canonical.split(".")
    return f"blk.{layer[1]}.{_NAMES[stem]}" if layer else _NAMES[stem]


def halves_from_interleaved(rows: npt.NDArray[Any], heads: int, rotary_dim: int) -> npt.NDArray[Any]:
    """Rows (or bias) of q or k, [heads * head_dim, ...], whose rotation pairs are neighbours (2i, 2i + 1), reordered to pairs
    (i, i + rotary_dim / 2). Elements of a head beyond `rotary_dim` stay in place."""
    by_head = rows.reshape(heads, -1, *rows.shape[1:])
    turned = by_head[:, :rotary_dim].reshape(heads, rotary_dim // 2, 2, *rows.shape[1:]).swapaxes(1, 2)
    turned = turned.reshape(heads, rotary_dim, *rows.shape[1:])
    return np.concatenate([turned, by_head[:, rotary_dim:]], axis=1).reshape(rows.shape)


@dataclass(frozen=True)
class GGUFModel:
    """An opened GGUF file."""

    file: GGUFFile
    config: ModelConfig
    tokenizer: TokenizerSource
    notes: tuple[str, ...]
    fingerprint: str

    @classmethod
    def open(cls, path: Path) -> GGUFModel:
        """Raises ModelFormatError or UnsupportedModelError; checks that every tensor is there, decodes none."""
        # Taken first: whatever replaces the file from here on gives it another one.
        fingerprint = fingerprint_files([path])
        file = read_gguf(path)
        config, notes = model_config(file)
        template = file.metadata.get("tokenizer.chat_template")
        tokenizer = TokenizerSource(gguf=vocabulary(file), chat_template=template if isinstance(template, str) else None)
        model = cls(file, config, tokenizer, notes, fingerprint)
        expected = {info.name for spec in tensor_specs(config) for info in model._infos(spec) if info is not None}
        extra = sorted(file.tensors.keys() - expected - set(_KNOWN_EXTRAS))
        if extra:
            shown = ", ".join(extra[:3]) + (", ..." if len(extra) > 3 else "")
            notes += (f"{path} holds {len(extra)} tensors that a {config.architecture} model has no use for ({shown}); ignored.",)
        return replace(model, notes=notes)

    def packed(self, quantization: Quantization | None = None, dtype: str = "auto") -> Iterator[tuple[str, PackedLinear | F32]]:
        for spec in tensor_specs(self.config):
            weight, bias = self._infos(spec)
            assert weight is not None
            yield spec.name, self._vector(weight) if not spec.is_matrix else self._matrix(spec, weight, bias, quantization, dtype)

    def _infos(self, spec: TensorSpec) -> tuple[TensorInfo | None, TensorInfo | None]:
        """The file's entries of a canonical tensor: weight and, for a matrix that has one, bias; checked."""
        name = file_name(spec.name)
        weight, bias = (self.file.tensors.get(f"{name}.{kind}") for kind in ("weight", "bias"))
        if weight is None:
            raise missing_tensor(f"{name}.weight", self.file.path)
        if bias is None and spec.needs_bias:
            raise missing_tensor(f"{name}.bias", self.file.path)
        if not spec.is_matrix:
            bias = None
        for info, shape in ((weight, spec.shape), (bias, spec.shape[:1])):
            if info is not None and info.shape != shape:
                raise ModelFormatError(
                    f"{self.file.path} gives the tensor {info.name} the shape {list(info.shape)} where its metadata asks for "
                    f"{list(shape)}; the file is damaged or wrongly converted: fetch it again."
                )
        return weight, bias

    def _rows(self, spec: TensorSpec, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Rows in the order of halves."""
        part = spec.name.rpartition(".")[2]
        if self.config.architecture not in INTERLEAVED or part not in ("q", "k"):
            return rows
        heads = self.config.num_heads if part == "q" else self.config.num_kv_heads
        return halves_from_interleaved(rows, heads, self.config.rope.rotary_dim or self.config.head_dim)

    def _vector(self, info: TensorInfo) -> F32:
        try:
            values = decode_vector(info.type_name, self.file.rows(info))
        except UndecodableTypeError:
            raise self._undecodable(info) from None
        require_finite(values, info.name, self.file.path)
        return values

    def _matrix(
        self, spec: TensorSpec, info: TensorInfo, bias_info: TensorInfo | None, quantization: Quantization | None, dtype: str
    ) -> PackedLinear:
        bias = None if bias_info is None else self._rows(spec, self._vector(bias_info))
        rows = self._rows(spec, self.file.rows(info))
        try:
            matrix = decode_matrix(info.type_name, rows, spec.shape[1], bias)
        except UndecodableTypeError:
            raise self._undecodable(info) from None
        require_finite(matrix, info.name, self.file.path)
        return encode(spec.name, matrix, quantization, dtype, bias)

    def _undecodable(self, info: TensorInfo) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.file.path} stores the tensor {info.name} as {info.type_name}, which kvist cannot decode; "
            "use a file in Q4_0, Q4_1, Q4_K_M, Q8_0, F16 or BF16."
        )
