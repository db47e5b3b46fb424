"""Engines side by side: the same works and the same token ids, in turn, each engine in a process of its own.

Each work is run by one contender after the other (A B C, A B C, ...), a round a measurement, so that a machine whose speed drifts
drifts for all. The first contender is kvist; the others are the peers. It knows no engine (`peers/`), no files and no tables.
Invariants: only one process computes at a time; what fails is reported with its reason, once, and is not tried again.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvist.bench.machine import read_file
from kvist.bench.measure import Round, Unit
from kvist.bench.session import Contender, Session, SessionError
from kvist.bench.throughput import tokens_per_second
from kvist.bench.workloads import SEED, Work, draw_prompts

UNITS: dict[str, Unit] = {"prefill": "tokens/s", "decode": "tokens/s", "output": "tokens/s", "start": "ms", "memory": "MiB"}
LOWER_IS_BETTER = ("start", "memory")
FRESH = ("start", "memory")
"""Works that take a new process for each measurement."""
WARM_UP = (16, 4)
Report = Callable[[str], None]


@dataclass(frozen=True)
class Failure:
    """What could not be run, and why. `work` None: nothing of this contender."""

    contender: str
    work: str | None
    reason: str


@dataclass
class Comparison:
    """Values by (work, contender), in the order of the rounds; what each engine told of itself; what failed."""

    works: tuple[Work, ...]
    contenders: tuple[Contender, ...]
    values: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    interrupted: bool = False
    """The user ended it; the values are those measured until then."""

    def failed(self, contender: str, work: str) -> bool:
        return any(one.contender == contender and one.work in (None, work) for one in self.failures)


def peak_memory(pids: Sequence[int]) -> float:
    """MiB that the processes had in RAM at their peaks, added up. Raises SessionError where the system does not tell."""
    total = 0
    for pid in pids:
        lines = [line for line in read_file(f"/proc/{pid}/status").splitlines() if line.startswith("VmHWM:")]
        if not lines:
            raise SessionError("this system does not tell a process's peak memory")
        total += int(lines[0].split()[1])
    return total / 1024


def figure(work: Work, answer: Mapping[str, Any]) -> float:
    """A throughput work's tokens a second. Raises SessionError where the engine did not tell the time of its first token."""
    after_first = answer["after_first"]
    if work.counts == "decode" and not after_first:
        raise SessionError("it did not tell when the first token came")
    return tokens_per_second(work, Round(answer["total"], (answer["total"] - (after_first or 0.0),)))


class Contest:
    """The processes of one comparison while it runs."""

    def __init__(self, works: Sequence[Work], contenders: Sequence[Contender], vocab_size: int, timeout: float) -> None:
        self.result = Comparison(tuple(works), tuple(contenders))
        self.vocab_size = vocab_size
        self.timeout = timeout
        self.sessions: dict[str, Session] = {}
        lasting = [work for work in works if work.counts not in FRESH]
        self.context = max((work.num_tokens for work in lasting), default=0)
        self.max_seqs = max((work.num_requests for work in lasting), default=1)

    def measure(self, contender: Contender, work: Work, prompts: list[list[int]]) -> float:
        """One measurement. Raises SessionError."""
        new_tokens = work.new_tokens + (work.counts == "decode")
        if work.counts in FRESH:
            return self._measure_fresh(contender, work, prompts, new_tokens)
        session = self._session(contender)
        try:
            answer = session.ask(prompts, new_tokens, self.timeout)
        except BaseException:
            # A late answer would be taken for the next work's.
            self.sessions.pop(contender.name).close()
            raise
        session.rest()
        return figure(work, answer)

    def _session(self, contender: Contender) -> Session:
        session = self.sessions.get(contender.name)
        if session is None:
            session = Session.start(contender, context=self.context, max_seqs=self.max_seqs, cold=False, timeout=self.timeout)
            try:
                # So that no work pays for first touches.
                session.ask(draw_prompts(random.Random(SEED), 1, WARM_UP[0], self.vocab_size), WARM_UP[1], self.timeout)
            except BaseException:
                session.close()
                raise
            self.sessions[contender.name] = session
            self.result.facts[contender.name] = session.facts
        return session

    def _measure_fresh(self, contender: Contender, work: Work, prompts: list[list[int]], new_tokens: int) -> float:
        session = Session.start(contender, context=work.num_tokens, max_seqs=1, cold=True, timeout=self.timeout)
        try:
            answer = session.ask(prompts, new_tokens, self.timeout)
            elapsed = time.monotonic() - answer.get("started", session.begun)
            self.result.facts.setdefault(contender.name, session.facts)
            return elapsed * 1e3 if work.counts == "start" else peak_memory(answer.get("pids", [session.process.pid]))
        finally:
            session.close()

    def close(self) -> None:
        for session in self.sessions.values():
            session.close()


