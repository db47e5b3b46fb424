"""One engine's process under comparison: start it, ask it, hold it still while others compute, end it.

It speaks the JSON lines of `peers/host.py` and knows no works. Invariants: a process that is not being asked is stopped (SIGSTOP),
so that two never compute at once; whatever happens, `close` ends it with all that it started. A failure is a SessionError, whose
text is a reason that can stand in a report.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvist.errors import KvistError

HOST = Path(__file__).parent / "peers" / "host.py"
END_SECONDS = 5.0


class SessionError(KvistError):
    """An engine's process failed; the message says how."""


@dataclass(frozen=True)
class Contender:
    """An engine with what it runs: how it is named in tables, the command that starts a Python for it, and its driver's setup."""

    name: str
    python: tuple[str, ...]
    driver: Path
    setup: Mapping[str, Any]
    weights: str = ""
    """What it runs, in words: the file's format, or what was made of it."""


def driver_path(engine: str) -> Path:
    """The driver that kvist brings for an engine."""
    return HOST.with_name(f"{engine}_driver.py")


def own_python() -> tuple[str, ...]:
    """The Python that runs kvist."""
    return (sys.executable,)


@dataclass
class Session:
    """A running contender; `facts` is what its driver told when it was ready."""

    contender: Contender
    process: subprocess.Popen[bytes]
    complaints: Any
    begun: float
    facts: dict[str, Any] = field(default_factory=dict)
    _pending: bytes = b""

    @classmethod
    def start(cls, contender: Contender, *, context: int, max_seqs: int, cold: bool, timeout: float) -> Session:
        """Start the process and wait until it is ready. `cold`: it serves one request of `context` tokens. Raises SessionError."""
        complaints = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the session)
        begun = time.monotonic()
        try:
            process = subprocess.Popen(
                [*contender.python, str(HOST), str(contender.driver)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                process_group=0,
            )
        except OSError as error:
            complaints.close()
            raise SessionError(f"{contender.python[0]} cannot be run: {error.strerror or error}") from error
        session = cls(contender, process, complaints, begun)
        try:
            session.send({**contender.setup, "context": context, "max_seqs": max_seqs, "cold": cold})
            session.facts = session.receive(timeout)
        except BaseException:
            session.close()
            raise
        return session

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, prompts: Sequence[Sequence[int]], new_tokens: int, timeout: float) -> dict[str, Any]:
        """Wake the process, have it run the requests, hold it still again. Raises SessionError."""
        self._signal(signal.SIGCONT)
        self.send({"prompts": prompts, "new_tokens": new_tokens})
        answer = self.receive(timeout)
        if made := [count for count in answer["made"] if count != new_tokens]:
            raise SessionError(f"a request made {made[0]} of {new_tokens} tokens")
        return answer

    def rest(self) -> None:
        """Hold the process still until it is asked again; returns once it stands."""
        self._signal(signal.SIGSTOP)
        # WNOWAIT: an end that is seen here is still there for `process.wait`.
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def send(self, message: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        # A process that has ended is noticed when its answer is missed.
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def receive(self, timeout: float) -> dict[str, Any]:
        """The next line as JSON. Raises SessionError when it is an error, or does not come."""
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        end = time.monotonic() + timeout
        while b"\n" not in self._pending:
            readable, _, _ = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
            if not readable:
                raise SessionError(f"it took more than {timeout:.0f} seconds")
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                raise SessionError(self._last_words())
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise SessionError(f"it answered {line[:80]!r}, which is no JSON") from error
        if "error" in answer:
            raise SessionError(str(answer["error"]))
        return answer

    def _last_words(self) -> str:
        status = self.process.wait()
        end = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        self.complaints.seek(0)
        lines = [line for line in self.complaints.read().decode(errors="replace").splitlines() if line.strip()]
        return f"its process {end}" + (f": {lines[-1].strip()[:300]}" if lines else "")

    def _signal(self, number: signal.Signals) -> None:
        # Its own group, so that what it started (a server program, workers) is held and ended with it.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """End the process and all that it started; wait until it is gone."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        self._signal(signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        self.complaints.close()
