"""GGUF metadata to a `ModelConfig` and a vocabulary, with the defaults that readers of such files are used to.

It knows the keys of the llama family of architectures, and of tensors only their names and shapes (and the values of
`rope_freqs.weight`). Invariants: a missing optional key has its usual default, a key of the wrong type is `ModelFormatError`, a
feature that changes results and that kvist does not compute is `UnsupportedModelError`; nothing of the kind is ignored silently.
Source of keys and defaults: the GGUF specification and llama.cpp's loader.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvist.config import ModelConfig, RopeConfig
from kvist.errors import ModelFormatError, UnsupportedModelError
from kvist.weights.gguf_file import GGUFFile
from kvist.weights.gguf_quants import decode_vector
from kvist.weights.source import ARCHITECTURES, GGUFVocab, check_shape, missing_tensor

INTERLEAVED = ("llama", "mistral")
"""Architectures whose files hold rotation pairs as neighbouring rows."""
DEFAULT_CONTEXT = 2048


class Metadata:
    """Typed reading of one file's metadata; `{arch}.` in a key stands for the architecture."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.arch = self.text("general.architecture") or ""

    def get(self, key: str, kinds: type | tuple[type, ...], what: str) -> Any:
        key = key.replace("{arch}", getattr(self, "arch", ""))
        value = self.file.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise self.wrong(key, value, what)
        return value

    def wrong(self, key: str, value: Any, what: str) -> ModelFormatError:
        shown = repr(value)[:40]
        return ModelFormatError(f"{self.file.path} gives {key} as {shown} where {what} belongs; fetch it again or convert it anew.")

    def text(self, key: str) -> str | None:
        value: str | None = self.get(key, str, "a text")
        return value

    def flag(self, key: str) -> bool | None:
        value: bool | None = self.get(key, bool, "true or false")
        return value

    def real(self, key: str) -> float | None:
        value = self.get(key, (int, float), "a number")
        if value is not None and not math.isfinite(value):
            raise self.wrong(key, value, "a finite number")
        return None if value is None else float(value)

    def whole(self, key: str) -> int | None:
        """A whole number; a list of equal ones (one a layer, as some converters write) counts as that number."""
        value = self.get(key, (int, list), "a whole number")
        if isinstance(value, list):
            if not value or any(not isinstance(item, int) or isinstance(item, bool) for item in value):
                raise self.wrong(key, value, "a whole number")
            if len(set(value)) > 1:
                raise UnsupportedModelError(f"{self.file.path} gives each layer its own {key}, which kvist does not support.")
            return int(value[0])
        return None if value is None else int(value)

    def need(self, key: str) -> int:
        value = self.whole(key)
        if value is None:
            full = key.replace("{arch}", self.arch)
            raise ModelFormatError(f"{self.file.path} lacks {full} in its metadata; fetch it again or convert it anew.")
        return value

    def items(self, key: str, kind: type | tuple[type, ...], what: str) -> list[Any] | None:
        values: list[Any] | None = self.get(key, list, f"a list of {what}")
        if values is not None and any(not isinstance(value, kind) for value in values):
            raise self.wrong(key, values, f"a list of {what}")
        return values


