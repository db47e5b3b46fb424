"""How much may be pinned: the budget, and what pins must leave to the requests that are open.

A request's pin is charged in full when it is queued, so that it is refused then or holds later; what it takes less is given back
when its prompt has been computed. Pinned blocks are lost to all others, so a pin is refused that would leave too few for an open
request, and a request that needs more than the pins leave: whoever is queued can finish. Blocks that a request would share
with a pin count on both sides, which refuses a little too early.
Invariant: pinned and promised blocks together stay within the budget, and every open request fits beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvist.errors import ContextLengthError, InvalidRequestError
from kvist.kv.retention import Retention
from kvist.kv.spec import KVSpec
from kvist.request import Request


class Pins:
    def __init__(self, spec: KVSpec, num_blocks: int, retention: Retention) -> None:
        self._spec = spec
        self._num_blocks = num_blocks
        self._retention = retention
        self._needs: dict[str, int] = {}
        self._promised: dict[str, int] = {}

    @property
    def num_taken(self) -> int:
        """Pinned or promised."""
        return self._retention.num_pinned + sum(self._promised.values())

    def add(self, request: Request) -> None:
        """Take note of what a request needs, and promise it its pin. Raises InvalidRequestError or ContextLengthError, and then
        nothing has changed."""
        need = self._spec.request_blocks(max(1, request.num_prompt_tokens + request.max_tokens))
        taken = self.num_taken
        if taken and need > self._num_blocks - taken:
            raise ContextLengthError(
                f"The request needs {need} blocks of the KV pool, and beside what is pinned there are {self._num_blocks - taken}: "
                "shorten the prompt or max_tokens, or unpin something (POST /v1/kv/pin)."
            )
        if request.kv is not None and request.kv.pin:
            want = request.num_prompt_tokens // self._spec.block_size * len(self._spec.groups)
            # Its own other choices come behind it, and need as much.
            self.check(want, [*self._needs.values(), need if request.sampling_params.n > 1 else 0])
            self._promised[request.request_id] = want
        self._needs[request.request_id] = need

    def settle(self, request_id: str) -> None:
        """The request's pin is in the books of retention now."""
        self._promised.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        self._promised.pop(request_id, None)
        self._needs.pop(request_id, None)

    def check_prefix(self, block_ids: Sequence[int]) -> None:
        """Raises InvalidRequestError if these cached blocks cannot be pinned."""
        self.check(self._retention.newly_pinned(block_ids), self._needs.values())

    def check(self, want: int, needs: Iterable[int]) -> None:
        budget, taken = self._retention.pin_budget, self.num_taken
        if taken + want > budget:
            raise InvalidRequestError(
                f"The pin asks for {want} blocks, and of the {budget} that may be pinned {budget - taken} are left: unpin "
                "something (POST /v1/kv/pin), or serve with a larger kv_pin_budget.",
                param="kv.pin",
            )
        if max(needs, default=0) > self._num_blocks - taken - want:
            raise InvalidRequestError(
                f"The pin asks for {want} blocks, which would leave too few for a request that is open: try again when it has "
                "ended.",
                param="kv.pin",
            )
