"""`kvist doctor --step`: where one request's decode step goes, Python and native calls, beside what the machine can do.

Loads the model, decodes on the clock, measures the machine's peaks with the same threads, and prints; what is timed and counted is
the engine's and the kernels' (`step_profile`, `cost`).
"""

from __future__ import annotations

from typing import Any

from kvist.config import EngineOptions
from kvist.engine.engine import Engine
from kvist.engine.step_profile import CallTime, StepProfile, profile_step
from kvist.kernels import cpu

PART_NOTES = {
    "schedule": "decide the step",
    "batch": "lay it out in arrays",
    "program": "start the program",
    "sample": "draw the token",
    "update": "advance the counters",
    "output": "text, stops, delta",
}


def examine_step(options: EngineOptions, context: int, steps: int = 64) -> dict[str, Any]:
    """Raises ConfigError, ModelError, DownloadError."""
    engine = Engine.from_options(options)
    config = engine.config
    profile = profile_step(engine, context=context, steps=steps)
    engine.close()
    peaks = None if config.isa == "numpy" else cpu.make_ops(config.isa, config.num_threads).peaks()
    return {
        "model": config.served_model_name,
        "isa": config.isa,
        "num_threads": config.num_threads,
        "context": profile.context,
        "steps": profile.steps,
        "step_us": profile.step_microseconds,
        "python_us": profile.python_microseconds,
        "native_us": profile.native_microseconds,
        "python": [{"name": name, "us": microseconds} for name, microseconds in profile.python.items()],
        "native": [_call(call, peaks) for call in profile.native],
        "all_native": _call(_sum(profile), peaks),
        "peaks": None if peaks is None else peaks._asdict(),
    }


def _sum(profile: StepProfile) -> CallTime:
    calls = profile.native
    return CallTime(
        "all",
        (),
        sum(call.calls for call in calls),
        profile.native_microseconds,
        sum(call.num_bytes for call in calls),
        sum(call.operations for call in calls),
    )


def _call(call: CallTime, peaks: cpu.Peaks | None) -> dict[str, Any]:
    """Bytes and operations a second, and the share of the peak that bounds the call more closely."""
    seconds = max(call.microseconds, 1e-3) / 1e6
    return {
        "name": call.name,
        "formats": list(call.formats),
        "calls": call.calls,
        "us": call.microseconds,
        "bytes": call.num_bytes,
        "operations": call.operations,
        "bytes_per_second": call.num_bytes / seconds,
        "operations_per_second": call.operations / seconds,
        "share_of_bandwidth": None if peaks is None else call.num_bytes / seconds / peaks.read_bytes,
        "share_of_operations": None if peaks is None else _share_of_operations(call, seconds, peaks),
    }


def _share_of_operations(call: CallTime, seconds: float, peaks: cpu.Peaks) -> float | None:
    """Against the integer products for quantized weights, else the f32 ones; None where formats mix or nothing is multiplied."""
    if not call.operations or len(call.formats) != 1:
        return None
    peak = {"w8a8": peaks.w8a8, "w4a8": peaks.w4a8}.get(call.formats[0], peaks.f32)
    return call.operations / seconds / peak


def print_step(report: dict[str, Any]) -> None:
    step = report["step_us"]
    print(
        f"One request's decode step behind {report['context']} tokens of {report['model']}: isa {report['isa']}, "
        f"{report['num_threads']} threads, medians of the {report['steps']} steps around it\n"
    )
    print(f"{'Python':<32} {'us':>9} {'share':>6}")
    for part in report["python"]:
        print(f"  {part['name']:<9}{PART_NOTES[part['name']]:<21} {part['us']:9.1f} {part['us'] / step:6.1%}")
    print(f"  {'all':<30} {report['python_us']:9.1f} {report['python_us'] / step:6.1%}")
    heads = f"{'us':>9} {'share':>6} {'calls':>5} {'MB':>7} {'GB/s':>6} {'peak':>5} {'MOP':>7} {'GOP/s':>6} {'peak':>5}"
    print(f"\n{'Native calls':<32} {heads}")
    for call in [*report["native"], report["all_native"]]:
        name = " ".join([call["name"], *call["formats"]])
        print(
            f"  {name:<30} {call['us']:9.1f} {call['us'] / step:6.1%} {call['calls']:5} {call['bytes'] / 1e6:7.2f} "
            f"{call['bytes_per_second'] / 1e9:6.1f} {_percent(call['share_of_bandwidth'])} {call['operations'] / 1e6:7.1f} "
            f"{call['operations_per_second'] / 1e9:6.1f} {_percent(call['share_of_operations'])}"
        )
    print(f"\n{'Step':<32} {step:9.1f}")
    if peaks := report["peaks"]:
        print(f"Peaks: {describe_peaks(peaks)}.")


def describe_peaks(peaks: dict[str, float]) -> str:
    read, f32, w8a8, w4a8 = (peaks[name] / 1e9 for name in ("read_bytes", "f32", "w8a8", "w4a8"))
    return f"{read:.1f} GB/s read, {f32:.0f} GOP/s f32, {w8a8:.0f} int8 (w8a8), {w4a8:.0f} 4-bit by int8 (w4a8)"


def _percent(share: float | None) -> str:
    return f"{'':5}" if share is None else f"{share:5.0%}"
