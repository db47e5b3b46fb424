"""KV memory by the name of its allocator. Decides nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvist.kv.manager import KVManager
from kvist.kv.memory import KVMemory
from kvist.kv.spec import KVSpec


class Sizes(NamedTuple):
    """What bounds a memory: blocks with physical memory at once, tokens of a request, requests at once, bytes of a system page."""

    num_blocks: int
    max_len: int
    max_num_seqs: int
    page_bytes: int = 4096


def make_kv_memory(
    allocator: str,
    spec: KVSpec,
    sizes: Sizes,
    *,
    enable_prefix_caching: bool = True,
    key: bytes = b"",
    keys: Mapping[str, bytes] | None = None,
    watermark: float = 0.01,
    eviction_policy: str = "density",
    pin_budget: float = 0.25,
    priority_budget: float = 0.5,
    tiered: bool = False,
) -> tuple[KVMemory, int]:
    """The memory, and how many block ids it hands out (so many blocks an arena must have). `key`, and for paged blocks
    `keys`, `eviction_policy`, the budgets and `tiered`: see `KVManager`."""
    if allocator == "paged":
        paged = KVManager(
            spec,
            sizes.num_blocks,
            enable_prefix_caching=enable_prefix_caching,
            key=key,
            keys=keys,
            watermark=watermark,
            eviction_policy=eviction_policy,
            tiered=tiered,
            pin_budget=pin_budget,
            priority_budget=priority_budget,
        )
        return paged, sizes.num_blocks
    # Spans are the exception: a start with paged blocks loads nothing of them.
    from kvist.kv.span_manager import SpanManager

    if allocator == "contiguous":
        from kvist.kv.contiguous import ContiguousSpans

        reserved = ContiguousSpans(sizes.num_blocks, len(spec.groups), spec.block_bytes)
        assert not enable_prefix_caching, "refused when options are checked"
        manager = SpanManager(spec, sizes.num_blocks, reserved, enable_prefix_caching=False, key=key, watermark=watermark)
        return manager, reserved.num_ids
    assert allocator == "virtual", f"an unknown allocator: {allocator}"
    from kvist.kv.virtual import VirtualSpans

    spans = VirtualSpans(
        sizes.num_blocks,
        len(spec.groups),
        spec.block_bytes,
        length=-(-spec.max_span_tokens(sizes.num_blocks, sizes.max_len) // spec.block_size),
        num_slots=sizes.max_num_seqs,
        # As many as may run are kept afterwards: each is a prefix that the next request may share.
        num_kept_slots=sizes.max_num_seqs if enable_prefix_caching else 0,
        page_bytes=sizes.page_bytes,
        on_evict=lambda span: virtual.on_evict(span),
    )
    virtual = SpanManager(spec, sizes.num_blocks, spans, enable_prefix_caching=enable_prefix_caching, key=key, watermark=watermark)
    return virtual, spans.num_ids
