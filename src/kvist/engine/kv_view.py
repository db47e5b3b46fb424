"""What users may ask about KV memory, answered on the engine thread between steps, as plain data that prints as JSON.

It reads deciders and copies what it tells. What may have to look at all blocks is a generator, which does so in bounded pieces:
steps may come between them. `salt` names whose prefixes are meant; None (a server without keys asks so): everybody's. Nothing tells
one tenant which blocks another has, by names or counts; how full the pool is in all everybody hears. Times are seconds ago.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvist.config import EngineConfig
from kvist.engine.kv_tree import Prefixes
from kvist.errors import InvalidRequestError
from kvist.kv import walks
from kvist.kv.block import BlockHash
from kvist.kv.hints import KVHints
from kvist.kv.manager import KVManager
from kvist.kv.memory import KVMemory, MemoryAccount
from kvist.kv.walks import Listed, Walk
from kvist.sched.preemption import Preemption


def _told(block: Listed) -> dict[str, Any]:
    return {
        "block_id": block.block_id,
        "hash": block.name.hex(),
        "tokens": block.num_tokens,
        "parent": None if block.parent == block.root else block.parent.hex(),
        "holders": block.holders,
        "priority": block.priority,
        "pinned": block.pinned,
    }


def _round(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


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
            return sum(index.root_of(block_id) == root for block_id in block_ids)

        return {
            "eviction_policy": self._config.eviction_policy,
            "indexed_blocks": index.count(root),
            "pin_budget_blocks": retention.pin_budget,
            "pinned_blocks": retention.num_pinned if root is None else own(retention.pinned_blocks()),
            "priority_budget_blocks": retention.priority_budget,
            "raised_blocks": retention.num_raised if root is None else own(retention.raised_blocks()),
            "next_event": keeper.events.next_number,
        }

    def blocks(self, now: float, salt: str | None, start: int, limit: int) -> Walk[dict[str, Any]]:
        """Cached blocks of the first KV group, by id: those from the id `start` on. See `walks`."""
        manager = self._paged(now)
        root, index = self._root(manager, salt), manager.index
        found, following = yield from walks.blocks_from(index, manager.keeper, root, start, limit)
        return {"total": index.count_in(0, root), "blocks": list(map(_told, found)), "next": following}

    def prefixes(self, now: float, salt: str | None) -> Walk[Prefixes]:
        """What the radix view is worked out from, in another thread."""
        manager = self._paged(now)
        listing = yield from walks.listing(manager.index, manager.keeper, self._root(manager, salt))
        return Prefixes(listing, manager.spec.block_size, now)

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

    def flush(self, now: float, salt: str | None) -> Walk[dict[str, Any]]:
        manager = self._paged(now)
        count = yield from walks.flush(manager.index, manager.keeper, self._root(manager, salt))
        return {"flushed_blocks": count}

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
                "reason": record.reason,
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
