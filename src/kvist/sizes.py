"""Sizes in bytes as users write and read them (leaf: any room may import it).

This module knows no machine: what a share is a share of is an argument.
"""

from __future__ import annotations

import re

from kvist.errors import ConfigError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def parse_memory(value: str | int | float, *, free: int) -> int:
    """Bytes meant by `kv_cache_memory`: 2147483648, "2GiB", "2GB", or a share of `free`: "40%", "0.4". Raises ConfigError."""
    text = str(value).strip().lower().replace("_", "")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%|[kmgt]?i?b?)", text)
    if match and not isinstance(value, bool):
        number, unit = match.groups()
        share = float(number) / 100 if unit == "%" else float(number) if unit == "" and "." in number else None
        if share is not None and 0 < share <= 1:
            return int(free * share)
        if share is None and unit in _UNITS and float(number) > 0:
            return int(float(number) * _UNITS[unit])
    raise ConfigError(
        f'kv_cache_memory takes bytes ("2GiB", 2147483648) or a share of the free memory ("40%", "0.4"), not {value!r}.'
    )


def format_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")
