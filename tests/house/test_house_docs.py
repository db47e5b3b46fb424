"""The pages stay true: files that they name exist, flags and commands that they name are those of the program, and back."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from kvist.cli.main import COMMANDS, build_app

ROOT = Path(__file__).parents[2]
ROOMS = ("kv", "sched", "kernels", "store", "models", "weights", "text", "engine", "server", "bench", "cli", "csrc", "tests")


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def named_paths(text: str) -> set[str]:
    """Paths in backticks that begin with a room's name, or name a module at the top."""
    names = set(re.findall(r"`([\w/.]+)`", text))
    return {name for name in names if "/" in name and name.split("/")[0] in ROOMS} | ({"config.py"} & names)


PAGES = ("README.md", *(f"docs/{name}.md" for name in ("architecture", "memory", "performance", "serving", "testing", "tuning")))


@pytest.mark.parametrize("name", PAGES)
def test_every_file_that_a_page_names_exists(name: str) -> None:
    missing = [path for path in named_paths(page(name)) if not ((ROOT / "src/kvist" / path).exists() or (ROOT / path).exists())]
    assert not missing


def test_the_way_of_a_request_names_files() -> None:
    assert {"sched/scheduler.py", "kv/manager.py", "engine/batch.py", "csrc/"} <= named_paths(page("docs/architecture.md"))


def serve_flags() -> list[set[str]]:
    """The long flags of `kvist serve`, those of one option together: a switch has two."""
    command = build_app("serve").commands["serve"]
    options = [option for option in command.params if isinstance(option, click.Option)]
    return [{name for name in (*option.opts, *option.secondary_opts) if name.startswith("--")} for option in options]


def test_the_serving_page_has_every_flag_and_no_other() -> None:
    table = page("docs/serving.md").split("## Flags")[1].split("## Routes")[0]
    named = set(re.findall(r"`(--[a-z-]+)", table))
    flags = serve_flags()
    assert named <= set().union(*flags)
    assert [names for names in flags if not names & named] == []


def test_readme_names_every_command() -> None:
    named = set(re.findall(r"^\| `kvist (\w+)", page("README.md"), re.MULTILINE))
    assert named == {command.name for command in COMMANDS}
