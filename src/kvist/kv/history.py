"""What happened to blocks, and which prompts came: two bounded records from which misses are explained.

Both hold what the manager has anyway (hashes, packed tokens), and cost O(1) a batch of blocks and a request; the prompts are kept
by `kv/trails.py`. This module decides nothing. Invariants: event numbers ascend by one and never repeat; neither record grows
beyond its bounds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvist.kv.block import HASH_BYTES, BlockHash, PackedNames, Tail

MAX_EVENTS = 4096
MAX_PROMPTS = 128
PART, SOON = 4, 64
"""So many tokens in succession are taken for a part of an answer, where they stand no further behind the first differing one."""


def max_event_blocks(num_blocks: int) -> int:
    """An event keeps the names of its blocks, of some 90 bytes each: an eighth of the pool's, within bounds."""
    return min(max(num_blocks // 8, 1 << 10), 1 << 16)


def max_prompt_tokens(num_blocks: int) -> int:
    """A remembered token takes 4 bytes, and its part of a name."""
    return min(max(4 * num_blocks, 1 << 13), 1 << 18)


class KVEvent(NamedTuple):
    """`kind` (and `reason`) on the device: stored (computed or restored from a tier), removed (evicted, flushed, superseded),
    retained, expired or withdrawn (of claims). In a tier: stored, removed (evicted, damaged, failed), or not_stored (dropped,
    failed). `owners` are the roots of the blocks' prefixes, one for all or one each; None where that is not known."""

    number: int
    time: float
    kind: str
    reason: str
    owners: tuple[BlockHash | None, ...]
    block_hashes: Sequence[BlockHash]
    tier: str = "device"

    def of(self, owner: BlockHash | None) -> list[BlockHash]:
        """The blocks that `owner` may see (None: all)."""
        if owner is None:
            return list(self.block_hashes)
        if len(self.owners) == 1:
            return list(self.block_hashes) if self.owners[0] == owner else []
        return [name for name, root in zip(self.block_hashes, self.owners, strict=True) if root == owner]


_Entry = tuple[int, float, str, str, tuple[BlockHash | None, ...] | BlockHash, Sequence[BlockHash] | bytes, str]
"""The number of its blocks, and what else an event is made of: of most one owner, and their names may stand one after the other."""


class EventLog:
    """The latest events, up to MAX_EVENTS and `max_blocks` blocks in all."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._events: deque[_Entry] = deque()
        """Most are never asked for."""
        self._num_blocks = 0
        self.next_number = 0

    def add(
        self,
        time: float,
        kind: str,
        reason: str,
        owners: tuple[BlockHash | None, ...],
        block_hashes: Sequence[BlockHash],
        tier: str = "device",
    ) -> None:
        if not block_hashes:
            return
        self._add((len(block_hashes), time, kind, reason, owners, block_hashes, tier))

    def add_of(self, time: float, kind: str, reason: str, owner: BlockHash, block_hashes: Sequence[BlockHash]) -> None:
        """The same of blocks of one owner, at least one, on the device."""
        count = len(block_hashes)
        # A list of one name would take as much as the name.
        self._add((count, time, kind, reason, owner, block_hashes if count > 1 else block_hashes[0], "device"))

    def add_packed(self, time: float, kind: str, reason: str, owner: BlockHash, names: bytes) -> None:
        """The same of names that stand one after the other."""
        self._add((len(names) // HASH_BYTES, time, kind, reason, owner, names, "device"))

    def _add(self, entry: _Entry) -> None:
        events, num_blocks = self._events, self._num_blocks + entry[0]
        events.append(entry)
        self.next_number += 1
        while len(events) > MAX_EVENTS or (num_blocks > self._max_blocks and len(events) > 1):
            num_blocks -= events.popleft()[0]
        self._num_blocks = num_blocks

    def since(self, number: int, limit: int) -> list[KVEvent]:
        """Up to `limit` events from `number` on, oldest first. Earlier ones than the first kept are gone."""
        first = self.next_number - len(self._events)
        start = max(0, number - first)
        return [self._event(first, place) for place in range(start, min(len(self._events), start + limit))]

    def _event(self, first: int, place: int) -> KVEvent:
        _, time, kind, reason, owners, names, tier = self._events[place]
        owners = owners if isinstance(owners, tuple) else (owners,)
        return KVEvent(first + place, time, kind, reason, owners, PackedNames(names) if isinstance(names, bytes) else names, tier)


@dataclass(slots=True)
class Seen:
    """A sequence that is open, whose lists are the request's and the manager's own, and grow with them; or one that has ended, and
    `prompt` is all of it, packed: nobody changes that any more."""

    root: BlockHash
    hashes: list[BlockHash]
    prompt: Sequence[int]
    output: Sequence[int]
    tail: Tail | None = None
    """Its last block, if that is not full and can be found."""
    num_prompt_tokens: int | None = None
    """Of a request that has ended."""
    time: float = 0.0
    """When it ended."""

    def token_id(self, position: int) -> int:
        split = len(self.prompt)
        return self.prompt[position] if position < split else self.output[position - split]

    def token_ids(self, start: int, stop: int) -> list[int]:
        split = len(self.prompt)
        if stop <= split:
            return list(self.prompt[start:stop])
        return [*self.prompt[start:stop], *self.output[max(0, start - split) : max(0, stop - split)]]

    def common(self, token_ids: Sequence[int], hashes: Sequence[BlockHash], block_size: int) -> int:
        """How many leading tokens of one that has ended are equal. Equal hashes mean equal beginnings, so halving finds the last
        equal block."""
        both = min(len(hashes), len(self.hashes))
        blocks = bisect_left(range(both), True, key=lambda block: hashes[block] != self.hashes[block])
        position, end = blocks * block_size, min(len(self.prompt), len(token_ids))
        while position < end and self.prompt[position] == token_ids[position]:
            position += 1
        return position


def nearest(
    ended: Iterable[Seen], root: BlockHash, token_ids: Sequence[int], hashes: Sequence[BlockHash], block_size: int
) -> tuple[Seen, int] | None:
    """The request of `root` with the longest common beginning, the latest of equals, and its length in tokens; None if nobody
    shares a token."""
    best, length = None, 0
    for seen in ended:
        if seen.root != root or seen.num_prompt_tokens is None:
            continue
        if (common := seen.common(token_ids, hashes, block_size)) >= max(length, 1):
            best, length = seen, common
    return None if best is None else (best, length)


def rewritten(
    ended: Iterable[Seen], root: BlockHash, token_ids: Sequence[int], hashes: Sequence[BlockHash], block_size: int, slack: int
) -> int | None:
    """Where a prompt leaves a known conversation within its answer (or the last `slack` tokens before that), if nobody shares more
    with it and a part of the answer stands just before that place or soon behind it; else it is another question."""
    longest, place = 0, None
    for seen in ended:
        if seen.root != root or seen.num_prompt_tokens is None:
            continue
        if (common := seen.common(token_ids, hashes, block_size)) < max(longest, 1):
            continue
        within = seen.num_prompt_tokens - slack <= common < min(len(seen.prompt), len(token_ids))
        start = max(min(common, seen.num_prompt_tokens), common - PART)
        again = within and _share_a_part(seen.prompt[seen.num_prompt_tokens :], token_ids[start : common + SOON])
        place = common if again or place == common else None
        longest = common
    return place


def _share_a_part(answer: Sequence[int], behind: Sequence[int]) -> bool:
    """Whether PART successive tokens (or all, if it has fewer) of an answer stand in the other."""
    size = min(PART, len(answer))
    parts = {tuple(answer[start : start + size]) for start in range(len(answer) - size + 1)}
    return any(tuple(behind[start : start + size]) in parts for start in range(len(behind) - size + 1))