def compare(
    contenders: Sequence[Contender],
    works: Sequence[Work],
    rounds: int,
    *,
    vocab_size: int,
    report: Report,
    timeout: float = 900.0,
    seed: int = SEED,
) -> Comparison:
    """Run `rounds` rounds of each work on each contender, in turn. A start is run once before its first round, uncounted, so that
    files are in memory for all alike. `report` is told of each measurement. An interrupt ends it early, with what was measured."""
    contest = Contest(works, contenders, vocab_size, timeout)
    result = contest.result
    draws = {work.name: random.Random(f"{seed}/{work.name}") for work in works}
    uncounted = 1 if any(work.counts == "start" for work in works) else 0
    try:
        for turn in range(-uncounted, rounds):
            for work in works:
                if turn < 0 and work.counts != "start":
                    continue
                prompts = draw_prompts(draws[work.name], work.num_requests, work.prompt_tokens, vocab_size)
                for contender in contenders:
                    _take_turn(
                        contest,
                        contender,
                        work,
                        prompts,
                        f"round {turn + 1} of {rounds}" if turn >= 0 else "before the first round",
                        turn >= 0,
                        report,
                    )
    except KeyboardInterrupt:
        result.interrupted = True
    finally:
        contest.close()
    return result


def _take_turn(
    contest: Contest, contender: Contender, work: Work, prompts: list[list[int]], label: str, counted: bool, report: Report
) -> None:
    result = contest.result
    if result.failed(contender.name, work.name):
        return
    try:
        value = contest.measure(contender, work, prompts)
    except SessionError as error:
        # An engine that never answered will not run the other works either; one that did may fail at a single work.
        result.failures.append(Failure(contender.name, work.name if contender.name in result.facts else None, str(error)))
        report(f"{label}: {work.name}, {contender.name}: {error}")
        return
    if counted:
        result.values.setdefault((work.name, contender.name), []).append(value)
        report(f"{label}: {work.name}, {contender.name}: {value:,.1f} {UNITS[work.counts]}")


def summarize(result: Comparison) -> list[dict[str, Any]]:
    """A row a work: every contender's values and median, the best peer, and how many times as good kvist is (the quotient of the
    medians, turned over where lower is better; None without both)."""
    kvist, *peers = (contender.name for contender in result.contenders)
    rows = []
    for work in result.works:
        lower = work.counts in LOWER_IS_BETTER
        values = {name: result.values[work.name, name] for name in (kvist, *peers) if (work.name, name) in result.values}
        medians = {name: statistics.median(each) for name, each in values.items()}
        ranked = sorted((name for name in peers if name in medians), key=medians.__getitem__, reverse=not lower)
        best = ranked[0] if ranked else None
        ratios = {
            name: medians[name] / medians[kvist] if lower else medians[kvist] / medians[name] for name in ranked if kvist in medians
        }
        rows.append(
            {
                "work": work.name,
                "unit": UNITS[work.counts],
                "lower_is_better": lower,
                "values": values,
                "medians": medians,
                "ratios": ratios,
                "best_peer": best,
                "ratio_to_best": ratios.get(best) if best else None,
            }
        )
    return rows
