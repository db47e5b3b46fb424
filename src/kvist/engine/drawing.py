"""From a step's logits to a token for each choice that has come to its end, and to the scores of prompts that are asked for.

It joins the choices of an engine with the sampler and with the masks of their forms; it advances no counter, ends no choice and
makes no text. Invariants: what fails one choice is noted of it and leaves the others; a step's draws take one call of the kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvist.engine.forms import Forms
from kvist.engine.output import ChoiceOutput
from kvist.engine.runner import PromptLogits
from kvist.engine.sampler import Failure, Note, Sampler, SamplingState, score
from kvist.kernels.ops import F32, Ops
from kvist.request import Request
from kvist.sched.output import SchedulerOutput

if TYPE_CHECKING:
    from kvist.engine.constraints import Constraint


@dataclass(slots=True)
class Choice:
    """What the engine keeps of one running choice."""

    request: Request
    output: ChoiceOutput
    sampling: SamplingState
    constraint: Constraint | None


class Drawing:
    """`choices` are the engine's own, by the names of their scheduler requests."""

    def __init__(self, ops: Ops, forms: Forms, choices: Mapping[str, Choice]) -> None:
        self._ops, self._forms, self._choices = ops, forms, choices
        self._sampler = Sampler(ops)

    def draw(self, output: SchedulerOutput, logits: F32) -> tuple[dict[str, int], dict[str, Note]]:
        """A token for each choice whose rows reach its end or which forks off there, and notes, both by name. `logits` has a row
        for each scheduled request that samples."""
        names: list[str] = []
        states: list[SamplingState] = []
        constrained: list[tuple[Constraint, SamplingState]] = []
        for item in output.scheduled:
            if item.samples:
                names.append(item.request_id)
                if item.forks:
                    names += item.forks
        for name in names:
            choice = self._choices[name]
            states.append(choice.sampling)
            if choice.constraint is not None:
                constrained.append((choice.constraint, choice.sampling))
        if not names:
            return {}, {}
        if len(names) > len(logits):
            logits = np.repeat(logits, [1 + len(item.forks) for item in output.scheduled if item.samples], axis=0)
        if constrained:
            self._forms.fill_masks(constrained)
        token_ids, notes = self._sampler.sample(logits, states)
        drawn = {}
        for row, name in enumerate(names):
            drawn[name] = token_ids[row]
        return drawn, {names[row]: note for row, note in notes.items()} if notes else {}

    def score_prompts(self, parts: Iterable[PromptLogits]) -> dict[str, Failure]:
        """Fill in the scores that these rows give; the choices for which that is impossible, and why."""
        failed: dict[str, Failure] = {}
        for part in parts:
            try:
                self._score_prompt(part)
            except Exception as error:
                failed[part.request_id] = Failure.of(error)
        return failed

    def _score_prompt(self, part: PromptLogits) -> None:
        """The row at position p scores the prompt token at p + 1; the first token has no score."""
        choice = self._choices[part.request_id]
        prompt, scores = choice.request.prompt_token_ids, choice.output.prompt_logprobs
        num_top = choice.request.sampling_params.prompt_logprobs
        assert scores is not None
        assert num_top is not None
        end = min(part.start + 1 + len(part.logits), len(prompt))
        missing = [position for position in range(part.start + 1, end) if scores[position] is None]
        rows, token_ids = [position - part.start - 1 for position in missing], [prompt[position] for position in missing]
        found = score(self._ops, part.logits, rows, token_ids, [num_top] * len(missing))
        for position, logprob in zip(missing, found, strict=True):
            scores[position] = logprob
