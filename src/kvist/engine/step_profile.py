"""Where the time of one request's decode step goes: the parts of Python, and each native call summed over the layers.

It runs a request on an engine of its own whose scheduler and runner it stands in front of; the engine itself knows no stopwatch.
Medians over the steps; the clock costs a few microseconds a step. Invariant: the parts of a step add up to the step.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvist.engine.engine import Engine
from kvist.errors import ConfigError
from kvist.kernels.cost import Cost, cost_of
from kvist.kernels.ops import F32, ForwardBatch
from kvist.kernels.program import Call
from kvist.request import SamplingParams

WARM_STEPS = 8
PYTHON_PARTS = ("schedule", "batch", "program", "sample", "update", "output")
"""In the order of a step. "program": from the batch's arrays to the native call, and back; "output": text, deltas, counters."""


@dataclass(frozen=True)
class CallTime:
    """Calls of one kind and shape in a step, added up. `num_bytes` and `operations` are what they have to read and compute."""

    name: str
    formats: tuple[str, ...]
    calls: int
    microseconds: float
    num_bytes: int
    operations: int


@dataclass(frozen=True)
class StepProfile:
    """Microseconds of a step, by part. `context`: the position of the last row measured."""

    context: int
    steps: int
    step_microseconds: float
    python: dict[str, float]
    native: tuple[CallTime, ...]

    @property
    def python_microseconds(self) -> float:
        return sum(self.python.values())

    @property
    def native_microseconds(self) -> float:
        return sum(call.microseconds for call in self.native)


class _Timed:
    """Stands before the scheduler and the runner, and notes when each part of a step ends."""

    def __init__(self, inner: Any, ends: dict[str, int]) -> None:
        self._inner, self._ends = inner, ends

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _TimedScheduler(_Timed):
    def schedule(self, now: float) -> Any:
        output = self._inner.schedule(now)
        self._ends["schedule"] = time.perf_counter_ns()
        return output

    def update(self, output: Any, sampled: Any) -> None:
        self._ends["sample"] = time.perf_counter_ns()
        self._inner.update(output, sampled)
        self._ends["update"] = time.perf_counter_ns()


class _TimedRunner(_Timed):
    """Runs the model's program call by call on the clock."""

    times: npt.NDArray[np.int64]
    batch: Any

    def forward(self, output: Any) -> tuple[ForwardBatch, F32]:
        program = self._inner.model.program
        batch = self._inner.batches.build(output.scheduled)
        self._ends["batch"] = time.perf_counter_ns()
        logits, self.times = program.run_timed(batch)
        self.batch = batch
        self._ends["program"] = time.perf_counter_ns()
        return batch, logits


def profile_step(engine: Engine, *, context: int = 64, steps: int = 64) -> StepProfile:
    """Decode `steps` tokens of one greedy request behind a prompt of `context` tokens. The engine must be idle, and serves nobody
    afterwards. Raises ConfigError when its context is too short."""
    room = engine.config.effective_max_len
    if context + WARM_STEPS + steps > room:
        raise ConfigError(f"A step at {context} tokens takes {context + WARM_STEPS + steps} in all, and the engine holds {room}.")
    vocabulary = engine.config.model.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=WARM_STEPS + steps, ignore_eos=True)
    engine.add_request("profile", [7919 * i % vocabulary for i in range(1, context + 1)], params)
    while engine.snapshot().generated_tokens < WARM_STEPS:
        engine.step()
    ends: dict[str, int] = {}
    runner = _TimedRunner(engine.runner, ends)
    engine.runner, engine.scheduler = _as_any(runner), _as_any(_TimedScheduler(engine.scheduler, ends))
    totals, times, python = [], [], defaultdict[str, list[float]](list)
    while engine.has_work:
        started = time.perf_counter_ns()
        engine.step()
        ends["output"] = time.perf_counter_ns()
        totals.append((ends["output"] - started) / 1e3)
        times.append(runner.times.copy())
        for name in PYTHON_PARTS:
            inside = int(runner.times.sum()) if name == "program" else 0
            python[name].append((ends[name] - started - inside) / 1e3)
            started = ends[name]
    return StepProfile(
        context=int(runner.batch.seq_lens[0]) - 1,
        steps=len(totals),
        step_microseconds=statistics.median(totals),
        python={name: statistics.median(python[name]) for name in PYTHON_PARTS},
        native=_by_cost(runner.model.program.calls, runner.batch, np.array(times)),
    )


def _as_any(stand_in: Any) -> Any:
    return stand_in


def _by_cost(calls: Sequence[Call], batch: ForwardBatch, nanoseconds: npt.NDArray[np.int64]) -> tuple[CallTime, ...]:
    """Calls that cost the same, added up; `nanoseconds` [steps, calls]. Steps differ in bytes by the keys that attention reads:
    those of `batch`, the last one, are told."""
    places = defaultdict[Cost, list[int]](list)
    for place, call in enumerate(calls):
        places[cost_of(call, batch)].append(place)
    return tuple(
        CallTime(
            cost.name,
            cost.formats,
            len(same),
            statistics.median(nanoseconds[:, same].sum(axis=1).tolist()) / 1e3,
            cost.num_bytes * len(same),
            cost.operations * len(same),
        )
        for cost, same in places.items()
    )
