"""kvist: an exact LLM inference and serving engine built around the KV cache.

The public names are fetched on first use, so that `import kvist` (and `kvist --help`) loads no arrays, kernels or tokenizers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvist.config import EngineConfig, EngineOptions
    from kvist.engine.async_engine import AsyncEngine
    from kvist.engine.engine import Engine
    from kvist.engine.llm import LLM
    from kvist.errors import (
        ConfigError,
        ContextLengthError,
        DownloadError,
        EngineError,
        EngineStoppedError,
        InvalidRequestError,
        KvistError,
        ModelError,
        ModelFormatError,
        ModelNotFoundError,
        UnsupportedModelError,
        UsageError,
    )
    from kvist.request import (
        CompletionOutput,
        OutputDelta,
        RequestOutput,
        RequestUsage,
        SamplingParams,
        StructuredOutputsParams,
        TokenLogprob,
    )

__version__ = "0.1.0"

_HOMES = {
    "kvist.config": ("EngineConfig", "EngineOptions"),
    "kvist.engine.async_engine": ("AsyncEngine",),
    "kvist.engine.engine": ("Engine",),
    "kvist.engine.llm": ("LLM",),
    "kvist.errors": (
        "ConfigError",
        "ContextLengthError",
        "DownloadError",
        "EngineError",
        "EngineStoppedError",
        "InvalidRequestError",
        "KvistError",
        "ModelError",
        "ModelFormatError",
        "ModelNotFoundError",
        "UnsupportedModelError",
        "UsageError",
    ),
    "kvist.request": (
        "CompletionOutput",
        "OutputDelta",
        "RequestOutput",
        "RequestUsage",
        "SamplingParams",
        "StructuredOutputsParams",
        "TokenLogprob",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "ConfigError",
    "ContextLengthError",
    "DownloadError",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineOptions",
    "EngineStoppedError",
    "InvalidRequestError",
    "KvistError",
    "ModelError",
    "ModelFormatError",
    "ModelNotFoundError",
    "OutputDelta",
    "RequestOutput",
    "RequestUsage",
    "SamplingParams",
    "StructuredOutputsParams",
    "TokenLogprob",
    "UnsupportedModelError",
    "UsageError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'kvist' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
