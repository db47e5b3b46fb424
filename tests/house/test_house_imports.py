"""Imports point one way: each room may use only the rooms below it, and the deciders only the standard library."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "kvist"
LEAVES = {"config", "errors", "machine", "request", "sizes", "kv.spec", "kv.hints"}
ALLOWED: dict[str, set[str]] = {
    "config": {"errors"},
    "errors": set(),
    "machine": set(),
    "request": {"errors"},
    "sizes": {"errors"},
    "kv.spec": {"errors"},
    "kv.hints": {"errors"},
    "kv": set(),
    "sched": {"kv"},
    "planner": {"sched", "kv"},
    "kernels": set(),
    "store": set(),
    "models": {"kernels"},
    "weights": {"kernels"},
    "text": set(),
    "engine": {"sched", "kv", "models", "store", "weights", "kernels", "text"},
    "server": {"kvist", "engine", "text", "planner"},
    "bench": {"kvist", "sched", "kv"},
    "cli": {"kvist", "server", "engine", "weights", "text", "bench", "planner"},
    "kvist": {"engine"},
}
"""Room -> rooms it may use besides itself; the leaves are open to all. `kvist` is the top module with the public names."""

EXCEPTIONS = {"cli.doctor_report": {"kernels"}, "cli.doctor_step": {"kernels"}}
"""`kvist doctor` tells which kernels will run, and asks the kernels themselves."""

DECIDERS = {"kv", "sched", "planner", *LEAVES}
CLOCK_AND_CHANCE = {"time", "datetime", "random", "secrets", "threading", "asyncio", "uuid"}
NOT_IN_THE_CORE = {"torch", "transformers", "triton", "ray", "redis"}

MODULES = sorted(path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".") for path in PACKAGE.rglob("*.py"))


def room_of(module: str) -> str:
    """The room of a module's name within the package ("kv.pool" -> "kv"; leaves are rooms of their own; "" is the top)."""
    name = module.removesuffix(".__init__")
    if name in LEAVES:
        return name
    return "kvist" if name in ("", "__init__") else name.split(".")[0]


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports anywhere, in full ("kvist.kv.spec", "numpy")."""
    package = ["kvist", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module or "").split(".")] if node.module else base
            for alias in node.names:
                full = [*base, alias.name]
                inside = full[0] == "kvist" and (
                    PACKAGE.joinpath(*full[1:]).with_suffix(".py").exists() or PACKAGE.joinpath(*full[1:]).is_dir()
                )
                yield ".".join(full if inside else base)


def used_rooms(path: Path) -> set[str]:
    return {
        room_of(name.removeprefix("kvist").removeprefix("."))
        for name in imports(path)
        if name.split(".")[0] == "kvist" and not name.startswith("kvist._cpu_")
    }


def path_of(module: str) -> Path:
    return PACKAGE.joinpath(*module.split(".")).with_suffix(".py")


def test_the_walk_sees_the_package() -> None:
    assert {"config", "errors", "request", "kv.spec", "cli.main"} <= set(MODULES)
    assert used_rooms(path_of("cli.main")) == {"kvist", "cli", "errors"}
    assert used_rooms(path_of("kernels.ops")) == {"kernels", "kv.spec"}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module: str) -> None:
    room = room_of(module)
    assert room in ALLOWED, f"{module} is in no room of the design"
    wrong = used_rooms(path_of(module)) - {room} - ALLOWED[room] - LEAVES - EXCEPTIONS.get(module, set())
    assert not wrong, f"{module} may not import {', '.join(sorted(wrong))}"


@pytest.mark.parametrize("module", [module for module in MODULES if room_of(module) in DECIDERS])
def test_deciders_use_the_standard_library_alone(module: str) -> None:
    tops = {name.split(".")[0] for name in imports(path_of(module))} - {"kvist"}
    assert tops <= sys.stdlib_module_names, f"{module} imports {sorted(tops - sys.stdlib_module_names)}"


@pytest.mark.parametrize("module", [module for module in MODULES if room_of(module) in {"kv", "sched", "planner", "kv.spec"}])
def test_deciders_read_no_clock_and_no_chance(module: str) -> None:
    tops = {name.split(".")[0] for name in imports(path_of(module))}
    assert not tops & CLOCK_AND_CHANCE


DRIVERS = [module for module in MODULES if module.startswith("bench.peers.") and not module.endswith("__init__")]
"""Scripts that run in the Python of an engine that kvist is compared with, never in kvist's own (but kvist's own driver)."""


@pytest.mark.parametrize("module", DRIVERS)
def test_a_peers_driver_needs_no_kvist(module: str) -> None:
    tops = {name.split(".")[0] for name in imports(path_of(module))}
    assert ("kvist" in tops) == (module == "bench.peers.kvist_driver")


@pytest.mark.parametrize("module", [module for module in MODULES if module not in DRIVERS])
def test_the_core_imports_no_torch(module: str) -> None:
    assert not {name.split(".")[0] for name in imports(path_of(module))} & NOT_IN_THE_CORE
