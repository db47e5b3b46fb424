"""The books of a tier: what is offered, what a hit could be lengthened by, and the cost model, on integers."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.deciders import make_request, make_spec
from kvist.config import MAX_BLOCK_SIZE
from kvist.kv.block import BlockHash
from kvist.kv.manager import KVManager
from kvist.kv.origins import (
    Origin,
    decode_format,
    encode_format,
    format_of,
    max_bytes,
    parent_of,
    root_of,
    tokens_of,
)
from kvist.kv.tiers import PATIENCE, Restore, TierDecider, TierRates, TransferPlan, name_of, parse_name, restore_is_cheaper
from kvist.request import Request
from kvist.store.segments import MAX_ABOUT

A, B, C = (BlockHash(bytes([number]) * 32) for number in range(3))


ROOT = BlockHash(b"r" * 32)


def make_tier(num_groups: int = 1) -> TierDecider:
    return TierDecider(make_spec(*[None] * num_groups, block_size=4))


def offer(tier: TierDecider, group: int, block_hashes: Sequence[BlockHash], block_ids: Iterable[int]) -> None:
    tier.offer(group, ROOT, ROOT, block_hashes, block_ids, array("I", range(4 * len(block_hashes))))


def restart(tier: TierDecider | None, plan: TransferPlan) -> None:
    """A process finds at its start what another has written."""
    assert tier is not None
    tier.found((copy.name, copy.about) for copy in plan.copies)


def test_names_say_hash_and_group() -> None:
    assert parse_name(name_of(3, A)) == (3, A)
    assert len({name_of(0, A), name_of(1, A), name_of(0, B)}) == 3


def test_a_block_is_offered_once_while_it_is_there_or_on_its_way() -> None:
    tier = make_tier(2)
    offer(tier, 0, [A, B], [7, 8])
    offer(tier, 0, [A], [9])
    offer(tier, 1, [A], [5])
    plan = tier.take_offers()
    assert plan is not None
    assert [(copy.block_hash, copy.group, copy.block_id) for copy in plan.copies] == [(A, 0, 7), (B, 0, 8), (A, 1, 5)]
    assert tier.take_offers() is None
    tier.stored([name_of(0, A)])
    offer(tier, 0, [A, B], [1, 2])
    assert tier.take_offers() is None, "one is there, the other on its way"
    tier.lost([name_of(0, A), name_of(0, B)])
    offer(tier, 0, [A, B], [1, 2])
    again = tier.take_offers()
    assert again is not None
    assert [copy.block_id for copy in again.copies] == [1, 2]
    tier.check_invariants()


def test_who_owns_a_block_is_known_from_its_offer_or_from_what_the_tier_keeps_with_it() -> None:
    tier = make_tier()
    offer(tier, 0, [A, B], [7, 8])
    plan = tier.take_offers()
    assert plan is not None
    assert tier.stored([name_of(0, A)]) == {A: ROOT}
    assert tier.stored([name_of(0, A)]) == {}, "that is no news"
    assert tier.lost([name_of(0, A), name_of(0, B)]) == ({A: ROOT}, {B: ROOT}), "one is gone, the other never came"
    tier.check_invariants()
    new = make_tier()
    restart(new, plan)
    assert new.keeps(0, A)
    assert new.lost([name_of(0, A), name_of(0, C)]) == ({A: ROOT}, {})
    new.check_invariants()


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200),
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=32, max_size=32),
    st.sampled_from(["f32", "bf16", "fp8_e4m3"]),
)
def test_an_origin_comes_back_as_it_was(tokens: list[int], root: bytes, parent: bytes, kv_format: str) -> None:
    origin = Origin(encode_format(kv_format, len(tokens)), BlockHash(root), BlockHash(parent), array("I", tokens))
    data = origin.encode()
    assert Origin(format_of(data), root_of(data), parent_of(data), tokens_of(data)) == origin
    assert decode_format(format_of(data)) == (kv_format, len(tokens))
    assert len(data) == max_bytes(len(tokens))


def test_the_largest_block_is_told_to_a_store() -> None:
    origin = Origin(encode_format("fp8_e4m3", MAX_BLOCK_SIZE), ROOT, A, array("I", range(MAX_BLOCK_SIZE))).encode()
    assert len(origin) == max_bytes(MAX_BLOCK_SIZE) <= MAX_ABOUT
    assert decode_format(format_of(origin)) == ("fp8_e4m3", MAX_BLOCK_SIZE)


def test_names_of_other_models_are_passed_over() -> None:
    """A folder may hold blocks of a model with more groups, and of other formats."""
    tier = make_tier()
    more = Origin(encode_format("f32", 48), ROOT, ROOT, array("I", range(4))).encode()
    own = Origin(encode_format("bf16", 4), ROOT, ROOT, array("I", range(4))).encode()
    tier.found([(name_of(5, A), more), (name_of(0, B), own)])
    tier.lost([name_of(5, A)])
    assert not tier.keeps(0, A)
    assert tier.keeps(0, B)
    assert sorted(tier.formats, reverse=True) == [("f32", 48), ("bf16", 4)]


@given(st.integers(1, 10**12), st.integers(1, 10**7), st.integers(0, 10**12), st.integers(1, 10**6))
def test_the_cheaper_of_the_two(read: int, tokens: int, num_bytes: int, num_tokens: int) -> None:
    rates = TierRates(read, tokens)
    assert restore_is_cheaper(rates, num_bytes, num_tokens) == (num_bytes * tokens < num_tokens * read)
    assert not restore_is_cheaper(rates, num_bytes, 0)


def test_what_was_never_measured_is_tried() -> None:
    assert restore_is_cheaper(TierRates(None, 10), 1 << 60, 1)
    assert restore_is_cheaper(TierRates(10, None), 1 << 60, 1)


def test_after_many_refusals_one_is_tried() -> None:
    tier = make_tier()
    tier.rates = TierRates(read_bytes_per_second=1, tokens_per_second=1000)
    restore = Restore(0, 16, ((0, A),), ROOT, (0,), [A], 1)
    assert [tier.is_worth_it(restore) for _ in range(2 * PATIENCE + 2)] == [*[False] * PATIENCE, True] * 2
    assert tier.num_refused == 2 * PATIENCE
    tier.rates = TierRates(read_bytes_per_second=10**9, tokens_per_second=1000)
    assert tier.is_worth_it(restore)


def computed(manager: KVManager, request: Request) -> None:
    """All but the last token of a request that holds nothing."""
    manager.add(request)
    assert manager.allocate(request, request.num_tokens)
    request.num_computed_tokens = request.num_tokens
    manager.commit(request)


def test_a_restore_lengthens_the_hit_by_what_the_device_lacks() -> None:
    manager = KVManager(make_spec(None, 8, block_size=4), 40, watermark=0.0, tiered=True)
    assert manager.tier is not None
    first = make_request("first", range(17))
    computed(manager, first)
    plan = manager.tier.take_offers()
    assert plan is not None
    assert len(plan.copies) == 2 * 4
    manager.free(first)
    other = KVManager(make_spec(None, 8, block_size=4), 40, watermark=0.0, tiered=True)
    restart(other.tier, plan)
    request = make_request("again", range(20))
    other.add(request)
    match = other.match(request)
    restore = other.restorable(request, match)
    assert restore is not None
    # The windowed group needs the last two blocks alone: a row at 16 sees 9 to 16.
    assert (restore.start, restore.stop, [group for group, _ in restore.missing]) == (0, 16, [0, 0, 0, 1, 0, 1])
    filling = other.prepare_restore(request, restore, match)
    assert filling is not None
    assert other.num_free_blocks == 34
    assert sorted(other.tier.pinned()) == sorted(copy.block_id for copy in filling.copies)
    assert other.match(request).num_tokens == 0, "not before it is complete"
    other.check_invariants()
    other.complete_restore(filling.plan_id, [True] * 6)
    assert other.num_free_blocks == 40
    assert other.match(request).num_tokens == 16
    assert other.restorable(request, other.match(request)) is None
    other.check_invariants()


def test_a_restore_that_fails_in_part_gives_what_came() -> None:
    manager = KVManager(make_spec(block_size=4), 10, watermark=0.0, tiered=True)
    assert manager.tier is not None
    first = make_request("first", range(17))
    computed(manager, first)
    plan = manager.tier.take_offers()
    assert plan is not None
    other = KVManager(make_spec(block_size=4), 10, watermark=0.0, tiered=True)
    restart(other.tier, plan)
    request = make_request("again", range(17))
    other.add(request)
    restore = other.restorable(request, other.match(request))
    assert restore is not None
    filling = other.prepare_restore(request, restore, other.match(request))
    assert filling is not None
    other.complete_restore(filling.plan_id, [True, True, False, True])
    assert other.match(request).num_tokens == 8
    assert other.usage().cached == 3
    other.check_invariants()


def test_a_hit_on_the_device_is_not_evicted_for_its_own_continuation() -> None:
    manager = KVManager(make_spec(block_size=4), 5, watermark=0.0, tiered=True)
    assert manager.tier is not None
    short = make_request("short", range(9))
    computed(manager, short)
    manager.free(short)
    long = make_request("long", range(21))
    manager.add(long)
    assert manager.match(long).num_tokens == 8
    hashes = manager._records["long"].hashes
    origin = Origin(encode_format("bf16", 4), ROOT, ROOT, array("I", range(4)))
    manager.tier.found((name_of(0, block_hash), origin.encode()) for block_hash in hashes[2:])
    match = manager.match(long)
    restore = manager.restorable(long, match)
    assert restore is not None
    assert (restore.start, restore.stop) == (8, 20)
    plan = manager.prepare_restore(long, restore, match)
    assert plan is not None
    assert manager.match(long).num_tokens == 8, "three of the five blocks were taken, and not these two"
    manager.complete_restore(plan.plan_id, [True] * 3)
    assert manager.match(long).num_tokens == 20


def test_what_is_here_of_a_longer_prefix_is_not_evicted_for_the_rest_of_it() -> None:
    """Of 16 tokens one block was evicted, and of the windowed group the last alone is here: there is no hit without both."""
    manager = KVManager(make_spec(None, 4, block_size=4), 16, watermark=0.0, tiered=True)
    assert manager.tier is not None
    request, other = make_request("first", range(17)), make_request("other", range(100, 109))
    for one in (request, other):
        manager.add(one)
        while one.num_computed_tokens < one.num_tokens:
            rows = min(4, one.num_tokens - one.num_computed_tokens)
            assert manager.allocate(one, rows)
            one.num_computed_tokens += rows
            manager.commit(one)
            manager.trim(one)
        manager.free(one)
    plan = manager.tier.take_offers()
    assert plan is not None
    manager.tier.stored(copy.name for copy in plan.copies)
    again = make_request("again", range(17))
    manager.add(again)
    taken = []
    while manager.match(again).num_tokens:
        taken += manager.keeper.pool.take(1) or []
    match = manager.match(again)
    restore = manager.restorable(again, match)
    assert restore is not None
    assert (restore.stop, len(restore.missing), len(restore.here)) == (16, 1, 4)
    (queued,) = manager.keeper.pool.free_queue()[:1]
    assert queued in restore.here, "it would have been the next to go"
    filling = manager.prepare_restore(again, restore, match)
    assert filling is not None
    manager.complete_restore(filling.plan_id, [True])
    assert manager.match(again).num_tokens == 16
    manager.keeper.pool.release(taken)
    manager.check_invariants()


@pytest.mark.parametrize("before", [[], [0, 1, 2, 3]])
def test_a_last_block_that_comes_back_hides_no_whole_one_to_copy_from(before: list[int]) -> None:
    """Behind the same tokens the device has a whole block, still being written, and the tier a last one that is not full."""
    old = KVManager(make_spec(block_size=4), 20, watermark=0.0, tiered=True)
    ended = make_request("ended", [*before, 4, 5, 6])
    computed(old, ended)
    old.free(ended)
    assert old.tier is not None
    plan = old.tier.take_offers()
    assert plan is not None
    new = KVManager(make_spec(block_size=4), 20, watermark=0.0, tiered=True)
    restart(new.tier, plan)
    whole = make_request("whole", [*before, 7, 8, 9, 10])
    computed(new, whole)
    new.free(whole)
    again = make_request("again", [*before, 4, 5, 6, 20])
    new.add(again)
    restore = new.restorable(again, new.match(again))
    assert restore is not None
    filling = new.prepare_restore(again, restore, new.match(again))
    assert filling is not None
    new.complete_restore(filling.plan_id, [True])
    assert new.match(again).num_tokens == len(before) + 3
    other = make_request("other", [*before, 7, 8, 9, 20])
    new.add(other)
    assert new.match(other).num_tokens == len(before) + 3
    new.check_invariants()


@pytest.mark.parametrize(("size", "offered"), [(6, [4, 2]), (5, [4]), (4, [4]), (3, [3])])
def test_who_is_swapped_offers_a_last_block_that_is_half_full(size: int, offered: list[int]) -> None:
    manager = KVManager(make_spec(None, 6, block_size=4), 20, watermark=0.0, tiered=True)
    request = make_request("request", range(size))
    computed(manager, request)
    assert manager.tier is not None
    assert manager.swap_out(request)
    plan = manager.tier.take_offers()
    assert plan is not None
    for group in (0, 1):
        copies = [copy for copy in plan.copies if copy.group == group]
        assert [len(tokens_of(copy.about)) for copy in copies] == offered
        assert [copy.block_id for copy in copies] == list(manager.block_tables(request)[group][: len(offered)])


def test_a_last_block_whose_copy_is_only_planned_is_not_offered() -> None:
    manager = KVManager(make_spec(block_size=4), 20, watermark=0.0, tiered=True)
    one, two = (make_request(name, [*range(7)]) for name in ("one", "two"))
    computed(manager, one)
    manager.add(two)
    manager.fork(one, two)
    two.num_computed_tokens = 7
    assert manager.tier is not None
    manager.tier.take_offers()
    assert manager.allocate(two, 1), "in a block of its own, into which nothing has been copied yet"
    manager.swap_out(two)
    assert manager.tier.take_offers() is None
    manager.release(two)
    manager.swap_out(one)
    plan = manager.tier.take_offers()
    assert plan is not None
    assert [(copy.block_id, list(tokens_of(copy.about))) for copy in plan.copies] == [(1, [4, 5, 6])]
    manager.check_invariants()


@pytest.mark.parametrize("preempted", [True, False])
def test_who_finds_its_own_last_block_again_goes_on_in_it(preempted: bool) -> None:
    """Another makes a copy, so that others find it too, unless there are no blocks to copy to."""
    manager = KVManager(make_spec(None, 6, block_size=4), 8, watermark=0.0, tiered=True)
    ended = make_request("ended", range(7))
    computed(manager, ended)
    tables = [list(table) for table in manager.block_tables(ended)]
    manager.free(ended)
    request = make_request("request", range(8))
    request.num_preemptions = int(preempted)
    manager.add(request)
    match = manager.match(request)
    over = match._replace(takes_over=True)
    assert (match.num_tokens, match.num_copied) == (7, 3)
    assert manager.ways(request, match) == ([over, match, match.whole()] if preempted else [match, over, match.whole()])
    manager.keeper.pool.take(3)
    assert [manager.has_room(request, way, alone=True) for way in (match, over)] == [False, True]
    manager.attach(request, over)
    assert [list(table) for table in manager.block_tables(request)] == tables
    assert manager.num_free_blocks == 1
    request.num_computed_tokens = 7
    assert manager.allocate(request, 1)
    assert not manager.take_plan(), "nothing is copied"
    other = make_request("other", range(8))
    manager.add(other)
    assert manager.match(other).num_tokens == 4, "nobody reads what is written to"
    request.num_computed_tokens = 8
    manager.commit(request)
    manager.free(request)
    assert manager.match(other).num_tokens == 7


@pytest.mark.parametrize("others", ["holds", "has more"])
def test_a_last_block_that_is_not_ones_own_alone_is_copied(others: str) -> None:
    manager = KVManager(make_spec(block_size=4), 8, watermark=0.0, tiered=True)
    ended = make_request("ended", range(7))
    computed(manager, ended)
    manager.free(ended)
    if others == "holds":
        holder = make_request("holder", range(8))
        manager.add(holder)
        manager.attach(holder, manager.match(holder))
    request = make_request("request", range(8) if others == "holds" else [*range(6), 90])
    request.num_preemptions = 1
    manager.add(request)
    match = manager.match(request)
    assert match.num_copied == (3 if others == "holds" else 2)
    assert manager.ways(request, match) == [match, match.whole()]


def test_prompt_scores_restore_nothing() -> None:
    manager = KVManager(make_spec(block_size=4), 10, watermark=0.0, tiered=True)
    assert manager.tier is not None
    first = make_request("first", range(17))
    computed(manager, first)
    plan = manager.tier.take_offers()
    assert plan is not None
    restart(manager.tier, plan)
    scored = make_request("scored", range(17), prompt_logprobs=0)
    manager.add(scored)
    assert manager.restorable(scored, manager.match(scored)) is None
