"""What can be asked of the server rather than of the engine, frozen and checked; light enough for the command line to import.

Knows no routes. A combination that cannot be is refused here with a sentence that names the options.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kvist.config import require_one_of
from kvist.errors import ConfigError

MAX_BODY_BYTES = 4 * 1024 * 1024
TOOL_PARSERS = ("auto", "none", "hermes", "llama3_json", "mistral")
REASONING_PARSERS = ("auto", "none", "think", "deepseek_r1", "qwen3")
"""The last three are one: vLLM's names for `<think>` are understood."""


@dataclass(frozen=True)
class ServerOptions:
    """No `served_model_names`: the engine's own name. Sizes in bytes, times in seconds, None: no limit."""

    api_keys: tuple[str, ...] = ()
    api_key_file: Path | None = None
    key_isolation: bool = True
    max_requests_per_key: int | None = None
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    """Prompt tokens of all queued requests together."""
    served_model_names: tuple[str, ...] = ()
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    max_body_bytes: int = MAX_BODY_BYTES
    cors_origins: tuple[str, ...] = ()
    root_path: str = ""
    """The path under which a proxy shows the server; both `/v1/models` and that path before it are answered."""
    forwarded_allow_ips: tuple[str, ...] = ()
    """Proxies whose word on the client's address is taken."""

    keep_alive_seconds: float = 15.0
    """How long a stream is silent before it says that it lives."""
    vllm_metrics: bool = False
    """Show the metrics under vLLM's names too."""
    warm_up: bool = True
    """Ready only after a completion has worked; what structured outputs need is made right behind."""
    max_connections: int = 4096
    drain_timeout: float = 30.0
    """From the first signal until what still runs is ended."""
    stream_timeout: float = 60.0
    """How long a client may read nothing of what waits for it."""

    @property
    def wants_keys(self) -> bool:
        return bool(self.api_keys) or self.api_key_file is not None

    def __post_init__(self) -> None:
        if self.max_requests_per_key is not None:
            _at_least(self.max_requests_per_key, 1, "--max-requests-per-key")
            if not self.wants_keys:
                raise ConfigError("--max-requests-per-key needs keys; give --api-key or --api-key-file.")
        if self.max_queued_requests is not None:
            _at_least(self.max_queued_requests, 0, "--max-queued-requests")
        if self.max_queued_tokens is not None:
            _at_least(self.max_queued_tokens, 0, "--max-queued-tokens")
        require_one_of(self.tool_call_parser, TOOL_PARSERS, "--tool-call-parser")
        require_one_of(self.reasoning_parser, REASONING_PARSERS, "--reasoning-parser")
        _at_least(self.max_body_bytes, 1024, "--max-body-size")
        _at_least(self.max_connections, 1, "--max-connections")
        _at_least(self.drain_timeout, 0, "--drain-timeout")
        _at_least(self.stream_timeout, 1, "--stream-timeout")
        for origin in self.cors_origins:
            _check_origin(origin)
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"--root-path begins with a slash and ends without one, as in /llm, not {self.root_path!r}.")
        for address in self.forwarded_allow_ips:
            _check_address(address)


def _at_least(value: float, low: int, flag: str) -> None:
    if not value >= low:
        raise ConfigError(f"{flag} must be at least {low}, not {value}.")


def _check_origin(origin: str) -> None:
    """`*`, or a scheme and host as browsers send them."""
    parts = urlsplit(origin)
    if origin != "*" and not (parts.scheme and parts.netloc and origin == f"{parts.scheme}://{parts.netloc}"):
        raise ConfigError(f"--cors-origin is an origin such as https://chat.example.org, or *, not {origin!r}.")


def _check_address(address: str) -> None:
    if address == "*":
        return
    try:
        ipaddress.ip_network(address)
    except ValueError:
        raise ConfigError(
            f"--forwarded-allow-ips takes addresses and networks such as 10.0.0.0/8, or *, not {address!r}."
        ) from None
