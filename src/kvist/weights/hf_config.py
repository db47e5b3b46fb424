"""config.json of a Hugging Face folder to a `ModelConfig`, in the forms that transformers 4 and 5 write.

It knows the settings of four families, not weights. Invariants: what changes results and is not computed by kvist is
`UnsupportedModelError` by name; what is damaged or missing is `ModelFormatError`; windows are resolved per layer here.
Source: transformers' configuration classes and `modeling_rope_utils` (behaviour, defaults).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from kvist.config import ModelConfig, RopeConfig
from kvist.errors import ModelFormatError, UnsupportedModelError
from kvist.weights.source import ARCHITECTURES, check_shape

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


class Settings:
    """Typed reading of one JSON object; null counts as missing."""

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def _typed(self, key: str, kinds: tuple[type, ...], what: str) -> Any:
        value = self.values.get(key)
        if value is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            raise ModelFormatError(f"{self.path} gives {key} as {value!r:.40} where {what} belongs; fetch it again.")
        return value

    def whole(self, key: str) -> int | None:
        value: int | None = self._typed(key, (int,), "a whole number")
        return value

    def need(self, key: str) -> int:
        value = self.whole(key)
        if value is None:
            raise ModelFormatError(f"{self.path} lacks {key}; fetch it again.")
        return value

    def real(self, key: str) -> float | None:
        value = self._typed(key, (int, float), "a number")
        if value is not None and not math.isfinite(value):
            raise ModelFormatError(f"{self.path} gives {key} as {value!r} where a finite number belongs; fetch it again.")
        return None if value is None else float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._typed(key, (bool,), "true or false")
        return default if value is None else bool(value)

    def text(self, key: str) -> str | None:
        value: str | None = self._typed(key, (str,), "a text")
        return value

    def table(self, key: str) -> Settings | None:
        value = self._typed(key, (dict,), "an object")
        return None if value is None else Settings(value, self.path)

    def ids(self, key: str) -> tuple[int, ...]:
        value = self._typed(key, (int, list), "a token id or a list of them")
        items = value if isinstance(value, list) else [] if value is None else [value]
        if any(not isinstance(item, int) or isinstance(item, bool) for item in items):
            raise ModelFormatError(f"{self.path} gives {key} as {value!r:.40} where token ids belong; fetch it again.")
        return tuple(items)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} where the file is absent. Raises ModelFormatError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        # JSON can spell half a surrogate pair, which is no text and could be written nowhere.
        json.dumps(value, ensure_ascii=False).encode()
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path} is no sound JSON ({error}); fetch it again.") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path} holds no JSON object; fetch it again.")
    return value


def model_config(folder: Path) -> ModelConfig:
    """The model's shape as config.json tells it; `tie_word_embeddings` is what it says, not yet what the weights bear out."""
    path = folder / "config.json"
    settings = Settings(read_json(path), path)
    arch = _architecture(settings)
    if (activation := settings.text("hidden_act") or "silu") not in ("silu", "swish"):
        raise UnsupportedModelError(f"{path} uses the activation {activation!r}, and kvist computes silu.")
    if settings.table("quantization_config") is not None:
        raise UnsupportedModelError(f"{path} holds weights quantized for other software; use the unquantized model or a GGUF file.")
    hidden, heads, layers = (settings.need(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    if heads <= 0 or not 0 < layers <= 100_000:
        raise ModelFormatError(f"{path} announces {layers} layers of {heads} heads; fetch it again.")
    # Qwen 3's class has a head size of its own by default; the others divide the width.
    head_dim = settings.whole("head_dim") or (128 if arch == "qwen3" else hidden // heads)
    generation = Settings(read_json(folder / "generation_config.json"), folder / "generation_config.json")
    bos = settings.ids("bos_token_id")
    config = ModelConfig(
        architecture=arch,
        vocab_size=settings.need("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=settings.whole("num_key_value_heads") or heads,
        head_dim=head_dim,
        intermediate_size=settings.need("intermediate_size"),
        max_position_embeddings=settings.whole("max_position_embeddings") or 2048,
        rms_norm_eps=_default(settings.real("rms_norm_eps"), 1e-6),
        rope=_rope(settings, head_dim),
        layer_windows=_windows(settings, arch, layers),
        qk_norm=arch == "qwen3",
        tie_word_embeddings=settings.flag("tie_word_embeddings", False),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys((*settings.ids("eos_token_id"), *generation.ids("eos_token_id")))),
        name=folder.resolve().name,
    )
    check_shape(config, path)
    return config


def _default(value: float | None, default: float) -> float:
    return default if value is None else value


def _architecture(settings: Settings) -> str:
    arch = settings.text("model_type")
    classes = settings.values.get("architectures") or []
    named = next((name for name in classes if isinstance(name, str)), None) if isinstance(classes, list) else None
    if arch not in ARCHITECTURES or (named is not None and named != _CLASSES[arch]):
        raise UnsupportedModelError(
            f"{settings.path} is of the architecture {named or arch!r}; kvist runs {', '.join(_CLASSES.values())}."
        )
    return arch


def _windows(settings: Settings, arch: str, layers: int) -> tuple[int | None, ...]:
    """Each layer's window; () where all attend to everything."""
    if arch == "llama":
        return ()
    window = settings.whole("sliding_window")
    if arch == "mistral":
        # The one family whose class has a window by default; null means none.
        window = window if "sliding_window" in settings.values else 4096
        return (window,) * layers if window else ()
    if not window or not settings.flag("use_sliding_window", False):
        return ()
    kinds = settings.values.get("layer_types")
    if kinds is None:
        full = settings.whole("max_window_layers")
        full = 28 if full is None else full
        kinds = ["full_attention"] * min(full, layers) + ["sliding_attention"] * max(layers - full, 0)
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise ModelFormatError(f"{settings.path} gives layer_types that are not one known kind for each layer; fetch it again.")
    windows = tuple(known[kind] for kind in kinds)
    return windows if any(windows) else ()


def _rope(settings: Settings, head_dim: int) -> RopeConfig:
    """`rope_parameters` (transformers 5), else `rope_theta` and `rope_scaling` (4, with `rope_type` or `type`)."""
    table = settings.table("rope_parameters") or settings.table("rope_scaling") or Settings({}, settings.path)
    if any(isinstance(value, dict) for value in table.values.values()):
        raise UnsupportedModelError(f"{settings.path} rotates layers of different kinds differently, which kvist does not support.")
    theta = _default(table.real("rope_theta"), _default(settings.real("rope_theta"), 10000.0))
    share = _default(table.real("partial_rotary_factor"), _default(settings.real("partial_rotary_factor"), 1.0))
    rotary = None if share == 1.0 else int(head_dim * share)
    kind = table.text("rope_type") or table.text("type") or "default"
    if kind == "default":
        return RopeConfig(theta, rotary)
    if kind not in ("linear", "llama3", "yarn"):
        raise UnsupportedModelError(f"{settings.path} scales its positions by {kind!r}; kvist knows linear, llama3 and yarn.")
    original = table.whole("original_max_position_embeddings") or settings.whole("original_max_position_embeddings")
    if original is None and kind != "linear":
        original = settings.whole("max_position_embeddings")
    factor = table.real("factor")
    if factor is None:
        if kind != "yarn" or not original:
            raise ModelFormatError(f"{settings.path} scales its positions by {kind} without a factor; fetch it again.")
        factor = settings.need("max_position_embeddings") / original
    values: dict[str, Any] = {"scaling": kind, "factor": factor, "original_max_position": original}
    if kind == "llama3":
        values["low_freq_factor"] = _default(table.real("low_freq_factor"), 1.0)
        values["high_freq_factor"] = _default(table.real("high_freq_factor"), 4.0)
    if kind == "yarn":
        if not table.flag("truncate", True):
            raise UnsupportedModelError(f"{settings.path} uses yarn with truncate=false, which kvist does not support.")
        values["attention_factor"] = _yarn_attention(table, factor)
        values["beta_fast"] = _default(table.real("beta_fast"), 32.0)
        values["beta_slow"] = _default(table.real("beta_slow"), 1.0)
    return RopeConfig(theta, rotary, **values)


def _yarn_attention(table: Settings, factor: float) -> float | None:
    """The factor on cos and sin where the file sets it (directly or by DeepSeek's two scales); None: YaRN's own rule."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    direct, mscale, all_dim = (table.real(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if direct is not None:
        return direct
    return scale(mscale) / scale(all_dim) if mscale and all_dim else None
