"""Joins a tier's decider (its books, the plans) and its computer (the threads that copy), on the engine thread.

Before a step it passes on what the threads have done; after a decision it has the plans carried out. It measures the two rates of
the cost model: bytes a second of reads, tokens a second of steps that compute prompts. It knows no requests.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from kvist.config import DiskTier
from kvist.engine.transfers import Filled, Lost, Stored, Transfers
from kvist.kv.manager import KVManager
from kvist.kv.memory import KVMemory
from kvist.kv.origins import max_bytes
from kvist.kv.tiers import TierRates, TransferPlan
from kvist.sched.prefetch import Prefetcher
from kvist.sizes import format_bytes
from kvist.store.tier import StoreStats

NAME = "disk"
PROMPT_ROWS = 32
"""Steps of fewer rows say little about the speed of prompts."""
WEIGHT = 0.25
"""Of the newest measurement in a rate."""
WRITING_SECONDS = 0.1
"""After so many an engine without work looks again what was written."""
PATIENCE = 0.02
"""Seconds that a step without rows waits for the disk before the engine looks at its inbox again."""


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """A tier at one moment."""

    name: str
    store: StoreStats
    dropped_blocks: int
    """Not written, because writing could not keep up."""
    refused_restores: int
    """Not read, because computing was cheaper."""
    swaps: int
    """Preempted requests that were to come back from here."""
    rates: TierRates
    is_read_only: bool
    """For now nothing new is written."""


class Tiers:
    """`manager` has a tier's books; `transfers` moves the bytes."""

    def __init__(self, manager: KVManager, transfers: Transfers) -> None:
        assert manager.tier is not None
        self._decider = manager.tier
        self._keeper = manager.keeper
        self._transfers = transfers
        self.prefetcher = Prefetcher(manager)
        self._read_rate: float | None = None
        self._token_rate: float | None = None

    @property
    def num_restoring(self) -> int:
        return self.prefetcher.num_restoring

    def receive(self) -> None:
        """Tell the deciders what has been stored, lost and filled, and whether more is written."""
        self._decider.takes_blocks = self._transfers.takes_blocks
        for event in self._transfers.events():
            match event:
                case Stored(names):
                    self._keeper.tell("stored", "", self._decider.stored(names), NAME)
                case Lost(losses):
                    for why in dict.fromkeys(losses.values()):
                        gone, missed = self._decider.lost(name for name, reason in losses.items() if reason == why)
                        self._keeper.tell("removed", why, gone, NAME)
                        self._keeper.tell("not_stored", why, missed, NAME)
                case Filled(plan_id, filled, num_bytes, seconds):
                    self.prefetcher.complete(plan_id, filled)
                    if num_bytes:
                        self._read_rate = _mean(self._read_rate, num_bytes / max(seconds, 1e-6))
                        self._update_rates()

    def rest(self) -> float:
        """The same while there are no steps. Returns after how many seconds there may be more of it; inf: never."""
        self.receive()
        return WRITING_SECONDS if self._transfers.is_writing else inf

    def send(self, restores: tuple[TransferPlan, ...] = ()) -> None:
        """Copy out what was offered, before anything else is written to those blocks, and begin to fill others."""
        offers = self._decider.take_offers()
        if offers is not None:
            self._transfers.copy_out(offers)
        for plan in restores:
            self._transfers.fill(plan)
        self._transfers.stop_filling(self.prefetcher.unwanted)

    def wait(self) -> None:
        """There is nothing to compute until blocks have come."""
        self._transfers.stop_filling(self.prefetcher.unwanted)
        self._transfers.wait(PATIENCE)

    def measured(self, num_rows: int, seconds: float) -> None:
        """A step took so long."""
        if num_rows >= PROMPT_ROWS:
            self._token_rate = _mean(self._token_rate, num_rows / max(seconds, 1e-6))
            self._update_rates()

    def _update_rates(self) -> None:
        rates = [None if rate is None else max(1, int(rate)) for rate in (self._read_rate, self._token_rate)]
        self._decider.rates = TierRates(*rates)

    def describe(self) -> str:
        """One sentence for the user."""
        stats = self._transfers.store_stats
        used, quota = format_bytes(stats.used_bytes), format_bytes(stats.quota_bytes)
        damaged = f", {stats.damaged_blocks:,} damaged dropped" if stats.damaged_blocks else ""
        return f"Disk tier: {used} of {quota} used, {stats.found_blocks:,} blocks found{damaged}."

    def close(self) -> None:
        """Write what is under way. The pool must stay until then."""
        self.send()
        self._transfers.close()

    def snapshot(self, num_swaps: int) -> TierSnapshot:
        decider, transfers = self._decider, self._transfers
        counts = transfers.num_dropped, decider.num_refused, num_swaps
        return TierSnapshot(NAME, transfers.store_stats, *counts, decider.rates, not transfers.takes_blocks)


def open_disk_tier(tier: DiskTier, manager: KVMemory, blocks: npt.NDArray[np.uint8], warn: Callable[[str], None]) -> Tiers:
    """The tier with all that its folder holds. Raises ConfigError."""
    from kvist.store.disk import DiskStore

    assert isinstance(manager, KVManager)
    assert manager.tier is not None
    store = DiskStore(
        tier.folder, tier.quota, blocks.shape[1], max_about=max_bytes(manager.spec.block_size), sync=tier.sync, warn=warn
    )
    free = shutil.disk_usage(tier.folder).free + store.stats().used_bytes
    if free < tier.quota:
        warn(
            f"The disk tier may take {format_bytes(tier.quota)}, but {tier.folder} has room for {format_bytes(free)}; "
            "lower the size in kv_tiers."
        )
    manager.tier.found(store.records())
    # One that is smaller than the pool would be filled by hits over and over.
    manager.tier.renews = tier.quota >= blocks.nbytes
    return Tiers(manager, Transfers(store, blocks))


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + (new - old) * WEIGHT
