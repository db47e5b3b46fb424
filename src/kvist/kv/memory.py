"""What a scheduler asks of KV memory: the `KVMemory` protocol, what an allocator can do, and one account of bytes.

Three kinds implement it. Paged (`kv/manager.py`): any block anywhere, shared in place. Contiguous and virtual (`kv/span_manager.py`
over `kv/contiguous.py` or `kv/virtual.py`): each request has one run of consecutive block ids. Nothing here changes state.

Fragmentation is defined once, for all of them. `held` are the bytes that live requests keep from others: blocks (paged), whole
reserved spans (contiguous), committed pages of spans (virtual). `used` are the bytes of tokens in them that have been computed.
Internal fragmentation is (held - used) / held. External fragmentation is the share of the free bytes that lie outside the longest
hole: 0 where any free piece serves anywhere.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from kvist.errors import ConfigError
from kvist.kv.block import BlockHash
from kvist.kv.prefix import PrefixIndex, PrefixMatch
from kvist.kv.spec import KVSpec
from kvist.request import PrefixMiss, Request


class KVUsage(NamedTuple):
    """The pool at one moment, in blocks; `live + cached + free == total`."""

    total: int
    live: int
    """Held by at least one request."""
    cached: int
    """Held by nobody, but still found by the prefix index until reused."""
    free: int
    """Held by nobody, and of no use to anybody."""
    evictions: int
    """Cached blocks that were reused, since the start."""


class MemoryAccount(NamedTuple):
    """KV memory at one moment, in bytes; the definitions are in the module's docstring."""

    reserved: int
    """Set aside for live requests, with memory behind it or not."""
    committed: int
    """With physical memory behind it: written once (paged, contiguous) or committed and not released (virtual)."""
    held: int
    used: int
    shared: int
    """What requests would hold more if nothing were shared."""
    external_fragmentation: float

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        return {
            "reserved": self.reserved,
            "committed": self.committed,
            "held": self.held,
            "used": self.used,
            "shared": self.shared,
        }

    @property
    def internal_fragmentation(self) -> float:
        return (self.held - self.used) / self.held if self.held else 0.0


class MemoryPlan(NamedTuple):
    """What must happen to the arena before a step: first ranges of bytes are given back to the system, then blocks are copied, in
    order. No range holds the source of a copy."""

    releases: tuple[tuple[int, int], ...] = ()
    """[start, stop) offsets in the arena, whole memory pages."""
    copies: tuple[tuple[int, int], ...] = ()
    """(source block id, destination block id)."""

    def __bool__(self) -> bool:
        return bool(self.releases or self.copies)


NO_PLAN = MemoryPlan()


def require_a_token(spec: KVSpec, num_blocks: int) -> None:
    """Raises ConfigError for a pool that holds none."""
    if num_blocks < len(spec.groups):
        raise ConfigError(
            f"num_kv_blocks={num_blocks} is less than the {len(spec.groups)} blocks that one token of this model takes (one per KV "
            "group): raise num_kv_blocks or kv_cache_memory."
        )


def account_blocks(
    spec: KVSpec, *, num_live: int, num_touched: int, held: Iterable[tuple[Sequence[array[int]], Sequence[int], int]]
) -> MemoryAccount:
    """Of a pool with `num_live` held blocks. `held`: per request its tables, how many leading entries of each it has let go, and
    how many tokens it has computed. A block that is not full is a request's own, or shared by forks that are equally far."""
    num_held = empty = 0
    tails = set()
    for tables, let_go, computed in held:
        num_held += sum(len(table) - gone for table, gone in zip(tables, let_go, strict=True))
        if tables[0] and tables[0][-1] not in tails:
            tails.add(tables[0][-1])
            empty += len(tables) * (len(tables[0]) * spec.block_size - computed)
    block_bytes = spec.block_bytes
    return MemoryAccount(
        reserved=num_live * block_bytes,
        committed=num_touched * block_bytes,
        held=num_live * block_bytes,
        used=num_live * block_bytes - empty * block_bytes // spec.block_size,
        shared=max(0, num_held - num_live) * block_bytes,
        external_fragmentation=0.0,
    )


