"""Copies blocks between the pool and a store behind it, off the engine thread: one thread writes, one reads.

It carries out plans and decides nothing but what to drop when writing cannot keep up. `copy_out` copies to a bounded staging area
before it returns, so the blocks may be reused at once; `fill` reads straight into the plan's blocks, which stay pinned until its
`Filled` is out, and takes what is still in the staging area from there. What happened comes back as events, in order, when the
engine thread asks. Invariants: each name that was copied out ends in one `Stored` or one `Lost`; each plan to fill ends in one
`Filled`, whatever fails; a block stays in the staging area until the store has it or has failed; nothing touches the pool after
`close`.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvist.kv.tiers import BlockCopy, TransferPlan
from kvist.store.tier import BlockStore, Loss

logger = logging.getLogger("kvist.tier")

STAGING_BYTES = 64 << 20
MIN_STAGED = 8
WRITE_BATCH = 8
"""Blocks that one write, and one fsync under the policy "always", may take together."""
READ_BATCH_BYTES = 1 << 20
"""Read at once, before it is asked again whether anybody still waits."""


@dataclass(frozen=True, slots=True)
class Stored:
    names: list[bytes]


@dataclass(frozen=True, slots=True)
class Lost:
    losses: dict[bytes, Loss]
    """By name."""

    @property
    def names(self) -> list[bytes]:
        return list(self.losses)


@dataclass(frozen=True, slots=True)
class Filled:
    plan_id: int
    filled: list[bool]
    num_bytes: int
    """That the store read, in so many seconds."""
    seconds: float


Event = Stored | Lost | Filled


class Transfers:
    """`blocks` is the pool, uint8 [num_blocks, block_bytes]. The store is closed with it."""

    def __init__(
        self,
        store: BlockStore,
        blocks: npt.NDArray[np.uint8],
        *,
        staging_bytes: int = STAGING_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._blocks, self._clock = store, blocks, clock
        num_staged = max(MIN_STAGED, staging_bytes // blocks.shape[1])
        self._staging = np.empty((num_staged, blocks.shape[1]), np.uint8)
        self._free = deque(reversed(range(num_staged)))
        """Used from the end: what is never needed is never written, and takes no memory."""
        self._staged: dict[bytes, int] = {}
        """By name, the slot from which it is still to be written."""
        self._slots = threading.Lock()
        """Held while a slot is read by another thread than the writing one, and while it is given back."""
        self._writes: queue.SimpleQueue[tuple[bytes, bytes, int] | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[TransferPlan | None] = queue.SimpleQueue()
        self._unwanted: frozenset[int] = frozenset()
        self._read_batch = max(1, READ_BATCH_BYTES // blocks.shape[1])
        self._events: deque[Event] = deque()
        self._news = threading.Condition()
        self.num_dropped = 0
        """Blocks that were not written because the disk could not keep up."""
        self.store_stats = store.stats()
        self._threads = [
            threading.Thread(target=self._guard, args=(run,), name=f"kvist-tier-{name}", daemon=True)
            for name, run in (("write", self._write), ("read", self._read))
        ]
        for thread in self._threads:
            thread.start()
        # A script that ends without closing its engine keeps what it computed all the same.
        atexit.register(self.close)

    # The engine thread

    @property
    def takes_blocks(self) -> bool:
        """Whether what is copied out would be written."""
        return not self._store.is_read_only

    @property
    def is_writing(self) -> bool:
        """Whether the store is still to say of something whether it has it."""
        return bool(self._staged or self._events)

    def copy_out(self, plan: TransferPlan) -> None:
        """Blocks that find no room in the staging area are dropped."""
        dropped = []
        for copy in plan.copies:
            if self._free:
                slot = self._free.pop()
                self._staging[slot] = self._blocks[copy.block_id]
                self._staged[copy.name] = slot
                self._writes.put((copy.name, copy.about, slot))
            else:
                dropped.append(copy.name)
        if dropped:
            self.num_dropped += len(dropped)
            self._tell(Lost(dict.fromkeys(dropped, "dropped")))

    def fill(self, plan: TransferPlan) -> None:
        self._reads.put(plan)

    def stop_filling(self, plan_ids: frozenset[int]) -> None:
        """Read no more for these plans than what is being read; what is not filled then stays so."""
        self._unwanted = plan_ids

    def events(self) -> list[Event]:
        """All that happened since the last call."""
        with self._news:
            events = list(self._events)
            self._events.clear()
        return events

    def wait(self, seconds: float) -> None:
        """Until there is an event, but no longer than this."""
        with self._news:
            self._news.wait_for(lambda: bool(self._events), seconds)

    def close(self) -> None:
        """Write all that was copied out, and stop. Twice is harmless."""
        if self._threads:
            atexit.unregister(self.close)
            self._writes.put(None)
            self._reads.put(None)
            for thread in self._threads:
                thread.join()
            self._threads = []
            self._store.close()
            self.store_stats = self._store.stats()

    # The threads

    def _guard(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException:
            logger.exception("A thread of the disk tier ends.")
            raise

    def _write(self) -> None:
        going = True
        while going:
            batch = [self._writes.get()]
            while len(batch) < WRITE_BATCH and batch[-1] is not None and not self._writes.empty():
                batch.append(self._writes.get())
            going = batch[-1] is not None
            self._put([item for item in batch if item is not None])

    def _put(self, batch: list[tuple[bytes, bytes, int]]) -> None:
        try:
            kept = set(self._store.put([(name, about, memoryview(self._staging[slot])) for name, about, slot in batch]))
        except Exception:
            logger.exception("Blocks could not be written to the disk tier.")
            kept = set()
        failed: dict[bytes, Loss] = {name: "failed" for name, _, _ in batch if name not in kept}
        lost = failed | self._store.take_lost()
        self._tell(Lost(lost), Stored([name for name, _, _ in batch if name in kept]))
        self._give_back({name: slot for name, _, slot in batch})

    def _give_back(self, slots: dict[bytes, int]) -> None:
        with self._slots:
            for name, slot in slots.items():
                if self._staged.get(name) == slot:
                    del self._staged[name]
        self._free.extend(slots.values())

    def _read(self) -> None:
        while (plan := self._reads.get()) is not None:
            filled = [self._fill_from_staging(copy) for copy in plan.copies]
            rest = [number for number, done in enumerate(filled) if not done]
            started = self._clock()
            for start in range(0, len(rest), self._read_batch):
                if plan.plan_id in self._unwanted:
                    break
                batch = rest[start : start + self._read_batch]
                for number, done in zip(batch, self._get([plan.copies[number] for number in batch]), strict=True):
                    filled[number] = done
            seconds = self._clock() - started
            num_bytes = sum(filled[number] for number in rest) * self._blocks.shape[1]
            self._tell(Lost(self._store.take_lost()), Filled(plan.plan_id, filled, num_bytes, seconds))

    def _fill_from_staging(self, copy: BlockCopy) -> bool:
        with self._slots:
            slot = self._staged.get(copy.name)
            if slot is not None:
                self._blocks[copy.block_id] = self._staging[slot]
        return slot is not None

    def _get(self, copies: list[BlockCopy]) -> list[bool]:
        try:
            return self._store.get([(copy.name, memoryview(self._blocks[copy.block_id])) for copy in copies])
        except Exception:
            logger.exception("Blocks could not be read from the disk tier.")
            return [False] * len(copies)

    def _tell(self, *events: Event) -> None:
        self.store_stats = self._store.stats()
        with self._news:
            self._events.extend(event for event in events if isinstance(event, Filled) or event.names)
            self._news.notify()
