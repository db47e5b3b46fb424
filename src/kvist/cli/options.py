"""The flags that several commands share, and how a command takes them all as one object.

`EngineOptions` and `SamplingParams` are the words; this module gives each field its flag, help text and panel, and adds the
whole set to a command by one decorator, so that every command spells the same option the same way. It knows no engine, no model
and no values' domains: those are checked by the objects themselves, with the same sentence on the command line as in Python.
Invariants: a bundle has exactly one flag for each field that it covers; defaults are the object's unless a command names its own.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

from kvist.cli.params import option
from kvist.config import (
    EVICTION_POLICIES,
    ISAS,
    KV_ALLOCATORS,
    KV_FORMATS,
    QUANTIZATIONS,
    SYNC_POLICIES,
    EngineOptions,
    check_options,
)
from kvist.errors import UsageError
from kvist.request import SamplingParams

JsonFlag = Annotated[bool, option("--json", help="Print the result as JSON.")]
KeptFile = Annotated[
    Path | None,
    option(metavar="FILE.json", help="Keep each run in this file; where it has some already, only the others are made."),
]


@dataclass(frozen=True)
class Bundle:
    """Flags (name -> annotation, default) that together make one object."""

    flags: Mapping[str, tuple[Any, Any]]
    build: Callable[[Mapping[str, Any]], Any]


def takes(**bundles: Bundle) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command that takes each named bundle's object as a keyword; its flags follow the command's own."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**values: Any) -> None:
            built = {name: bundle.build({flag: values.pop(flag) for flag in bundle.flags}) for name, bundle in bundles.items()}
            command(**values, **built)

        hints = typing.get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(command).parameters.items()
            if name not in bundles
        ]
        shared = [
            inspect.Parameter(flag, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for bundle in bundles.values()
            for flag, (annotation, default) in bundle.flags.items()
        ]
        parameters = [*own, *shared]
        del run.__wrapped__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _one_of(values: tuple[str, ...]) -> str:
    return "|".join(values)


_ENGINE: dict[str, Any] = {
    "model": Annotated[
        str,
        option(
            "--model",
            "-m",
            metavar="MODEL",
            panel="Model",
            help="A name that `kvist models` lists, a GGUF file, a Hugging Face folder or a hub name; pulled on first use.",
        ),
    ],
    "dtype": Annotated[
        str,
        option(metavar="auto|f32|f16|bf16", panel="Model", help="Format of unquantized matrices; auto: the file's."),
    ],
    "quantization": Annotated[
        str | None,
        option(metavar=_one_of(QUANTIZATIONS), panel="Model", help="Re-encode the weights; without it the file's own format."),
    ],
    "kv_cache_dtype": Annotated[
        str, option(metavar=_one_of(KV_FORMATS), panel="Memory", help="Format of keys and values in the cache.")
    ],
    "max_model_len": Annotated[
        int | None,
        option(panel="Memory", help="Longest prompt and answer together, in tokens; without it the model's own."),
    ],
    "block_size": Annotated[int, option(panel="Memory", help="Tokens of one KV block.")],
    "num_kv_blocks": Annotated[
        int | None, option(panel="Memory", help="Size of the KV pool in blocks, instead of --kv-cache-memory.")
    ],
    "kv_cache_memory": Annotated[
        str | None,
        option(
            metavar="SIZE",
            panel="Memory",
            help="Size of the KV pool: bytes (2GiB, 2147483648) or a share of free memory (40%, which is the default).",
        ),
    ],
    "max_num_seqs": Annotated[int, option(panel="Scheduling", help="Most requests that run at once.")],
    "max_num_batched_tokens": Annotated[int, option(panel="Scheduling", help="Most tokens computed in one step.")],
    "enable_prefix_caching": Annotated[
        bool,
        option(
            panel="Memory",
            help="Keep computed prefixes and share them between requests.",
        ),
    ],
    "kv_allocator": Annotated[
        str,
        option(
            metavar=_one_of(KV_ALLOCATORS),
            panel="Memory",
            help="How KV memory is handed out. paged: blocks anywhere, shared in place. contiguous: one span a request, reserved "
            "for its longest length; nothing is shared. virtual: one span of addresses a request, with memory behind it as it "
            "grows; prefixes are copied.",
        ),
    ],
    "eviction_policy": Annotated[
        str | None,
        option(
            metavar=_one_of(EVICTION_POLICIES),
            panel="Memory",
            help="Which cached block is reused first: the one least likely to be hit for its time (density, the default with "
            "paged blocks), or the least recently used.",
        ),
    ],
    "kv_pin_budget": Annotated[
        float | None,
        option(panel="Memory", help="Share of the pool that requests may pin (kv.pin), 0.25 unless given; 0 refuses pins."),
    ],
    "kv_priority_budget": Annotated[
        float | None,
        option(
            panel="Memory",
            help="Share of the pool for prefixes of kv.priority above 50, 0.5 unless given; beyond it the oldest are ordinary "
            "again.",
        ),
    ],
    "num_threads": Annotated[
        int | None,
        option(
            panel="Machine",
            help="Threads that compute; without it one for each CPU that affinity and container leave to kvist.",
        ),
    ],
    "pin_threads": Annotated[
        bool,
        option(
            "--pin-threads/--no-pin-threads",
            panel="Machine",
            help="Bind each computing thread but the first to a CPU; of use where nothing else runs.",
        ),
    ],
    "isa": Annotated[
        str,
        option(
            metavar=_one_of(ISAS),
            panel="Machine",
            help="Which build of the kernels runs; `kvist doctor` tells which can.",
        ),
    ],
    "seed": Annotated[
        int | None,
        option(panel="Machine", help="Seed for requests that bring none of their own; without it drawn at start."),
    ],
    "use_cache": Annotated[
        bool,
        option(
            panel="Memory",
            help="Off: recompute the whole sequence for each token, as a baseline to measure against.",
        ),
    ],
    "watermark": Annotated[float, option(panel="Scheduling", help="Share of the pool kept free when new requests are admitted.")],
    "kv_tiers": Annotated[
        str | None,
        option(
            metavar="disk=SIZE:FOLDER",
            panel="Memory",
            help="Keep computed prefixes on disk too, across restarts: disk=20GiB:/path. One server to a folder.",
        ),
    ],
    "kv_tier_fsync": Annotated[
        str | None,
        option(
            metavar=_one_of(SYNC_POLICIES),
            panel="Memory",
            help="When blocks are forced to disk: with each batch, each full segment file (the default), or when the system likes.",
        ),
    ],
}


def _build_engine(values: Mapping[str, Any], check: Callable[[EngineOptions], None]) -> EngineOptions:
    options = EngineOptions(**values)
    check(options)
    return options


def engine_options(only: Sequence[str] = (), *, check: Callable[[EngineOptions], None] = check_options, **defaults: Any) -> Bundle:
    """All of EngineOptions, or `only` some, with this command's own defaults for some fields. `check` raises ConfigError."""
    standard = {field.name: field.default for field in fields(EngineOptions) if not only or field.name in only}
    return Bundle({name: (_ENGINE[name], {**standard, **defaults}[name]) for name in standard}, partial(_build_engine, check=check))


