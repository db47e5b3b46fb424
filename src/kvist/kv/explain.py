"""Why a prompt finds no more than it does: from what was asked, from what is remembered, and from where else its owner has it.

Where else is without the salt that it asks with, or on the disk in another format: both are looked up by names that its owner alone
has, so nobody is told of another's prefixes. It knows no pool and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvist.kv.block import BlockHash, extend_hashes, hasher_of, root_hash
from kvist.kv.lookup import Lookup
from kvist.kv.names import Record
from kvist.kv.prefix import PrefixMatch
from kvist.kv.spec import KVSpec
from kvist.kv.tiers import TierDecider
from kvist.request import PrefixMiss, Request

Recall = Callable[[BlockHash, list[int], Sequence[BlockHash], int], PrefixMiss]
"""Why the block at a position of a prompt, given by root, tokens and names, is not found, as far as is remembered."""


class Elsewhere:
    """What a disk `tier` keeps of the model in other formats than `spec`'s. `keys` are the model's by KV format."""

    def __init__(self, spec: KVSpec, keys: Mapping[str, bytes], tier: TierDecider) -> None:
        self._own, self._keys, self._tier = (spec.kv_format, spec.block_size), keys, tier

    def kept(self, token_ids: Sequence[int], salt: str) -> tuple[int, str] | None:
        """How many leading tokens there are at most in another format, and in which."""
        found = []
        for kv_format, size in self._tier.formats:
            if (kv_format, size) != self._own and kv_format in self._keys:
                root = root_hash(self._keys[kv_format], kv_format, size, salt)
                found.append((self._reach(root, token_ids, size), f"{kv_format} in blocks of {size}"))
        return max(found, default=None)

    def _reach(self, root: BlockHash, token_ids: Sequence[int], size: int) -> int:
        """Costs what it finds, and one block's name."""
        hashes: list[BlockHash] = []
        hasher, end = hasher_of(root), 0
        while end + size <= len(token_ids):
            extend_hashes(hashes, hasher, token_ids[end : end + size], size)
            if not any(hashes[-1] in names for names in self._tier.names):
                break
            end += size
        return end


class Finder(Protocol):
    """The memory of which is told."""

    enable_prefix_caching: bool

    def hashes_of(self, token_ids: Sequence[int], salt: str) -> tuple[BlockHash, list[BlockHash]]: ...

    def find(self, token_ids: list[int], salt: str) -> PrefixMatch: ...


class Explainer:
    """`elsewhere`: a disk tier's, if there is one."""

    def __init__(
        self,
        memory: Finder,
        lookup: Lookup,
        recall: Recall,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._memory, self._lookup, self._recall, self._elsewhere = memory, lookup, recall, elsewhere

    def of_request(self, request: Request, record: Record, match: PrefixMatch) -> PrefixMiss:
        """Why `match` covers no more of the prompt. An answer may be read by others than the owner of its key, so this does not
        tell what is kept without the request's salt."""
        if (plain := self._lookup.plain_miss(request, match, caching=self._memory.enable_prefix_caching)) is not None:
            return plain
        miss = self._recall(record.root, request.prompt_token_ids, record.hashes, match.num_tokens)
        return self._in_other_formats(miss, request.prompt_token_ids, request.cache_salt)

    def of_prompt(self, token_ids: list[int], salt: str, position: int, plain_salt: str | None) -> PrefixMiss:
        """Why a prompt is not found from `position` on. See `KVMemory.explain`."""
        if not self._memory.enable_prefix_caching:
            return PrefixMiss("caching_off", 0)
        if (covered := self._lookup.covered(position, len(token_ids))) is not None:
            return covered
        miss = self._recall(*self._with_names(token_ids, salt), position)
        if plain_salt is not None and plain_salt != salt and miss.reason in ("never_seen", "not_found"):
            reach = self._memory.find(token_ids, plain_salt).num_tokens
            if reach > position:
                return miss._replace(reason="other_salt", would_hit=reach)
        return self._in_other_formats(miss, token_ids, salt)

    def _with_names(self, token_ids: list[int], salt: str) -> tuple[BlockHash, list[int], list[BlockHash]]:
        root, hashes = self._memory.hashes_of(token_ids, salt)
        return root, token_ids, hashes

    def _in_other_formats(self, miss: PrefixMiss, token_ids: Sequence[int], salt: str) -> PrefixMiss:
        if miss.reason != "never_seen" or self._elsewhere is None:
            return miss
        reach, kept_as = self._elsewhere.kept(token_ids, salt) or (0, "")
        return miss._replace(reason="other_format", would_hit=reach, kept_as=kept_as) if reach > miss.position else miss