class KVMemory(Protocol):
    """The memory of requests, decided on integers. See `kv/manager.py` for the order of calls."""

    spec: KVSpec
    num_blocks: int
    """Blocks that have physical memory at once."""
    enable_prefix_caching: bool
    shares_in_place: bool
    """Whether several requests can hold one block, so that one can fork off another."""

    @property
    def index(self) -> PrefixIndex:
        """What can be found now; empty without prefix caching."""

    @property
    def num_free_blocks(self) -> int: ...

    @property
    def num_pinned_blocks(self) -> int:
        """Held though no request may hold them."""

    def num_pledged_blocks(self, to_pin: Sequence[int] = (), salt: str = "") -> int:
        """Pinned, or to be pinned by an open request, or by one that would pin the prompt `to_pin`: a new request cannot count on
        them."""

    @property
    def request_ids(self) -> frozenset[str]: ...

    def max_request_tokens(self, limit: int) -> int:
        """The most tokens, up to `limit`, that one request alone can have."""

    def hashes_of(self, token_ids: Sequence[int], salt: str) -> tuple[BlockHash, list[BlockHash]]:
        """Root and names of the whole blocks of a prompt."""

    def find(self, token_ids: list[int], salt: str) -> PrefixMatch:
        """What a prompt would find now."""

    def explain(self, token_ids: list[int], salt: str, position: int, plain_salt: str | None) -> PrefixMiss:
        """Why a prompt finds no more than is before `position`. `plain_salt`: of the same owner's prefixes where it asks for
        no salt; it is looked for there too."""

    def match(self, request: Request) -> PrefixMatch: ...

    def no_match(self) -> PrefixMatch: ...

    def explain_miss(self, request: Request, match: PrefixMatch) -> PrefixMiss: ...

    def is_being_computed(self, request: Request, match: PrefixMatch, running: Iterable[Request]) -> bool: ...

    def ways(self, request: Request, match: PrefixMatch) -> list[PrefixMatch]:
        """How a request may use the hit `match`, as there is room for it, the best first."""

    def has_room(self, request: Request, match: PrefixMatch, *, alone: bool, growth: int = 0) -> bool:
        """Whether a waiting request can be admitted with the hit `match`; `alone`: nobody runs, so no reserve is kept. `growth`:
        blocks that stay free in any case."""

    def has_room_to_fork(self, count: int) -> bool:
        """Whether so many forks could go on, each writing to blocks of its own, and leave the reserve free."""

    def fit(self, request: Request, num_new_tokens: int) -> int: ...

    def block_tables(self, request: Request) -> tuple[array[int], ...]: ...

    def usage(self) -> KVUsage: ...

    def account(self, requests: Iterable[Request]) -> MemoryAccount:
        """Bytes now; `requests` are all that hold blocks."""

    def advance(self, now: float) -> float:
        """It is `now`, in seconds that never go back; called before each step and each `add`. Returns when time alone will change
        something next; inf: never."""

    def add(self, request: Request) -> None: ...

    def attach(self, request: Request, match: PrefixMatch) -> None: ...

    def fork(self, source: Request, request: Request) -> None:
        """Hold what `source` does, which has committed what it computed; the caller sets `num_computed_tokens`."""

    def allocate(self, request: Request, num_new_tokens: int) -> bool: ...

    def commit(self, request: Request) -> None: ...

    def trim(self, request: Request) -> None: ...

    def rewind(self, request: Request) -> None: ...

    def release(self, request: Request) -> int: ...

    def free(self, request: Request, *, in_step: bool = False) -> int:
        """Take all blocks back from a request that has ended, and forget it; how many became free. `in_step`: its last step was not
        updated, so what was planned for it may not have been done."""

    def take_plan(self) -> MemoryPlan:
        """What has to be done to the arena before the next step; each item is given out once."""

    def complete_plan(self) -> None:
        """What was taken has been done, or the step was given up."""

    def check_invariants(self) -> None: ...
