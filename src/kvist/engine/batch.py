"""Lowers what the scheduler decided (integers and growing arrays) to what a model reads (one `ForwardBatch`).

It decides nothing and touches no logits. Invariants: sequence s of the batch is `scheduled[s]`, its rows in order of position;
block tables are copied (the manager's own may grow in the next step); padding is some block or other and is never read.

After a forward pass the processor's caches hold weights, so that each small array costs microseconds to make. A step of the same
shape as the last one (the usual case while requests decode) therefore gets the same batch again, with new numbers in its arrays.
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
        self._shape = (1, 1, 1, TABLE_STEP)
        self._memory = _Memory(self._shape, num_groups)

    def build(self, scheduled: Sequence[ScheduledRequest]) -> ForwardBatch:
        """The step's rows, in the scheduler's order. `scheduled` is not empty."""
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
        if shape != self._shape:
            self._shape, self._memory = shape, _Memory(shape, self._num_groups)
        memory = self._memory
        memory.together[:] = array("i", token_ids + positions + query_start_loc + seq_lens + logit_rows)
        for group, (table, slots) in enumerate(memory.groups):
            rows: list[int] = []
            for index, item in enumerate(scheduled):
                own = item.block_tables[group]
                table[index * width : index * width + len(own)] = own
                _append_slots(rows, own, item.start, seq_lens[index], self._block_size)
            slots[:] = array("q", rows)
        return memory.batch


class _Memory:
    """The numbers of one shape of batch (rows, sequences, rows with logits, table width), and the batch that is made of them."""

    def __init__(self, shape: tuple[int, int, int, int], num_groups: int) -> None:
        rows, sequences, wanted, width = shape
        self.together = array("i", bytes(4 * (2 * rows + 2 * sequences + 1 + wanted)))
        self.groups = [(array("i", bytes(4 * sequences * width)), array("q", bytes(8 * rows))) for _ in range(num_groups)]
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
