"""Joins the two sides of KV memory: the decider that hands out block ids, and the arena that the ids stand for.

Knows no model and no request. Invariant: every id that the decider can hand out is a block of the arena.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass

from kvist.config import EngineConfig
from kvist.kv.contiguous import ContiguousSpans
from kvist.kv.manager import KVManager
from kvist.kv.memory import KVMemory
from kvist.kv.span_manager import SpanManager
from kvist.kv.spans import Span, SpanAllocator
from kvist.kv.virtual import VirtualSpans
from kvist.store.arena import Arena


@dataclass(frozen=True)
class Memory:
    manager: KVMemory
    arena: Arena


def make_memory(config: EngineConfig, key: bytes) -> Memory:
    """The memory that `config.kv_allocator` names. `key`: see `KVManager`. Raises ConfigError."""
    spec, num_blocks = config.spec, config.num_kv_blocks
    if config.kv_allocator == "paged":
        manager = KVManager(
            spec, num_blocks, enable_prefix_caching=config.enable_prefix_caching, key=key, watermark=config.watermark
        )
        return Memory(manager, Arena(num_blocks, spec.block_bytes))
    if config.kv_allocator == "contiguous":
        spans = _contiguous(config)
    else:
        spans = _virtual(config, on_evict=lambda span: span_manager.on_evict(span))
    span_manager = SpanManager(
        spec, num_blocks, spans, enable_prefix_caching=config.enable_prefix_caching, key=key, watermark=config.watermark
    )
    return Memory(span_manager, Arena(spans.num_ids, spec.block_bytes, huge_pages=config.kv_allocator == "contiguous"))


def _contiguous(config: EngineConfig) -> SpanAllocator:
    return ContiguousSpans(config.num_kv_blocks, len(config.spec.groups), config.spec.block_bytes)


def _virtual(config: EngineConfig, on_evict: Callable[[Span], None]) -> SpanAllocator:
    """As many slots are kept after their requests as may run: each is a prefix that the next request may share."""
    return VirtualSpans(
        config.num_kv_blocks,
        len(config.spec.groups),
        config.spec.block_bytes,
        length=-(-config.effective_max_len // config.spec.block_size),
        num_slots=config.max_num_seqs,
        num_kept_slots=config.max_num_seqs if config.enable_prefix_caching else 0,
        page_bytes=mmap.PAGESIZE,
        on_evict=on_evict,
    )
