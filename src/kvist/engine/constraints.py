"""Which tokens an output's form leaves for each draw: one `Constraint` per choice, all masks of a step filled in one native call.

It knows matchers and sampling states, no scheduler, no text and no logits. Invariants:

* a matcher takes each token of its choice's output once, when it is drawn: computing a request again after a preemption draws
  nothing, and so advances nothing;
* a mask depends on the form and on the choice's own tokens alone (L1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvist.engine.sampler import SamplingState
from kvist.errors import EngineError
from kvist.request import Request
from kvist.text.grammar import Grammar, message_of

if TYPE_CHECKING:
    from llguidance import LLExecutor

Words = npt.NDArray[np.uint32]


class Constraint:
    """The form of one choice's output. `error` says why it cannot go on, once it cannot."""

    def __init__(self, grammar: Grammar, request: Request) -> None:
        self.matcher = grammar.new_matcher()
        self.error: str | None = None
        self._ends = sorted(request.eos_token_ids) if request.sampling_params.ignore_eos else []

    def accept(self, token_id: int) -> bool:
        """Take the token just drawn; whether the output is complete with it. Raises EngineError."""
        self.matcher.consume_token(token_id)
        self.check()
        return self.matcher.is_stopped()

    def check(self) -> None:
        """Raises EngineError when the matcher has given up, which it does on forms that take too long."""
        if self.matcher.is_error():
            self.error = f"The form asked of the output cannot be followed: {message_of(self.matcher)[:300]}."
            raise EngineError(self.error)

    def rule_out_ends(self, state: SamplingState, mask: Words) -> None:
        """`ignore_eos` and `min_tokens` go on for as long as the form lets them: an output that can only end does."""
        ends = {*self._ends, *(state.masked_until_min_tokens if state.masked else ())}
        if ends:
            left = mask.copy()
            for token_id in ends:
                if token_id // 32 < len(left):
                    left[token_id // 32] &= ~np.uint32(1 << token_id % 32)
            if left.any():
                mask[:] = left
            else:
                state.masked_until_min_tokens = ()


class Masks:
    """The masks of a step, in one array that the next step writes over. `num_words` is a matcher's, `vocab_size` the model's."""

    def __init__(self, num_words: int, vocab_size: int, num_threads: int) -> None:
        self._num_words = num_words
        self._used = -(-vocab_size // 32)
        self._num_threads = num_threads
        self._rows: Words = np.empty((0, num_words), np.uint32)
        self._executor: LLExecutor | None = None

    def fill(self, constrained: Sequence[tuple[Constraint, SamplingState]]) -> None:
        """Set each state's mask for its next draw. A constraint that fails has its `error` set, and leaves no token."""
        if len(constrained) > len(self._rows):
            self._rows = np.empty((len(constrained), self._num_words), np.uint32)
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self._num_threads)
        matchers = [(constraint.matcher, row) for row, (constraint, _) in enumerate(constrained)]
        rows = self._rows
        self._executor.unsafe_compute_mask_ptr(matchers, rows.ctypes.data, rows.strides[0], len(rows))
        for row, (constraint, state) in enumerate(constrained):
            state.mask = rows[row, : self._used]
            try:
                constraint.check()
            except EngineError:
                state.mask[:] = 0
            else:
                constraint.rule_out_ends(state, state.mask)
