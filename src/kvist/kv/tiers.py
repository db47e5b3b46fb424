"""Which blocks a tier behind the device keeps, what is to be written to it, and what to bring back from it instead of computing it.

The decider of tiers handles names and block ids, no bytes: it emits frozen plans, and a computer carries them out (law L4). It
knows of a tier only what it was told: what was stored, and what was lost. Such knowledge may be out of date, so a plan may fail
block by block; what failed is computed. With each block the tier keeps its origin (`kv/origins.py`), so that a new process knows
its owner, and which block stood behind which: as on the device, the beginning of one serves a prompt that ends or turns off in it.

Blocks are written when they are committed, not when they are evicted: a copy is at hand in time without holding up the step that
needs the block, a killed process leaves all but its last moments behind, and preemption by swap has nothing left to write. It costs
writing what nobody will ask for; a block is a few hundred kilobytes for 16 tokens of work, so the disk has long idled between two.
What is on its way there counts as there: a copy of it is at hand, and a request that comes back at once finds what it gave up.

A restore is cheaper than computing again if reading its bytes at the measured rate takes less time than its tokens at theirs.
After PATIENCE refusals in a row one is restored all the same: rates are only measured by doing it, and disks have bad moments.

Invariants: a name is offered once while it is kept: in the tier or on its way there; no block is the target of two plans; the
blocks of a restore are held (pinned) from `prepare` to `complete`, and are found by the index only after it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from kvist.kv.block import HASH_BYTES, BlockHash, PackedNames, Tail
from kvist.kv.origins import Origin, decode_format, encode_format, format_of, parent_of, root_of, tokens_of
from kvist.kv.prefix import PrefixIndex, PrefixMatch
from kvist.kv.spec import KVSpec
from kvist.kv.trails import common_length

PATIENCE = 15
MAX_FOLLOWERS = 16
"""Blocks behind one block that are looked at for how a prompt goes on: short questions behind one system prompt, say."""
Tokens = Callable[[int, int], Sequence[int]]
"""Those from a position to another of a prompt."""
Owned = dict[BlockHash, BlockHash]
"""Blocks, each with the root of its prefix."""


class BlockCopy(NamedTuple):
    """One block, and what its content is called."""

    block_hash: BlockHash
    group: int
    block_id: int
    about: bytes = b""
    """On its way to a store: its encoded `Origin`."""

    @property
    def name(self) -> bytes:
        """The name under which a store keeps it."""
        return name_of(self.group, self.block_hash)


class TransferPlan(NamedTuple):
    """Blocks to copy out (before anything else is written to them), or to fill (before `complete` says that they are)."""

    plan_id: int
    copies: tuple[BlockCopy, ...]


class Follower(NamedTuple):
    """A block that stood behind another one: whole, or the last of a sequence that has ended."""

    name: BlockHash
    tokens: array[int]


class Restore(NamedTuple):
    """What a tier could add to a request's hit on the device: tokens [start, stop), by blocks that the device lacks."""

    start: int
    stop: int
    missing: tuple[tuple[int, BlockHash], ...]
    """(group, name), in the order of positions."""
    root: BlockHash
    """Of the prefix."""
    blocks: tuple[int, ...]
    """Of each missing block its number in the prefix."""
    hashes: Sequence[BlockHash]
    """Of the prefix; its first `length` do not change."""
    length: int
    """Whole blocks in [0, stop)."""
    follower: Follower | None = None
    """The block behind these that begins with the tokens from there to `stop`."""
    here: tuple[int, ...] = ()
    """The blocks that the device has of all these."""

    def tail(self, block_size: int) -> Tail | None:
        """The follower, if it is not full."""
        if self.follower is None or len(self.follower.tokens) == block_size:
            return None
        parent = self.hashes[self.length - 1] if self.length else self.root
        return Tail(self.follower.name, parent, self.length, len(self.follower.tokens))

    def needs_copy(self, block_size: int) -> bool:
        """Whether the follower must be copied: it is full, or holds more than is asked for."""
        used = self.stop - self.length * block_size
        return self.follower is not None and not used == len(self.follower.tokens) < block_size

    def whole(self, block_size: int) -> Restore | None:
        """Without the follower; None: that is all."""
        stop, kept = self.length * block_size, sum(block < self.length for block in self.blocks)
        if not kept or stop <= self.start:
            return None
        return self._replace(stop=stop, missing=self.missing[:kept], blocks=self.blocks[:kept], follower=None)

    def names(self) -> list[BlockHash]:
        """Of all blocks that are there or brought, one after the other."""
        return [*self.hashes[: self.length], *([] if self.follower is None else [self.follower.name])]


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
    """One tier's books, for memory of this `spec`."""

    def __init__(self, spec: KVSpec) -> None:
        self.rates = TierRates()
        self.takes_blocks = True
        """False once writing to it is given up: what it has can still be read."""
        self.renews = True
        """Whether it is large enough that what is hit on the device, and the tier has let go, is written again."""
        self._size, self._block_bytes, self._looks_inside = spec.block_size, spec.block_bytes, spec.copies_beginnings
        self._format = encode_format(spec.kv_format, spec.block_size)
        self._formats: set[bytes] = set()
        """All that have been found in the tier."""
        self._kept: tuple[dict[BlockHash, bytes], ...] = tuple({} for _ in spec.groups)
        """In the tier or on the way there, each with its encoded origin."""
        self._storing: set[tuple[int, BlockHash]] = set()
        """Of these, what has not arrived."""
        self._followers: dict[BlockHash, bytes] = {}
        """By the name of the block before them, or the root: the MAX_FOLLOWERS latest that are kept, of the first group."""
        self._offers: list[BlockCopy] = []
        self._restores: dict[int, TransferPlan] = {}
        self._loading: dict[tuple[int, BlockHash], int] = {}
        """And by which plan."""
        self._num_plans = 0
        self._refusals = 0
        self.num_refused = 0
        """Restores that were not worth it."""

    # Writing

    def offer(
        self,
        group: int,
        root: BlockHash,
        parent: BlockHash,
        block_hashes: Iterable[BlockHash],
        block_ids: Iterable[int],
        tokens: array[int],
    ) -> bool:
        """These blocks follow each other behind `parent`, hold these tokens, and stay as they are until `take_offers` was carried
        out. Whether they all are kept now."""
        kept, size = self._kept[group], self._size
        for block, (block_hash, block_id) in enumerate(zip(block_hashes, block_ids, strict=True)):
            if block_hash not in kept:
                if not self.takes_blocks:
                    return False
                origin = Origin(self._format, root, parent, tokens[block * size : (block + 1) * size]).encode()
                self._enter(group, block_hash, origin)
                self._storing.add((group, block_hash))
                self._offers.append(BlockCopy(block_hash, group, block_id, origin))
            parent = block_hash
        return True

    def take_offers(self) -> TransferPlan | None:
        """What is to be copied out now, before the next step writes."""
        if not self._offers:
            return None
        self._num_plans += 1
        plan, self._offers = TransferPlan(self._num_plans, tuple(self._offers)), []
        return plan

    def found(self, records: Iterable[tuple[bytes, bytes]]) -> None:
        """These names were in the tier at the start, and so much is known of them. Some may be of another model or format."""
        for name, origin in records:
            group, block_hash = parse_name(name)
            self._formats.add(format_of(origin))
            if group < len(self._kept):
                self._enter(group, block_hash, origin)

    def stored(self, names: Iterable[bytes]) -> Owned:
        """What was offered has arrived. Returns what was not known to be there."""
        new = {}
        for pair in map(parse_name, names):
            if pair in self._storing:
                self._storing.remove(pair)
                group, block_hash = pair
                new[block_hash] = root_of(self._kept[group][block_hash])
        return new

    def _enter(self, group: int, block_hash: BlockHash, origin: bytes) -> None:
        self._kept[group][block_hash] = origin
        if group == 0 and self._looks_inside:
            parent = parent_of(origin)
            if (others := self._without(parent, block_hash)) is None:
                self._followers[parent] = block_hash
            else:
                self._followers[parent] = (others + block_hash)[-MAX_FOLLOWERS * HASH_BYTES :]

    def _without(self, parent: BlockHash, block_hash: BlockHash) -> bytes | None:
        """The names of the other followers of a block, if it has any."""
        names = PackedNames(self._followers.get(parent, b""))
        return b"".join(name for name in names if name != block_hash) or None

    def lost(self, names: Iterable[bytes]) -> tuple[Owned, Owned]:
        """Returns what is no longer in the tier, and what has never arrived."""
        gone: Owned = {}
        missed: Owned = {}
        for name in names:
            group, block_hash = pair = parse_name(name)
            if group >= len(self._kept) or (origin := self._kept[group].pop(block_hash, None)) is None:
                continue
            (missed if pair in self._storing else gone)[block_hash] = root_of(origin)
            self._storing.discard(pair)
            if group == 0 and (parent := parent_of(origin)) in self._followers:
                if (others := self._without(parent, block_hash)) is None:
                    del self._followers[parent]
                else:
                    self._followers[parent] = others
        return gone, missed

    def keeps(self, group: int, block_hash: BlockHash) -> bool:
        """In the tier, or on its way."""
        return block_hash in self._kept[group]

    # Bringing back

    def beside(self, tables: Sequence[Container[BlockHash]]) -> tuple[Container[BlockHash], ...]:
        """Per group, what is on the device or kept."""
        return tuple(Either(table, kept) for table, kept in zip(tables, self._kept, strict=True))

    def beyond(
        self,
        index: PrefixIndex,
        root: BlockHash,
        hashes: Sequence[BlockHash],
        num_tokens: int,
        match: PrefixMatch,
        token_ids: Tokens,
    ) -> Restore | None:
        """What the tier adds to the hit `match` of a prompt of `num_tokens`, whose last is computed; None if it adds nothing.
        `hashes` are at least those of the blocks that may be found."""
        found, limit = match.whole().num_tokens // self._size, (num_tokens - 1) // self._size
        length = found if found == limit else index.longest(hashes, limit, self.beside(index.among(hashes[:limit])))
        follower, copied = self._follower(index, root, hashes, length, num_tokens, token_ids)
        stop = length * self._size + copied
        if length == found and 2 * (stop - match.num_tokens + 1) < self._size:
            # Not worth the block that would be evicted for it.
            return None
        needed, names = index.needed(hashes, length), list(hashes[:length])
        if follower is not None:
            names.append(follower.name)
            needed += [(group, length, index.get(group, names, length)) for group in range(index.num_groups)]
        pairs = [(group, block) for group, block, block_id in needed if block_id is None]
        if not pairs:
            return None
        missing, blocks = tuple((group, names[block]) for group, block in pairs), tuple(block for _, block in pairs)
        here = tuple(block_id for _, _, block_id in needed if block_id is not None)
        return Restore(match.num_tokens, stop, missing, root, blocks, hashes, length, follower, here)

    def _follower(
        self, index: PrefixIndex, root: BlockHash, hashes: Sequence[BlockHash], length: int, num_tokens: int, token_ids: Tokens
    ) -> tuple[Follower | None, int]:
        """The block behind a prompt's first `length` blocks that begins most like what follows, and for how many tokens. With the
        last token, which is computed anyway, it is half a block, or not worth it."""
        parent = hashes[length - 1] if length else root
        begin, end = length * self._size, min((length + 1) * self._size, num_tokens) - 1
        if parent not in self._followers or 2 * (end - begin + 1) < self._size:
            return None, 0
        best, most, asked = None, 0, token_ids(begin, end)
        for name, tokens in self.followers(parent):
            copied = common_length(tokens, asked)
            if (best is None or copied > most) and 2 * (copied + 1) >= self._size:
                prefix = [*hashes[:length], name]
                if all(name in there or index.get(group, prefix, length) is not None for group, there in enumerate(self._kept)):
                    best, most = Follower(name, tokens), copied
        return best, most

    def followers(self, parent: BlockHash) -> Iterator[tuple[BlockHash, array[int]]]:
        """The blocks behind one, or a root, that are kept in the first group, and their tokens: the latest first."""
        for name in PackedNames(self._followers.get(parent, b""))[::-1]:
            yield name, tokens_of(self._kept[0][name])

    def reach(self, index: PrefixIndex, root: BlockHash, hashes: Sequence[BlockHash], token_ids: Sequence[int]) -> int:
        """How many tokens of a prompt, without its last, device and tier hold together."""
        limit = (len(token_ids) - 1) // self._size
        length = index.longest(hashes, limit, self.beside(index.among(hashes[:limit])))
        _, copied = self._follower(index, root, hashes, length, len(token_ids), lambda start, stop: token_ids[start:stop])
        return length * self._size + copied

    @property
    def names(self) -> Sequence[Container[BlockHash]]:
        """Per group, what is kept."""
        return self._kept

    @property
    def formats(self) -> list[tuple[str, int]]:
        """KV formats and block sizes that were found in the tier at the start."""
        return [decode_format(form) for form in self._formats]

    @property
    def is_empty(self) -> bool:
        return not any(self._kept)

    def loading(self, restore: Restore) -> int | None:
        """A plan that is bringing some of it."""
        return next((plan for pair in restore.missing if (plan := self._loading.get(pair)) is not None), None)

    def is_worth_it(self, restore: Restore) -> bool:
        """The cost model's answer, which counts its refusals."""
        if self.is_cheaper(len(restore.missing), restore.stop - restore.start) or self._refusals >= PATIENCE:
            self._refusals = 0
            return True
        self._refusals += 1
        self.num_refused += 1
        return False

    def is_cheaper(self, num_blocks: int, num_tokens: int) -> bool:
        return restore_is_cheaper(self.rates, num_blocks * self._block_bytes, num_tokens)

    def prepare(self, restore: Restore, block_ids: Sequence[int]) -> TransferPlan:
        """Fill these blocks, which the caller holds until `complete`."""
        assert self.loading(restore) is None
        self._num_plans += 1
        pairs = zip(restore.missing, block_ids, strict=True)
        plan = TransferPlan(
            self._num_plans, tuple(BlockCopy(block_hash, group, block_id) for (group, block_hash), block_id in pairs)
        )
        self._restores[plan.plan_id] = plan
        self._loading.update(dict.fromkeys(restore.missing, plan.plan_id))
        return plan

    def complete(self, plan_id: int) -> TransferPlan:
        """The plan was carried out, as far as it could be; its blocks are the caller's again."""
        plan = self._restores.pop(plan_id)
        for copy in plan.copies:
            del self._loading[copy.group, copy.block_hash]
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
        assert all(block_hash in self._kept[group] for group, block_hash in self._storing)
        for parent, packed in self._followers.items():
            names = PackedNames(packed)
            assert 0 < len(names) == len(set(names)) <= MAX_FOLLOWERS
            assert all(parent_of(self._kept[0][name]) == parent for name in names)
        for copy in self._offers:
            assert (copy.group, copy.block_hash) in self._storing
