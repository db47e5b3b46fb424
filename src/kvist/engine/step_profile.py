"""Where the time of one request's decode step goes: the parts of Python, and each native call summed over the layers.

It runs a request on an engine of its own whose scheduler and runner it stands in front of; the engine itself knows no stopwatch.
Medians over the steps; the clock costs a few microseconds a step. Invariant: the parts of a step add up to the step.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns as clock
from typing import Any

import numpy as np
import numpy.typing as npt

from kvist.engine.engine import Engine
from kvist.errors import ConfigError
from kvist.kernels.cost import Cost, cost_of
from kvist.kernels.ops import F32, ForwardBatch
from kvist.request import SamplingParams
from kvist.sched.output import SchedulerOutput

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
    """Microseconds of a step, by part. `context`: the position of the row in the middle of those measured, whose bytes are told."""

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


class _Stopwatch:
    """Stands before an engine's scheduler and runner, and notes in `ends` when each part of a step ends (nanoseconds)."""

    def __init__(self, engine: Engine) -> None:
        self.ends: list[int] = []
        self.batch: Any = None
        self.times: Any = None
        """Of each native call of the step."""
        self.program = engine.runner.model.program
        self._schedule, self._update = engine.scheduler.schedule, engine.scheduler.update
        self._build, self._run = engine.runner.batches.build, self.program.run_timed
        engine.scheduler.schedule, engine.scheduler.update = self.schedule, self.update  # type: ignore[method-assign]
        engine.runner = _as_any(self)

    def schedule(self, now: float) -> SchedulerOutput:
        output = self._schedule(now)
        self.ends.append(clock())
        return output

    def forward(self, output: SchedulerOutput) -> tuple[ForwardBatch, F32]:
        """The model's program, call by call on the clock."""
        batch = self.batch = self._build(output.scheduled)
        self.ends.append(clock())
        logits, self.times = self._run(batch)
        self.ends.append(clock())
        return batch, logits

    def update(self, output: SchedulerOutput, sampled: Mapping[str, int]) -> None:
        self.ends.append(clock())
        self._update(output, sampled)
        self.ends.append(clock())


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
    watch = _Stopwatch(engine)
    totals, times, python = list[float](), [], defaultdict[str, list[float]](list)
    middle, costs = 0, list[Cost]()
    while engine.has_work:
        watch.ends.clear()
        started = clock()
        engine.step()
        ends = [*watch.ends, clock()]
        if len(totals) <= steps // 2:
            # Attention reads more with each step; medians are those of the middle.
            middle, costs = int(watch.batch.seq_lens[0]) - 1, [cost_of(call, watch.batch) for call in watch.program.calls]
        totals.append((ends[-1] - started) / 1e3)
        times.append(watch.times.copy())
        for name, begin, end in zip(PYTHON_PARTS, [started, *ends], ends, strict=False):
            inside = int(watch.times.sum()) if name == "program" else 0
            python[name].append((end - begin - inside) / 1e3)
    return StepProfile(
        context=middle,
        steps=len(totals),
        step_microseconds=statistics.median(totals),
        python={name: statistics.median(python[name]) for name in PYTHON_PARTS},
        native=_by_cost(costs, np.array(times)),
    )


def _as_any(stand_in: Any) -> Any:
    return stand_in


def _by_cost(costs: Sequence[Cost], nanoseconds: npt.NDArray[np.int64]) -> tuple[CallTime, ...]:
    """Calls that cost the same, added up; `nanoseconds` [steps, calls]."""
    places = defaultdict[Cost, list[int]](list)
    for place, cost in enumerate(costs):
        places[cost].append(place)
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
