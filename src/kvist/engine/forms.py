"""What engines need for outputs with a form (schemas, grammars, choices), made with the first of them: most never see one.

It joins the compiler (`text/grammar.py`) and the masks of a step (`engine/constraints.py`), which are imported here alone, and no
sooner. It knows no scheduler and no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from kvist.request import Request, SamplingParams, StructuredOutputsParams
from kvist.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvist.engine.constraints import Constraint, Masks
    from kvist.engine.sampler import SamplingState
    from kvist.text.grammar import Grammar, GrammarCompiler


class Forms:
    """For one engine. `vocab_size` is the model's, `eos_token_ids` are the ids that may follow a complete output."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int], num_threads: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos, self._num_threads = eos_token_ids, num_threads

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Where two threads come first at once, one compiler is kept; what the other made is good all the same."""
        from kvist.text.grammar import GrammarCompiler

        return GrammarCompiler(self._tokenizer, self._vocab_size, self._eos)

    @cached_property
    def masks(self) -> Masks:
        from kvist.engine.constraints import Masks

        return Masks(self.grammars.mask_words, self._vocab_size, self._num_threads)

    def compile(self, params: SamplingParams) -> Grammar | None:
        """The form of a request's output; None where it may have any. Any thread may call it. Raises InvalidRequestError."""
        form = params.structured_outputs
        assert form is None or isinstance(form, StructuredOutputsParams)
        return None if form is None else self.grammars.compile(form)

    def constrain(self, grammar: Grammar | None, request: Request) -> Constraint | None:
        """What keeps one choice's output to the form."""
        if grammar is None:
            return None
        from kvist.engine.constraints import Constraint

        return Constraint(grammar, request)

    def fill_masks(self, constrained: Sequence[tuple[Constraint, SamplingState]]) -> None:
        """See `Masks.fill`."""
        self.masks.fill(constrained)
