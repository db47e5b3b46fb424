"""Runs of a long measurement, kept in a file as they are made, so that one that was broken off goes on where it stopped.

A run is a plain dictionary; what is the same for all runs (command, machine, options) is the head. A file holds runs of one head
only, for figures of another machine or another set of options must not be mixed in. It knows nothing of what is measured.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvist.errors import UsageError


class Kept:
    """The runs so far. Without a path they are kept in memory alone. Raises UsageError where the file is of something else."""

    def __init__(self, head: Mapping[str, Any], path: Path | None = None) -> None:
        self._head: dict[str, Any] = json.loads(json.dumps(head))
        self._path = path
        self.runs: list[dict[str, Any]] = []
        if path is None:
            return
        if not path.absolute().parent.is_dir():
            raise UsageError(f"There is no folder {path.absolute().parent} to keep {path.name} in.")
        if path.exists():
            self.runs = self._read(path)

    def _read(self, path: Path) -> list[dict[str, Any]]:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"Cannot read {path}: {error.strerror or error}.") from error
        except ValueError as error:
            raise UsageError(f"{path} is no JSON: {error}.") from error
        if not isinstance(found, dict) or not isinstance(found.get("runs"), list):
            raise UsageError(f"{path} holds no runs that were kept with --save; name a new file.")
        other = next((name for name in self._head if found.get(name) != self._head[name]), None)
        if other is not None:
            raise UsageError(f"{path} was kept with another {other}, so its runs cannot be gone on with; name a new file.")
        return list(found["runs"])

    def select(self, **facts: Any) -> list[dict[str, Any]]:
        """The runs that have these values, in the order in which they were made."""
        return [run for run in self.runs if all(run.get(name) == value for name, value in facts.items())]

    def add(self, run: Mapping[str, Any]) -> None:
        """Keep one more; the file is whole at any moment."""
        self.runs.append(json.loads(json.dumps(run)))
        if self._path is not None:
            new = self._path.with_name(f".{self._path.name}.new")
            new.write_text(json.dumps({**self._head, "runs": self.runs}, indent=1) + "\n", encoding="utf-8")
            os.replace(new, self._path)
