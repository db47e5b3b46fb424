"""`kvist serve`: a model over an OpenAI-compatible HTTP API.

Takes the engine's options, binds the address first (so that a taken port costs no loading time), loads, says in one block what
runs, and serves until a signal. It knows the server's and the engine's constructors and nothing of their inside.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kvist.cli.fetching import fetch
from kvist.cli.options import engine_options, takes
from kvist.cli.terminal import say
from kvist.config import EngineConfig, EngineOptions, require_one_of
from kvist.errors import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error")


@takes(options=engine_options())
def serve(
    host: Annotated[
        str, typer.Option(rich_help_panel="Server", help="Address to listen on; 0.0.0.0 opens the server to the network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(rich_help_panel="Server", help="Port to listen on; 0: any free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel="Server",
            metavar="KEY",
            help="Refuse requests without one of these keys; give it several times, or a comma-separated list.",
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel="Server",
            metavar="NAME",
            help="The name that requests use for the model; several times for aliases, the first one is in the answers.",
        ),
    ] = None,
    log_level: Annotated[
        str, typer.Option(rich_help_panel="Server", metavar="|".join(LOG_LEVELS), help="How much to log, to standard error.")
    ] = "info",
    *,
    options: EngineOptions,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API."""
    require_one_of(log_level, LOG_LEVELS, "--log-level")
    keys, names = _split(api_key, "--api-key"), _names(served_model_name)

    import logging

    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    from kvist.engine.async_engine import AsyncEngine
    from kvist.engine.engine import Engine
    from kvist.server.app import create_app
    from kvist.server.run import address_of, bind, serve_app
    from kvist.server.state import ServerOptions

    listener = bind(host, port)
    try:
        fetch(options.model)
        engine = Engine.from_options(options, report=say)
        served = AsyncEngine(engine)
        app = create_app(served, ServerOptions(api_keys=keys, served_model_names=names))
        say(_summary(engine.config, names, address_of(listener), bool(keys)))
        status = serve_app(
            app, listener, on_ready=lambda: say("Ready. Ctrl+C ends."), stop_engine=served.shutdown, log_level=log_level
        )
    finally:
        listener.close()
    say("Stopped.")
    raise typer.Exit(status)


def _split(values: list[str] | None, option: str) -> tuple[str, ...]:
    """Repeated and comma-separated values as one tuple; an empty one would let everybody in, or nobody."""
    parts = tuple(part.strip() for value in values or () for part in value.split(","))
    if not all(parts):
        raise ConfigError(f"{option} holds an empty key; give a key, or leave the option out.")
    if not all(part.isascii() and part.isprintable() and " " not in part for part in parts):
        raise ConfigError(f"{option} takes keys of printable ASCII characters without spaces, as HTTP headers can carry.")
    return parts


def _names(values: list[str] | None) -> tuple[str, ...]:
    if not all(values or ()):
        raise ConfigError("--served-model-name holds an empty name; give a name, or leave the option out.")
    return tuple(dict.fromkeys(values or ()))


def _summary(config: EngineConfig, names: tuple[str, ...], address: str, keys: bool) -> str:
    """What the loader has not said already: it reports the model, the threads and what the pool holds."""
    return (
        f"Profile {config.profile}; context {config.effective_max_len:,} tokens; {config.max_num_seqs} requests at once, "
        f"{config.max_num_batched_tokens} tokens a step.\n"
        f"Serving {', '.join(names or (config.served_model_name,))} on {address}/v1{' (API key needed)' if keys else ''}."
    )
