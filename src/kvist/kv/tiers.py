"""Which blocks a tier behind the device keeps, what is to be written to it, and what to bring back from it instead of computing it.

The decider of tiers handles names and block ids, no bytes: it emits frozen plans, and a computer carries them out (law L4). It
knows of a tier only what it was told: what was stored, and what was lost. Such knowledge may be out of date, so a plan may fail
block by block; what failed is computed.

Blocks are written when they are committed, not when they are evicted: a copy is at hand in time without holding up the step that
needs the block, a killed process leaves all but its last moments behind, and preemption by swap has nothing left to write. It costs
writing what nobody will ask for; a block is a few hundred kilobytes for 16 tokens of work, so the disk has long idled between two.

A restore is cheaper than computing again if reading its bytes at the measured rate takes less time than its tokens at theirs.
After PATIENCE refusals in a row one is restored all the same: rates are only measured by doing it, and disks have bad moments.

Invariants: a name is offered once while it is in the tier or on its way there; no block is the target of two plans; the blocks of
a restore are held (pinned) from `prepare` to `complete`, and are found by the index only after it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from kvist.kv.block import BlockHash
from kvist.kv.prefix import PrefixIndex

PATIENCE = 16
HASH_BYTES = 32
Owned = dict[BlockHash, BlockHash | None]
"""Blocks, each with the root of its prefix where that is known."""


class BlockCopy(NamedTuple):
    """One block, and what its content is called."""

    block_hash: BlockHash
    group: int
    block_id: int

    @property
    def name(self) -> bytes:
        """The name under which a store keeps it."""
        return name_of(self.group, self.block_hash)


class TransferPlan(NamedTuple):
    """Blocks to copy out (before anything else is written to them), or to fill (before `complete` says that they are)."""

    plan_id: int
    copies: tuple[BlockCopy, ...]


class Restore(NamedTuple):
    """What a tier could add to a request's hit on the device: tokens [start, stop), by blocks that the device lacks."""

    start: int
    stop: int
    missing: tuple[tuple[int, BlockHash], ...]
    """(group, name), in the order of positions."""
    root: BlockHash
    hashes: Sequence[BlockHash]
    """Of the whole prefix."""
    blocks: tuple[int, ...]
    """The numbers of the missing blocks in it."""


class TierRates(NamedTuple):
    """Measured speeds; None where nothing has been measured yet."""

    read_bytes_per_second: int | None = None
    tokens_per_second: int | None = None


def name_of(group: int, block_hash: BlockHash) -> bytes:
    return block_hash + group.to_bytes(2, "little")


def parse_name(name: bytes) -> tuple[int, BlockHash]:
    return int.from_bytes(name[HASH_BYTES:], "little"), BlockHash(name[:HASH_BYTES])


def restore_is_cheaper(rates: TierRates, num_bytes: int, num_tokens: int) -> bool:
    """Reading against computing, by cross products of integers. What was never measured is tried."""
    if rates.read_bytes_per_second is None or rates.tokens_per_second is None:
        return True
    return num_bytes * rates.tokens_per_second < num_tokens * rates.read_bytes_per_second


class Either(Container[BlockHash]):
    """What is in one place or the other."""

    def __init__(self, one: Container[BlockHash], other: Container[BlockHash]) -> None:
        self._one, self._other = one, other

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._one or block_hash in self._other


