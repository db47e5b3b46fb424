"""Runs of consecutive block ids: what a request gets from the contiguous and the virtual allocator.

A span has one run of equal length for each KV group. `SpanAllocator` hands spans out and says how far each may grow; which tokens
lie in them is known to `kv/span_manager.py`. Decides on integers, like all of `kv/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True, eq=False)
class Span:
    """Blocks [begin[g], end) of each run g are in use; ids are `starts[g]` + the logical block."""

    starts: tuple[int, ...]
    length: int
    """The most blocks of each run."""
    end: int = 0
    begin: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin = [0] * len(self.starts)


class SpanAllocator(Protocol):
    """Spans over one arena of `num_ids` block ids."""

    num_ids: int

    def can_open(self, length: int, num_blocks: int, keep: tuple[int, ...]) -> bool:
        """Whether a span of `length` can be opened and grown to `num_blocks` now, without evicting what the ids `keep` lie in."""

    def open(self, length: int) -> Span | None:
        """A new span of `length`, or None."""

    def room(self, span: Span) -> int:
        """Blocks by which the span can grow now."""

    def grow(self, span: Span, num_blocks: int) -> None:
        """At most `room`."""

    def trim(self, span: Span, group: int, begin: int) -> None:
        """The blocks of a run before `begin` are needed no more."""

    def close(self, span: Span, first: int, last: int) -> None:
        """The request is gone. Blocks [first, last) of each run are worth keeping while memory allows (none if equal)."""

    def touch(self, block_id: int) -> None:
        """A block's content was found: what lies in its span is kept a while longer, and not evicted before `take_releases`."""

    def take_releases(self) -> list[tuple[int, int]]:
        """Byte ranges of the arena to give back to the system, each given out once."""

    @property
    def num_free(self) -> int:
        """Blocks that could be handed out, kept ones included."""

    @property
    def num_kept(self) -> int:
        """Blocks of closed spans that are kept."""

    @property
    def reserved_bytes(self) -> int: ...

    @property
    def committed_bytes(self) -> int: ...

    @property
    def held_bytes(self) -> int: ...

    @property
    def external_fragmentation(self) -> float: ...

    def check_invariants(self) -> None: ...


OnEvict = Callable[[Span], None]
"""Told when a kept span is given up."""
