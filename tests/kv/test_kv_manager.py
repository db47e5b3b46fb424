"""The KV manager on integers: exact block ids, hit lengths, reference counts and the order of reuse."""

from __future__ import annotations

import pytest

from helpers.deciders import make_request, make_spec
from kvist.errors import ConfigError
from kvist.kv.manager import KVManager, KVUsage
from kvist.kv.prefix import PrefixMatch
from kvist.request import Request


def make_manager(*windows: int | None, num_blocks: int, block_size: int = 16, **more: object) -> KVManager:
    return KVManager(make_spec(*windows, block_size=block_size), num_blocks, watermark=0.0, **more)  # type: ignore[arg-type]


def admit(manager: KVManager, request: Request) -> PrefixMatch:
    manager.add(request)
    match = manager.match(request)
    manager.attach(request, match)
    request.num_computed_tokens = match.num_tokens
    return match


def compute(manager: KVManager, request: Request, num_tokens: int) -> None:
    assert manager.allocate(request, num_tokens)
    request.num_computed_tokens += num_tokens
    manager.commit(request)
    manager.trim(request)
    manager.check_invariants()


def run(manager: KVManager, request: Request) -> PrefixMatch:
    match = admit(manager, request)
    compute(manager, request, request.num_tokens - request.num_computed_tokens)
    return match


def tables(manager: KVManager, request: Request) -> list[list[int]]:
    return [list(table) for table in manager.block_tables(request)]


