"""Claims and what they may take: of other owners, and beside the further choices of the same request."""

from __future__ import annotations

import pytest

from helpers.deciders import make_spec
from kvist.errors import InvalidRequestError
from kvist.kv.block import BlockHash
from kvist.kv.hints import KVHints
from kvist.kv.manager import KVManager
from kvist.kv.retention import Retention
from kvist.request import Request, SamplingParams

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


@pytest.mark.parametrize(("choices", "num_blocks", "fits"), [(1, 8, True), (2, 8, False), (2, 9, True)])
def test_a_pin_leaves_room_for_the_other_choices_of_its_request(choices: int, num_blocks: int, fits: bool) -> None:
    """Four blocks are pinned, and each choice that comes later needs five."""
    manager = KVManager(make_spec(block_size=4), num_blocks, watermark=0.0, pin_budget=0.5)
    params = SamplingParams(max_tokens=1, n=choices)
    request = Request("r", list(range(16)), params, 1, kv=KVHints(pin=True))
    if fits:
        manager.add(request)
        assert manager.num_pledged_blocks == 4
    else:
        with pytest.raises(InvalidRequestError, match="leave too few for a request that is open"):
            manager.add(request)
        assert (manager.num_pledged_blocks, manager.request_ids) == (0, frozenset())
    manager.check_invariants()
