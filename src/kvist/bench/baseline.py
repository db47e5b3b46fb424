"""This run against one that was kept: ratios of medians, for a check that warns and never fails.

A baseline is a file with one report of `kvist bench throughput --json`, or a list of them, one a kind of machine. Only like is
compared with like: the same processor by its name, cores, kernels and model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvist.errors import UsageError

TOLERANCE = 0.8
"""A work below this share of its baseline is called slower: shared machines differ by some 20 % from hour to hour."""


@dataclass(frozen=True)
class AgainstBaseline:
    """Ratios by work, above 1 where this run is faster; empty, with the reason, where nothing can be compared."""

    ratios: Mapping[str, float]
    reason: str | None = None
    beside: str | None = None
    """What the baseline was measured on."""

    @property
    def slower(self) -> tuple[str, ...]:
        return tuple(name for name, ratio in self.ratios.items() if ratio < TOLERANCE)

    def as_dict(self) -> dict[str, Any]:
        return {"ratios": dict(self.ratios), "slower": list(self.slower), "reason": self.reason, "beside": self.beside}


def read_baseline(path: Path, text: str) -> list[dict[str, Any]]:
    """The reports in a baseline file. Raises UsageError."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}.") from error
    reports = value if isinstance(value, list) else [value]
    if not all(isinstance(report, dict) and report.get("command") == "throughput" for report in reports):
        raise UsageError(f"{path} is no report of `kvist bench throughput --json`, nor a list of them.")
    try:
        for report in reports:
            described(report)
            _kind(report)
            _medians(report)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(
            f"{path} has a report that this kvist cannot read ({type(error).__name__}: {error}); make a new one."
        ) from error
    return reports


def _medians(report: Mapping[str, Any]) -> dict[str, float]:
    medians = {row["name"]: float(row["median"]) for row in report["measurements"]}
    if not all(value > 0 for value in medians.values()):
        raise ValueError("a median is not above 0")
    return medians


def _kind(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """What must be alike for two figures to be compared."""
    cpu, engine = report["machine"]["cpu"], report["engine"]
    names = ("model", "isa", "num_threads", "quantization", "kv_cache_dtype", "use_cache")
    return (cpu["name"], tuple(cpu["flags"]), cpu["usable_cores"], *(engine.get(name) for name in names))


def described(report: Mapping[str, Any]) -> str:
    """What a report was measured on, in words."""
    cpu, engine = report["machine"]["cpu"], report["engine"]
    weights = f", {engine['quantization']}" if engine["quantization"] else ""
    threads = f"{engine['num_threads']} threads on {cpu['usable_cores']} cores"
    return f"{engine['model']}{weights} on {cpu['name']} ({engine['isa']}, {threads}, KV {engine['kv_cache_dtype']})"


def against_baseline(report: Mapping[str, Any], baselines: list[dict[str, Any]]) -> AgainstBaseline:
    """Compare with the report of the same kind."""
    alike = [one for one in baselines if _kind(one) == _kind(report)]
    if not alike:
        kept = "; ".join(sorted({described(one) for one in baselines})) or "nothing"
        return AgainstBaseline({}, f"this is {described(report)}, and the baseline has {kept}")
    then = _medians(alike[-1])
    ratios = {row["name"]: row["median"] / then[row["name"]] for row in report["measurements"] if row["name"] in then}
    return AgainstBaseline(ratios, None if ratios else "the baseline has none of these works", described(alike[-1]))
