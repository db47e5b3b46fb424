"""One forward pass, and the logits that a step asks for. It decides nothing, and knows neither text nor sampling.

Invariants: a step's hidden states are computed once; logits only for rows that a token is drawn from, or whose prompt token is
scored, the latter in slices so that a long prompt never holds [prompt, vocabulary] floats at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvist.engine.batch import build_batch
from kvist.kernels.ops import F32, ForwardBatch
from kvist.kv.spec import KVSpec
from kvist.sched.output import ScheduledRequest, SchedulerOutput

LOGITS_SLICE = 64
"""Rows whose logits are held at once when prompts are scored."""


class ForwardModel(Protocol):
    """A model bound to its weights, kernels and KV memory."""

    def forward(self, batch: ForwardBatch) -> F32:
        """Hidden states [rows, hidden] of every row, before the final norm; writes the rows' keys and values."""

    def logits(self, hidden: F32) -> F32:
        """[rows, vocabulary] of some rows' hidden states."""


@dataclass(frozen=True)
class PromptLogits:
    """Logits of the rows at positions [start, start + len(logits)) of one request's prompt."""

    request_id: str
    start: int
    logits: F32


@dataclass(frozen=True)
class Runner:
    model: ForwardModel
    spec: KVSpec

    def forward(self, output: SchedulerOutput) -> F32:
        """Hidden states of the step's rows, in the scheduler's order."""
        return self.model.forward(build_batch(output.scheduled, self.spec.block_size, len(self.spec.groups)))

    def sampled_logits(self, output: SchedulerOutput, hidden: F32) -> F32:
        """Logits of the last row of each request that samples, in the scheduler's order."""
        ends = np.cumsum([len(item.token_ids) for item in output.scheduled])
        rows = [int(end) - 1 for item, end in zip(output.scheduled, ends, strict=True) if item.samples]
        return self.model.logits(np.ascontiguousarray(hidden[rows]))

    def prompt_logits(self, output: SchedulerOutput, hidden: F32) -> Iterator[PromptLogits]:
        """Logits of the prompt rows that are to be scored, at most LOGITS_SLICE rows at a time."""
        first_row = 0
        for item in output.scheduled:
            if item.prompt_logprobs_from is not None:
                yield from self._slices(item, hidden[first_row : first_row + len(item.token_ids)])
            first_row += len(item.token_ids)

    def _slices(self, item: ScheduledRequest, hidden: F32) -> Iterator[PromptLogits]:
        assert item.prompt_logprobs_from is not None
        for start in range(item.prompt_logprobs_from - item.start, len(hidden), LOGITS_SLICE):
            logits = self.model.logits(np.ascontiguousarray(hidden[start : start + LOGITS_SLICE]))
            yield PromptLogits(item.request_id, item.start + start, logits)
