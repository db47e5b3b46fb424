"""What is worth bringing back from a tier, and in which order its blocks are looked at, on integers."""

from __future__ import annotations

from array import array

import pytest

from helpers.deciders import make_request, make_spec
from kvist.kv.block import BlockHash
from kvist.kv.manager import KVManager
from kvist.kv.tiers import Follower, Restore, TierDecider, TransferPlan
from kvist.request import Request

A, B, C, ROOT = (BlockHash(bytes([number]) * 32) for number in range(4))


def serve(manager: KVManager, name: str, prompt: list[int]) -> TransferPlan:
    request = make_request(name, prompt, 1)
    manager.add(request)
    manager.attach(request, match := manager.match(request))
    request.num_computed_tokens = match.num_tokens
    assert manager.allocate(request, len(prompt) - match.num_tokens)
    manager.take_plan()
    manager.complete_plan()
    request.num_computed_tokens = len(prompt)
    manager.commit(request)
    manager.free(request)
    assert manager.tier is not None
    plan = manager.tier.take_offers()
    assert plan is not None
    return plan


@pytest.mark.parametrize(("found", "is_worth_it"), [(3, True), (5, True), (6, False), (10, False)])
def test_a_block_is_not_read_for_a_few_tokens_more_than_the_device_has(found: int, is_worth_it: bool) -> None:
    """Of a block of 16 the tier has the first 12. With the next one, which is computed, it adds half a block, or nothing."""
    old, new = (KVManager(make_spec(), 20, watermark=0.0, tiered=True) for _ in range(2))
    assert new.tier is not None
    new.tier.found((copy.name, copy.about) for copy in serve(old, "first", list(range(12))).copies)
    serve(new, "other", [*range(found), *range(90, 102 - found)])
    again: Request = make_request("again", list(range(15)), 1)
    new.add(again)
    match = new.match(again)
    assert match.num_tokens == found
    restore = new.restorable(again, match)
    assert (restore is not None) == is_worth_it
    assert restore is None or (restore.start, restore.stop) == (found, 12)


def test_the_latest_block_behind_another_is_looked_at_first() -> None:
    tier = TierDecider(make_spec(block_size=4))
    for number, name in enumerate((A, B, C, A)):
        tier.offer(0, ROOT, ROOT, [name], [number], array("I", range(4)))
    assert [name for name, _ in tier.followers(ROOT)] == [C, B, A]
    tier.lost([C + bytes(2)])
    assert [name for name, _ in tier.followers(ROOT)] == [B, A]


def test_what_is_left_without_a_beginning_is_no_restore_if_the_device_has_as_much() -> None:
    follower = Follower(C, array("I", range(4)))
    for start, left in ((7, 8), (8, None), (10, None)):
        restore = Restore(start, 11, ((0, A), (0, C)), ROOT, (1, 2), [B, A], 2, follower)
        whole = restore.whole(4)
        assert (None if whole is None else whole.stop) == left
        assert whole is None or (whole.missing, whole.blocks, whole.follower) == (((0, A),), (1,), None)
