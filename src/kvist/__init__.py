"""kvist: an exact LLM inference and serving engine built around the KV cache."""

from __future__ import annotations

__version__ = "0.1.0"
