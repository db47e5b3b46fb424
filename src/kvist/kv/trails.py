"""Which sequence went on behind a cached block: how a prompt that ends or turns off inside a block finds that block's beginning.

The keys and values of a token depend on itself and those before it, so the first m tokens of a cached block serve every prompt that
has the same m tokens there, by copy. Each sequence leaves its mark at the blocks it computed and at the one before them, the latest
over earlier ones; who has been matched up to a block looks at the one sequence that is marked there. That costs a request a handful
of comparisons, and a block one store. Tokens are not stored again: a mark leads to a request's own lists while it lives, and
to the packed tokens of the latest that have ended, within the bounds of `kv/history.py`, from which misses are explained too.

The last block of a sequence that has ended, if it is not full, has a name too: its `tail` is found by the name of the block before.
The latest one behind a block takes an earlier one's place, and one that a whole block begins with is of no more use. The caller is
told which tails are not found any more.

Marks are hints. A mark may be old, and its block reused: what it leads to counts only if its names up to there are the asker's, so
nothing is ever shared between roots (salts, models, formats). This module knows neither reference counts nor eviction. Invariants:
a sequence is open or among the latest that have ended, or it is forgotten, and then no mark leads to it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from kvist.kv.block import BlockHash, Tail
from kvist.kv.history import MAX_PROMPTS, Seen, max_prompt_tokens
from kvist.kv.prefix import PrefixIndex, PrefixMatch
from kvist.request import Request


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading items are equal."""
    for length, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return length
    return min(len(one), len(other))


