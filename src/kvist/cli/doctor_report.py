"""The plain report of `kvist doctor`: facts of the machine, the kernels, the compiler and the models, and advice.

Apart from the command, so that its help loads neither kernels nor arrays. It asks the kernels themselves which of them can run.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

from kvist import __version__
from kvist.bench.machine import machine_facts, read_bandwidth
from kvist.config import DEFAULT_MODEL, EngineOptions, cache_dir
from kvist.kernels import cpu
from kvist.machine import available_cpus
from kvist.sizes import format_bytes

LOW_MEMORY = 1 << 30


def kernel_facts(flags: list[str]) -> dict[str, Any]:
    """Builds, fastest first: those that suit this processor, were built, can run; and the one that `--isa auto` takes."""
    # The system writes avx512_vnni where the builds, as the compiler does, ask for avx512vnni.
    present = {flag.replace("_", "") for flag in flags}
    usable = cpu.available()
    return {
        "suited": [isa for isa, needed in cpu.REQUIRED_FLAGS.items() if set(needed) <= present],
        "built": list(cpu.built()),
        "usable": list(usable),
        "in_use": usable[0] if usable else "numpy",
        "native": bool(usable),
    }


def compiler_facts() -> dict[str, Any] | None:
    """The C++ compiler that a build would find, and what it calls itself; None without one."""
    path = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if path is None:
        return None
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return {"path": path, "version": answer.stdout.splitlines()[0] if answer.stdout else ""}


def pulled_models() -> list[dict[str, Any]]:
    """Models of the registry that are in the cache folder: name and size in bytes."""
    from kvist.weights.hub import list_models

    return [{"name": model.name, "path": str(model.path)} for model in list_models() if model.path is not None]


def advice(report: dict[str, Any]) -> list[str]:
    """What to do about what is missing, the most urgent first."""
    kernels, compiler = report["kernels"], report["compiler"]
    lines = []
    if not kernels["built"]:
        first = "" if compiler else "install a C++20 compiler (Debian and Ubuntu: apt-get install g++), then "
        lines.append(
            f"No native kernels are built: {first}reinstall kvist with `python -m pip install -v .` and read what CMake says."
        )
    elif not kernels["usable"]:
        lines.append(
            "Native kernels are built, but this processor can run none of them: reinstall kvist from source on this machine."
        )
    else:
        better = [isa for isa in kernels["suited"][:1] if isa not in kernels["usable"]]
        if better:
            lines.append(
                f"This processor suits the {better[0]} kernels, which this installation lacks: "
                "reinstall kvist from source with a newer C++ compiler."
            )
    memory = report["machine"]["memory"]["available_bytes"]
    if memory < LOW_MEMORY:
        lines.append(f"Only {format_bytes(memory)} of memory are free: end other programs or size the pool with --kv-cache-memory.")
    if not report["models"]["pulled"]:
        lines.append(f"No models are pulled yet: `kvist pull {DEFAULT_MODEL}` fetches the default one, and so does its first use.")
    return lines


def measured(options: EngineOptions) -> dict[str, Any]:
    """Peaks of the machine with the kernels that run: bytes a second read, operations a second by format; a second or so."""
    threads = options.num_threads or available_cpus()
    isa = next(iter(cpu.available()), "numpy") if options.isa == "auto" else options.isa
    if isa == "numpy":
        return {"isa": isa, "num_threads": threads, "read_bytes": read_bandwidth(threads)}
    return {"isa": isa, "num_threads": threads} | cpu.make_ops(isa, threads).peaks()._asdict()


def examine(measure: bool, options: EngineOptions) -> dict[str, Any]:
    """The whole report; `measure` works for a second or two to tell what the machine reaches."""
    machine = machine_facts()
    kernels = kernel_facts(machine["cpu"]["flags"])
    report: dict[str, Any] = {
        "version": __version__,
        "machine": machine,
        "kernels": kernels,
        "peaks": measured(options) if measure else None,
        "compiler": compiler_facts(),
        "models": {"cache_dir": str(cache_dir()), "pulled": pulled_models()},
    }
    return report | {"advice": advice(report), "ok": kernels["native"]}


def print_report(report: dict[str, Any]) -> None:
    """The report for people, one fact a line."""
    machine, kernels, compiler = report["machine"], report["kernels"], report["compiler"]
    processor, memory = machine["cpu"], machine["memory"]
    rows = [
        ("kvist", f"{report['version']}, Python {machine['python']}, {machine['system']}"),
        ("processor", f"{processor['name']} ({processor['architecture']})"),
        ("instructions", " ".join(processor["flags"]) or "unknown"),
        ("cores", f"{processor['usable_cores']} of {processor['cores']} usable"),
        ("memory", f"{format_bytes(memory['available_bytes'])} free of {format_bytes(memory['total_bytes'] or 0)}"),
    ]
    if peaks := report["peaks"]:
        rows.append(("read speed", f"{peaks['read_bytes'] / 1e9:.1f} GB/s with {peaks['num_threads']} threads"))
        if "f32" in peaks:
            figures = ", ".join(f"{peaks[name] / 1e9:.0f} {name}" for name in ("f32", "w8a8", "w4a8"))
            rows.append(("products", f"{figures} GOP/s at most, from the first cache, with the {peaks['isa']} kernels"))
    pulled = [model["name"] for model in report["models"]["pulled"]]
    rows += [
        ("kernels", f"{kernels['in_use']} in use; built: {', '.join(kernels['built']) or 'none'}"),
        ("compiler", compiler["version"] or compiler["path"] if compiler else "none found"),
        ("models", f"{', '.join(pulled) or 'none pulled'} ({report['models']['cache_dir']})"),
    ]
    for name, value in rows:
        print(f"{name:<13} {value}")
    for line in report["advice"]:
        print(f"\n-> {line}")
