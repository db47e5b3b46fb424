"""A forward pass as data: fused calls of `Ops` over workspace arrays, recorded once by a model and run on each step.

`Ops.record` turns a list of calls into a `Program`; a native machine runs it in one call. `DirectProgram` makes the calls one by
one, and is the definition. This module knows no models and no requests. Invariants: a program and the direct calls in its order
give the same bits; running allocates nothing once its arrays hold as many rows as a step has.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from kvist.kernels.ops import F32, I64, ForwardBatch, Linear, Ops


class Array:
    """A float32 workspace [rows, width] that only ever grows, by half at least. A step uses its first rows: one for each row of the
    batch, or, if it is `taken`, one for each row that the batch wants logits of."""

    def __init__(self, width: int, *, taken: bool = False) -> None:
        self.width, self.taken = width, taken
        self.memory: F32 = np.empty((0, width), np.float32)

    def reserve(self, batch: ForwardBatch) -> F32:
        """The whole memory, with room for a step; contents undefined. It is another array once it has grown."""
        rows = self.count(batch)
        if rows > len(self.memory):
            self.memory = np.empty((max(rows, len(self.memory) * 3 // 2), self.width), np.float32)
        return self.memory

    def rows(self, batch: ForwardBatch) -> F32:
        """The step's rows, a view that the next step overwrites."""
        return self.memory[: self.count(batch)]

    def count(self, batch: ForwardBatch) -> int:
        return len(batch.logit_rows) if self.taken else batch.num_tokens


class Embed(NamedTuple):
    table: Linear
    out: Array


class NormLinear(NamedTuple):
    x: Array
    norm: F32
    eps: float
    weight: Linear
    out: Array


class LinearAdd(NamedTuple):
    x: Array
    weight: Linear
    residual: Array


class GatedMlp(NamedTuple):
    x: Array
    norm: F32
    eps: float
    gate_up: Linear
    down: Linear


class RopeWrite(NamedTuple):
    attention: Any
    qkv: Array


class Attend(NamedTuple):
    attention: Any
    qkv: Array
    out: Array


class Take(NamedTuple):
    """out[i] = x[batch.logit_rows[i]]"""

    x: Array
    out: Array


Call = Embed | NormLinear | LinearAdd | GatedMlp | RopeWrite | Attend | Take
"""One call; the fields are the arguments of the method of `Ops` of the same name, what a step brings left out."""


def arrays_of(calls: Sequence[Call]) -> list[Array]:
    """The arrays that calls name, each once, in the order of their first use."""
    named = [value for call in calls for value in call if isinstance(value, Array)]
    return list(dict.fromkeys(named))


class DirectProgram:
    """Makes each call of a program through `Ops`, in order."""

    def __init__(self, ops: Ops, calls: Sequence[Call], result: Array) -> None:
        self.calls = tuple(calls)
        self._ops, self._result, self._arrays = ops, result, arrays_of(calls)

    def run(self, batch: ForwardBatch) -> F32:
        result, _ = self.run_timed(batch)
        return result

    def run_timed(self, batch: ForwardBatch) -> tuple[F32, I64]:
        step = self._ops.bind_batch(batch)
        for array in self._arrays:
            array.reserve(batch)
        ends = [time.perf_counter_ns()]
        for call in self.calls:
            self._make(call, batch, step)
            ends.append(time.perf_counter_ns())
        return self._result.rows(batch), np.array([after - before for before, after in pairwise(ends)], np.int64)

    def _make(self, call: Call, batch: ForwardBatch, step: Any) -> None:
        ops = self._ops
        match call:
            case Embed(table, out):
                ops.embed(table, batch.token_ids, out.rows(batch))
            case NormLinear(x, norm, eps, weight, out):
                ops.norm_linear(x.rows(batch), norm, eps, weight, out.rows(batch))
            case LinearAdd(x, weight, residual):
                ops.linear_add(x.rows(batch), weight, residual.rows(batch))
            case GatedMlp(x, norm, eps, gate_up, down):
                ops.gated_mlp(x.rows(batch), norm, eps, gate_up, down)
            case RopeWrite(attention, qkv):
                ops.rope_write(step, attention, qkv.rows(batch))
            case Attend(attention, qkv, out):
                ops.attend(step, attention, qkv.rows(batch), out.rows(batch))
            case Take(x, out):
                out.rows(batch)[...] = x.rows(batch)[batch.logit_rows]
