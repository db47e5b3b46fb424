"""A recorded program on a native machine: lowered once, then one native call a step that lets go of Python's lock once.

It knows the native module's `Program` class and the calls of `program.py`, and does no arithmetic. Invariants: the program keeps
alive every handle and array whose memory the native side reads; an array that grew is bound anew before the next run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvist.kernels.ops import F32, I64, ForwardBatch
from kvist.kernels.program import Array, Attend, Call, Embed, GatedMlp, LinearAdd, NormLinear, RopeWrite, Take, arrays_of


class NativeProgram:
    """`native` is an empty `Program` of a module. Handles are those of `CpuOps`."""

    def __init__(self, native: Any, calls: Sequence[Call], result: Array) -> None:
        self.calls = tuple(calls)
        self._native, self._result = native, result
        self._batch: ForwardBatch | None = None
        self._view: F32 = result.memory
        self._times: I64 = np.zeros(len(self.calls), np.int64)
        self._arrays = arrays_of(calls)
        numbers = {array: native.add_array(array.width, array.taken) for array in self._arrays}
        self._bound: list[F32 | None] = [None] * len(self._arrays)
        for call in calls:
            _lower(native, call, numbers)
        native.bind_times(self._times)

    def run(self, batch: ForwardBatch) -> F32:
        view = self._view if batch is self._batch else self._begin(batch)
        self._native.run()
        return view

    def run_timed(self, batch: ForwardBatch) -> tuple[F32, I64]:
        view = self._view if batch is self._batch else self._begin(batch)
        self._native.run_timed()
        return view, self._times

    def _begin(self, batch: ForwardBatch) -> F32:
        """Hand the batch's arrays over; the view of the result. Both stay what they are while the same batch runs again."""
        self._batch = None
        native, bound = self._native, self._bound
        for number, array in enumerate(self._arrays):
            memory = array.reserve(batch)
            if memory is not bound[number]:
                native.bind_array(number, memory)
                bound[number] = memory
        native.begin(batch.token_ids, batch.positions, batch.query_start_loc, batch.logit_rows)
        for group in batch.groups:
            native.add_group(group.block_table, group.slot_mapping)
        self._batch, self._view = batch, self._result.rows(batch)
        return self._view


def _lower(native: Any, call: Call, numbers: dict[Array, int]) -> None:
    match call:
        case Embed(table, out):
            native.embed(_native(table), numbers[out])
        case NormLinear(x, norm, eps, weight, out):
            native.norm_linear(numbers[x], norm, eps, _native(weight), numbers[out])
        case LinearAdd(x, weight, residual):
            native.linear_add(numbers[x], _native(weight), numbers[residual])
        case GatedMlp(x, norm, eps, gate_up, down):
            native.gated_mlp(numbers[x], norm, eps, _native(gate_up), _native(down))
        case RopeWrite(attention, qkv):
            native.rope_write(_native(attention), numbers[qkv])
        case Attend(attention, qkv, out):
            native.attend(_native(attention), numbers[qkv], numbers[out])
        case Take(x, out):
            native.take(numbers[x], numbers[out])


def _native(handle: Any) -> Any:
    return handle.native