class Trails:
    """`num_ids` block ids of `block_size` tokens, found in `index`."""

    def __init__(self, num_ids: int, block_size: int, index: PrefixIndex) -> None:
        self._block_size = block_size
        self._index = index
        self._mark = array("I", bytes(4 * num_ids))
        """By block id of the first group: the number of a sequence, 0 for none."""
        self._beginning: dict[BlockHash, int] = {}
        """By root: the latest sequence that computed a first block."""
        self._trails: dict[int, Seen] = {}
        self._ended: deque[int] = deque()
        self._num_ended_tokens = 0
        self._max_tokens = max_prompt_tokens(num_ids)
        self._tails: dict[BlockHash, int] = {}
        """By the name of the block before it, or the root: the sequence whose tail is found there."""
        self._number = 0

    def open(self, root: BlockHash, hashes: list[BlockHash], request: Request) -> int:
        """A sequence begins; its number."""
        self._number = self._number % 0xFFFFFFFF + 1
        self._trails[self._number] = Seen(root, hashes, request.prompt_token_ids, request.output_token_ids)
        return self._number

    def passed(self, number: int, start: int, block_ids: Sequence[int], last: int) -> BlockHash | None:
        """A sequence has computed these blocks (of the first group; those that are found, where its own are the second ones of a
        content), from its logical block `start` on, behind its block `last`. Returns a tail that is not found any more."""
        mark, trail = self._mark, self._trails[number]
        if not start:
            self._beginning[trail.root] = number
        # A block without a name is the second one of its content: the mark belongs to the first, which is found.
        elif (before := self._index.get(0, trail.hashes, start - 1, last)) is not None:
            mark[before] = number
        for block_id in block_ids:
            mark[block_id] = number
        if not self._tails or (ended := self._tails.get(trail.hashes[start - 1] if start else trail.root)) is None:
            return None
        tail, begin = self._trails[ended].tail, start * self._block_size
        assert tail is not None
        theirs = self._trails[ended].token_ids(begin, begin + tail.num_tokens)
        return self._lose_tail(ended) if theirs == trail.token_ids(begin, begin + tail.num_tokens) else None

    def mark(self, number: int, block_id: int) -> None:
        """A sequence has computed this block."""
        self._mark[block_id] = number

    def succeed(self, block_id: int, other: int) -> None:
        """`block_id` is found in the place of `other`."""
        self._mark[block_id] = self._mark[other]

    def ended(self) -> Iterator[Seen]:
        """The latest sequences that have ended, oldest first."""
        return map(self._trails.__getitem__, self._ended)

    def close(
        self,
        number: int,
        token_ids: array[int] | None,
        tail: Tail | None,
        num_prompt_tokens: int | None = None,
        now: float = 0.0,
    ) -> Sequence[BlockHash]:
        """A sequence has ended at `now` with these tokens, which nobody changes any more. None: it computed nothing, and is
        forgotten. `tail`: its last block, if that is not full and can be found. Returns the names of tails that are not found any
        more."""
        if token_ids is None:
            self._forget(number)
            return ()
        lost: list[BlockHash | None] = []
        trail = self._trails[number]
        trail.prompt, trail.output, trail.tail = token_ids, (), tail
        trail.num_prompt_tokens, trail.time = num_prompt_tokens, now
        if tail is not None:
            if (earlier := self._tails.get(tail.parent)) is not None:
                lost.append(self._lose_tail(earlier))
            self._tails[tail.parent] = number
        self._ended.append(number)
        self._num_ended_tokens += len(token_ids)
        while len(self._ended) > MAX_PROMPTS or (self._num_ended_tokens > self._max_tokens and len(self._ended) > 1):
            forgotten = self._ended.popleft()
            if self._trails[forgotten].tail is not None:
                lost.append(self._lose_tail(forgotten))
            self._num_ended_tokens -= len(self._forget(forgotten).prompt)
        return [name for name in lost if name is not None and (tail is None or name != tail.name)] if lost else ()

    def brought(
        self, root: BlockHash, hashes: list[BlockHash], token_ids: array[int], last: int | None, tail: Tail | None
    ) -> Sequence[BlockHash]:
        """These tokens came from a tier: whole blocks called `hashes`, and behind them a `tail`, if it has one. `last` is the
        block, of the first group, before the last one of both; it is marked where that one is whole. Returns as `close` does."""
        self._number = number = self._number % 0xFFFFFFFF + 1
        self._trails[number] = Seen(root, hashes, token_ids, ())
        # A tail is found by the name before it, and a mark that led to nothing else would hide a sequence with a whole block.
        if tail is None and last is None:
            self._beginning[root] = number
        elif tail is None and last is not None:
            self._mark[last] = number
        return self.close(number, token_ids, tail)

    def _lose_tail(self, number: int) -> BlockHash | None:
        trail = self._trails[number]
        if trail.tail is None:
            return None
        del self._tails[trail.tail.parent]
        name, trail.tail = trail.tail.name, None
        return name

    def _forget(self, number: int) -> Seen:
        trail = self._trails.pop(number)
        if self._beginning.get(trail.root) == number:
            del self._beginning[trail.root]
        return trail

    def extend(
        self,
        match: PrefixMatch,
        root: BlockHash,
        hashes: Sequence[BlockHash],
        token_ids: Sequence[int],
        others: Iterable[tuple[BlockHash, Sequence[int]]] = (),
    ) -> PrefixMatch:
        """The hit `match`, of whole blocks, made longer by the beginning of one more block if there is one. `hashes` are the
        asker's names, at least of the blocks of the hit; `token_ids` are its tokens behind it, at least one and fewer than a
        block. `others`: blocks known to have stood there too, with their tokens."""
        length = match.num_tokens // self._block_size
        best = 0
        sources: tuple[int, ...] = ()
        more = (([*hashes[:length], name], length, theirs) for name, theirs in others if theirs[0] == token_ids[0])
        for names, block, theirs in chain(self._candidates(match, length, root, hashes, token_ids[0]), more):
            if (common := common_length(theirs, token_ids)) > best:
                found = [self._index.get(group, names, block) for group in range(len(match.block_ids))]
                if None not in found:
                    best, sources = common, tuple(block_id for block_id in found if block_id is not None)
        return match._replace(num_tokens=match.num_tokens + best, copied_from=sources, num_copied=best) if best else match

    def _candidates(
        self, match: PrefixMatch, length: int, root: BlockHash, hashes: Sequence[BlockHash], token_id: int
    ) -> list[tuple[list[BlockHash], int, Sequence[int]]]:
        """Blocks that stood behind the `length` blocks of a hit and begin with this token: prefix, number in it, and tokens."""
        begin, trail, found = match.num_tokens, None, list[tuple[list[BlockHash], int, Sequence[int]]]()
        if not length:
            trail = self._trails.get(self._beginning.get(root, 0))
        elif match.first_blocks[0] < length:
            trail = self._trails.get(self._mark[match.block_ids[0][-1]])
        begins_alike = trail is not None and len(trail.hashes) > length and trail.token_id(begin) == token_id
        if trail is not None and begins_alike and (not length or trail.hashes[length - 1] == hashes[length - 1]):
            found.append((trail.hashes, length, trail.token_ids(begin, begin + self._block_size)))
        if self._tails and (ended := self._tails.get(hashes[length - 1] if length else root)) is not None:
            tail = self._trails[ended].tail
            assert tail is not None
            found.append(([tail.name], 0, self._trails[ended].token_ids(begin, begin + tail.num_tokens)))
        return found

    def check_invariants(self) -> None:
        assert len(self._ended) == len(set(self._ended)) <= MAX_PROMPTS
        assert self._num_ended_tokens == sum(len(self._trails[number].prompt) for number in self._ended)
        assert all(self._trails[number].root == root for root, number in self._beginning.items())
        with_tails = {trail.tail.parent: number for number, trail in self._trails.items() if trail.tail is not None}
        assert with_tails == self._tails