def model_config(file: GGUFFile) -> tuple[ModelConfig, tuple[str, ...]]:
    """The model's shape, and notes on what was assumed. Raises ModelFormatError or UnsupportedModelError."""
    meta = Metadata(file)
    if meta.arch not in ARCHITECTURES:
        named = f"is of the architecture {meta.arch!r}" if meta.arch else "names no architecture"
        raise UnsupportedModelError(f"{file.path} {named}; kvist runs {', '.join(ARCHITECTURES)}.")
    _refuse_unsupported(meta)
    embed = file.tensors.get("token_embd.weight")
    if embed is None or len(embed.shape) != 2:
        raise missing_tensor("token_embd.weight", file.path)
    notes: list[str] = []
    layers, hidden, heads = (meta.need("{arch}." + key) for key in ("block_count", "embedding_length", "attention.head_count"))
    if not 0 < layers <= len(file.tensors) or heads <= 0 or hidden <= 0:
        raise ModelFormatError(
            f"{file.path} announces {layers} layers, {heads} heads and a width of {hidden}, which its {len(file.tensors)} tensors "
            "do not bear out; fetch it again or convert it anew."
        )
    head_dim = meta.whole("{arch}.attention.key_length") or hidden // heads
    if (meta.whole("{arch}.attention.value_length") or head_dim) != head_dim:
        raise UnsupportedModelError(f"{file.path} has keys and values of different lengths, which kvist does not support.")
    context = meta.whole("{arch}.context_length")
    if context is None:
        context = DEFAULT_CONTEXT
        notes.append(f"{file.path.name} does not say how long a context it is made for; {DEFAULT_CONTEXT} tokens are assumed.")
    window = meta.whole("{arch}.attention.sliding_window")
    config = ModelConfig(
        architecture=meta.arch,
        vocab_size=embed.shape[0],
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=meta.whole("{arch}.attention.head_count_kv") or heads,
        head_dim=head_dim,
        intermediate_size=meta.need("{arch}.feed_forward_length"),
        max_position_embeddings=context,
        rms_norm_eps=_default(meta.real("{arch}.attention.layer_norm_rms_epsilon"), 1e-5),
        rope=_rope(meta, head_dim),
        layer_windows=(window,) * layers if window else (),
        qk_norm=meta.arch == "qwen3" or "blk.0.attn_q_norm.weight" in file.tensors,
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=meta.whole("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_ends(meta),
        name=meta.text("general.name") or file.path.stem,
    )
    check_shape(config, file.path)
    return config, tuple(notes)


def _default(value: float | None, default: float) -> float:
    return default if value is None else value


def _ends(meta: Metadata) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = [meta.whole(f"tokenizer.ggml.{key}") for key in keys]
    return tuple(dict.fromkeys(end for end in ends if end is not None))


def _refuse_unsupported(meta: Metadata) -> None:
    if meta.whole("{arch}.expert_count"):
        raise UnsupportedModelError(f"{meta.file.path} is a mixture of experts, which kvist does not run; use a dense model.")
    parts = meta.whole("split.count")
    if parts is not None and parts > 1:
        raise UnsupportedModelError(
            f"{meta.file.path} is one of {parts} parts of a split file; join them first with llama-gguf-split --merge."
        )


def _rope(meta: Metadata, head_dim: int) -> RopeConfig:
    theta = _default(meta.real("{arch}.rope.freq_base"), 10000.0)
    rotary = meta.whole("{arch}.rope.dimension_count") or head_dim
    factors = _freq_factors(meta.file, rotary)
    plain = RopeConfig(theta, None if rotary == head_dim else rotary, freq_factors=factors)
    factor = meta.real("{arch}.rope.scaling.factor") or meta.real("{arch}.rope.scale_linear") or 1.0
    # A factor without a type means linear, as in llama.cpp.
    kind = meta.text("{arch}.rope.scaling.type") or "linear"
    if kind not in ("none", "linear", "llama3", "yarn"):
        raise UnsupportedModelError(f"{meta.file.path} scales its positions by {kind!r}; kvist knows linear, llama3 and yarn.")
    if kind == "none" or factor == 1.0:
        return plain
    original = meta.whole("{arch}.rope.scaling.original_context_length")
    values: dict[str, Any] = {"scaling": kind, "factor": factor, "original_max_position": original}
    if kind == "llama3":
        values["low_freq_factor"] = _default(meta.real("{arch}.rope.scaling.low_freq_factor"), 1.0)
        values["high_freq_factor"] = _default(meta.real("{arch}.rope.scaling.high_freq_factor"), 4.0)
    if kind == "yarn":
        attention = meta.real("{arch}.rope.scaling.attn_factor")
        if attention is not None:
            values["attention_factor"] = attention * (1.0 + 0.1 * math.log(factor))
        values["beta_fast"] = _default(meta.real("{arch}.rope.scaling.yarn_beta_fast"), 32.0)
        values["beta_slow"] = _default(meta.real("{arch}.rope.scaling.yarn_beta_slow"), 1.0)
    if kind in ("llama3", "yarn") and original is None:
        raise ModelFormatError(f"{meta.file.path} scales positions by {kind} without original_context_length; convert it anew.")
    return RopeConfig(theta, plain.rotary_dim, freq_factors=factors, **values)


def _freq_factors(file: GGUFFile, rotary: int) -> tuple[float, ...] | None:
    """`rope_freqs.weight`: what each rotated pair's frequency is divided by (Llama 3.1's scaling arrives this way)."""
    info = file.tensors.get("rope_freqs.weight")
    if info is None:
        return None
    factors = decode_vector(info.type_name, file.rows(info)) if info.type_name in ("F32", "F16", "BF16") else np.zeros(0)
    if factors.shape != (rotary // 2,) or not np.isfinite(factors).all() or (factors <= 0).any():
        raise ModelFormatError(
            f"{file.path} holds a rope_freqs.weight that is not {rotary // 2} positive numbers, one for each rotated pair; "
            "fetch it again or convert it anew."
        )
    return tuple(float(factor) for factor in factors)


def vocabulary(file: GGUFFile) -> GGUFVocab:
    """The vocabulary, as stored. Raises ModelFormatError where there is none or its lists disagree."""
    meta = Metadata(file)
    key = "tokenizer.ggml."
    tokens = meta.items(key + "tokens", str, "texts")
    model = meta.text(key + "model")
    if not tokens or model is None:
        raise ModelFormatError(f"{file.path} has no vocabulary in it; fetch a whole model file.")
    scores = meta.items(key + "scores", (int, float), "numbers")
    types = meta.items(key + "token_type", int, "whole numbers")
    for name, values in (("scores", scores), ("token_type", types)):
        if values is not None and len(values) != len(tokens):
            raise ModelFormatError(f"{file.path} has {len(tokens)} tokens but {len(values)} {name}; fetch it again.")
    return GGUFVocab(
        model=model,
        pre=meta.text(key + "pre"),
        tokens=tokens,
        scores=scores,
        types=types,
        merges=meta.items(key + "merges", str, "texts"),
        add_bos=meta.flag(key + "add_bos_token"),
        add_eos=meta.flag(key + "add_eos_token"),
        add_space_prefix=meta.flag(key + "add_space_prefix"),
        bos_token_id=meta.whole(key + "bos_token_id"),
        eos_token_id=meta.whole(key + "eos_token_id"),
        eot_token_id=meta.whole(key + "eot_token_id"),
        eom_token_id=meta.whole(key + "eom_token_id"),
        unk_token_id=meta.whole(key + "unknown_token_id"),
        pad_token_id=meta.whole(key + "padding_token_id"),
    )
