"""`kvist doctor`: what this machine offers, which kernels run on it, what is here already, and what to do about what is missing.

It gathers facts and says what follows from them; it changes nothing. Exit status 1 when no native kernels can run, since everything
else still works then, only many times slower. Which builds can run is the kernels' answer.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import Annotated, Any

import typer

from kvist import __version__
from kvist.bench.machine import machine_facts, read_bandwidth
from kvist.cli.options import JsonFlag
from kvist.cli.terminal import print_json
from kvist.config import DEFAULT_MODEL, cache_dir, format_bytes
from kvist.kernels import cpu
from kvist.machine import available_cpus

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


def examine(measure: bool) -> dict[str, Any]:
    """The whole report; `measure` reads memory for about a second to tell its bandwidth."""
    machine = machine_facts()
    threads = available_cpus()
    report: dict[str, Any] = {
        "version": __version__,
        "machine": machine,
        "kernels": kernel_facts(machine["cpu"]["flags"]),
        "read_bandwidth": {"bytes_per_second": read_bandwidth(threads), "num_threads": threads} if measure else None,
        "compiler": compiler_facts(),
        "models": {"cache_dir": str(cache_dir()), "pulled": pulled_models()},
    }
    return report | {"advice": advice(report), "ok": report["kernels"]["native"]}


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
    if report["read_bandwidth"]:
        bandwidth = report["read_bandwidth"]
        rows.append(("read speed", f"{bandwidth['bytes_per_second'] / 1e9:.1f} GB/s with {bandwidth['num_threads']} threads"))
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


def doctor(
    as_json: JsonFlag = False,
    measure: Annotated[bool, typer.Option("--measure/--no-measure", help="Measure how fast memory is read (a second).")] = True,
) -> None:
    """Tell what this machine offers and what is missing.

    Exit status 1 when no native kernels can run here, 0 otherwise.
    """
    report = examine(measure)
    if as_json:
        print_json(report)
    else:
        print_report(report)
    if not report["ok"]:
        raise typer.Exit(1)
