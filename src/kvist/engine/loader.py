"""From `EngineOptions` to everything an engine holds: configuration, model, tokenizer, template, KV memory.

It glues rooms that do not know each other (weights, text, models, kernels, store) and computes nothing. A model is packed on its
first use, its tokenizer with it; later starts read the pack alone, and import nothing that only packing needs.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvist.config import DTYPES, KV_FORMATS, EngineConfig, EngineOptions, ModelConfig, check_options, describe_pool, resolve
from kvist.engine.kernels import select_ops
from kvist.engine.memory import make_memory
from kvist.engine.runner import ForwardModel
from kvist.kernels.ops import F32, Ops, PackedLinear
from kvist.kv.block import make_key
from kvist.kv.memory import KVMemory
from kvist.machine import available_cpus, usable_cpus
from kvist.models import build_model
from kvist.store.arena import Arena
from kvist.text.chat_template import ChatTemplate
from kvist.text.tokenizer import Tokenizer, TokenizerInfo
from kvist.text.tokenizer_parts import join_tokenizer, split_tokenizer

if TYPE_CHECKING:
    from kvist.engine.tiers import Tiers
    from kvist.weights.pack import PackedModel
    from kvist.weights.source import TokenizerSource

Report = Callable[[str], None]
Done = Callable[[str], None]
INFO_FILE, TEMPLATE_FILE, VERSION_FILE = "tokenizer_info.json", "chat_template.jinja", "text_version"
"""Besides the tokenizer's own parts (`text/tokenizer_parts.py`)."""
TEXT_VERSION = b"2"
"""Raised when tokenizers are built differently: packs with another version are made again."""


class Packed(Protocol):
    """A model's own part: what `weights.pack.PackedModel` has, and a test can make up."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def linears(self) -> Mapping[str, PackedLinear]: ...
    @property
    def vectors(self) -> Mapping[str, F32]: ...
    @property
    def key(self) -> str: ...


class Loaded(NamedTuple):
    """What an `Engine` is made of."""

    config: EngineConfig
    ops: Ops
    model: ForwardModel
    manager: KVMemory
    arena: Arena
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    tiers: Tiers | None = None


def load(options: EngineOptions, *, report: Report | None = None, done: Done = lambda stage: None) -> Loaded:
    """Find (or pull), pack if need be, and bind a model. Raises ConfigError, ModelError, DownloadError.

    `report` gets sentences for the user; without it, only warnings are given, as Python warnings. `done` is told each stage's end:
    kernels, weights, tokenizer, pool, model.
    """
    from kvist.weights.hub import resolve_model

    check_options(options)
    warn = report or _warn
    cpus = usable_cpus() if options.pin_threads else ()
    ops = select_ops(options.isa, options.num_threads or available_cpus(), warn=warn, cpus=cpus)
    done("kernels")
    packed = _pack(resolve_model(options.model, progress=_stages(options.model, report)), options, report)
    for note in packed.notes:
        warn(note)
    done("weights")
    with _no_collections():
        tokenizer, template = _load_text(packed.files)
        done("tokenizer")
        loaded = assemble(options, packed, ops, tokenizer, template, warn=warn, done=done)
    if report is not None:
        config = loaded.config
        report(f"Model {config.served_model_name} ({config.model.architecture}), isa {config.isa}, {config.num_threads} threads.")
        report(describe_pool(config))
        if loaded.tiers is not None:
            report(loaded.tiers.describe())
    return loaded


def assemble(
    options: EngineOptions,
    packed: Packed,
    ops: Ops,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    *,
    warn: Report | None = None,
    done: Done = lambda stage: None,
) -> Loaded:
    """Size the pool, and bind the model to it. Raises ConfigError and ModelFormatError."""
    formats = "+".join(sorted({linear.format for linear in packed.linears.values()}))
    profiles = {kv_format: f"{ops.profile}/{formats}/{kv_format}" for kv_format in KV_FORMATS}
    profile = profiles[options.kv_cache_dtype]
    config = resolve(options, packed.config, isa=ops.isa, profile=profile, num_threads=ops.num_threads)
    memory = make_memory(config, {kv_format: make_key(packed.key, profile) for kv_format, profile in profiles.items()})
    done("pool")
    model = build_model(
        packed.config, packed.linears, packed.vectors, ops, memory.arena.blocks, config.spec, max_model_len=config.effective_max_len
    )
    done("model")
    # Last, as it takes the folder: whatever fails before leaves it free.
    tiers: Tiers | None = None
    if config.disk_tier is not None:
        from kvist.engine.tiers import open_disk_tier

        tiers = open_disk_tier(config.disk_tier, memory.manager, memory.arena.blocks, warn or _warn)
    return Loaded(config, ops, model, memory.manager, memory.arena, tokenizer, template, tiers)


def _stages(name: str, report: Report | None) -> Callable[[str, int, int], None] | None:
    """A pull's progress as one sentence for each of its stages."""
    if report is None:
        return None
    told: set[str] = set()

    def progress(stage: str, done: int, total: int) -> None:
        if stage not in told:
            told.add(stage)
            report(f"Pulling {name}: {stage}.")

    return progress


@contextmanager
def _no_collections() -> Iterator[None]:
    """What is loaded here stays, so that looking among it for garbage, again and again while it grows, finds nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def _pack(path: Path, options: EngineOptions, report: Report | None) -> PackedModel:
    """The packed model with its text files, from the cache or made now."""
    from kvist.weights.pack import load_packed, write_packed

    dtype = DTYPES[options.dtype]
    packed = load_packed(path, options.quantization, dtype)
    if packed is not None and packed.files.get(VERSION_FILE) == TEXT_VERSION:
        return packed
    from kvist.weights.source import open_model

    if report is not None:
        report(f"Packing {path.name} for the kernels, once.")
    source = open_model(path)
    return write_packed(path, source, options.quantization, _text_files(source.tokenizer, source.config), dtype)


def _text_files(source: TokenizerSource, config: ModelConfig) -> dict[str, bytes]:
    """What a pack keeps of a model's tokenizer and template, ready to load."""
    from kvist.text.build import build_tokenizer

    tokenizer_json, info = build_tokenizer(source, eos_token_ids=config.eos_token_ids, bos_token_id=config.bos_token_id)
    files = {VERSION_FILE: TEXT_VERSION, INFO_FILE: info.to_json(), **split_tokenizer(tokenizer_json)}
    if source.chat_template is not None:
        files[TEMPLATE_FILE] = source.chat_template.encode()
    return files


def _load_text(files: Mapping[str, bytes]) -> tuple[Tokenizer, ChatTemplate | None]:
    info = TokenizerInfo.from_json(files[INFO_FILE])
    tokenizer = Tokenizer(join_tokenizer(files), info)
    template = files.get(TEMPLATE_FILE)
    return tokenizer, None if template is None else ChatTemplate(template.decode(), info)