class TierDecider:
    """One tier's books. `num_groups` is the number of KV groups, `block_bytes` what one block takes."""

    def __init__(self, num_groups: int, block_bytes: int) -> None:
        self.rates = TierRates()
        self._block_bytes = block_bytes
        self._present: tuple[dict[BlockHash, BlockHash | None], ...] = tuple({} for _ in range(num_groups))
        self._storing: tuple[dict[BlockHash, BlockHash | None], ...] = tuple({} for _ in range(num_groups))
        """Each with the root of its prefix; None: found at the start, and not brought back since."""
        self._offers: list[BlockCopy] = []
        self._restores: dict[int, TransferPlan] = {}
        self._loading: set[tuple[int, BlockHash]] = set()
        self._num_plans = 0
        self._refusals = 0
        self.num_refused = 0
        """Restores that were not worth it."""

    # Writing

    def offer(self, group: int, block_hashes: Iterable[BlockHash], block_ids: Iterable[int], root: BlockHash | None = None) -> None:
        """These blocks, of a prefix behind `root`, hold what their names say, and stay as they are until `take_offers` was carried
        out."""
        present, storing = self._present[group], self._storing[group]
        for block_hash, block_id in zip(block_hashes, block_ids, strict=True):
            if block_hash not in present and block_hash not in storing:
                storing[block_hash] = root
                self._offers.append(BlockCopy(block_hash, group, block_id))

    def take_offers(self) -> TransferPlan | None:
        """What is to be copied out now, before the next step writes."""
        if not self._offers:
            return None
        self._num_plans += 1
        plan, self._offers = TransferPlan(self._num_plans, tuple(self._offers)), []
        return plan

    def stored(self, names: Iterable[bytes]) -> Owned:
        """Returns what was not known to be there."""
        new = {}
        for name in names:
            group, block_hash = parse_name(name)
            if group < len(self._present):
                root = self._storing[group].pop(block_hash, None)
                if block_hash not in self._present[group]:
                    new[block_hash] = self._present[group][block_hash] = root
        return new

    def lost(self, names: Iterable[bytes]) -> tuple[Owned, Owned]:
        """Returns what is no longer in the tier, and what has never arrived."""
        gone: Owned = {}
        missed: Owned = {}
        for name in names:
            group, block_hash = parse_name(name)
            if group < len(self._present):
                for place, out in ((self._present[group], gone), (self._storing[group], missed)):
                    if block_hash in place:
                        out[block_hash] = place.pop(block_hash)
        return gone, missed

    def keeps(self, group: int, block_hash: BlockHash) -> bool:
        """In the tier, or on its way."""
        return block_hash in self._present[group] or block_hash in self._storing[group]

    # Bringing back

    def beside(self, tables: Sequence[Container[BlockHash]]) -> tuple[Container[BlockHash], ...]:
        """Per group, what is on the device or in the tier."""
        return tuple(Either(table, present) for table, present in zip(tables, self._present, strict=True))

    def beyond(
        self, index: PrefixIndex, root: BlockHash, hashes: Sequence[BlockHash], limit: int, found_tokens: int
    ) -> Restore | None:
        """What the tier adds to the `found_tokens` of a prompt, of which `limit` blocks may be found; None if it adds nothing."""
        length = index.longest(hashes, limit, self.beside(index.among(hashes[:limit])))
        if length * index.block_size <= found_tokens:
            return None
        missing = index.missing(hashes, length)
        numbers = {block_hash: block for block, block_hash in enumerate(hashes[:length])}
        blocks = tuple(numbers[block_hash] for _, block_hash in missing)
        return Restore(found_tokens, length * index.block_size, tuple(missing), root, hashes[:length], blocks)

    @property
    def names(self) -> Sequence[Container[BlockHash]]:
        """Per group, what the tier has."""
        return self._present

    @property
    def is_empty(self) -> bool:
        return not any(self._present)

    def is_loading(self, restore: Restore) -> bool:
        """Whether another plan is bringing some of it."""
        return any(pair in self._loading for pair in restore.missing)

    def is_worth_it(self, restore: Restore) -> bool:
        """The cost model's answer, which counts its refusals."""
        if self.is_cheaper(len(restore.missing), restore.stop - restore.start) or self._refusals + 1 >= PATIENCE:
            self._refusals = 0
            return True
        self._refusals += 1
        self.num_refused += 1
        return False

    def is_cheaper(self, num_blocks: int, num_tokens: int) -> bool:
        return restore_is_cheaper(self.rates, num_blocks * self._block_bytes, num_tokens)

    def prepare(self, restore: Restore, block_ids: Sequence[int]) -> TransferPlan:
        """Fill these blocks, which the caller holds until `complete`."""
        assert not self.is_loading(restore)
        self._num_plans += 1
        pairs = zip(restore.missing, block_ids, strict=True)
        plan = TransferPlan(
            self._num_plans, tuple(BlockCopy(block_hash, group, block_id) for (group, block_hash), block_id in pairs)
        )
        self._restores[plan.plan_id] = plan
        self._loading.update(restore.missing)
        for group, block_hash in restore.missing:
            if block_hash in self._present[group]:
                self._present[group][block_hash] = restore.root
        return plan

    def complete(self, plan_id: int) -> TransferPlan:
        """The plan was carried out, as far as it could be; its blocks are the caller's again."""
        plan = self._restores.pop(plan_id)
        self._loading.difference_update((copy.group, copy.block_hash) for copy in plan.copies)
        return plan

    @property
    def num_restoring(self) -> int:
        return len(self._restores)

    def pinned(self) -> Iterator[int]:
        """The blocks of all restores under way."""
        for plan in self._restores.values():
            for copy in plan.copies:
                yield copy.block_id

    def check_invariants(self) -> None:
        """Walk everything; O(blocks in the tier)."""
        pinned = list(self.pinned())
        assert len(pinned) == len(set(pinned))
        assert len(self._loading) == len(pinned)
        for present, storing in zip(self._present, self._storing, strict=True):
            assert not present.keys() & storing.keys()
        for copy in self._offers:
            assert copy.block_hash in self._storing[copy.group]