_SAMPLING: dict[str, Any] = {
    "max_tokens": Annotated[
        int | None,
        option(panel="Sampling", help="Most new tokens of an answer; without it up to the end of the context."),
    ],
    "temperature": Annotated[float, option(panel="Sampling", help="0 takes the likeliest token; higher values spread the choice.")],
    "top_p": Annotated[
        float,
        option(panel="Sampling", help="Choose among the likeliest tokens that together reach this probability."),
    ],
    "top_k": Annotated[int, option(panel="Sampling", help="Choose among this many likeliest tokens; 0: no limit.")],
    "min_p": Annotated[
        float,
        option(panel="Sampling", help="Leave out tokens below this share of the likeliest one's probability."),
    ],
    "repetition_penalty": Annotated[
        float, option(panel="Sampling", help="Above 1 makes tokens that were used already less likely.")
    ],
    "stop": Annotated[list[str] | None, option(panel="Sampling", help="End the answer at this text; may be given several times.")],
}


def _build_sampling(values: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(**{**values, "stop": tuple(values["stop"] or ())})


def sampling_params(**defaults: Any) -> Bundle:
    """The sampling flags, with this command's own defaults."""
    standard = {field.name: field.default for field in fields(SamplingParams)} | {"stop": None}
    return Bundle({name: (annotation, {**standard, **defaults}[name]) for name, annotation in _SAMPLING.items()}, _build_sampling)


def read_text(path: Path) -> str:
    """A file the user named, as text, without a byte order mark; a sentence when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text (byte {error.start}); convert it first.") from error
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror or error}.") from error
