"""One forward pass, and the logits that a step asks for. It decides nothing, and knows neither text nor sampling.

Invariants: a step's rows are computed once; logits only for rows that a token is drawn from, or whose prompt token is scored, the
latter in slices so that a long prompt never holds [prompt, vocabulary] floats at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from kvist.engine.batch import BatchBuilder
from kvist.kernels.ops import F32, ForwardBatch, Program
from kvist.sched.output import ScheduledRequest, SchedulerOutput

LOGITS_SLICE = 64
"""Rows whose logits are held at once when prompts are scored."""


class ForwardModel(Protocol):
    """A model bound to its weights, kernels and KV memory. Both calls give a view that is valid until the next call of either."""

    @property
    def program(self) -> Program:
        """What `forward` runs."""

    def forward(self, batch: ForwardBatch) -> F32:
        """Writes the rows' keys and values; logits [rows, vocabulary] of `batch.logit_rows`."""

    def logits(self, batch: ForwardBatch) -> F32:
        """Logits of `batch.logit_rows`, of the batch that `forward` computed last."""


class PromptLogits(NamedTuple):
    """Logits of the rows at positions [start, start + len(logits)) of one request's prompt."""

    request_id: str
    start: int
    logits: F32


@dataclass(frozen=True)
class Runner:
    model: ForwardModel
    batches: BatchBuilder

    def forward(self, output: SchedulerOutput) -> tuple[ForwardBatch, F32]:
        """Compute the step's rows. The batch, and logits [requests that sample, vocabulary] of the last row of each that samples,
        in the scheduler's order: a view that the next call overwrites."""
        batch = self.batches.build(output.scheduled)
        return batch, self.model.forward(batch)

    def prompt_logits(self, output: SchedulerOutput, batch: ForwardBatch) -> Iterator[PromptLogits]:
        """Logits of the prompt rows that are to be scored, at most LOGITS_SLICE rows at a time, of the `batch` computed last."""
        first_row = 0
        for item in output.scheduled:
            if item.prompt_logprobs_from is not None:
                yield from self._slices(item, first_row, batch)
            first_row += len(item.token_ids)

    def _slices(self, item: ScheduledRequest, first_row: int, batch: ForwardBatch) -> Iterator[PromptLogits]:
        assert item.prompt_logprobs_from is not None
        for start in range(item.prompt_logprobs_from - item.start, len(item.token_ids), LOGITS_SLICE):
            stop = min(start + LOGITS_SLICE, len(item.token_ids))
            rows = np.arange(first_row + start, first_row + stop, dtype=np.int32)
            yield PromptLogits(item.request_id, item.start + start, self.model.logits(batch._replace(logit_rows=rows)))
