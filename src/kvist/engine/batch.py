"""Lowers what the scheduler decided (integers and growing arrays) to what a model reads (one `ForwardBatch`).

It decides nothing and touches no logits. Invariants: sequence s of the batch is `scheduled[s]`, its rows in order of position;
block tables are copied (the manager's own may grow in the next step); padding is some block or other and is never read.

After a forward pass the processor's caches hold weights, so that each small array or list costs microseconds to make. A step of
the same shape as the last one therefore gets the same batch again, with new numbers in its arrays; and where each request has one
row and a token is drawn from each (the usual case while requests decode) the numbers go straight there. What a step becomes does
not depend on the steps before.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from kvist.kernels.ops import ForwardBatch, GroupTables
from kvist.sched.output import ScheduledRequest

TABLE_STEP = 8
"""Tables are as wide as the longest, rounded up to this, so that a request that grows rarely changes the batch's shape."""


class BatchBuilder:
    """Builds the batches of one engine's steps. A batch is good until the next one is built."""

    def __init__(self, block_size: int, num_groups: int) -> None:
        self._block_size, self._num_groups = block_size, num_groups
        self._memory: _Memory | None = None
        """What the last step was written to."""

    def build(self, scheduled: Sequence[ScheduledRequest]) -> ForwardBatch:
        """The step's rows, in the scheduler's order. `scheduled` is not empty."""
        count, memory = len(scheduled), self._memory
        if memory is None or memory.num_single != count or not self._write_single_rows(scheduled, memory):
            memory = self._write_any(scheduled)
        return memory.batch

    def _write_single_rows(self, scheduled: Sequence[ScheduledRequest], memory: _Memory) -> bool:
        """False, and numbers of no meaning in `memory`, unless its shape is the step's: one row a request, and logits of each."""
        count, width, numbers, block_size = len(scheduled), memory.shape[3], memory.together, self._block_size
        longest = 0
        for index, item in enumerate(scheduled):
            token_ids, start, block_tables = item.token_ids, item.start, item.block_tables
            blocks = len(block_tables[0])
            if len(token_ids) != 1 or not item.samples or blocks > width:
                return False
            if blocks > longest:
                longest = blocks
            numbers[index] = token_ids[0]
            numbers[count + index] = start
            numbers[3 * count + 1 + index] = start + 1
            block, offset = start // block_size, start % block_size
            for group, own in enumerate(block_tables):
                table, slots = memory.groups[group]
                table[index * width : index * width + blocks] = own
                slots[index] = own[block] * block_size + offset
        return longest > width - TABLE_STEP

    def _write_any(self, scheduled: Sequence[ScheduledRequest]) -> _Memory:
        """The definition; `_write_single_rows` gives the same for the steps that it takes."""
        token_ids: list[int] = []
        positions: list[int] = []
        query_start_loc, seq_lens, logit_rows = [0], [], []
        longest = 0
        for item in scheduled:
            token_ids += item.token_ids
            stop = item.start + len(item.token_ids)
            positions += range(item.start, stop)
            query_start_loc.append(len(token_ids))
            seq_lens.append(stop)
            longest = max(longest, len(item.block_tables[0]))
            if item.samples:
                logit_rows.append(len(token_ids) - 1)
        width = -(-longest // TABLE_STEP) * TABLE_STEP
        shape = (len(token_ids), len(seq_lens), len(logit_rows), width)
        memory = self._memory
        if memory is None or memory.shape != shape:
            memory = self._memory = _Memory(shape, self._num_groups)
        memory.together[:] = array("I", token_ids + positions + query_start_loc + seq_lens + logit_rows)
        for group, (table, slots) in enumerate(memory.groups):
            rows: list[int] = []
            for index, item in enumerate(scheduled):
                own = item.block_tables[group]
                table[index * width : index * width + len(own)] = own
                _append_slots(rows, own, item.start, seq_lens[index], self._block_size)
            slots[:] = array("q", rows)
        return memory


class _Memory:
    """The numbers of one shape of batch (rows, sequences, rows with logits, table width), and the batch that is made of them."""

    def __init__(self, shape: tuple[int, int, int, int], num_groups: int) -> None:
        self.shape = shape
        rows, sequences, wanted, width = shape
        self.num_single = sequences if rows == sequences == wanted else 0
        """Requests, if each has one row, and logits of it."""
        # Single numbers are written at half the cost through a view.
        self.together = memoryview(array("I", bytes(4 * (2 * rows + 2 * sequences + 1 + wanted))))
        self.groups = [
            (array("I", bytes(4 * sequences * width)), memoryview(array("q", bytes(8 * rows)))) for _ in range(num_groups)
        ]
        all_of_it = np.frombuffer(self.together, np.int32)
        ends = np.cumsum([rows, rows, sequences + 1, sequences])
        token_ids, positions, query_start_loc, seq_lens, logit_rows = np.split(all_of_it, ends)
        tables = tuple(
            GroupTables(np.frombuffer(table, np.int32).reshape(sequences, width), np.frombuffer(slots, np.int64))
            for table, slots in self.groups
        )
        self.batch = ForwardBatch(token_ids, positions, query_start_loc, seq_lens, tables, logit_rows)


def _append_slots(slots: list[int], table: array[int], start: int, stop: int, block_size: int) -> None:
    """The slots of positions [start, stop), block by block."""
    while start < stop:
        block, offset = divmod(start, block_size)
        first = table[block] * block_size + offset
        count = min(block_size - offset, stop - start)
        slots += range(first, first + count)
        start += count
