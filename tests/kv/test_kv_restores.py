"""What is worth bringing back from a tier, and in which order its blocks are looked at, on integers."""

from __future__ import annotations

from array import array

import pytest

from helpers.deciders import make_request, make_spec
from kvist.kv.block import BlockHash
from kvist.kv.density import Density
from kvist.kv.manager import KVManager
from kvist.kv.tiers import Follower, Restore, TierDecider, TransferPlan
from kvist.request import Request

A, B, C, ROOT = (BlockHash(bytes([number]) * 32) for number in range(4))


def compute(manager: KVManager, name: str, prompt: list[int]) -> None:
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


def serve(manager: KVManager, name: str, prompt: list[int]) -> TransferPlan:
    """What the tier is offered of it."""
    compute(manager, name, prompt)
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


def plan_for(num_tokens: int) -> tuple[KVManager, Request, TransferPlan]:
    """A manager with a plan under way for a prompt of which the tier has all, in blocks of 16."""
    old, new = (KVManager(make_spec(), 40, watermark=0.0, tiered=True) for _ in range(2))
    assert new.tier is not None
    prompt = list(range(num_tokens))
    new.tier.found((copy.name, copy.about) for copy in serve(old, "first", prompt).copies)
    request: Request = make_request("again", prompt, 1)
    new.add(request)
    match = new.match(request)
    restore = new.restorable(request, match)
    assert restore is not None
    plan = new.prepare_restore(request, restore, match)
    assert plan is not None
    return new, request, plan


@pytest.mark.parametrize(
    ("filled", "brought"), [("1111", 63), ("1101", 32), ("0111", 0), ("0000", 0), ("1110", 48)], ids=lambda value: str(value)
)
def test_a_plan_has_brought_what_comes_before_the_first_gap(filled: str, brought: int) -> None:
    manager, request, plan = plan_for(64)
    assert manager.complete_restore(plan.plan_id, [good == "1" for good in filled]) == brought
    assert manager.match(request).num_tokens == brought
    manager.check_invariants()


def test_a_plan_has_brought_nothing_that_was_computed_meanwhile() -> None:
    manager, request, plan = plan_for(64)
    compute(manager, "other", [*range(64), 99])
    assert manager.complete_restore(plan.plan_id, [True] * 4) == 0
    assert manager.match(request).num_tokens == 63
    manager.check_invariants()


def test_what_a_plan_only_keeps_counts_as_used_once_it_is() -> None:
    """The device has the first block of four. Its class is what it would be without a tier."""
    old, new = (KVManager(make_spec(), 40, watermark=0.0, tiered=True) for _ in range(2))
    assert new.tier is not None
    new.tier.found((copy.name, copy.about) for copy in serve(old, "first", list(range(65))).copies)
    compute(new, "begun", list(range(17)))
    request: Request = make_request("again", list(range(65)), 1)
    new.add(request)
    match = new.match(request)
    block_id, policy = match.block_ids[0][0], new.keeper.policy
    assert isinstance(policy, Density)
    (before,) = policy.leave([block_id])
    restore = new.restorable(request, match)
    assert restore is not None
    plan = new.prepare_restore(request, restore, match)
    assert plan is not None
    assert [memo & 7 for memo in policy.leave([block_id])] == [before & 7]
    new.complete_restore(plan.plan_id, [True] * len(plan.copies))
    new.attach(request, new.match(request))
    assert [memo & 7 for memo in policy.leave([block_id])] == [(before & 7) + 1]
