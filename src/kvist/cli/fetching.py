"""The progress bar of a pull, and the pull that comes before a model's first use.

On standard error, and only on a terminal; `rich` is imported with the first stage of a pull that really happens. What a name means
and how it is fetched is `weights/hub.py`'s.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvist.weights.wheels import Progress


@contextmanager
def pull_bar() -> Iterator[Progress]:
    """A progress bar on standard error, one line a stage; silent where that is no terminal."""
    bar: Any = None
    task: Any = None
    current = ""

    def show(stage: str, done: int, total: int) -> None:
        nonlocal bar, task, current
        # Made with the first stage, not before: a question about terms would be drawn over.
        if bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

            console = Console(stderr=True)
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
            bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
            task = bar.add_task("", total=None)
            bar.start()
        if stage != current:
            bar.reset(task, description=stage, total=total or None)
            current = stage
        bar.update(task, completed=done, total=total or None)

    try:
        yield show
    finally:
        if bar is not None:
            bar.stop()


def fetch(model: str) -> None:
    """Pull a model that is not here, with a progress bar. Without a terminal nothing happens: loading pulls it too, and says so."""
    if sys.stderr.isatty():
        from kvist.weights.hub import resolve_model

        with pull_bar() as progress:
            resolve_model(model, progress=progress)
