"""What this machine is: processor, cores, memory, container limits, and the memory bandwidth that reading reaches.

Facts only, as plain dictionaries that print as JSON; what follows from them is the reader's. It knows no kernels and no models.
Every fact that the system does not tell is None.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from kvist.machine import available_cpus, available_memory

ISA_FLAGS = (
    "sse4_2",
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512dq",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "amx_int8",
    "asimd",
    "asimddp",
    "sve",
    "bf16",
)
"""The instruction sets worth naming, x86 and Arm, by the kernel's names."""


def read_file(path: str) -> str:
    """A system file's text, empty where the system has none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def cpu_facts() -> dict[str, Any]:
    """Model name, the instruction-set flags among ISA_FLAGS, cores that the machine has and that this process may use."""
    info = read_file("/proc/cpuinfo")
    name = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info, re.MULTILINE)
    present = set(flags.group(1).split()) if flags else set()
    return {
        "name": name.group(1).strip() if name else platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "flags": [flag for flag in ISA_FLAGS if flag in present],
        "cores": os.cpu_count(),
        "usable_cores": available_cpus(),
    }


def memory_facts() -> dict[str, Any]:
    """Bytes: in the machine, available now to this process (its container's limits included)."""
    total = re.search(r"^MemTotal:\s*(\d+) kB", read_file("/proc/meminfo"), re.MULTILINE)
    return {"total_bytes": int(total.group(1)) * 1024 if total else None, "available_bytes": available_memory()}


def has_bytecode() -> bool:
    """Whether kvist's modules are here compiled, as an installation leaves them. Else each process compiles what it imports."""
    spec = importlib.util.find_spec("kvist.engine.engine")
    return spec is not None and spec.cached is not None and Path(spec.cached).exists()


NO_BYTECODE = (
    "kvist's modules are not compiled here, as they are where it is installed, so each start takes longer by compiling them: unset "
    "PYTHONDONTWRITEBYTECODE, or run python -m compileall on its folder."
)


def machine_facts() -> dict[str, Any]:
    """What a figure needs beside it to be compared with another one."""
    return {
        "cpu": cpu_facts(),
        "memory": memory_facts(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def resident_bytes() -> int | None:
    """Memory of this process that is in RAM now."""
    match = re.search(r"^VmRSS:\s*(\d+) kB", read_file("/proc/self/status"), re.MULTILINE)
    return int(match.group(1)) * 1024 if match else None


def peak_resident_bytes() -> int:
    """The most memory that this process ever had in RAM."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # The kernel counts the peak lazily, so that it may lag behind what is resident now.
    return max(peak if platform.system() == "Darwin" else peak * 1024, resident_bytes() or 0)


def read_bandwidth(num_threads: int, *, megabytes: int = 256, rounds: int = 3) -> float:
    """Bytes a second that `num_threads` threads read from memory: each sums its share of an array larger than the caches. The best
    of the rounds counts, since anything else on the machine only takes away."""
    data = np.ones(megabytes * (1 << 20) // 4, dtype=np.float32)
    shares = np.array_split(data, num_threads)
    best = 0.0
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(rounds):
            start = time.perf_counter()
            list(pool.map(lambda share: float(share @ share), shares))
            best = max(best, data.nbytes / (time.perf_counter() - start))
    return best