@pytest.mark.parametrize(("length", "hit"), [(1, 0), (7, 0), (8, 7), (15, 14), (16, 15), (17, 16), (47, 46), (48, 47), (49, 48)])
def test_a_repeated_prompt_hits_all_but_its_last_token_where_half_a_block_is_filled(length: int, hit: int) -> None:
    manager = make_manager(num_blocks=8)
    first = make_request("first", range(length))
    assert run(manager, first).num_tokens == 0
    ids = tables(manager, first)[0]
    manager.free(first)
    for name in ("second", "third"):
        again = make_request(name, range(length))
        match = run(manager, again)
        assert match.num_tokens == hit
        assert list(match.block_ids[0]) == ids[: hit // 16]
        assert match.copied_from == ((ids[hit // 16],) if hit % 16 else ())
        manager.free(again)
    assert manager.num_free_blocks == 8


def test_running_requests_share_blocks_and_own_what_differs() -> None:
    manager = make_manager(num_blocks=8)
    one, two = make_request("one", range(40)), make_request("two", [*range(33), 99, 98])
    run(manager, one)
    assert run(manager, two).num_tokens == 32
    assert tables(manager, one) == [[0, 1, 2]]
    assert tables(manager, two) == [[0, 1, 3]]
    assert manager.usage() == KVUsage(total=8, live=4, cached=0, free=4, evictions=0)
    assert manager.free(one) == 1
    # Half of its last block is kept, but not three tokens of the other one's.
    assert manager.usage() == KVUsage(total=8, live=3, cached=1, free=4, evictions=0)
    assert manager.free(two) == 3
    assert manager.usage() == KVUsage(total=8, live=0, cached=3, free=5, evictions=0)
    manager.check_invariants()


def test_output_tokens_are_hit_like_prompt_tokens() -> None:
    manager = make_manager(num_blocks=8)
    turn = make_request("turn", range(10), max_tokens=40)
    run(manager, turn)
    for token_id in range(100, 130):
        turn.output_token_ids.append(token_id)
        compute(manager, turn, 1)
    manager.free(turn)
    following = make_request("next", [*range(10), *range(100, 130), 7, 7])
    assert run(manager, following).num_tokens == 40, "half a block of it by copy"


def test_a_tail_is_reused_before_the_beginning_and_the_older_request_before_the_younger() -> None:
    manager = make_manager(num_blocks=6, block_size=4)
    old, young = make_request("old", range(12)), make_request("young", range(50, 62))
    run(manager, old)
    run(manager, young)
    assert tables(manager, old) + tables(manager, young) == [[0, 1, 2], [3, 4, 5]]
    manager.free(old)
    manager.free(young)
    third = make_request("third", range(80, 96))
    run(manager, third)
    assert tables(manager, third) == [[2, 1, 0, 5]]
    assert manager.usage().evictions == 4
    manager.free(third)
    # Only the first two blocks of the younger one are left (its third would not serve a prompt of 12 anyway).
    assert [manager.match(known(manager, range(12))).num_tokens, manager.match(known(manager, range(50, 62))).num_tokens] == [0, 8]


def known(manager: KVManager, prompt: range, **more: object) -> Request:
    request = make_request(f"probe {prompt} {more}", prompt, **more)  # type: ignore[arg-type]
    manager.add(request)
    return request


def test_a_hit_makes_blocks_young_again() -> None:
    manager = make_manager(num_blocks=4, block_size=4)
    for start in (0, 50):
        request = make_request(f"from {start}", range(start, start + 8))
        run(manager, request)
        manager.free(request)
    # The order of reuse is now 1, 0, 3, 2; a hit on block 0 puts it last.
    again = make_request("again", range(5))
    assert run(manager, again).num_tokens == 4
    assert tables(manager, again) == [[0, 1]]
    manager.free(again)
    big = make_request("big", range(90, 102))
    run(manager, big)
    assert tables(manager, big) == [[1, 3, 2]]
    manager.free(big)
    assert manager.match(known(manager, range(8))).num_tokens == 4
    assert manager.match(known(manager, range(50, 58))).num_tokens == 0


def test_blocks_are_shared_only_after_they_were_computed() -> None:
    manager = make_manager(num_blocks=8)
    one, two, three = (make_request(name, range(33)) for name in ("one", "two", "three"))
    admit(manager, one)
    assert manager.allocate(one, 33)
    assert admit(manager, two).num_tokens == 0
    assert manager.allocate(two, 33)
    for request in (one, two):
        request.num_computed_tokens = 33
        manager.commit(request)
    # The first computed keeps the name; the twin blocks of the second are reused first once it lets them go.
    assert admit(manager, three).num_tokens == 32
    assert tables(manager, three) == [[0, 1]]
    assert tables(manager, two) == [[3, 4, 5]]
    manager.free(two)
    assert manager.usage() == KVUsage(total=8, live=3, cached=0, free=5, evictions=0)
    manager.check_invariants()


def test_a_partial_block_is_never_shared() -> None:
    manager = make_manager(num_blocks=8)
    one = make_request("one", range(31))
    run(manager, one)
    assert run(manager, make_request("two", range(40))).num_tokens == 16


def test_salts_and_keys_do_not_share() -> None:
    manager = make_manager(num_blocks=16)
    for salt in ("", "a", "b"):
        request = make_request(f"salt {salt}", range(40), salt=salt)
        assert run(manager, request).num_tokens == 0
    assert run(manager, make_request("again", range(40), salt="a")).num_tokens == 32


def test_prefix_caching_off_keeps_nothing() -> None:
    manager = make_manager(num_blocks=8, enable_prefix_caching=False)
    for name in ("one", "two"):
        request = make_request(name, range(40))
        assert run(manager, request).num_tokens == 0
        manager.free(request)
        assert manager.usage() == KVUsage(total=8, live=0, cached=0, free=8, evictions=0)


def test_prompt_logprobs_skip_the_lookup_but_leave_blocks_to_others() -> None:
    manager = make_manager(num_blocks=8)
    for name in ("one", "two"):
        assert run(manager, make_request(name, range(33), prompt_logprobs=0)).num_tokens == 0
    assert run(manager, make_request("three", range(33))).num_tokens == 32


def test_no_room_changes_nothing() -> None:
    manager = make_manager(num_blocks=4)
    one, two = make_request("one", range(40)), make_request("two", range(100, 140))
    run(manager, one)
    admit(manager, two)
    assert not manager.allocate(two, 17)
    assert tables(manager, two) == [[]]
    assert manager.fit(two, 17) == 16
    assert manager.allocate(two, 16)
    assert manager.fit(one, 100) == 8
    assert manager.fit(two, 100) == 16
    manager.check_invariants()


def test_queries_change_nothing() -> None:
    manager = make_manager(None, 16, num_blocks=12)
    request = make_request("one", range(40))
    run(manager, request)
    probe = make_request("two", range(40))
    manager.add(probe)
    before = (manager.usage(), tables(manager, request))
    match = manager.match(probe)
    assert manager.match(probe) == match
    manager.has_room(probe, match, alone=False)
    manager.fit(probe, 100)
    assert (manager.usage(), tables(manager, request)) == before
    manager.check_invariants()


def test_groups_get_blocks_side_by_side_and_give_them_back_so() -> None:
    manager = make_manager(None, 8, num_blocks=8, block_size=4)
    request = make_request("one", range(8))
    run(manager, request)
    # The next row, at 8, reads 1 .. 8 in the windowed group: nothing can go yet.
    assert tables(manager, request) == [[0, 2], [1, 3]]
    manager.free(request)
    big = make_request("big", range(50, 66))
    run(manager, big)
    # New blocks first, then the tail of each group, then the beginning of each; the window then let go of the first entries.
    assert manager.usage().evictions == 4
    assert tables(manager, big) == [[4, 6, 2, 0], [0, 0, 3, 1]]


def test_a_window_lets_go_exactly_what_the_next_row_does_not_read() -> None:
    manager = make_manager(8, num_blocks=8, block_size=4)
    run(manager, make_request("holds block 0", [99]))
    request = make_request("one", range(30))
    admit(manager, request)
    seen = []
    for chunk in (5, 5, 1, 1, 7):
        compute(manager, request, chunk)
        seen.append((request.num_computed_tokens, tables(manager, request)[0]))
    assert seen == [
        (5, [1, 2]),
        (10, [1, 2, 3]),  # row 10 reads 3 .. 10
        (11, [0, 2, 3]),  # row 11 reads 4 .. 11
        (12, [0, 2, 3]),
        (19, [0, 0, 0, 4, 5]),  # row 19 reads 12 .. 19
    ]
    assert manager.usage() == KVUsage(total=8, live=3, cached=3, free=2, evictions=0)


def test_a_windowed_hit_holds_only_its_window() -> None:
    manager = make_manager(None, 8, num_blocks=20, block_size=4)
    one = make_request("one", range(18))
    run(manager, one)
    assert tables(manager, one) == [[0, 2, 4, 6, 8], [0, 0, 5, 7, 9]]
    two = make_request("two", range(18))
    # A row at 16 reads 9 .. 16: blocks 2 and 3 of the windowed group.
    assert admit(manager, two).num_tokens == 16
    assert tables(manager, two) == [[0, 2, 4, 6], [0, 0, 5, 7]]
    manager.check_invariants()
    manager.free(one)
    manager.free(two)
    assert manager.num_free_blocks == 20


def test_hit_blocks_that_the_window_leaves_behind_save_no_room() -> None:
    """At its last token a request of 17 holds the blocks 2 to 4; that others hold 0 and 1 of its hit is no help there."""
    for free in (2, 3):
        manager = make_manager(6, num_blocks=2 + free, block_size=4)
        run(manager, make_request("one", range(8)))
        assert manager.num_free_blocks == free
        probe = make_request("two", range(17))
        manager.add(probe)
        match = manager.match(probe)
        assert (match.num_tokens, match.first_blocks) == (8, (0,))
        assert manager.has_room(probe, match, alone=False) == (free == 3)


def test_a_hit_shrinks_to_what_windowed_groups_still_have() -> None:
    manager = make_manager(None, 4, num_blocks=10, block_size=4)
    one = make_request("one", range(16))
    run(manager, one)
    assert tables(manager, one) == [[0, 2, 4, 6], [0, 0, 0, 7]]
    # The windowed blocks 5, 3, 1 are free and cached; two more blocks take 8 and 9, the next two evict 5 and 3.
    two = make_request("two", range(50, 58))
    run(manager, two)
    assert tables(manager, two) == [[8, 5], [0, 3]]
    # 12 tokens need block 2 of the windowed group, 8 need block 1: both gone; 4 need block 0.
    assert manager.match(known(manager, range(16))).num_tokens == 4


def test_a_pool_without_a_block_for_each_group_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_kv_blocks=1 is less than the 2 blocks"):
        make_manager(None, 8, num_blocks=1)


def test_misuse_asserts() -> None:
    manager = make_manager(num_blocks=4)
    request = make_request("one", range(20))
    run(manager, request)
    with pytest.raises(AssertionError, match="known already"):
        manager.add(request)
    with pytest.raises(AssertionError, match="holds blocks already"):
        manager.attach(request, manager.no_match())
    with pytest.raises(AssertionError, match="never written again"):
        manager.rewind(request)
