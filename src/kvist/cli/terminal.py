"""What commands say on the terminal besides their result: messages and late progress bars, all on standard error.

Standard output belongs to results. A bar appears only on a terminal and only once a job has taken two seconds, so that quick
commands stay quiet; `rich` is imported no earlier. It knows no models and no requests.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

QUIET_SECONDS = 2.0


def say(message: str) -> None:
    """A message about the work, kept apart from its result."""
    print(message, file=sys.stderr, flush=True)


def dim(text: str) -> str:
    """The text in the terminal's faint style, where standard error is one."""
    return f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text


def print_json(value: Any) -> None:
    """One JSON document on standard output, readable and with its characters as they are."""
    print(json.dumps(value, indent=2, ensure_ascii=False), flush=True)


@contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Gives a function that takes how many of `total` are done."""
    start = time.monotonic()
    bar: Any = None
    task: Any = None

    def update(done: int) -> None:
        nonlocal bar, task
        if bar is None and sys.stderr.isatty() and time.monotonic() - start > QUIET_SECONDS:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            bar = Progress(*columns, console=Console(stderr=True), transient=True)
            task = bar.add_task(description, total=total)
            bar.start()
        if bar is not None:
            bar.update(task, completed=done)

    try:
        yield update
    finally:
        if bar is not None:
            bar.stop()
