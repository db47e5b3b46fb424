"""`kvist serve`: a model over an OpenAI-compatible HTTP API.

Takes the engine's options, binds the address first (so that a taken port costs no loading time), loads, says in one block what
runs, and serves until a signal. It knows the server's and the engine's constructors and nothing of their inside.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Annotated

import click

from kvist.cli.fetching import fetch
from kvist.cli.options import engine_options, takes
from kvist.cli.params import argument, option
from kvist.cli.server_flags import server_options
from kvist.cli.terminal import say
from kvist.config import EngineConfig, EngineOptions, require_one_of
from kvist.errors import UsageError
from kvist.server.logs import LOG_FORMATS, configure_logging
from kvist.server.options import ServerOptions

LOG_LEVELS = ("debug", "info", "warning", "error")


@takes(front=server_options(), options=engine_options())
def serve(
    named: Annotated[str | None, argument(metavar="[MODEL]", help="The model, as with --model.")] = None,
    host: Annotated[
        str, option(panel="Server", help="Address to listen on; 0.0.0.0 opens the server to the network.")
    ] = "127.0.0.1",
    port: Annotated[int, option(panel="Server", help="Port to listen on; 0: any free one.")] = 8000,
    log_level: Annotated[
        str, option(panel="Server", metavar="|".join(LOG_LEVELS), help="How much to log, to standard error.")
    ] = "info",
    log_format: Annotated[
        str, option(panel="Server", metavar="|".join(LOG_FORMATS), help="Lines of text, or a JSON object a line.")
    ] = "text",
    *,
    front: ServerOptions,
    options: EngineOptions,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API."""
    if named is not None:
        source = click.get_current_context().get_parameter_source("model")
        if source is not None and source.name == "COMMANDLINE" and options.model != named:
            raise UsageError(f"The model is {named!r} by argument and {options.model!r} by --model; give it once.")
        options = replace(options, model=named)
    gc.disable()  # until all is loaded (`server/run.py`)
    require_one_of(log_level, LOG_LEVELS, "--log-level")
    require_one_of(log_format, LOG_FORMATS, "--log-format")
    configure_logging(log_level, log_format)  # type: ignore[arg-type]
    from kvist.engine.async_engine import AsyncEngine
    from kvist.engine.engine import Engine
    from kvist.server.app import create_app
    from kvist.server.life import Life
    from kvist.server.run import address_of, bind, serve_app

    listener = bind(host, port)
    try:
        fetch(options.model)
        engine = Engine.from_options(options, report=say)
        served = AsyncEngine(engine)
        life = Life()
        app = create_app(served, front, life)
        say(_summary(engine.config, front, address_of(listener)))
        status = serve_app(
            app,
            listener,
            front,
            life,
            on_ready=lambda: say("Ready. Ctrl+C ends."),
            stop_engine=served.shutdown,
            log_level=log_level,
        )
    finally:
        gc.enable()
        listener.close()
    say("Stopped.")
    raise click.exceptions.Exit(status)


def _summary(config: EngineConfig, front: ServerOptions, address: str) -> str:
    """What the loader has not said already: it reports the model, the threads and what the pool holds."""
    return (
        f"Profile {config.profile}; context {config.effective_max_len:,} tokens; {config.max_num_seqs} requests at once, "
        f"{config.max_num_batched_tokens} tokens a step.\n"
        f"Serving {', '.join(front.served_model_names or (config.served_model_name,))} on {address}/v1"
        f"{' (API key needed)' if front.wants_keys else ''}."
    )
