"""Walks over all cached blocks, a bounded piece at a time, while blocks come and go between the pieces.

A pool may have millions of blocks, and who serves requests must not stand still for all of them. A walk is a generator that looks
at a few blocks, yields, and returns what it has found in the end; whoever drives it chooses how many pieces it takes at a time. It
goes by block ids, which do not change, so no change between two pieces confuses it; where a second block of a content takes the
first one's place meanwhile, it looks there too. What it promises: each block is told as it was at one moment of the walk; one that
is cached all the time is told; one that comes or goes meanwhile may be told or not. A piece is a number of blocks: this module
reads no clock.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from itertools import compress
from struct import unpack_from
from typing import NamedTuple, TypeVar

from kvist.kv.block import BlockHash
from kvist.kv.keeper import Keeper
from kvist.kv.prefix import PrefixIndex
from kvist.kv.stretch import BLOCK_BYTES, NAME_FORMAT, Stretch
from kvist.kv.uses import Notes

PIECE_BLOCKS = 128
"""Ids looked at at once."""
FLUSHED_BLOCKS = 64
"""About as many blocks are taken out at once, which costs more."""

Result = TypeVar("Result")
Walk = Generator[None, None, Result]


def finish(walk: Walk[Result]) -> Result:
    """The rest of a walk at once."""
    while True:
        try:
            next(walk)
        except StopIteration as end:
            result: Result = end.value
            return result


class Listed(NamedTuple):
    """A cached block of the first KV group. `holders` are the requests that hold it."""

    block_id: int
    name: BlockHash
    parent: BlockHash
    root: BlockHash
    num_tokens: int
    holders: int
    priority: int
    pinned: bool


def blocks_from(
    index: PrefixIndex, keeper: Keeper, root: BlockHash | None, start: int, limit: int
) -> Walk[tuple[list[Listed], int | None]]:
    """The first `limit` blocks of one root (or all) with the id `start` or a higher one, by id; and the id of the next, None if
    there is none."""
    pool, retention, found = keeper.pool, keeper.retention, list[Listed]()
    for begin in range(start, index.num_blocks, PIECE_BLOCKS):
        for block_id, stretch in enumerate(index.stretches_of(begin, begin + PIECE_BLOCKS), begin):
            if stretch is None or stretch.group or (root is not None and stretch.root != root):
                continue
            if len(found) == limit:
                return found, block_id
            offset = stretch.block_ids().index(block_id)
            pinned = retention.is_pinned(block_id)
            found.append(
                Listed(
                    block_id,
                    stretch.name(offset),
                    stretch.name(offset - 1) if offset else stretch.parent,
                    stretch.root,
                    index.num_tokens(block_id),
                    pool.ref_count(block_id) - pinned,
                    retention.priority(block_id),
                    pinned,
                )
            )
        yield
    return found, None


class Part(NamedTuple):
    """Some stretches at one moment, in columns: an object for each would keep Python's garbage collector busy."""

    parents: list[BlockHash]
    data: list[bytes]
    """As `Stretch.data`."""
    finds: list[int]
    used_at: list[float]
    """Noted of the last block."""
    notes: list[Notes]
    tails: dict[BlockHash, int]
    """Of blocks that are not full, how many tokens they hold."""
    holders: dict[BlockHash, int]
    """Of those that requests hold, how many."""
    pinned: set[BlockHash]

    def blocks(self) -> Iterator[tuple[BlockHash, tuple[BlockHash, ...]]]:
        """Of each stretch the name before it, or the root, and its own."""
        for parent, data in zip(self.parents, self.data, strict=True):
            yield parent, unpack_from(len(data) // BLOCK_BYTES * NAME_FORMAT, data)


class Listing(NamedTuple):
    """All cached blocks of the first KV group, of one root or all. A name may stand in several parts; the last is the latest."""

    parts: list[Part]
    roots: set[BlockHash]


def listing(index: PrefixIndex, keeper: Keeper, root: BlockHash | None) -> Walk[Listing]:
    found, unseen, replaced = Listing([], set()), bytearray(b"\1") * index.num_blocks, dict[int, None]()

    def tell(here: Iterable[Stretch | None]) -> None:
        stretches = [one for one in dict.fromkeys(here) if one is not None and not one.group and (root is None or one.root == root)]
        if stretches:
            found.roots.update({one.root for one in stretches})
            found.parts.append(_part(index, keeper, stretches))
            # Who has one of these ids later, and other content, was not there all the time.
            for one in stretches:
                if one.num_blocks > 1:
                    for block_id in one.block_ids():
                        unseen[block_id] = 0

    with index.watch(replaced):
        for begin in range(0, index.num_blocks, PIECE_BLOCKS):
            end = begin + PIECE_BLOCKS
            tell(compress(index.stretches_of(begin, end), unseen[begin:end]))
            yield
        while replaced:
            piece = [replaced.popitem()[0] for _ in range(min(PIECE_BLOCKS, len(replaced)))]
            tell(one for block_id in piece for one in index.stretches_of(block_id, block_id + 1))
            yield
    return found


def _part(index: PrefixIndex, keeper: Keeper, stretches: list[Stretch]) -> Part:
    part = Part(
        [one.parent for one in stretches],
        [one.data for one in stretches],
        [one.finds for one in stretches],
        [one.used_at for one in stretches],
        [one.notes for one in stretches],
        {},
        {},
        set(),
    )
    # Most blocks are full, held by nobody and not pinned.
    block_ids, retention = [block_id for one in stretches for block_id in one.block_ids()], keeper.retention
    for block_id, count in keeper.pool.held_among(block_ids):
        name = index.name_of(block_id)
        if pinned := retention.is_pinned(block_id):
            part.pinned.add(name)
        if count > pinned:
            part.holders[name] = count - pinned
    for block_id in index.tails_among(block_ids):
        part.tails[index.name_of(block_id)] = index.num_tokens(block_id)
    return part


def flush(index: PrefixIndex, keeper: Keeper, root: BlockHash | None) -> Walk[int]:
    """Forget what was cached of one root (or all) when the walk began, as far as nobody holds it when the walk ends. Returns how
    many blocks that were."""
    held = dict[int, None]()
    with index.watch(held):
        return (yield from _flush(index, keeper, root, held))


def _flush(index: PrefixIndex, keeper: Keeper, root: BlockHash | None, held: dict[int, None]) -> Walk[int]:
    """`held` gets the blocks, all held, that have taken the place of others."""
    pool, count, begin = keeper.pool, 0, 0
    while begin < index.num_blocks:
        free: list[int] = []
        for one in dict.fromkeys(index.stretches_of(begin, begin + PIECE_BLOCKS)):
            if one is None or (root is not None and one.root != root):
                continue
            block_ids = one.block_ids().tolist()
            if in_use := dict.fromkeys(block_id for block_id, _ in pool.held_among(block_ids)):
                held |= in_use
                block_ids = [block_id for block_id in block_ids if block_id not in in_use]
            free += reversed(block_ids)
            if len(free) >= FLUSHED_BLOCKS:
                # Stretches may change before the next piece: it looks at these ids again.
                break
        else:
            begin += PIECE_BLOCKS
        keeper.forget(free, "flushed")
        count += len(free)
        yield
    # What was held when the walk came to it may have been let go since. The walk ends at a moment when none of that is free.
    while pool.free_among(list(held)):
        ids = list(held)
        for begin in range(0, len(ids), PIECE_BLOCKS):
            free = pool.free_among(ids[begin : begin + PIECE_BLOCKS])
            for block_id in free:
                del held[block_id]
            mine = [block_id for block_id in free if root is None or index.root_of(block_id) == root]
            keeper.forget(mine, "flushed")
            count += len(mine)
            yield
    return count
