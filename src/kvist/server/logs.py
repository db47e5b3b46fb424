"""How log records are written: as lines of text, or as one JSON object a line, to standard error.

Knows no routes. A record's `fields` (a dict in `extra`) become keys of the JSON object; in text they follow the message, except
those that it has by name.
Invariant: one record is one line of ASCII in JSON.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]
LOG_FORMATS: tuple[LogFormat, ...] = ("text", "json")
CLOSE_SECONDS = 2.0

log = logging.getLogger("kvist.server")


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = [f"{name}={value}" for name, value in getattr(record, "fields", {}).items() if f"%({name})" not in str(record.msg)]
        return " ".join([super().formatMessage(record), *fields])


class BackgroundHandler(logging.Handler):
    """Passes records on from a thread of its own: whoever logs never waits for a reader of standard error that has stopped. Beyond
    `size` records that nobody took, new ones are dropped and counted."""

    def __init__(self, target: logging.Handler, size: int = 10_000) -> None:
        super().__init__()
        self._target = target
        self._queue: queue.Queue[logging.LogRecord | None] = queue.Queue(size)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="kvist-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Write what is left, unless that takes too long; Python calls it at the end of the program."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
            self._thread.join(CLOSE_SECONDS)
        super().close()

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            self._target.handle(record)
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                self._target.handle(log.makeRecord(log.name, logging.WARNING, "", 0, "%d log lines were lost.", (dropped,), None))


def configure_logging(level: str, form: LogFormat) -> None:
    """Set up the root logger of a program, unless whoever runs it has done so."""
    if logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[BackgroundHandler(handler)])
