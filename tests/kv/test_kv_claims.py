"""Claims and what they may take and tell: of other owners, and beside the further choices of the same request."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.deciders import make_spec
from kvist.errors import ContextLengthError
from kvist.kv.block import BlockHash
from kvist.kv.hints import KVHints
from kvist.kv.manager import KVManager
from kvist.kv.retention import Claim, Retention
from kvist.kv.rings import ORDINARY_PRIORITY
from kvist.kv.walks import blocks_from, finish
from kvist.request import PrefixMiss, Request, SamplingParams

ONE, OTHER = (BlockHash(bytes([number]) * 32) for number in range(2))


def test_a_claim_is_withdrawn_by_its_owner_alone() -> None:
    retention = Retention(8, 8)
    retention.claim(ONE, [1, 2], 50, True, None)
    changes = retention.withdraw(OTHER, [1, 2])
    assert (changes.unpinned, retention.pinned_blocks()) == ([], [1, 2])
    assert retention.withdraw(ONE, [2]).unpinned == [1, 2]
    assert retention.num_pinned == 0
    retention.check_invariants()


def test_a_claim_is_covered_by_its_owners_alone() -> None:
    retention = Retention(8, 8)
    retention.claim(ONE, [1, 2], 50, True, None)
    retention.claim(OTHER, [1, 2], 50, True, None)
    assert retention.withdraw(ONE, [1]).unpinned == []
    assert retention.pinned_blocks() == [1, 2]
    retention.check_invariants()


@pytest.mark.parametrize(("choices", "num_blocks", "fits"), [(1, 8, False), (1, 9, True), (2, 8, False), (2, 9, True)])
def test_a_pin_leaves_room_for_its_request_and_the_other_choices(choices: int, num_blocks: int, fits: bool) -> None:
    """Four blocks are pinned, and each choice needs five, of which none need be pinned ones."""
    manager = KVManager(make_spec(block_size=4), num_blocks, watermark=0.0, pin_budget=0.5)
    params = SamplingParams(max_tokens=1, n=choices)
    request = Request("r", list(range(16)), params, 1, kv=KVHints(pin=True))
    if fits:
        manager.add(request)
        assert manager.num_pledged_blocks() == 4
    else:
        with pytest.raises(ContextLengthError, match=r"needs 5 blocks .* its own prompt too, there are 4"):
            manager.add(request)
        assert (manager.num_pledged_blocks(), manager.request_ids) == (0, frozenset())
    manager.check_invariants()


def serve(manager: KVManager, name: str, prompt: list[int], salt: str = "", kv: KVHints | None = None) -> None:
    request = Request(name, prompt, SamplingParams(max_tokens=1), 1, cache_salt=salt, kv=kv)
    manager.add(request)
    assert manager.allocate(request, len(prompt))
    request.num_computed_tokens = len(prompt)
    manager.commit(request)
    manager.free(request)


def test_a_pin_is_no_holder() -> None:
    manager = KVManager(make_spec(block_size=4), 8, watermark=0.0)
    serve(manager, "pins", list(range(9)), kv=KVHints(pin=True))
    listed, following = finish(blocks_from(manager.index, manager.keeper, None, 0, 10))
    assert [(block.block_id, block.holders, block.pinned) for block in listed] == [(0, 0, True), (1, 0, True)]
    assert following is None


def test_another_salt_is_named_only_where_more_is_found_with_it() -> None:
    manager = KVManager(make_spec(block_size=4), 20, watermark=0.0)
    serve(manager, "plain", list(range(9)))
    serve(manager, "salted", [*range(4), *[50] * 9], salt="mine")
    as_far = [*range(4), 90, 91, 92, 93, 94]
    assert manager.explain(as_far, "mine", 4, "") == PrefixMiss("never_seen", 4)
    assert manager.explain(list(range(9)), "mine", 4, "") == PrefixMiss("other_salt", 4, would_hit=8)


def test_a_claim_is_compared_with_none_that_only_shares_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts behind one system prompt, each to be kept: the books of the shared blocks are counted, not searched."""
    compared: list[Claim] = []
    covers = Claim.covers
    monkeypatch.setattr(Claim, "covers", lambda one, other: (compared.append(other), covers(one, other))[1])
    retention, shared = Retention(0, 2000), list(range(64))
    for own in range(100, 600):
        retention.claim(ONE, [*shared, own], 80, False, float(own))
    assert compared == []
    assert (retention.num_raised, retention.priority(0), retention.priority(100)) == (564, 80, 80)
    assert retention.claim(ONE, [*shared, 100], 70, False, 50.0).priorities == {}, "it is covered"
    assert len(compared) == 1
    changes, left = retention.expire(599.0)
    assert left == [*shared, *range(100, 600)]
    assert changes.priorities == dict.fromkeys([*shared, *range(100, 600)], ORDINARY_PRIORITY)
    retention.check_invariants()


class Unlisted(dict[Claim, None]):
    """The claims on a block, of which nobody may look at each."""

    def __iter__(self) -> Iterator[Claim]:
        raise AssertionError("the claims on a shared block were searched")


def test_what_holds_for_a_shared_block_is_counted_and_not_searched() -> None:
    retention, shared = Retention(8, 8), [0, 1, 2]
    for own in range(3, 7):
        retention.claim(ONE, [*shared, own], 80, own == 3, float(own))
    for block_id in shared:
        standing = retention.by_block[block_id]
        standing.claims = Unlisted(standing.claims)
    changes = retention.claim(ONE, [*shared, 7], 90, False, 7.0)
    assert changes.priorities == dict.fromkeys([*shared, 7], 90)
    assert [(retention.is_pinned(block_id), retention.priority(block_id)) for block_id in (0, 3, 4)] == [
        (True, 90),
        (True, 80),
        (False, 80),
    ]
    changes, left = retention.expire(3.0)
    assert (changes.unpinned, left, retention.priority(0)) == ([0, 1, 2, 3], [3], 90)
    changes, left = retention.expire(7.0)
    assert (left, retention.by_block, changes.priorities[0]) == ([0, 1, 2, 4, 5, 6, 7], {}, ORDINARY_PRIORITY)


def test_a_claim_whose_end_is_evicted_ends_before_it() -> None:
    retention = Retention(0, 2000)
    retention.claim(ONE, [3, 1, 2], 80, False, None)
    retention.forget([2])
    retention.check_invariants()
    retention.forget([1])
    retention.claim(ONE, [3, 4], 90, False, None)
    retention.check_invariants()
    assert [len(standing.claims) for standing in retention.by_block.values()] == [1, 1], "what is left of it is covered"
    assert retention.withdraw(ONE, [4]).priorities == {3: ORDINARY_PRIORITY, 4: ORDINARY_PRIORITY}
    assert not retention.by_block
    retention.check_invariants()
