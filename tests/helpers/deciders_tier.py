"""A pretended engine with a pretended disk tier, for tests of the deciders without a model.

Bytes are the fingerprints of `helpers.deciders.Arena`. Copies out are carried out at once, as the engine does it, and wait in a
staging area until they are on the disk; what was stored, lost or filled is told some steps later, in part, by a seeded generator:
stores may be dropped, kept blocks lost, fills may fail and then leave rubbish in the block.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from helpers.deciders import Sim
from kvist.kv.manager import KVManager
from kvist.kv.origins import tokens_of
from kvist.kv.tiers import TierRates, TransferPlan
from kvist.sched.output import SchedulerOutput
from kvist.sched.prefetch import Prefetcher


class TieredSim(Sim):
    """`latency`: the most steps that a fill takes, `write_latency` that the writing of a block takes, one after the other;
    `trouble`: the share of blocks that are dropped, lost or damaged."""

    def __init__(
        self,
        *windows: int | None,
        latency: int = 2,
        write_latency: int = 0,
        trouble: float = 0.0,
        seed: int = 0,
        **options: Any,
    ) -> None:
        def make(manager: KVManager) -> Prefetcher:
            assert manager.tier is not None
            self.tier = manager.tier
            self.prefetcher = Prefetcher(manager)
            return self.prefetcher

        super().__init__(*windows, prefetcher=make, **options)
        self.rng = random.Random(seed)
        self.latency, self.write_latency, self.trouble = latency, write_latency, trouble
        self.staged: dict[bytes, list[int | None]] = {}
        """In the order in which they are written."""
        self.writing = 0
        """Steps that the first of them still takes."""
        self.disk: dict[bytes, list[int | None]] = {}
        self.about: dict[bytes, bytes] = {}
        self.under_way: list[tuple[int, TransferPlan]] = []
        self.num_filled = self.num_failed = self.num_waits = self.num_stopped = 0

    def restart_from(self, old: TieredSim) -> None:
        """Find another's disk at the start."""
        self.disk, self.about = dict(old.disk), dict(old.about)
        self.tier.found((name, self.about[name]) for name in self.disk)

    def set_rates(self, read: int | None, tokens: int | None) -> None:
        self.tier.rates = TierRates(read, tokens)

    def copy_out(self) -> None:
        plan = self.tier.take_offers()
        if plan is None:
            return
        for copy in plan.copies:
            assert copy.name not in {*self.disk, *self.staged}, "a block is written once"
            if self.rng.random() < self.trouble:
                self.tier.lost([copy.name])
                continue
            self.staged[copy.name] = list(self.arena.slots[copy.block_id])
            self.about[copy.name] = copy.about
            assert None not in self.staged[copy.name][: len(tokens_of(copy.about))]
        self.write()

    def write(self, *, everything: bool = False) -> None:
        while self.staged and (everything or not self.writing):
            name = next(iter(self.staged))
            self.disk[name] = self.staged.pop(name)
            self.tier.stored([name])
            self.writing = self.rng.randint(0, self.write_latency) if self.write_latency else 0

    def deliver(self, *, everything: bool = False) -> None:
        self.writing = max(0, self.writing - 1)
        self.write(everything=everything)
        late, self.under_way = self.under_way, []
        for steps, plan in late:
            unwanted = plan.plan_id in self.prefetcher.unwanted
            if steps > 0 and not everything and not unwanted:
                self.under_way.append((steps - 1, plan))
                continue
            filled = []
            wanted = self.rng.randint(0, len(plan.copies)) if unwanted else len(plan.copies)
            for copy in plan.copies[:wanted]:
                found = self.staged.get(copy.name) or self.disk.get(copy.name)
                good = found is not None and self.rng.random() >= self.trouble
                if found is None:
                    self.tier.lost([copy.name])
                self.arena.slots[copy.block_id] = list(found) if found and good else [0] * self.spec.block_size
                filled.append(good)
            self.num_stopped += unwanted
            filled += [False] * (len(plan.copies) - wanted)
            self.num_filled += sum(filled)
            self.num_failed += len(filled) - sum(filled)
            self.prefetcher.complete(plan.plan_id, filled)
        if self.disk and self.rng.random() < self.trouble:
            name = self.rng.choice(sorted(self.disk))
            del self.disk[name]
            self.tier.lost([name])

    def step(self, between: Callable[[], None] | None = None) -> SchedulerOutput:
        self.deliver()
        self.now += 1.0
        output = self.scheduler.schedule(self.now)
        self.outputs.append(output)
        self.copy_out()
        for plan in output.restores:
            for copy in plan.copies:
                # What a reader may leave there at any moment.
                self.arena.slots[copy.block_id] = [0] * self.spec.block_size
            self.under_way.append((self.rng.randint(0, self.latency), plan))
        account = self.scheduler.account()
        assert account.used <= account.held <= account.committed, "what is filled is written to"
        if output.empty:
            assert self.prefetcher.num_restoring, "a step without rows waits for a tier"
            self.num_waits += 1
        sampled = self.arena.run(self.requests, output)
        if between is not None:
            between()
        self.scheduler.update(output, sampled)
        for item in output.scheduled:
            request = self.requests[item.request_id]
            scored = request.max_tokens == 0 and request.num_computed_tokens == request.num_tokens
            if not request.finished and (scored or len(request.output_token_ids) == request.max_tokens > 0):
                self.scheduler.finish(item.request_id, "length")
        self.copy_out()
        return output

    def run(self, limit: int = 100_000, *, check: bool = True) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                self.deliver(everything=True)
                return
            self.step()
            if check:
                self.scheduler.check_invariants()
        raise AssertionError(f"still working after {limit} steps")
