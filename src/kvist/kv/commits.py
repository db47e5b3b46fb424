"""Blocks that steps have filled, until they enter the prefix index: all at once, before anybody asks what is there.

A prompt is computed in chunks and an answer token by token, and each entry into the index costs several times what one block more
does. Whoever asks the manager has `enter` called first, so nobody misses what is there; events are told when somebody asks for them
at the latest, and of requests that compute one content at once another's blocks may be the named ones. With a tier they enter in
the step that filled them, as they are written from then on. This module knows neither reference counts nor steps. Invariant: what
waits is held by its request, and was computed.
"""

from __future__ import annotations

from itertools import groupby

from kvist.kv.keeper import Keeper
from kvist.kv.names import Record
from kvist.kv.prefix import PrefixIndex
from kvist.kv.records import PagedRecord
from kvist.kv.restores import Restores
from kvist.kv.trails import Trails
from kvist.request import Request


class Commits:
    def __init__(self, index: PrefixIndex, keeper: Keeper, trails: Trails, restores: Restores | None) -> None:
        self._index, self._keeper, self._trails, self._restores = index, keeper, trails, restores
        self._waiting: dict[str, tuple[Request, PagedRecord, int, float]] = {}
        """By request; how many leading blocks are full, and since when."""

    def add(self, request: Request, record: PagedRecord, full: int) -> None:
        self._waiting[request.request_id] = request, record, full, self._keeper.now
        if self._restores is not None:
            self.enter()

    def enter(self) -> None:
        """In the order in which the requests began to fill them."""
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            for request, record, full, time in waiting.values():
                self._enter(request, record, full, time)

    def _enter(self, request: Request, record: PagedRecord, full: int, time: float) -> None:
        if len(record.hashes) < full:
            record.hash_up_to(request, full, self._index.block_size)
        start = record.num_committed
        own = record.tables[0][start:full].tolist()
        for group, table in enumerate(record.tables):
            block_ids = table[start:full].tolist() if group else own
            if not self._name(record, group, start, block_ids, table[start - 1], time):
                record.has_doubles = True
                own = own if group else self._found_ones(record, start, own)
        superseded = self._trails.passed(record.trail, start, own, record.tables[0][start - 1])
        record.num_committed = full
        if self._restores is not None:
            self._restores.offer(record, [start] * len(record.tables))
        if superseded is not None:
            self._keeper.forget_tail(superseded)

    def _name(self, record: PagedRecord, group: int, start: int, block_ids: list[int], before: int, time: float) -> bool:
        """Let a request's blocks from number `start` on, behind its block `before`, be found; whether all are now.

        A second block of a content stays unnamed while somebody holds or claims the first: that may be shared, and pointing a
        request's table to it would change a table that is lent out. Else it takes the first one's place."""
        named, names = self._index.insert(group, record.root, record.hashes, start, block_ids, record.tokens, before)
        self._keeper.enter(record.root, names, named, time)
        if len(named) == len(block_ids):
            return True
        all_found = True
        for block, block_id in enumerate(block_ids, start):
            if not self._index.is_indexed(block_id):
                other = self._index.block(group, record.hashes, block)
                if not self._keeper.succeed(block_id, other):
                    all_found = False
                elif not group:
                    self._trails.succeed(block_id, other)
        return all_found

    def enter_again(self, record: PagedRecord) -> None:
        """Before a request lets go of its blocks, to be kept in order: name those that were second ones, where the first is gone or
        nobody's any more."""
        for group, (table, first) in enumerate(zip(record.tables, record.let_go, strict=True)):
            start = first
            for is_found, run in groupby(map(self._index.is_indexed, table[first : record.num_committed])):
                block_ids = table[start : start + len(list(run))].tolist()
                if not is_found:
                    for block_id in block_ids if not group else ():
                        self._trails.mark(record.trail, block_id)
                    self._name(record, group, start, block_ids, table[start - 1], self._keeper.now)
                start += len(block_ids)

    def _found_ones(self, record: Record, start: int, own: list[int]) -> list[int]:
        """A request's blocks, and of those that are second ones of a content and have another behind them the first ones."""
        found = [self._index.get(0, record.hashes, start + place) for place in range(len(own) - 1)]
        return [*(block_id if other is None else other for block_id, other in zip(own, found, strict=False)), own[-1]]
