"""Blocks that steps have filled, until they enter the prefix index: all at once, before anybody asks what is there.

A prompt is computed in chunks and an answer token by token, and each entry into the index costs several times what one block more
does. Whoever asks the manager has `enter` called first, so nobody misses what is there; events are told when somebody asks for them
at the latest, and of requests that compute one content at once another's blocks may be the named ones. With a tier they enter in
the step that filled them, as they are written from then on. This module knows neither reference counts nor steps. Invariant: what
waits is held by its request, and was computed.
"""

from __future__ import annotations

from kvist.kv.keeper import Keeper
from kvist.kv.names import Record
from kvist.kv.prefix import PrefixIndex
from kvist.kv.restores import Restores
from kvist.kv.trails import Trails
from kvist.request import Request


class Commits:
    def __init__(self, index: PrefixIndex, keeper: Keeper, trails: Trails, restores: Restores | None) -> None:
        self._index, self._keeper, self._trails, self._restores = index, keeper, trails, restores
        self._waiting: dict[str, tuple[Request, Record, int, float]] = {}
        """By request; how many leading blocks are full, and since when."""

    def add(self, request: Request, record: Record, full: int) -> None:
        self._waiting[request.request_id] = request, record, full, self._keeper.now
        if self._restores is not None:
            self.enter()

    def enter(self) -> None:
        """In the order in which the requests began to fill them."""
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            for request, record, full, time in waiting.values():
                self._enter(request, record, full, time)

    def _enter(self, request: Request, record: Record, full: int, time: float) -> None:
        """A second block of a content stays unnamed: the first may be shared already, and pointing a request's table to it would
        change a table that is lent out. It is reused first when it is let go."""
        if len(record.hashes) < full:
            record.hash_up_to(request, full, self._index.block_size)
        root, start = record.root, record.num_committed
        own = record.tables[0][start:full].tolist()
        for group, table in enumerate(record.tables):
            block_ids = table[start:full].tolist() if group else own
            named, names = self._index.insert(group, root, record.hashes, start, block_ids, record.tokens, table[start - 1])
            self._keeper.enter(root, names, named, time)
            if not group and len(named) < len(own):
                own = self._found_ones(record, start, own)
        superseded = self._trails.passed(record.trail, start, own, record.tables[0][start - 1])
        record.num_committed = full
        if self._restores is not None:
            self._restores.offer(record, [start] * len(record.tables))
        if superseded is not None:
            self._keeper.forget_tail(superseded)

    def _found_ones(self, record: Record, start: int, own: list[int]) -> list[int]:
        """A request's blocks, and of those that are second ones of a content and have another behind them the first ones."""
        found = [self._index.get(0, record.hashes, start + place) for place in range(len(own) - 1)]
        return [*(block_id if other is None else other for block_id, other in zip(own, found, strict=False)), own[-1]]
