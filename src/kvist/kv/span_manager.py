"""KV memory in which each request has one run of consecutive blocks: the contiguous and the virtual allocator.

A request's span is opened for its longest possible length when it is admitted, and closed when it is preempted or ends. Where the
allocator keeps closed spans, a common prefix is copied out of whichever span holds it, live or kept: nothing is shared in place, so
a block belongs to one request. Sharing in place, eviction policies, pins and tiers are for paged memory (`kv/manager.py`).

Invariants: entry i of a request's table for group g is `starts[g] + i`, or 0 if it was let go; a block enters the index in
`commit`, and leaves it before its memory is given back; a copy's source stays as it is until the plan that names it is taken.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from kvist.errors import InvalidRequestError
from kvist.kv.block import BlockHash, prompt_hashes, root_hash
from kvist.kv.explain import Explainer
from kvist.kv.lookup import Lookup
from kvist.kv.memory import KVUsage, MemoryAccount, MemoryPlan, require_a_token
from kvist.kv.names import Record, empty_tables, no_match
from kvist.kv.prefix import PrefixIndex, PrefixMatch
from kvist.kv.spans import Span, SpanAllocator
from kvist.kv.spec import KVSpec, first_block
from kvist.kv.trails import Trails
from kvist.request import PrefixMiss, Request


@dataclass(slots=True)
class _Record(Record):
    span: Span | None = None


class SpanManager:
    """`KVMemory` over a `SpanAllocator`, which is made by `make_spans` with the function that it tells of evictions."""

    shares_in_place = False

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: int,
        spans: SpanAllocator,
        *,
        enable_prefix_caching: bool,
        key: bytes = b"",
        watermark: float = 0.01,
    ) -> None:
        require_a_token(spec, num_blocks)
        self.spec = spec
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self._spans = spans
        self._reserve = int(watermark * num_blocks)
        self._key = key
        self._block_size = spec.block_size
        self._windows = tuple(group.window for group in spec.groups)
        num_found = spans.num_ids if enable_prefix_caching else 0
        self.index = PrefixIndex(num_found, self._windows, spec.block_size)
        self._trails = Trails(num_found, spec.block_size, self.index)
        self._lookup = Lookup(self.index, self._trails if spec.copies_beginnings else None, spec.block_size)
        self._keeps_tails = enable_prefix_caching and spec.copies_beginnings
        self._explainer = Explainer(self, self._lookup, self._recall)
        self._records: dict[str, _Record] = {}
        self._copies: list[tuple[int, int]] = []
        self._evictions = 0

    # Queries

    @property
    def num_free_blocks(self) -> int:
        return self._spans.num_free

    @property
    def num_pinned_blocks(self) -> int:
        return 0

    def num_pledged_blocks(self, to_pin: Sequence[int] = (), salt: str = "") -> int:
        return 0

    @property
    def request_ids(self) -> frozenset[str]:
        return frozenset(self._records)

    def max_request_tokens(self, limit: int) -> int:
        return self.spec.max_span_tokens(self.num_blocks, limit)

    def hashes_of(self, token_ids: Sequence[int], salt: str) -> tuple[BlockHash, list[BlockHash]]:
        root = root_hash(self._key, self.spec.kv_format, self._block_size, salt)
        return root, prompt_hashes(root, token_ids, self._block_size)

    def find(self, token_ids: list[int], salt: str) -> PrefixMatch:
        root, hashes = self.hashes_of(token_ids, salt)
        return self._lookup.find_all(root, hashes, token_ids)

    def match(self, request: Request) -> PrefixMatch:
        record = self._records[request.request_id]
        if not self.enable_prefix_caching or request.wants_prompt_logprobs:
            return self.no_match()
        return self._lookup.match(request, record)

    def no_match(self) -> PrefixMatch:
        return no_match(len(self._windows))

    def is_being_computed(self, request: Request, match: PrefixMatch, running: Iterable[Request]) -> bool:
        if not self.enable_prefix_caching or request.wants_prompt_logprobs:
            return False
        return self._lookup.is_being_computed(request, match, running, self._records)

    def explain_miss(self, request: Request, match: PrefixMatch) -> PrefixMiss:
        return self._explainer.of_request(request, self._records[request.request_id], match)

    def explain(self, token_ids: list[int], salt: str, position: int, plain_salt: str | None) -> PrefixMiss:
        return self._explainer.of_prompt(token_ids, salt, position, plain_salt)

    def ways(self, request: Request, match: PrefixMatch) -> list[PrefixMatch]:
        return match.ways()

    def has_room(self, request: Request, match: PrefixMatch, *, alone: bool, growth: int = 0) -> bool:
        sources = self._sources(match)
        reserve = growth + (0 if alone else self._reserve)
        blocks = -(-request.num_tokens // self._block_size) - (-reserve // len(self._windows))
        return self._spans.can_open(self._longest(request), min(blocks, self.num_blocks), sources)

    def has_room_to_fork(self, count: int) -> bool:
        return False

    def fit(self, request: Request, num_new_tokens: int) -> int:
        span = self._records[request.request_id].span
        assert span is not None, "a request that runs has a span"
        blocks = span.end + self._spans.room(span)
        return min(num_new_tokens, blocks * self._block_size - request.num_computed_tokens)

    def block_tables(self, request: Request) -> tuple[array[int], ...]:
        return self._records[request.request_id].tables

    def usage(self) -> KVUsage:
        free, cached = self._spans.num_free, self._spans.num_kept
        cached = min(cached, free)
        return KVUsage(self.num_blocks, self.num_blocks - free, cached, free - cached, self._evictions)

    def account(self, requests: Iterable[Request]) -> MemoryAccount:
        used = 0
        for request in requests:
            span = self._records[request.request_id].span
            if span is not None:
                used += sum(request.num_computed_tokens - begin * self._block_size for begin in span.begin)
        spans = self._spans
        return MemoryAccount(
            reserved=spans.reserved_bytes,
            committed=spans.committed_bytes,
            held=spans.held_bytes,
            used=used * self.spec.block_bytes // self._block_size,
            shared=0,
            external_fragmentation=spans.external_fragmentation,
        )

    # Changes

    def advance(self, now: float) -> float:
        """Spans are kept by the order of their use alone."""
        return inf

    def add(self, request: Request) -> None:
        if request.kv:
            raise InvalidRequestError("kv asks to keep a prefix, which needs --kv-allocator paged.", param="kv")
        assert request.request_id not in self._records, f"request {request.request_id} is known already"
        root = root_hash(self._key, self.spec.kv_format, self._block_size, request.cache_salt)
        record = self._records[request.request_id] = _Record(root, empty_tables(len(self._windows)))
        record.trail = self._trails.open(root, record.hashes, request)

    def attach(self, request: Request, match: PrefixMatch) -> None:
        """Open the request's span, and plan copies of the hit into it."""
        record = self._records[request.request_id]
        for block_id in self._sources(match):
            self._spans.touch(block_id)
        span = self._open(request, record)
        if not match.num_tokens:
            return
        blocks = match.num_tokens // self._block_size
        granted = self._grow(record, span, -(-match.num_tokens // self._block_size))
        assert granted, "a request is admitted only if its blocks are there"
        self._copies += ((source, table[blocks]) for source, table in zip(match.copied_from, record.tables, strict=False))
        for group, (ids, first) in enumerate(zip(match.block_ids, match.first_blocks, strict=True)):
            self._copies += zip(ids[first:], record.tables[group][first:blocks], strict=True)
            self._let_go(record, span, group, first)
        record.num_committed = blocks

    def fork(self, source: Request, request: Request) -> None:
        raise AssertionError("nothing is shared in place")

    def allocate(self, request: Request, num_new_tokens: int) -> bool:
        record = self._records[request.request_id]
        span = record.span or self._open(request, record)
        missing = -(-(request.num_computed_tokens + num_new_tokens) // self._block_size) - span.end
        return missing <= 0 or self._grow(record, span, missing)

    def commit(self, request: Request) -> None:
        record = self._records[request.request_id]
        full = request.num_computed_tokens // self._block_size
        if full == record.num_committed or not self.enable_prefix_caching:
            return
        record.hash_up_to(request, full, self._block_size)
        start = record.num_committed
        for group, table in enumerate(record.tables):
            self.index.insert(group, record.root, record.hashes, start, table[start:full].tolist(), record.tokens)
        superseded = self._trails.passed(record.trail, start, record.tables[0][start:full], record.tables[0][start - 1])
        record.num_committed = full
        if superseded is not None:
            self._forget_tail(superseded)

    def trim(self, request: Request) -> None:
        record = self._records[request.request_id]
        if record.span is None:
            return
        for group, window in enumerate(self._windows):
            if window is not None:
                self._let_go(record, record.span, group, first_block(request.num_computed_tokens, window, self._block_size))

    def rewind(self, request: Request) -> None:
        """The request will be computed from position 0 again."""
        record = self._records[request.request_id]
        assert record.num_committed == 0, "blocks in the index are never written again"
        if record.span is not None and any(record.span.begin):
            self.release(request)

    def release(self, request: Request) -> int:
        """Close the request's span. Returns how many blocks became free."""
        record = self._records[request.request_id]
        before = self._spans.num_free
        if record.span is not None:
            first, last = self._named(record, record.span)
            self._forget(record.span, keep=(first, last))
            self._spans.close(record.span, first, last)
        record.tables = empty_tables(len(self._windows))
        record.span = None
        record.num_committed = 0
        return self._spans.num_free - before

    def free(self, request: Request, *, in_step: bool = False) -> int:
        record = self._records[request.request_id]
        tail = None if in_step or not self._keeps_tails else record.tail(request, self._block_size)
        if tail is not None:
            for group, table in enumerate(record.tables):
                self.index.insert_tail(group, record.root, tail, table[tail.block])
            record.num_committed += 1
        freed = self.release(request)
        del self._records[request.request_id]
        tokens = record.all_tokens(request) if request.num_computed_tokens else None
        for name in self._trails.close(record.trail, tokens, tail):
            self._forget_tail(name)
        return freed

    def take_plan(self) -> MemoryPlan:
        copies, self._copies = tuple(self._copies), []
        return MemoryPlan(tuple(self._spans.take_releases()), copies)

    def complete_plan(self) -> None:
        """A copy's source is out of danger before the step that could write to it."""

    def on_evict(self, span: Span) -> None:
        """A kept span is given up: its blocks are found no more."""
        self._evictions += sum(span.end - begin for begin in span.begin)
        self._forget(span, keep=(0, 0))

    # Helpers

    def _forget_tail(self, name: BlockHash) -> None:
        ids = [self.index.get_tail(group, name) for group in range(len(self._windows))]
        if found := [block_id for block_id in ids if block_id is not None]:
            self.index.remove(found)

    def _recall(self, root: BlockHash, token_ids: Sequence[int], hashes: Sequence[BlockHash], position: int) -> PrefixMiss:
        """What was given up is not remembered."""
        return PrefixMiss("not_found" if self._evictions else "never_seen", position)

    def _sources(self, match: PrefixMatch) -> tuple[int, ...]:
        """The blocks that a hit is copied from."""
        whole = (block_id for ids, first in zip(match.block_ids, match.first_blocks, strict=True) for block_id in ids[first:])
        return *whole, *match.copied_from

    def _longest(self, request: Request) -> int:
        return -(-(request.num_prompt_tokens + request.max_tokens) // self._block_size)

    def _open(self, request: Request, record: _Record) -> Span:
        assert record.span is None, f"request {request.request_id} has a span already"
        span = self._spans.open(self._longest(request))
        assert span is not None, "a request is admitted only if there is a span for it"
        record.span = span
        return span

    def _grow(self, record: _Record, span: Span, num_blocks: int) -> bool:
        if num_blocks > self._spans.room(span):
            return False
        for start, table in zip(span.starts, record.tables, strict=True):
            table.extend(range(start + span.end, start + span.end + num_blocks))
        self._spans.grow(span, num_blocks)
        return True

    def _let_go(self, record: _Record, span: Span, group: int, begin: int) -> None:
        old = span.begin[group]
        if begin <= old:
            return
        self._unname(span.starts[group], old, begin)
        self._spans.trim(span, group, begin)
        if span.begin[group] == begin:
            for block in range(old, begin):
                record.tables[group][block] = 0

    def _named(self, record: _Record, span: Span) -> tuple[int, int]:
        """The least range of logical blocks that holds all blocks of the span that the index knows."""
        if not self.enable_prefix_caching:
            return 0, 0
        named = [
            block
            for start, begin in zip(span.starts, span.begin, strict=True)
            for block in range(begin, min(span.end, record.num_committed))
            if self.index.is_indexed(start + block)
        ]
        return (min(named), max(named) + 1) if named else (0, 0)

    def _forget(self, span: Span, keep: tuple[int, int]) -> None:
        for start, begin in zip(span.starts, span.begin, strict=True):
            self._unname(start, begin, min(span.end, keep[0]))
            self._unname(start, max(begin, keep[1]), span.end)

    def _unname(self, start: int, first: int, last: int) -> None:
        """Its blocks [first, last), from a span's first block `start` on, are found no more."""
        block_ids = range(start + last - 1, start + first - 1, -1)
        if self.enable_prefix_caching and (found := list(filter(self.index.is_indexed, block_ids))):
            self.index.remove(found)

    def check_invariants(self) -> None:
        """Walk everything; O(ids)."""
        self._spans.check_invariants()
        self.index.check_invariants()
        self._trails.check_invariants()
        for record in self._records.values():
            if record.span is None:
                assert not record.tables[0]
                continue
            for start, begin, table in zip(record.span.starts, record.span.begin, record.tables, strict=True):
                assert len(table) == record.span.end
                assert not any(table[:begin])
                assert list(table[begin:]) == list(range(start + begin, start + record.span.end))
            assert record.num_committed <= record.span.end
