"""Running the application: one socket, uvicorn, and an end in good order.

Knows uvicorn and signals, no routes. The first SIGTERM or SIGINT stops accepting and lets open requests finish until a deadline;
then the engine is stopped, which ends those still open with an error that their clients can read; a second signal ends at once.
"Ready" is said when the engine runs and the socket listens, never before.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from kvist.errors import ConfigError, KvistError

DRAIN_SECONDS = 30
LAST_WORDS_SECONDS = 5
"""From the deadline until connections are cut: time for a step to end and for errors to be sent."""
EXIT_FORCED = 1

log = logging.getLogger("kvist.server")


class AddressError(KvistError):
    """The address cannot be listened on."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: a taken port is known before a model is loaded. Raises AddressError."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be between 0 and 65535, not {port}.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise AddressError(f"The host {host!r} has no address ({error.strerror}); check --host.") from None
    listener = socket.socket(family, kind, protocol)
    try:
        # Not for Windows, where this option lets two servers share a port.
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise AddressError(f"Cannot listen on {host} port {port}: {error.strerror}; choose another with --port.") from None
    return listener


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn with a sentence when it is ready, a forced end on any second signal, and no signal raised again at the end."""

    def __init__(
        self, config: uvicorn.Config, on_ready: Callable[[], None], stop_engine: Callable[[], Awaitable[None]], drain_seconds: int
    ) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._stop_engine = stop_engine
        self._drain_seconds = drain_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and not self.should_exit:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        deadline = asyncio.create_task(self._end_open_requests())
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()

    async def _end_open_requests(self) -> None:
        await asyncio.sleep(self._drain_seconds)
        await self._stop_engine()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True


def serve_app(
    app: ASGIApp,
    listener: socket.socket,
    *,
    on_ready: Callable[[], None],
    stop_engine: Callable[[], Awaitable[None]],
    log_level: str = "info",
    drain_seconds: int = DRAIN_SECONDS,
) -> int:
    """Serve until a signal. The exit status: 0, or 1 when a second signal cut the end short. `stop_engine` is called where requests
    are still open after `drain_seconds`, and has to end them; the application stops its engine itself otherwise."""
    config = uvicorn.Config(
        app,
        log_level="warning" if log_level == "info" else log_level,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=drain_seconds + LAST_WORDS_SECONDS,
        timeout_keep_alive=75,
        lifespan="on",
    )
    server = _Server(config, on_ready, stop_engine, drain_seconds)
    try:
        server.run(sockets=[listener])
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise AddressError(f"Another program took {address_of(listener)} meanwhile; choose another port with --port.") from None
    return EXIT_FORCED if server.force_exit else 0
