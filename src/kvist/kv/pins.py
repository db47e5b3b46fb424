"""How much may be pinned: the budget, and what pins must leave to the requests that are open.

A request's pin is charged when it is queued, so that it is refused then or holds later; what it takes less is given back when its
prompt has been computed. Blocks go by their names, so what is pinned already, or promised to another request, is charged once; if a
pin ends that an open request counts on, its blocks are charged to that request's promise. Pinned blocks are lost to all others, so
a pin is refused that would leave too few for an open request, and a request that needs more than the pins leave: whoever is queued
can finish.

Invariant: pinned and promised blocks together stay within the budget, and beside them every open request fits that holds none of
them. Who pins is no exception: its prompt's blocks may be the second ones of their contents, and a windowed group lets go of blocks
that stay pinned. So the oldest request, for which all others give way, always gets what it needs: what is neither pinned nor its
own is free then, and once it runs it need not copy: the last holder of a block that is not full writes in place, as that has no
name. Blocks that a request does share with a pin count on both sides, which refuses a little too early.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvist.errors import ContextLengthError, InvalidRequestError
from kvist.kv.block import BlockHash
from kvist.kv.prefix import PrefixIndex
from kvist.kv.retention import Retention
from kvist.kv.spec import KVSpec
from kvist.request import Request


class Pins:
    def __init__(self, spec: KVSpec, num_blocks: int, retention: Retention, index: PrefixIndex) -> None:
        self._spec = spec
        self._num_blocks = num_blocks
        self._retention = retention
        self._index = index
        self._tokens: dict[str, int] = {}
        """The most that each open request may have."""
        self._promises: dict[str, Sequence[BlockHash]] = {}
        self._promised: Counter[BlockHash] = Counter()
        """How many open requests want a block of this name pinned, in every group."""
        self._num_promised: tuple[int, int] | None = None
        """State of the pins, and how many blocks are promised and not pinned then."""

    @property
    def num_taken(self) -> int:
        """Pinned or promised."""
        if self._num_promised is None or self._num_promised[0] != self._retention.num_pin_changes:
            unpinned: dict[BlockHash, int] = {}
            for names in self._promises.values():
                unpinned.update(zip(names, self._num_unpinned(names), strict=True))
            self._num_promised = self._retention.num_pin_changes, sum(unpinned.values())
        return self._retention.num_pinned + self._num_promised[1]

    def _num_unpinned(self, names: Sequence[BlockHash]) -> list[int]:
        """Of each block of a prefix: how many, one a group, are not pinned."""
        groups = [self._index.every(group, names) for group in range(self._index.num_groups)]
        return [
            sum(block_id is None or not self._retention.is_pinned(block_id) for block_id in ids)
            for ids in zip(*groups, strict=True)
        ]

    def num_wanted(self, names: Sequence[BlockHash]) -> int:
        """Blocks that a pin of a prompt, whose whole blocks have these names, would take beside what is taken."""
        missing = zip(names, self._num_unpinned(names), strict=True)
        return sum(count for name, count in missing if name not in self._promised)

    def add(self, request: Request, names: Sequence[BlockHash]) -> None:
        """Take note of what a request needs, and promise it its pin: `names` are those of its prompt's whole blocks. Raises
        InvalidRequestError or ContextLengthError, and then nothing has changed."""
        tokens, taken = max(1, len(request.prompt_token_ids) + request.max_tokens), self.num_taken
        need = self._spec.request_blocks(tokens)
        if taken and need > self._num_blocks - taken:
            raise ContextLengthError(
                f"The request needs {need} blocks of the KV pool, and beside what is pinned there are {self._num_blocks - taken}: "
                "shorten the prompt or max_tokens, or unpin something (POST /v1/kv/pin)."
            )
        if request.kv is not None and request.kv.pin:
            want = self.num_wanted(names)
            self.check(want, self._tokens.values())
            if need > self._num_blocks - taken - want:
                raise ContextLengthError(
                    f"The request needs {need} blocks of the KV pool, and beside what is pinned, its own prompt too, there are "
                    f"{self._num_blocks - taken - want}: shorten the prompt or max_tokens, or send it without the pin."
                )
            self._promises[request.request_id] = names
            self._promised.update(names)
            self._num_promised = None
        self._tokens[request.request_id] = tokens

    def settle(self, request_id: str) -> None:
        """The request's pin is in the books of retention now."""
        for name in self._promises.pop(request_id, ()):
            self._promised[name] -= 1
            if not self._promised[name]:
                del self._promised[name]
            self._num_promised = None

    def forget(self, request_id: str) -> None:
        if self._promises:
            self.settle(request_id)
        self._tokens.pop(request_id, None)

    def check_prefix(self, block_ids: Sequence[int]) -> None:
        """Raises InvalidRequestError if these cached blocks cannot be pinned."""
        new = {block_id for block_id in block_ids if not self._retention.is_pinned(block_id)}
        self.check(sum(self._index.hash_of(block_id) not in self._promised for block_id in new), self._tokens.values())

    def check(self, want: int, tokens: Iterable[int]) -> None:
        """`tokens`: of the requests that must fit beside the pins. A longer one needs no fewer blocks."""
        budget, taken = self._retention.pin_budget, self.num_taken
        if taken + want > budget:
            raise InvalidRequestError(
                f"The pin asks for {want} blocks, and of the {budget} that may be pinned {budget - taken} are left: unpin "
                "something (POST /v1/kv/pin), or serve with a larger kv_pin_budget.",
                param="kv.pin",
            )
        longest = max(tokens, default=0)
        if longest and self._spec.request_blocks(longest) > self._num_blocks - taken - want:
            raise InvalidRequestError(
                f"The pin asks for {want} blocks, which would leave too few for a request that is open: try again when it has "
                "ended.",
                param="kv.pin",
            )
