"""Threads: how many by default, in containers and with an affinity; which CPUs they are bound to; that idle ones take no time; who
waits for whom."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from helpers.machines import NATIVE, needs_native
from helpers.tiny_engine import tiny_engine
from kvist.config import EngineOptions, check_options
from kvist.engine.async_engine import FORM_THREADS, AsyncEngine
from kvist.engine.kernels import select_ops
from kvist.errors import ConfigError
from kvist.machine import available_cpus, usable_cpus
from kvist.request import SamplingParams

CGROUP = "sys/fs/cgroup"
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("quota", "cpus"), [("max 100000", 8), ("100000 100000", 1), ("150000 100000", 2), ("5000 100000", 1), ("9999999 100000", 8)]
)
def test_a_quota_of_version_2_is_rounded_up(tmp_path: Path, eight_cpus: None, quota: str, cpus: int) -> None:
    files = {"proc/self/cgroup": "0::/app\n", f"{CGROUP}/app/cpu.max": f"{quota}\n"}
    assert available_cpus(tree(tmp_path, files)) == cpus


def test_the_tightest_parent_counts(tmp_path: Path, eight_cpus: None) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/app\n",
        f"{CGROUP}/pod/app/cpu.max": "600000 100000\n",
        f"{CGROUP}/pod/cpu.max": "200000 100000\n",
    }
    assert available_cpus(tree(tmp_path, files)) == 2


def test_a_container_that_sees_its_own_cgroup_as_the_root(tmp_path: Path, eight_cpus: None) -> None:
    assert available_cpus(tree(tmp_path, {"proc/self/cgroup": "0::/\n", f"{CGROUP}/cpu.max": "300000 100000\n"})) == 3
    files = {"proc/self/cgroup": "0::/../elsewhere\n", f"{CGROUP}/cpu.max": "200000 100000\n"}
    assert available_cpus(tree(tmp_path, files)) == 2


@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(("quota", "cpus"), [("-1", 8), ("400000", 4), ("350000", 4), ("1000", 1)])
def test_a_quota_of_version_1(tmp_path: Path, eight_cpus: None, folder: str, quota: str, cpus: int) -> None:
    files = {
        "proc/self/cgroup": "5:memory:/box\n3:cpu,cpuacct:/box\n0::/\n",
        f"{CGROUP}/{folder}/box/cpu.cfs_quota_us": f"{quota}\n",
        f"{CGROUP}/{folder}/box/cpu.cfs_period_us": "100000\n",
    }
    assert available_cpus(tree(tmp_path, files)) == cpus


def test_an_affinity_narrower_than_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 5}, raising=False)
    assert available_cpus(tree(tmp_path, {"proc/self/cgroup": "0::/\n", f"{CGROUP}/cpu.max": "400000 100000\n"})) == 2
    assert usable_cpus(tmp_path) == (3, 5)


def test_cores_come_before_their_siblings(tmp_path: Path, eight_cpus: None) -> None:
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    apart = {topology.format(cpu): f"{cpu % 4},{cpu % 4 + 4}\n" for cpu in range(8)}
    assert usable_cpus(tree(tmp_path / "apart", apart)) == (0, 1, 2, 3, 4, 5, 6, 7)
    beside = {topology.format(cpu): f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}\n" for cpu in range(8)}
    assert usable_cpus(tree(tmp_path / "beside", beside)) == (0, 2, 4, 6, 1, 3, 5, 7)
    assert usable_cpus(tmp_path / "nothing") == tuple(range(8))


def test_pinning_what_cannot_be_pinned_is_refused() -> None:
    with pytest.raises(ConfigError, match="pin_threads is True or False"):
        check_options(EngineOptions(pin_threads=1))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"pin_threads.*isa=numpy"):
        check_options(EngineOptions(pin_threads=True, isa="numpy"))
    with pytest.raises(ConfigError, match="pin_threads"):
        select_ops("numpy", 2, warn=lambda _: None, cpus=(0,))


def thread_affinities() -> dict[str, str]:
    lines = {task.name: (task / "status").read_text().splitlines() for task in Path("/proc/self/task").iterdir()}
    return {name: line.split()[1] for name, text in lines.items() for line in text if line.startswith("Cpus_allowed_list")}


@needs_linux
@needs_native
def test_workers_are_bound_and_the_caller_is_not() -> None:
    before, cpus = thread_affinities(), usable_cpus()
    ops = select_ops(NATIVE[0], 3, warn=lambda _: None, cpus=cpus)  # type: ignore[arg-type]
    after = thread_affinities()
    assert ops.num_threads == 3
    assert sorted(after[name] for name in after.keys() - before.keys()) == sorted(str(cpus[i % len(cpus)]) for i in (1, 2))
    assert os.sched_getaffinity(0) == set(cpus)
    with pytest.raises(ConfigError, match="bind its threads"):
        select_ops(NATIVE[0], 2, warn=lambda _: None, cpus=(1 << 20,))  # type: ignore[arg-type]


@needs_linux
@needs_native
def test_an_idle_engine_takes_no_time() -> None:
    """Its threads are alive and parked: under a tenth of one CPU, where one spinning thread would take it all."""
    engine = AsyncEngine(tiny_engine(NATIVE[0], num_threads=3))
    engine.start()
    try:
        time.sleep(0.05)
        start, used = time.monotonic(), time.process_time()
        time.sleep(0.5)
        assert time.process_time() - used < 0.1 * (time.monotonic() - start)
    finally:
        engine.close()


def test_tokenizing_does_not_wait_for_forms_that_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tiny_engine()
    engine = AsyncEngine(inner)
    begun, release = threading.Semaphore(0), threading.Event()

    def compile_form(params: SamplingParams) -> None:
        begun.release()
        assert release.wait(60)

    monkeypatch.setattr(inner, "compile_form", compile_form)
    form = SamplingParams(max_tokens=1, structured_outputs={"choice": ["a"]})

    async def ask(name: str) -> None:
        async for _ in engine.generate(name, [1, 2], form):
            pass

    async def main() -> None:
        asked = [asyncio.create_task(ask(f"form {i}")) for i in range(FORM_THREADS)]
        for _ in asked:
            assert await asyncio.to_thread(begun.acquire, timeout=60)
        assert await asyncio.wait_for(engine.encode("hello"), 60)
        release.set()
        await asyncio.gather(*asked)

    engine.start()
    try:
        asyncio.run(main())
    finally:
        engine.close()
