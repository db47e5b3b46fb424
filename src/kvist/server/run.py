"""Running the application: one socket, uvicorn, and an end in good order.

Knows uvicorn and signals, no routes. From the first SIGTERM or SIGINT the server is not ready, refuses new work with 503 and lets
open requests finish until a deadline; then the engine is stopped, which ends those still open with an error that their clients can
read; a second signal ends at once.
"Ready" is said when the engine runs and the socket listens, never before.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from kvist.errors import ConfigError, KvistError
from kvist.server.connection import connection_class
from kvist.server.life import Life
from kvist.server.options import ServerOptions

LAST_WORDS_SECONDS = 5
"""From the deadline until connections are cut: time for a step to end and for errors to be sent."""
KEEP_ALIVE_SECONDS = 75
TICK_SECONDS = 0.05
SPARE_FILES = 256
EXIT_FORCED = 1

StopEngine = Callable[[], Awaitable[None]]

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
    """uvicorn with a sentence when it is ready, an end in good order, and no signal raised again at the end."""

    def __init__(
        self, config: uvicorn.Config, life: Life, drain_seconds: float, on_ready: Callable[[], None], stop_engine: StopEngine
    ) -> None:
        super().__init__(config)
        self._life = life
        self._drain_seconds = drain_seconds
        self._on_ready = on_ready
        self._stop_engine = stop_engine

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._life.start_error is not None:
            await self.lifespan.shutdown()
            raise self._life.start_error
        if self.started and not self.should_exit:
            # What was loaded stays. To search it for garbage, again and again, would hold every stream for tens of milliseconds.
            # What a start leaves of garbage is little, and looking for it takes as long.
            gc.freeze()
            gc.enable()
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Goes on answering until no request is open or the deadline has passed; only then are connections closed."""
        self._begin_drain()
        if self._life.open_requests:
            log.info(
                "Stopping: %d open requests may go on for up to %g seconds; another signal ends them at once.",
                self._life.open_requests,
                self._drain_seconds,
            )
        deadline = asyncio.create_task(self._end_open_requests())
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._drain_seconds + LAST_WORDS_SECONDS):
                    while self._life.open_requests and not self.force_exit:
                        await asyncio.sleep(TICK_SECONDS)
            await super().shutdown(sockets)
        finally:
            deadline.cancel()

    async def _end_open_requests(self) -> None:
        await asyncio.sleep(self._drain_seconds)
        await self._stop_engine()

    def _begin_drain(self) -> None:
        if not self._life.draining:
            self._life.drain(self._drain_seconds)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
            # What is cut off now, as was asked for, is no error; uvicorn would show a traceback for each of its tasks.
            logging.getLogger("uvicorn.error").disabled = True
        self.should_exit = True
        self._begin_drain()


def _allow_files(wanted: int) -> None:
    """A connection is a file; many systems allow 1,024 of them unless asked."""
    if os.name == "posix":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        enough = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft != resource.RLIM_INFINITY and soft < enough:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))


def uvicorn_config(app: ASGIApp, options: ServerOptions, *, log_level: str = "info") -> uvicorn.Config:
    """What uvicorn is told; it logs no requests, which is the access layer's to do, and no more than warnings unless asked."""
    return uvicorn.Config(
        app,
        http=connection_class(options),
        log_config=None,
        log_level="warning" if log_level == "info" else log_level,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=LAST_WORDS_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        lifespan="on",
        ws="none",
        proxy_headers=bool(options.forwarded_allow_ips),
        forwarded_allow_ips=list(options.forwarded_allow_ips),
    )


def serve_app(
    app: ASGIApp,
    listener: socket.socket,
    options: ServerOptions,
    life: Life,
    *,
    on_ready: Callable[[], None],
    stop_engine: StopEngine,
    log_level: str = "info",
) -> int:
    """Serve until a signal. The exit status: 0, or 1 when a second signal cut the end short. `stop_engine` is called where requests
    are still open at the drain deadline, and has to end them; the application stops its engine itself otherwise. Raises
    AddressError, and what the first completion failed with."""
    _allow_files(options.max_connections + SPARE_FILES)
    config = uvicorn_config(app, options, log_level=log_level)
    server = _Server(config, life, options.drain_timeout, on_ready, stop_engine)
    try:
        server.run(sockets=[listener])
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise AddressError(f"Another program took {address_of(listener)} meanwhile; choose another port with --port.") from None
    return EXIT_FORCED if server.force_exit else 0
