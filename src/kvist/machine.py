"""What this process may use of the machine: CPUs and memory, container limits included (leaf: any room may import it).

Facts only, read from the system each time; `root` is where its files are, so that tests can make up a machine. It knows no options.
"""

from __future__ import annotations

import math
import os
from pathlib import Path


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """The process's cgroup and its parents, nearest first, in version 2 or 1; each may set a limit."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            joined = root / "sys/fs/cgroup" / controllers
            base = joined if joined.is_dir() else joined.parent / controller
        else:
            continue
        here = base / path.lstrip("/")
        folders = [here, *here.parents]
        folders = folders[: folders.index(base) + 1] if base in folders else [base]
        if any(folder.is_dir() for folder in folders):
            return folders
    return []


def available_cpus(root: Path = Path("/")) -> int:
    """CPUs that this process may use: its affinity, and the quota of its container, rounded up to whole CPUs."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroup_folders(root, "cpu"):
        if text := _read(folder / "cpu.max"):
            quota, period = text.split()
        else:
            quota, period = (
                (_read(folder / "cpu.cfs_quota_us") or "max").strip(),
                (_read(folder / "cpu.cfs_period_us") or "1").strip(),
            )
        if quota not in ("max", "-1"):
            cpus = min(cpus, max(1, math.ceil(int(quota) / int(period))))
    return cpus


def usable_cpus(root: Path = Path("/")) -> tuple[int, ...]:
    """The CPUs of this process's affinity, in the order in which threads should take them: one of each core before its siblings."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))

    def sibling(cpu: int) -> int:
        """How many usable CPUs of the same core come before this one."""
        text = _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)
        ranges = [part.split("-") for part in text.strip().split(",")]
        return sum(int(ends[0]) <= other <= int(ends[-1]) for ends in ranges for other in cpus if other < cpu)

    return tuple(sorted(cpus, key=lambda cpu: (sibling(cpu), cpu)))


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: what the machine has available, and what its container's limits leave."""
    meminfo = dict(line.split(":", 1) for line in (_read(root / "proc/meminfo") or "").splitlines() if ":" in line)
    if "MemAvailable" in meminfo:
        free = int(meminfo["MemAvailable"].split()[0]) * 1024
    else:
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    for folder in _cgroup_folders(root, "memory"):
        for limit_name, used_name in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit, used = (_read(folder / limit_name) or "max").strip(), _read(folder / used_name)
            if limit == "max" or used is None:
                continue
            stat = dict(line.split(maxsplit=1) for line in (_read(folder / "memory.stat") or "").splitlines() if " " in line)
            reclaimable = int(stat.get("inactive_file", "0"))
            free = min(free, max(0, int(limit) - int(used) + reclaimable))
    return free
