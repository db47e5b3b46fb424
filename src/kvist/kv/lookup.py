"""What any KV memory that shares prefixes tells from the names of blocks: what a request finds, waits for, and why it misses more.

Nothing here changes anything but the memo of a request's block names. It knows no pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from kvist.kv.block import BlockHash
from kvist.kv.names import Record
from kvist.kv.prefix import PrefixIndex, PrefixMatch
from kvist.kv.tiers import TierDecider
from kvist.kv.trails import Trails, common_length
from kvist.request import PrefixMiss, Request


class Lookup:
    """Asks `index` and, where the beginnings of blocks can be copied (`trails` not None), `trails` and the books of a tier, which
    know more blocks that stood behind one."""

    def __init__(self, index: PrefixIndex, trails: Trails | None, block_size: int, tier: TierDecider | None = None) -> None:
        self._index, self._trails, self._block_size, self._tier = index, trails, block_size, tier

    def match(self, request: Request, record: Record) -> PrefixMatch:
        """The longest cached prefix of a request that leaves at least its last token to compute."""
        num_tokens = request.num_tokens
        limit = (num_tokens - 1) // self._block_size
        match = self._index.match(record.hashes, limit, record.recall(request, limit, self._index))
        return self._with_beginning(match, record.root, record.hashes, num_tokens, request.token_ids)

    def _with_beginning(
        self,
        match: PrefixMatch,
        root: BlockHash,
        hashes: Sequence[BlockHash],
        num_tokens: int,
        token_ids: Callable[[int, int], list[int]],
    ) -> PrefixMatch:
        """A hit of whole blocks, and of one more what it begins with; `token_ids(start, stop)` are some of the tokens."""
        if self._trails is None or (end := self._rest_end(match, num_tokens)) <= match.num_tokens:
            return match
        length = match.num_tokens // self._block_size
        others = () if self._tier is None else self._tier.followers(hashes[length - 1] if length else root)
        return self._trails.extend(match, root, hashes, token_ids(match.num_tokens, end), others)

    def find_all(self, root: BlockHash, hashes: Sequence[BlockHash], token_ids: list[int]) -> PrefixMatch:
        """What a prompt finds, `hashes` being the names of its whole blocks."""
        match = self._index.match(hashes, (len(token_ids) - 1) // self._block_size)
        return self._with_beginning(match, root, hashes, len(token_ids), lambda start, stop: token_ids[start:stop])

    def _rest_end(self, match: PrefixMatch, num_tokens: int) -> int:
        """The end of what could be copied behind a hit of whole blocks: less than a block, and not the last token."""
        return min(match.num_tokens + self._block_size - 1, num_tokens - 1)

    def is_being_computed(
        self, request: Request, match: PrefixMatch, running: Iterable[Request], records: Mapping[str, Record]
    ) -> bool:
        """Whether one of the `running` requests has yet to commit the block by which the hit `match` would be longer: a whole one,
        or one of which the last step has given it room to compute at least half a block more than there is to copy now. What is
        less is computed sooner than waited for, and so nobody waits for one of a row that share a little more each."""
        record, size, block = records[request.request_id], self._block_size, match.num_tokens // self._block_size
        more_whole = block < (request.num_tokens - 1) // size
        rest = [] if self._trails is None else request.token_ids(block * size, self._rest_end(match.whole(), request.num_tokens))
        if not more_whole and 2 * (len(rest) - match.num_copied) < size:
            return False
        for other in running:
            theirs = records[other.request_id]
            if theirs.root != record.root or not theirs.num_committed <= block < other.num_tokens // size:
                continue
            theirs.hash_up_to(other, block + 1, size)
            if more_whole and theirs.hashes[block] == record.hashes[block]:
                return True
            if rest and len(theirs.tables[0]) > block and (not block or theirs.hashes[block - 1] == record.hashes[block - 1]):
                common = common_length(other.token_ids(block * size, block * size + len(rest)), rest)
                if 2 * (common - match.num_copied) >= size:
                    return True
        return False

    def plain_miss(self, request: Request, match: PrefixMatch, *, caching: bool) -> PrefixMiss | None:
        """Why `match` covers no more of the prompt, where that follows from the request alone."""
        if not caching:
            return PrefixMiss("caching_off", 0)
        if request.wants_prompt_logprobs:
            return PrefixMiss("prompt_logprobs", 0)
        return self.covered(match.num_tokens, request.num_prompt_tokens)

    def covered(self, num_found: int, num_prompt_tokens: int) -> PrefixMiss | None:
        """Why a hit that covers all whole blocks of a prompt covers no more; None of a shorter one."""
        if num_found < (num_prompt_tokens - 1) // self._block_size * self._block_size:
            return None
        return PrefixMiss("last_token" if num_found >= num_prompt_tokens - 1 else "partial_block", num_found)
