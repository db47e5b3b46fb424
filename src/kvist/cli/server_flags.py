"""The flags of `kvist serve` that concern the server, not the engine, and how they become one `ServerOptions`.

Knows names, help texts and how values are split; what they may be is for `ServerOptions` and `check_key` to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from kvist.cli.options import Bundle
from kvist.cli.params import option
from kvist.config import api_keys_from_environment
from kvist.errors import ConfigError
from kvist.server.keys import KeyRing, check_key
from kvist.server.options import REASONING_PARSERS, TOOL_PARSERS, ServerOptions
from kvist.sizes import parse_memory

_DEFAULTS = ServerOptions()


def _option(help_text: str, **settings: Any) -> Any:
    return option(panel="Server", help=help_text, **settings)


_FLAGS: dict[str, tuple[Any, Any]] = {
    "api_key": (
        Annotated[
            list[str] | None,
            _option(
                "Refuse requests without one of these keys; give it several times, or a comma-separated list. "
                "$KVIST_API_KEY adds to them without showing in the list of processes.",
                metavar="KEY",
            ),
        ],
        None,
    ),
    "api_key_file": (
        Annotated[Path | None, _option("A file of keys, one a line, a name before it if you like; read again when it changes.")],
        None,
    ),
    "key_isolation": (
        Annotated[bool, _option("Keep the cached prefixes of each API key to itself.")],
        _DEFAULTS.key_isolation,
    ),
    "max_requests_per_key": (Annotated[int | None, _option("Most requests that one API key may have open at once.")], None),
    "max_queued_requests": (
        Annotated[int | None, _option("Most requests that may wait for a place; more are told when to come back.")],
        None,
    ),
    "max_queued_tokens": (
        Annotated[int | None, _option("Most prompt tokens that may wait for a place, all requests together.")],
        None,
    ),
    "served_model_name": (
        Annotated[
            list[str] | None,
            _option(
                "The name that requests use for the model; several times for aliases, the first one is in the answers.",
                metavar="NAME",
            ),
        ],
        None,
    ),
    "tool_call_parser": (
        Annotated[
            str,
            _option(
                "How the model writes tool calls. auto: as its chat template says; a name also serves tools to models whose "
                "template has no place for them.",
                metavar="|".join(TOOL_PARSERS),
            ),
        ],
        _DEFAULTS.tool_call_parser,
    ),
    "reasoning_parser": (
        Annotated[
            str,
            _option(
                "How the model marks its thoughts. auto: as its chat template says; think: <think> ... </think>.",
                metavar="|".join(REASONING_PARSERS),
            ),
        ],
        _DEFAULTS.reasoning_parser,
    ),
    "max_body_size": (
        Annotated[str, _option("Largest body of a request, as 4MiB or in bytes.", metavar="SIZE")],
        "4MiB",
    ),
    "max_connections": (
        Annotated[int, _option("Most connections; beyond them an idle one is closed for a new one.")],
        _DEFAULTS.max_connections,
    ),
    "drain_timeout": (
        Annotated[float, _option("Seconds from the first signal until requests that still run are ended.")],
        _DEFAULTS.drain_timeout,
    ),
    "stream_timeout": (
        Annotated[float, _option("Seconds after which a client that reads nothing of its answer is dropped.")],
        _DEFAULTS.stream_timeout,
    ),
    "vllm_metrics": (
        Annotated[bool, option("--vllm-metrics", panel="Server", help="Show the metrics under vLLM's names too.")],
        _DEFAULTS.vllm_metrics,
    ),
    "cors_origin": (
        Annotated[
            list[str] | None,
            _option("Let web pages of this origin call the server; may be given several times, * for all.", metavar="ORIGIN"),
        ],
        None,
    ),
    "root_path": (Annotated[str, _option("The path under which a proxy shows the server, as /llm.", metavar="PATH")], ""),
    "forwarded_allow_ips": (
        Annotated[
            str, _option("Proxies whose X-Forwarded-For is believed: addresses and networks with commas, or *.", metavar="IPS")
        ],
        "",
    ),
}


def _build(values: Mapping[str, Any]) -> ServerOptions:
    options = ServerOptions(
        api_keys=(*_keys(values["api_key"] or ()), *api_keys_from_environment()),
        api_key_file=values["api_key_file"],
        key_isolation=values["key_isolation"],
        max_requests_per_key=values["max_requests_per_key"],
        max_queued_requests=values["max_queued_requests"],
        max_queued_tokens=values["max_queued_tokens"],
        served_model_names=_names(values["served_model_name"] or ()),
        tool_call_parser=values["tool_call_parser"],
        reasoning_parser=values["reasoning_parser"],
        max_body_bytes=_size(values["max_body_size"], "--max-body-size"),
        max_connections=values["max_connections"],
        drain_timeout=values["drain_timeout"],
        stream_timeout=values["stream_timeout"],
        vllm_metrics=values["vllm_metrics"],
        cors_origins=tuple(values["cors_origin"] or ()),
        root_path=values["root_path"],
        forwarded_allow_ips=tuple(part.strip() for part in values["forwarded_allow_ips"].split(",") if part.strip()),
    )
    if options.wants_keys:
        KeyRing(options.api_keys, options.api_key_file)
    return options


def server_options() -> Bundle:
    return Bundle(_FLAGS, _build)


def _keys(values: list[str] | tuple[str, ...]) -> tuple[str, ...]:
    """Repeated and comma-separated values as one tuple; an empty one would let everybody in, or nobody."""
    parts = tuple(part.strip() for value in values for part in value.split(","))
    if not all(parts):
        raise ConfigError("--api-key holds an empty key; give a key, or leave the option out.")
    return tuple(check_key(part, "--api-key") for part in parts)


def _names(values: list[str] | tuple[str, ...]) -> tuple[str, ...]:
    if not all(values):
        raise ConfigError("--served-model-name holds an empty name; give a name, or leave the option out.")
    return tuple(dict.fromkeys(values))


def _size(text: str, flag: str) -> int:
    try:
        return parse_memory(text, free=0) or 1
    except ConfigError:
        raise ConfigError(f"{flag} takes a size such as 4MiB or 4194304, not {text!r}.") from None
