"""The facade over KV memory: what a request may reuse, whether it can grow, and what is kept when it goes.

A request's way: `add`, then (`match`, `attach`, `allocate`) at admission, `allocate` before each later step, `commit` and `trim`
after it; `release` when it is preempted, `free` when it ends. The manager decides on integers only: it knows no arrays of keys and
values, no step, no budget, no clock. Queries (`match`, `is_being_computed`, `has_room`, `fit`, `usage`) change nothing but
the memo of hashes, and enter what waits to be entered. Invariants, besides those of pool and index:

* a request's record (`kv/records.py`) names the blocks that it holds, and no others;
* a block's reference count is the number of tables that name it and of plans that fill or copy it, and one more if it is pinned;
* a block enters the index after `commit`, when its keys and values were computed: a hit never reads what is still being written;
* a request writes only at `num_computed_tokens` and after, and only to blocks that nobody else holds and the index does not name:
  `allocate` plans a copy of any other (`kv/copies.py`), unless `attach` has taken it over (`Keeper.ways`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial

from kvist.errors import InvalidRequestError
from kvist.kv.allocators import blocks_to_admit, grow, tails_first
from kvist.kv.block import BlockHash, Tail, prompt_hashes, root_hash
from kvist.kv.commits import Commits
from kvist.kv.copies import Copies
from kvist.kv.explain import Elsewhere, Explainer
from kvist.kv.keeper import Keeper
from kvist.kv.lookup import Lookup
from kvist.kv.memory import KVUsage, MemoryAccount, MemoryPlan, account_blocks, require_a_token
from kvist.kv.names import empty_tables, no_match
from kvist.kv.pins import Pins
from kvist.kv.prefix import PrefixIndex, PrefixMatch
from kvist.kv.records import PagedRecord
from kvist.kv.restores import Restores
from kvist.kv.spec import KVSpec, first_block
from kvist.kv.tiers import Restore, TierDecider, TransferPlan
from kvist.kv.trails import Trails
from kvist.request import PrefixMiss, Request


class KVManager:
    """`key` names everything but tokens, salt, format and block size that changes KV bytes: the model and the numeric profile
    (see `block.make_key`); `keys` is the same by KV format. `watermark` is the share of the pool that admission leaves free;
    `eviction_policy` is one of `eviction.POLICIES`; `pin_budget` is the share of the pool that may be pinned, `priority_budget`
    that which priorities above the ordinary one may hold. `tiered`: there is a tier behind the device, and `tier` has its books."""

    shares_in_place = True

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: int,
        *,
        enable_prefix_caching: bool = True,
        key: bytes = b"",
        keys: Mapping[str, bytes] | None = None,
        watermark: float = 0.01,
        tiered: bool = False,
        eviction_policy: str = "density",
        pin_budget: float = 0.25,
        priority_budget: float = 0.5,
    ) -> None:
        self._num_groups = len(spec.groups)
        require_a_token(spec, num_blocks)
        assert 0.0 <= watermark < 1.0, "the watermark is a share of the pool"
        self.spec = spec
        self.num_blocks = num_blocks
        self.watermark_blocks = int(watermark * num_blocks)
        self.enable_prefix_caching = enable_prefix_caching
        self._block_size = spec.block_size
        self._root = lru_cache(256)(partial(root_hash, key, spec.kv_format, spec.block_size))
        """Of a salt."""
        self._windows = tuple(group.window for group in spec.groups)
        self._has_windows = any(window is not None for window in self._windows)
        self._index = PrefixIndex(num_blocks, self._windows, spec.block_size)
        self._trails = Trails(num_blocks, spec.block_size, self._index)
        pins = int(pin_budget * num_blocks)
        self._keeper = Keeper(num_blocks, self._index, self._trails.ended, eviction_policy, pins, priority_budget)
        self._pool = self._keeper.pool
        self.tier = TierDecider(spec) if tiered and enable_prefix_caching else None
        self._lookup = Lookup(self._index, self._trails if spec.copies_beginnings else None, spec.block_size, self.tier)
        self._keeps_tails = enable_prefix_caching and spec.copies_beginnings
        self._copies = Copies(self._pool, spec.block_size)
        self.pins = Pins(spec, num_blocks, self._keeper.retention, self._index)
        self._records: dict[str, PagedRecord] = {}
        self._restores = None if self.tier is None else Restores(self.tier, self._keeper, self._index, self._trails)
        self._commits = Commits(self._index, self._keeper, self._trails, self._restores)
        recall = partial(self._keeper.explain, block_size=spec.block_size)
        elsewhere = None if self.tier is None else Elsewhere(spec, keys or {}, self.tier)
        self._explainer = Explainer(self, self._lookup, recall, elsewhere)

    @property
    def index(self) -> PrefixIndex:
        """What can be found now."""
        self._commits.enter()
        return self._index

    @property
    def keeper(self) -> Keeper:
        self._commits.enter()
        return self._keeper

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_pinned_blocks(self) -> int:
        return self._keeper.retention.num_pinned

    def num_pledged_blocks(self, to_pin: Sequence[int] = (), salt: str = "") -> int:
        return self.pins.num_taken + (self.pins.num_wanted(self.hashes_of(to_pin, salt)[1]) if to_pin else 0)

    def match(self, request: Request) -> PrefixMatch:
        """The longest cached prefix of a request that holds no blocks. At least its last token is left to compute."""
        if not self.enable_prefix_caching or request.wants_prompt_logprobs:
            return self.no_match()
        self._commits.enter()
        return self._lookup.match(request, self._records[request.request_id])

    def restorable(self, request: Request, match: PrefixMatch) -> Restore | None:
        """What the tier would add to the hit `match` of a waiting request."""
        if self._restores is None or request.wants_prompt_logprobs:
            return None
        return self._restores.find(request, self._records[request.request_id], match)

    def is_being_computed(self, request: Request, match: PrefixMatch, running: Iterable[Request]) -> bool:
        if not self.enable_prefix_caching or request.wants_prompt_logprobs:
            return False
        self._commits.enter()
        return self._lookup.is_being_computed(request, match, running, self._records)

    def explain_miss(self, request: Request, match: PrefixMatch) -> PrefixMiss:
        return self._explainer.of_request(request, self._records[request.request_id], match)

    def explain(self, token_ids: list[int], salt: str, position: int, plain_salt: str | None) -> PrefixMiss:
        return self._explainer.of_prompt(token_ids, salt, position, plain_salt)

    def no_match(self) -> PrefixMatch:
        return no_match(self._num_groups)

    def max_request_tokens(self, limit: int) -> int:
        return self.spec.max_request_tokens(self.num_blocks, limit)

    def ways(self, request: Request, match: PrefixMatch) -> list[PrefixMatch]:
        return self._keeper.ways(match, own=request.num_preemptions > 0)

    def has_room(self, request: Request, match: PrefixMatch, *, alone: bool, growth: int = 0) -> bool:
        """Whether all tokens of a waiting request can get blocks now and leave `growth` free, and the watermark, which is not asked
        of one that would run alone."""
        reserve = growth + (0 if alone else self.watermark_blocks)
        need = blocks_to_admit(self._pool, self._windows, self._block_size, request.num_tokens, match)
        return need + reserve <= self._pool.num_free

    def cached(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The blocks, of all groups, that there are of this prefix."""
        groups = [self.index.every(group, hashes) for group in range(self._num_groups)]
        return [block_id for ids in zip(*groups, strict=True) for block_id in ids if block_id is not None]

    def hashes_of(self, token_ids: Sequence[int], salt: str) -> tuple[BlockHash, list[BlockHash]]:
        return (root := self._root(salt)), prompt_hashes(root, token_ids, self._block_size)

    def find(self, token_ids: list[int], salt: str) -> PrefixMatch:
        self._commits.enter()
        return self._lookup.find_all(*self.hashes_of(token_ids, salt), token_ids)

    def has_room_to_fork(self, count: int) -> bool:
        return count * self._num_groups + self.watermark_blocks <= self._pool.num_free

    def fit(self, request: Request, num_new_tokens: int) -> int:
        """The most new tokens, up to `num_new_tokens`, that `allocate` would grant now."""
        record = self._records[request.request_id]
        free = self._pool.num_free
        if record.shares_tail:
            free -= len(self._copies.needed(record.tables, request.num_computed_tokens))
        blocks = len(record.tables[0]) + free // self._num_groups
        return 0 if free < 0 else min(num_new_tokens, blocks * self._block_size - request.num_computed_tokens)

    def block_tables(self, request: Request) -> tuple[array[int], ...]:
        """Per group, logical block -> block id: the manager's own arrays, lent until the step is updated."""
        return self._records[request.request_id].tables

    def usage(self) -> KVUsage:
        pool = self._pool
        live, empty = pool.num_blocks - pool.num_free, pool.num_free - pool.num_cached
        return KVUsage(total=pool.num_blocks, live=live, cached=pool.num_cached, free=empty, evictions=pool.num_evictions)

    def account(self, requests: Iterable[Request]) -> MemoryAccount:
        records = ((self._records[request.request_id], request.num_computed_tokens) for request in requests)
        held = [(record.tables, record.let_go, computed) for record, computed in records]
        return account_blocks(self.spec, num_live=self.usage().live, num_touched=self._pool.num_touched, held=held)

    def take_plan(self) -> MemoryPlan:
        """Paged blocks stay committed."""
        return self._copies.take()

    def complete_plan(self) -> None:
        self._copies.complete()

    def advance(self, now: float) -> float:
        """Claims whose time is up end."""
        return self._keeper.advance(now)

    def add(self, request: Request) -> None:
        """Open the record of a request that waits; it holds no blocks yet. Raises InvalidRequestError or ContextLengthError where
        its pin, or those of others, are in the way."""
        assert request.request_id not in self._records, f"request {request.request_id} is known already"
        if request.kv and not self.enable_prefix_caching:
            raise InvalidRequestError("kv asks to keep a prefix, and this server keeps none (prefix caching is off).", param="kv")
        record = PagedRecord(self._root(request.cache_salt), empty_tables(len(self._windows)), let_go=[0] * self._num_groups)
        if request.kv and request.kv.pin:
            record.hash_up_to(request, request.num_prompt_tokens // self._block_size, self._block_size)
        self.pins.add(request, tuple(record.hashes))
        try:
            record.trail = self._trails.open(record.root, record.hashes, request)
        except BaseException:
            self.pins.forget(request.request_id)
            raise
        self._records[request.request_id] = record

    def attach(self, request: Request, match: PrefixMatch) -> None:
        """Hold the blocks of a hit; the caller sets `num_computed_tokens` to `match.num_tokens`."""
        record = self._records[request.request_id]
        assert not record.tables[0], f"request {request.request_id} holds blocks already"
        if not match.num_tokens:
            return
        for group, (ids, first) in enumerate(zip(match.block_ids, match.first_blocks, strict=True)):
            self._pool.share(ids[first:].tolist())
            record.tables[group].extend(ids)
            record.let_go[group] = first
        if match.num_copied:
            self._keeper.hold_beginning(match)
            for table, block_id in zip(record.tables, match.copied_from, strict=True):
                table.append(block_id)
            record.shares_tail = not match.takes_over
        self._found(request, record, match.num_tokens // self._block_size)
        if self._restores is not None:
            self._restores.renew(record, record.let_go)

    def fork(self, source: Request, request: Request) -> None:
        """Hold what `source` does. The block that is not full stays shared until one of them writes to it."""
        self._commits.enter()
        theirs, record = self._records[source.request_id], self._records[request.request_id]
        assert not record.tables[0], f"request {request.request_id} holds blocks already"
        for table, other, first in zip(record.tables, theirs.tables, theirs.let_go, strict=True):
            self._pool.share(other[first:].tolist())
            table.extend(other)
        record.hash_up_to(request, theirs.num_committed, self._block_size)
        record.let_go = list(theirs.let_go)
        record.shares_tail = theirs.shares_tail = True
        record.has_doubles = theirs.has_doubles
        self._found(request, record, theirs.num_committed)

    def allocate(self, request: Request, num_new_tokens: int) -> bool:
        """Make room for the rows [num_computed_tokens, + num_new_tokens); False, and nothing changed, if the pool has too few."""
        record = self._records[request.request_id]
        tables = record.tables
        missing = -(-(request.num_computed_tokens + num_new_tokens) // self._block_size) - len(tables[0])
        if record.shares_tail:
            shared = self._copies.needed(tables, request.num_computed_tokens)
            if len(shared) + max(0, missing) * self._num_groups > self._pool.num_free:
                return False
            self._copies.plan(shared, request.num_computed_tokens)
            record.shares_tail = False
        return missing <= 0 or grow(self._pool, tables, missing)

    def commit(self, request: Request) -> None:
        """Enter the blocks that `num_computed_tokens` has filled into the prefix index."""
        record = self._records[request.request_id]
        full = request.num_computed_tokens // self._block_size
        if full != record.num_committed and self.enable_prefix_caching:
            self._commits.add(request, record, full)
        if request.kv and not record.retained and request.num_computed_tokens >= request.num_prompt_tokens:
            record.retained = True
            # The names of the prompt's last blocks may not be known before.
            self._commits.enter()
            self.pins.settle(request.request_id)
            self._keeper.claim(record.root, self.cached(record.hashes[: request.num_prompt_tokens // self._block_size]), request.kv)

    def prepare_restore(self, request: Request, restore: Restore, match: PrefixMatch) -> TransferPlan | None:
        """Hold blocks for what a tier will bring: see `Restores.prepare`."""
        assert self._restores is not None
        return self._restores.prepare(restore, self._records[request.request_id], match)

    def complete_restore(self, plan_id: int, filled: Sequence[bool]) -> int:
        """Enter what was brought into the prefix index, and let go of the plan's blocks: see `Restores.complete`."""
        assert self._restores is not None
        return self._restores.complete(plan_id, filled)

    def swap_out(self, request: Request) -> bool:
        """Before `release`: offer the tier what it lacks of a request. Whether it can come back from there sooner than computed."""
        assert self._restores is not None
        self._commits.enter()
        record = self._records[request.request_id]
        tail = record.tail(request, self._block_size) if self._keeps_tails and not self._copies.are_planned else None
        return self._restores.swap(record, record.let_go, tail, request)

    def trim(self, request: Request) -> None:
        """Let go of blocks that lie wholly before the window of the next row, at position `num_computed_tokens`."""
        if not self._has_windows:
            return
        self._commits.enter()
        record = self._records[request.request_id]
        position, size = request.num_computed_tokens, self._block_size
        ends = [max(gone, first_block(position, window, size)) for window, gone in zip(self._windows, record.let_go, strict=True)]
        if ends == record.let_go:
            return
        self._give_back(record, ends)
        record.cut(ends)

    def rewind(self, request: Request) -> None:
        """The request will be computed from position 0 again: in blocks it holds, or, if a window has let some go, in new ones."""
        self._commits.enter()
        record = self._records[request.request_id]
        assert record.num_committed == 0, "blocks in the index are never written again"
        if any(record.let_go):
            self.release(request)

    def release(self, request: Request) -> int:
        """Take all blocks back from a request that goes on later. Returns how many became free."""
        self._commits.enter()
        record = self._records[request.request_id]
        freed = self._let_go(record)
        record.clear()
        return freed

    def free(self, request: Request, *, in_step: bool = False) -> int:
        self._commits.enter()
        record = self._records.pop(request.request_id)
        tail = None if in_step or not self._keeps_tails else record.tail(request, self._block_size)
        if tail and not self._enter_tail(record, tail):
            tail = None
        if tail and self._restores is not None:
            self._restores.offer_tail(record, tail, request)
        freed = self._let_go(record)
        self.pins.forget(request.request_id)
        tokens = record.all_tokens(request) if request.num_computed_tokens else None
        for name in self._trails.close(record.trail, tokens, tail, request.num_prompt_tokens, self._keeper.now):
            self._keeper.forget_tail(name)
        return freed

    def _enter_tail(self, record: PagedRecord, tail: Tail) -> bool:
        """Whether a request's last block, which is not full, can be found. While another holds it too, it gets no name: that one
        would have to copy it then before it goes on, and there may be no room."""
        block_ids = [table[tail.block] for table in record.tables]
        shared = any(self._pool.ref_count(block_id) > 1 for block_id in block_ids)
        return not shared and self._keeper.enter_tail(record.root, tail, block_ids)

    def _found(self, request: Request, record: PagedRecord, num_blocks: int) -> None:
        record.num_committed = num_blocks
        if num_blocks and not request.num_preemptions:
            self._index.note(record.hashes, num_blocks, record.tables[0], 1, self._keeper.now)

    def _let_go(self, record: PagedRecord) -> int:
        """Of all blocks of a request. Returns how many became free."""
        if record.has_doubles:
            self._commits.enter_again(record)
        if record.num_committed:
            self._index.note(record.hashes, record.num_committed, record.tables[0], 0, self._keeper.now)
        freed, tables = 0, record.tables
        if self._copies.are_planned:
            freed = self._copies.withdraw(record.held())
        return freed + self._give_back(record, [len(tables[0])] * len(tables))

    def _give_back(self, record: PagedRecord, ends: Sequence[int]) -> int:
        """Let go of the entries [let_go[g], ends[g]) of each group g, last block first and the groups side by side: what is reused
        first is then the tail of a prefix, in all groups alike, and the beginning, which most requests share, lives longest."""
        return self._pool.release(tails_first(record.tables, record.let_go, ends))

    def check_invariants(self) -> None:
        """Walk everything; O(num_blocks)."""
        self._pool.check_invariants()
        self._index.check_invariants()
        counts = array("i", bytes(4 * self.num_blocks))
        if self.tier is not None:
            self.tier.check_invariants()
            for block_id in self.tier.pinned():
                counts[block_id] += 1
        self._keeper.check_invariants()
        self._trails.check_invariants()
        for block_id in [*self._keeper.retention.pinned_blocks(), *self._copies.sources()]:
            counts[block_id] += 1
        for record in self._records.values():
            record.check_tables()
            record.check_invariants(self._block_size)
            for block_ids in record.held():
                for block_id in block_ids:
                    counts[block_id] += 1
        for block_id, count in enumerate(counts):
            assert self._pool.ref_count(block_id) == count
            assert self._pool.is_cached(block_id) == self._index.is_indexed(block_id)

    @property
    def request_ids(self) -> frozenset[str]:
        """The requests that have a record (for invariants)."""
        return frozenset(self._records)
