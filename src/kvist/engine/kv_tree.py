"""The radix view of what is cached, worked out from a listing, in any thread but the engine's.

A listing may have millions of blocks, and what works on one holds Python's lock, for which the engine thread would wait up to
5 ms each time it needs it. So this work stops for a moment after each few hundred blocks, and lets go of what it has built in small
parts. The listing may have been made while blocks came and went (`kv/walks.py`): a name counts once, wherever it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from heapq import nsmallest
from itertools import chain, pairwise
from math import inf
from time import sleep
from typing import Any, NamedTuple

from kvist.errors import InvalidRequestError
from kvist.kv.block import HASH_BYTES, BlockHash
from kvist.kv.uses import Notes
from kvist.kv.walks import Listing, Part

AT_ONCE = 512
"""Blocks between two stops: some 0.2 ms."""
RUN_BLOCKS = 4
"""A run costs as much as so many blocks, besides those it has."""
PAUSE_SECONDS = 1e-4


class _Pace:
    """Lets other threads go first now and then."""

    def __init__(self) -> None:
        self._left = AT_ONCE

    def did(self, count: int) -> None:
        """With a run of so many blocks."""
        self._left -= RUN_BLOCKS + count
        if self._left <= 0:
            self._left = AT_ONCE
            sleep(PAUSE_SECONDS)

    def drain(self, take: Callable[[], object], count: int) -> None:
        """What is let go in one piece holds the lock for as long as that takes."""
        for start in range(0, count, AT_ONCE):
            for _ in range(min(AT_ONCE, count - start)):
                take()
            self.did(AT_ONCE)


class _Node(NamedTuple):
    """A run of blocks without a fork, and what hangs below it. Nodes are sorted as they are shown, the largest first."""

    minus_size: int
    first: BlockHash
    last: BlockHash
    blocks: int
    tokens: int
    children: int
    hits: int
    used_at: float
    holders: int
    pinned: bool


@dataclass
class Prefixes:
    """`now` is the time of the question."""

    listing: Listing
    block_size: int
    now: float

    def tree(self, parent: str | None, limit: int) -> dict[str, Any]:
        """The radix view below a block (or the beginnings): runs of blocks without a fork, with how many children each has, how
        many blocks hang below, how many requests found it and when it was used last. Blocks whose predecessor is gone are not
        reachable and only counted. The listing is used up. Raises InvalidRequestError."""
        below = None if parent is None else _unhex(parent)
        tree = _Tree(self.listing.parts, self.block_size)
        try:
            tops = sorted(self.listing.roots) if below is None else [below]
            total = sum(map(tree.num_children, tops))
            shown = nsmallest(limit, (tree.node(name) for top in tops for name in tree.children(top)))
            unreachable = len(tree.names) - tree.num_reached if below is None else None
            return {"prefixes": list(map(self._told, shown)), "total": total, "unreachable_blocks": unreachable}
        finally:
            tree.let_go()

    def _told(self, node: _Node) -> dict[str, Any]:
        return {
            "first": node.first.hex(),
            "last": node.last.hex(),
            "blocks": node.blocks,
            "tokens": node.tokens,
            "children": node.children,
            "blocks_below": -node.minus_size - node.blocks,
            "hits": node.hits,
            "used_ago": self._ago(node.used_at, node.holders),
            "holders": node.holders,
            "pinned": node.pinned,
        }

    def _ago(self, used_at: float, holders: int) -> float | None:
        """Seconds since the last use; None of what was brought from a tier and not used since."""
        if holders:
            return 0.0
        return None if used_at == -inf else round(max(0.0, self.now - used_at), 3)


class _Tree:
    """Names, and which follow which. Most blocks have one that follows or none: no object is kept for those."""

    def __init__(self, parts: list[Part], block_size: int) -> None:
        """The parts are used up."""
        self.names: set[BlockHash] = set()
        self.num_reached = 0
        self._block_size = block_size
        self._next: dict[BlockHash, BlockHash] = {}
        """The first that follows a name, or a root."""
        self._others: dict[BlockHash, list[BlockHash]] = {}
        """The others that do."""
        self._finds: dict[BlockHash, int] = {}
        self._used_at: dict[BlockHash, float] = {}
        self._tails: dict[BlockHash, int] = {}
        self._holders: dict[BlockHash, int] = {}
        self._pinned: set[BlockHash] = set()
        self._pace = _Pace()
        while parts:
            # The latest first: of a name that stands in several it counts.
            self._add_part(parts.pop())

    def _add_part(self, part: Part) -> None:
        known = self.names
        self._tails |= {name: count for name, count in part.tails.items() if name not in known}
        self._holders |= {name: count for name, count in part.holders.items() if name not in known}
        self._pinned |= part.pinned - known
        for (before, names), finds, used_at, notes in zip(part.blocks(), part.finds, part.used_at, part.notes, strict=True):
            self._note(names, finds, used_at, notes)
            self._add(before, names)

    def _note(self, names: tuple[BlockHash, ...], finds: int, used_at: float, notes: Notes) -> None:
        """Finds and last use of a stretch's last block; of others, or of blocks that were behind it."""
        last = len(names) - 1
        for offset, more, at in ((last, finds, used_at), *notes):
            name = names[min(offset, last)]
            if at != -inf and name not in self.names:
                self._finds[name] = self._finds.get(name, 0) + more
                self._used_at[name] = max(self._used_at.get(name, at), at)

    def _add(self, before: BlockHash, names: tuple[BlockHash, ...]) -> None:
        known, following = self.names, self._next
        if known.isdisjoint(names) and following.keys().isdisjoint(names[:-1]):
            # Nearly always, and in fewer calls.
            known.update(names)
            following.update(pairwise(names))
            self._link(before, names[0])
        else:
            for name in names:
                if name not in known:
                    known.add(name)
                    self._link(before, name)
                before = name
        self._pace.did(len(names))

    def _link(self, before: BlockHash, name: BlockHash) -> None:
        if self._next.setdefault(before, name) is not name:
            self._others.setdefault(before, []).append(name)

    def num_children(self, name: BlockHash) -> int:
        return (name in self._next) + len(self._others.get(name, ()))

    def children(self, name: BlockHash) -> Iterator[BlockHash]:
        first = self._next.get(name)
        return iter(()) if first is None else chain((first,), self._others.get(name, ()))

    def node(self, top: BlockHash) -> _Node:
        """The run that begins with a block."""
        size, holders = self._block_size, self._holders
        run = self._run(top)
        last, below = run[-1], 0
        hits, used_at = self._uses(run)
        stack = [self.children(last)]
        while stack:
            if (name := next(stack[-1], None)) is None:
                stack.pop()
                continue
            more = self._run(name)
            below += len(more)
            more_hits, more_used_at = self._uses(more)
            hits, used_at = hits + more_hits, max(used_at, more_used_at)
            if more[-1] in self._next:
                stack.append(self.children(more[-1]))
        self.num_reached += len(run) + below
        return _Node(
            -len(run) - below,
            top,
            last,
            len(run),
            # Nothing follows a block that is not full.
            size * (len(run) - 1) + self._tails.get(last, size),
            self.num_children(last),
            hits,
            used_at,
            max(holders.get(name, 0) for name in run) if holders else 0,
            not self._pinned.isdisjoint(run),
        )

    def _run(self, top: BlockHash) -> list[BlockHash]:
        """From a block on until a fork or the end."""
        run, following, others = [top], self._next, self._others
        while (name := following.get(run[-1])) is not None and run[-1] not in others:
            run.append(name)
        self._pace.did(len(run))
        return run

    def _uses(self, run: list[BlockHash]) -> tuple[int, float]:
        """What is noted of these blocks: finds, and the last use."""
        hits, used_at = 0, -inf
        for name in filter(self._used_at.__contains__, run):
            hits += self._finds[name]
            used_at = max(used_at, self._used_at[name])
        return hits, used_at

    def let_go(self) -> None:
        drain = self._pace.drain
        for held in (self._next, self._finds, self._used_at, self._tails, self._holders):
            drain(held.popitem, len(held))
        for others in self._others.values():
            drain(others.pop, len(others))
        drain(self._pinned.pop, len(self._pinned))
        drain(self.names.pop, len(self.names))


def _unhex(text: str) -> BlockHash:
    with suppress(ValueError):
        if len(name := bytes.fromhex(text)) == HASH_BYTES:
            return BlockHash(name)
    raise InvalidRequestError(f"{text[:80]!r} is no block hash; take one from this listing.", param="parent")
