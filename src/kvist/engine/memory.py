"""Joins the two sides of KV memory: the decider that hands out block ids, and the arena that the ids stand for.

Knows no model and no request. Invariant: every id that the decider can hand out is a block of the arena.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import NamedTuple

from kvist.config import EngineConfig
from kvist.kv.kinds import Sizes, make_kv_memory
from kvist.kv.memory import KVMemory
from kvist.store.arena import Arena


class Memory(NamedTuple):
    manager: KVMemory
    arena: Arena


def make_memory(config: EngineConfig, keys: Mapping[str, bytes]) -> Memory:
    """The memory that `config.kv_allocator` names. `keys`: by KV format, see `KVManager`. Raises ConfigError."""
    manager, num_ids = make_kv_memory(
        config.kv_allocator,
        config.spec,
        Sizes(config.num_kv_blocks, config.max_model_len, config.max_num_seqs, mmap.PAGESIZE),
        enable_prefix_caching=config.enable_prefix_caching,
        key=keys[config.spec.kv_format],
        keys=keys,
        watermark=config.watermark,
        eviction_policy=config.eviction_policy,
        tiered=config.disk_tier is not None,
        pin_budget=config.kv_pin_budget,
        priority_budget=config.kv_priority_budget,
    )
    # A virtual arena gives memory back page by page, which huge pages would prevent.
    return Memory(manager, Arena(num_ids, config.spec.block_bytes, huge_pages=config.kv_allocator != "virtual"))
