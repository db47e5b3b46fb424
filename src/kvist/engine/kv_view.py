"""What users may ask about KV memory, answered on the engine thread between steps, as plain data that prints as JSON.

It reads deciders and copies what it tells; a listing copies arrays and leaves the work on them to `Blocks`, which any thread may
do. `salt` names whose prefixes are meant; None (a server without keys asks so): everybody's. Nothing tells one tenant which
blocks another has, by names or counts; how full the pool is in all everybody hears. Times are seconds ago.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from kvist.config import EngineConfig
from kvist.errors import InvalidRequestError
from kvist.kv.block import BlockHash
from kvist.kv.hints import KVHints
from kvist.kv.manager import KVManager
from kvist.kv.memory import KVMemory, MemoryAccount
from kvist.kv.pool import RefCounts
from kvist.kv.prefix import IndexEntry, IndexListing
from kvist.kv.rings import ORDINARY_PRIORITY
from kvist.kv.uses import UseListing
from kvist.sched.preemption import Preemption


@dataclass(frozen=True)
class Blocks:
    """All cached blocks at one moment."""

    listing: IndexListing
    root: BlockHash | None
    ref_counts: RefCounts
    priorities: dict[int, int]
    """Of claimed blocks."""
    pinned: frozenset[int]
    block_size: int
    uses: UseListing
    now: float

    def _mine(self) -> list[int]:
        return [
            block_id
            for block_id, entry in enumerate(self.listing.entries)
            if entry is not None and (self.root is None or entry.root == self.root) and not entry.group
        ]

    def _entry(self, block_id: int) -> IndexEntry:
        entry = self.listing.entries[block_id]
        assert entry is not None
        return entry

    def page(self, start: int, limit: int) -> dict[str, Any]:
        """Blocks by id, of the first KV group."""
        mine = self._mine()
        return {
            "total": len(mine),
            "blocks": [self._block(block_id) for block_id in mine[start : start + limit]],
            "next": start + limit if start + limit < len(mine) else None,
        }

    def _block(self, block_id: int) -> dict[str, Any]:
        entry = self._entry(block_id)
        return {
            "block_id": block_id,
            "hash": entry.name.hex(),
            "tokens": self.listing.tails.get(block_id, self.block_size),
            "parent": None if entry.parent == entry.root else entry.parent.hex(),
            "holders": self.ref_counts[block_id] - (block_id in self.pinned),
            "priority": self.priorities.get(block_id, ORDINARY_PRIORITY),
            "pinned": block_id in self.pinned,
        }

    def tree(self, parent: str | None, limit: int) -> dict[str, Any]:
        """The radix view below a block (or the beginnings): runs of blocks without a fork, with how many children each has, how
        many blocks hang below, how many requests found it and when it was used last. Blocks whose predecessor is gone are not
        reachable and only counted."""
        children: dict[BlockHash, list[int]] = {}
        mine = self._mine()
        for block_id in mine:
            children.setdefault(self._entry(block_id).parent, []).append(block_id)
        if parent is None:
            tops = [block_id for block_id in mine if self._entry(block_id).parent == self._entry(block_id).root]
        else:
            tops = children.get(BlockHash(_unhex(parent)), [])
        reached = 0
        nodes: list[dict[str, Any]] = []
        for top in tops:
            run: list[int] = [top]
            below: list[int] = []
            while len(following := children.get(self._entry(run[-1]).name, [])) == 1:
                run.append(following[0])
            stack = list(following)
            while stack:
                block_id = stack.pop()
                below.append(block_id)
                stack += children.get(self._entry(block_id).name, ())
            reached += len(run) + len(below)
            finds, used_at = self.uses.of([*run, *below])
            holders = max(self.ref_counts[block_id] - (block_id in self.pinned) for block_id in run)
            nodes.append(
                {
                    "first": self._entry(top).name.hex(),
                    "last": self._entry(run[-1]).name.hex(),
                    "blocks": len(run),
                    "tokens": sum(self.listing.tails.get(block_id, self.block_size) for block_id in run),
                    "children": len(following),
                    "blocks_below": len(below),
                    "hits": finds,
                    "used_ago": self._ago(used_at, holders),
                    "holders": holders,
                    "pinned": any(block_id in self.pinned for block_id in run),
                }
            )
        nodes.sort(key=lambda node: (-(node["blocks"] + node["blocks_below"]), node["first"]))
        unreachable = len(mine) - reached if parent is None else None
        return {"prefixes": nodes[:limit], "total": len(nodes), "unreachable_blocks": unreachable}

    def _ago(self, used_at: float, holders: int) -> float | None:
        """Seconds since the last use; None of what was brought from a tier and not used since."""
        if holders:
            return 0.0
        return None if used_at == -inf else round(max(0.0, self.now - used_at), 3)


def _round(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def _unhex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise InvalidRequestError(f"{text[:80]!r} is no block hash; take one from this listing.", param="parent") from None


class KVView:
    """Asks `manager`; `now` is asked for the time of each question, so that claims end in time on an idle engine too."""

    def __init__(
        self,
        manager: KVMemory,
        config: EngineConfig,
        preemptions: Callable[[], tuple[Preemption, ...]],
        account: Callable[[], MemoryAccount],
    ) -> None:
        self._manager = manager
        self._config = config
        self._preemptions = preemptions
        self._account = account

    def stats(self, now: float, salt: str | None) -> dict[str, Any]:
        """With any allocator; what only paged memory has is left out with the others."""
        manager, config = self._manager, self._config
        manager.advance(now)
        usage, account = manager.usage(), self._account()
        told = {
            "kv_allocator": config.kv_allocator,
            "enable_prefix_caching": manager.enable_prefix_caching,
            "block_size": manager.spec.block_size,
            "bytes_per_block": manager.spec.block_bytes,
            "kv_groups": len(manager.spec.groups),
            "kv_format": manager.spec.kv_format,
            "pool": {"blocks": usage.total, "held": usage.live, "cached": usage.cached, "free": usage.free},
            "bytes": account.bytes_by_kind,
            "fragmentation": {
                "internal": round(account.internal_fragmentation, 6),
                "external": round(account.external_fragmentation, 6),
            },
            "evictions": usage.evictions,
        }
        return told | self._paged_stats(manager, salt) if isinstance(manager, KVManager) else told

    def _paged_stats(self, manager: KVManager, salt: str | None) -> dict[str, Any]:
        keeper, root, index = manager.keeper, self._root(manager, salt), manager.index
        retention = keeper.retention

        def own(block_ids: list[int]) -> int:
            return len(block_ids) if root is None else sum(index.root_of(block_id) == root for block_id in block_ids)

        return {
            "eviction_policy": self._config.eviction_policy,
            "indexed_blocks": index.count(root),
            "pin_budget_blocks": retention.pin_budget,
            "pinned_blocks": own(retention.pinned_blocks()),
            "priority_budget_blocks": retention.priority_budget,
            "raised_blocks": own(retention.raised_blocks()),
            "next_event": keeper.events.next_number,
        }

    def blocks(self, now: float, salt: str | None) -> Blocks:
        manager = self._paged(now)
        retention, pool = manager.keeper.retention, manager.keeper.pool
        claimed = {block_id: retention.priority(block_id) for block_id in retention.claimed()}
        pinned = frozenset(retention.pinned_blocks())
        root = self._root(manager, salt)
        uses = manager.index.uses()
        return Blocks(manager.index.listing(), root, pool.ref_counts(), claimed, pinned, manager.spec.block_size, uses, now)

    def explain(self, now: float, salt: str, token_ids: list[int], plain_salt: str | None) -> dict[str, Any]:
        """How much of a prompt would hit now, and why no more. `plain_salt`: the same caller's where it names none, to look there
        too. Raises InvalidRequestError."""
        manager = self._manager
        manager.advance(now)
        if not token_ids:
            raise InvalidRequestError("The prompt has no tokens; give at least one.", param="prompt")
        size = manager.spec.block_size
        root, hashes = manager.hashes_of(token_ids, salt)
        found = manager.find(token_ids, salt).num_tokens
        on_disk = max(0, self._on_disk(manager, root, hashes, token_ids) - found)
        miss = manager.explain(token_ids, salt, found + on_disk, plain_salt)._asdict()
        nearest = manager.keeper.nearest(root, token_ids, hashes, size) if isinstance(manager, KVManager) else None
        return {
            "prompt_tokens": len(token_ids),
            "hit_tokens": {"device": found, "disk": on_disk},
            "block_size": size,
            "miss": {name: _round(value) for name, value in miss.items() if value is not None},
            "nearest": None if nearest is None else {name: _round(value) for name, value in nearest._asdict().items()},
        }

    def pin(self, now: float, salt: str, token_ids: list[int], hints: KVHints | None) -> dict[str, Any]:
        """Claim what is cached of a prompt's whole blocks; `hints` None withdraws. Raises InvalidRequestError."""
        manager = self._paged(now)
        keeper = manager.keeper
        root, hashes = manager.hashes_of(token_ids, salt)
        kept = manager.index.match(hashes, len(hashes)).num_tokens // manager.spec.block_size
        blocks = manager.cached(hashes[:kept])
        if hints is None:
            return {"tokens": kept * manager.spec.block_size, "unpinned_blocks": keeper.withdraw(root, blocks)}
        if not manager.enable_prefix_caching:
            raise InvalidRequestError("This server keeps no prefixes (prefix caching is off), so there is nothing to pin.")
        if not blocks:
            raise InvalidRequestError(
                "Nothing of this prompt is cached, so there is nothing to keep; send it with `kv` in a completion first.",
                param="prompt",
            )
        if hints.pin:
            manager.pins.check_prefix(blocks)
        keeper.claim(root, blocks, hints)
        return {"tokens": kept * manager.spec.block_size, "blocks": len(blocks)}

    def flush(self, now: float, salt: str | None) -> dict[str, Any]:
        manager = self._paged(now)
        return {"flushed_blocks": manager.keeper.flush(self._root(manager, salt))}

    def events(self, now: float, salt: str | None, since: int, limit: int) -> dict[str, Any]:
        manager = self._paged(now)
        root, log = self._root(manager, salt), manager.keeper.events
        found = log.since(since, limit)
        told = [
            {
                "number": event.number,
                "seconds_ago": round(now - event.time, 3),
                "event": event.kind,
                "tier": event.tier,
                **({"reason": event.reason} if event.reason else {}),
                "block_hashes": [name.hex() for name in names],
            }
            for event in found
            if (names := event.of(root))
        ]
        # Numbers count everybody's events; what was passed over tells how busy the server is, as its metrics do.
        return {"events": told, "next": found[-1].number + 1 if found else max(since, log.next_number)}

    def preemptions(self, now: float, salt: str | None, since: int, limit: int) -> dict[str, Any]:
        """The latest, oldest first. For whom a request had to give way is told where that one is the asker's too."""
        records = self._preemptions()
        kept = [record for record in records if record.number >= since]
        found = [record for record in kept if salt is None or record.salt == salt][:limit]
        told = [
            {
                "number": record.number,
                "seconds_ago": round(max(0.0, now - record.time), 3),
                "request_id": record.request_id,
                "cause_request_id": record.cause_request_id if salt is None or record.cause_salt == salt else None,
                "kind": record.kind,
                "state": record.state,
                "tokens": record.num_tokens,
                "tokens_found": record.num_tokens_found,
                "blocks_freed": record.num_blocks_freed,
                "stall": None if record.stall is None else round(record.stall, 3),
            }
            for record in found
        ]
        last = found[-1].number if len(found) == limit else records[-1].number if records else since - 1
        return {"preemptions": told, "next": max(since, last + 1)}

    def _paged(self, now: float) -> KVManager:
        if not isinstance(self._manager, KVManager):
            raise InvalidRequestError(
                f"kv_allocator={self._config.kv_allocator} keeps spans of requests, of whose blocks nothing can be told, kept or "
                "forgotten; serve with --kv-allocator paged.",
                code="not_offered",
            )
        self._manager.advance(now)
        return self._manager

    def _root(self, manager: KVMemory, salt: str | None) -> BlockHash | None:
        return None if salt is None else manager.hashes_of((), salt)[0]

    def _on_disk(self, manager: KVMemory, root: BlockHash, hashes: Sequence[BlockHash], token_ids: Sequence[int]) -> int:
        """Tokens that device and disk tier hold together; 0 without one."""
        tier = manager.tier if isinstance(manager, KVManager) else None
        return 0 if tier is None else tier.reach(manager.index, root, hashes, token_ids)
