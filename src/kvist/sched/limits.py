"""How long one request can be (what the model's context and the KV pool hold), and how far requests stand back for each other."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.errors import ContextLengthError
from kvist.request import Request

MAX_DOUBLINGS = 6
"""Of the room that a request leaves to others after a preemption: about a thousand tokens to each."""
ROWS_BESIDE = 128
SHARE_BESIDE = 4


def rows_beside(budget: int) -> int:
    """Of a step's budget, what is left to prompts beside requests that wait for their next token: a quarter, or 128 rows where that
    is more, as fewer would read the weights too often. A prompt is computed nearly as fast as in steps of its own."""
    return max(ROWS_BESIDE, budget // SHARE_BESIDE)


@dataclass(frozen=True, slots=True)
class Limits:
    """In tokens, prompt and output together. `pool_tokens`: what one request alone can have of the pool."""

    max_model_len: int
    pool_tokens: int

    @property
    def effective(self) -> int:
        return min(self.max_model_len, self.pool_tokens)

    def refuse_oversize(self, request: Request) -> None:
        """Raises ContextLengthError if there is never room for the request's prompt and its budget."""
        prompt, budget = request.num_prompt_tokens, request.max_tokens
        asked = f"The prompt needs {prompt} tokens" + (f" (and {budget} more to generate)" if budget else "")
        if prompt + budget > self.max_model_len:
            raise ContextLengthError(f"{asked}, but the context holds {self.max_model_len}: shorten the prompt or max_tokens.")
        if prompt + budget > self.pool_tokens:
            raise ContextLengthError(
                f"{asked}, but the KV pool holds {self.pool_tokens} for one request: shorten the prompt or max_tokens, or serve "
                "with a larger num_kv_blocks."
            )
