"""Blocks that are copied before they are written, on integers: which, from where, who holds what, and when nothing is copied."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from helpers.deciders import Sim, make_request, make_spec
from kvist.kv.hints import KVHints
from kvist.kv.history import MAX_PROMPTS
from kvist.kv.manager import KVManager, KVUsage
from kvist.kv.memory import NO_PLAN
from kvist.kv.prefix import PrefixMatch
from kvist.request import PrefixMiss, Request

FIRST = range(12)


def make_manager(*windows: int | None, num_blocks: int = 8, **more: object) -> KVManager:
    return KVManager(make_spec(*windows, block_size=4), num_blocks, watermark=0.0, **more)  # type: ignore[arg-type]


def find(manager: KVManager, name: str, prompt: Iterable[int], salt: str = "") -> tuple[Request, PrefixMatch]:
    request = make_request(name, list(prompt), salt=salt)
    manager.add(request)
    return request, manager.match(request)


def start(manager: KVManager, request: Request, match: PrefixMatch) -> None:
    manager.attach(request, match)
    request.num_computed_tokens = match.num_tokens


def finish(manager: KVManager, request: Request) -> None:
    request.num_computed_tokens = request.num_tokens
    manager.complete_plan()
    manager.commit(request)
    manager.trim(request)
    manager.check_invariants()


def run(manager: KVManager, name: str, prompt: Iterable[int]) -> Request:
    request, match = find(manager, name, prompt)
    start(manager, request, match)
    assert manager.allocate(request, request.num_tokens - request.num_computed_tokens)
    manager.take_plan()
    finish(manager, request)
    return request


def table(manager: KVManager, request: Request, group: int = 0) -> list[int]:
    return list(manager.block_tables(request)[group])


def test_the_beginning_of_a_block_is_copied_into_a_block_of_its_own() -> None:
    manager = make_manager()
    manager.free(run(manager, "first", FIRST))
    request, match = find(manager, "second", [*range(6), 99, 98])
    assert (match.num_tokens, match.num_copied, list(match.block_ids[0]), match.copied_from) == (6, 2, [0], (1,))
    assert match.whole() == PrefixMatch(4, match.block_ids, match.first_blocks)
    start(manager, request, match)
    assert table(manager, request) == [0, 1]
    assert manager.fit(request, 99) == 2 + 4 * 5
    assert manager.allocate(request, 2)
    assert table(manager, request) == [0, 3]
    assert manager.usage() == KVUsage(total=8, live=3, cached=1, free=4, evictions=0)
    manager.check_invariants()
    assert manager.take_plan().copies == ((1, 3),)
    assert manager.take_plan() == NO_PLAN, "each copy is given out once"
    manager.check_invariants()
    finish(manager, request)
    assert manager.usage() == KVUsage(total=8, live=2, cached=2, free=4, evictions=0)
    assert manager.match(find(manager, "probe", [*range(6), 99, 98, 97])[0]).num_tokens == 8


def test_a_copy_into_block_0_survives_the_preemption_of_a_request_that_has_let_blocks_go() -> None:
    """Tables hold 0 where a window has gone by."""
    manager = make_manager(4, num_blocks=4, enable_prefix_caching=False)
    gone, victim = run(manager, "gone", range(3)), run(manager, "victim", FIRST)
    source = run(manager, "source", range(6))
    assert (table(manager, gone), table(manager, victim), table(manager, source)) == ([0], [0, 0, 3], [1, 2])
    manager.free(gone)
    fork = find(manager, "fork", range(6))[0]
    manager.fork(source, fork)
    fork.num_computed_tokens = 6
    assert manager.allocate(fork, 1)
    assert table(manager, fork) == [1, 0]
    manager.release(victim)
    manager.check_invariants()
    assert manager.take_plan().copies == ((2, 0),)


def test_who_went_that_way_last_is_copied_from() -> None:
    manager = make_manager(num_blocks=16)
    for number, tail in enumerate(([5, 6, 7, 7], [5, 8, 8, 8])):
        manager.free(run(manager, f"{number}", [0, 1, 2, 3, *tail]))
    found = [find(manager, f"{tail}", [0, 1, 2, 3, *tail])[1].num_copied for tail in ([5, 8, 8, 1], [5, 6, 7, 1], [6, 8, 8, 1])]
    assert found == [3, 1, 0]
    # Nobody has a first block that begins so.
    assert find(manager, "new", [1, 2, 3])[1].num_tokens == 0


@pytest.mark.parametrize("others", [MAX_PROMPTS - 1, MAX_PROMPTS])
def test_so_many_sequences_are_remembered(others: int) -> None:
    """The blocks of the others are found as wholes."""
    manager = make_manager(num_blocks=400)
    manager.free(run(manager, "first", FIRST))
    for number in range(others):
        manager.free(run(manager, f"{number}", [100 + number] * 5))
        manager.free(find(manager, f"never ran {number}", [7])[0])
    match = find(manager, "second", [*range(6), 99])[1]
    assert (match.num_tokens, match.num_copied) == ((6, 2) if others < MAX_PROMPTS else (4, 0))
    manager.check_invariants()


@pytest.mark.parametrize("prompt", [FIRST, range(11), range(10), range(9)])
def test_the_last_token_is_always_computed(prompt: range) -> None:
    manager = make_manager()
    manager.free(run(manager, "first", FIRST))
    request, match = find(manager, "again", prompt)
    assert match.num_tokens == len(prompt) - 1
    assert manager.explain_miss(request, match) == PrefixMiss("last_token", len(prompt) - 1)


def test_salts_scores_and_formats_that_encode_whole_blocks_copy_nothing() -> None:
    manager = make_manager()
    manager.free(run(manager, "first", FIRST))
    assert find(manager, "salted", [0, 1, 9], salt="x")[1].num_tokens == 0
    scored = make_request("scored", [0, 1, 9], prompt_logprobs=0)
    manager.add(scored)
    assert manager.match(scored).num_tokens == 0
    whole = KVManager(make_spec(block_size=4)._replace(kv_format="by_block"), 8, watermark=0.0)
    whole.free(run(whole, "first", FIRST))
    request, match = find(whole, "again", FIRST)
    assert (match.num_tokens, match.copied_from) == (8, ())
    assert whole.explain_miss(request, match) == PrefixMiss("partial_block", 8)


def test_what_is_copied_cannot_be_evicted_before() -> None:
    manager = make_manager(num_blocks=4)
    manager.free(run(manager, "first", FIRST))
    request, match = find(manager, "second", [*range(10), 99])
    # Two whole blocks, the one to copy, and the copy.
    assert match.copied_from == (2,)
    assert manager.has_room(request, match, alone=True)
    start(manager, request, match)
    assert manager.allocate(request, 1)
    assert table(manager, request) == [0, 1, 3]
    other, _ = find(manager, "other", [50])
    manager.attach(other, manager.no_match())
    assert not manager.allocate(other, 1), "the source stays until it has been copied"
    assert manager.take_plan().copies == ((2, 3),)
    assert not manager.allocate(other, 1)
    manager.complete_plan()
    assert manager.allocate(other, 1)
    assert table(manager, other) == [2]


def test_without_room_for_the_source_the_tokens_are_computed() -> None:
    sim = Sim(num_blocks=4, block_size=4)
    sim.generate("first", FIRST, 1)
    other = sim.add("other", [50], 9)
    sim.step()
    # The pool has three blocks for who needs three: none for the source besides.
    request = sim.add("second", [*range(10), 99], 1)
    output = sim.step()
    assert sim.rows(output) == {"other": (1, 1), "second": (8, 3)}
    assert (request.num_cached_tokens, output.memory.copies) == (8, ())
    sim.run()
    assert not other.num_preemptions


def test_who_gives_way_in_the_same_step_takes_its_plan_back() -> None:
    manager = make_manager()
    manager.free(run(manager, "first", FIRST))
    request, match = find(manager, "second", [*range(6), 99])
    start(manager, request, match)
    assert manager.allocate(request, 1)
    assert manager.release(request) == 3, "two blocks of its own and the source"
    assert manager.take_plan() == NO_PLAN
    manager.check_invariants()
    assert manager.num_free_blocks == 8


def test_every_group_copies() -> None:
    manager = make_manager(None, 4, num_blocks=20)
    first = run(manager, "first", FIRST)
    assert (table(manager, first), table(manager, first, 1)) == ([0, 2, 4], [0, 0, 5])
    request, match = find(manager, "second", [*range(10), 99])
    assert (match.num_tokens, match.copied_from) == (10, (4, 5))
    start(manager, request, match)
    assert manager.allocate(request, 1)
    assert manager.take_plan().copies == ((4, 6), (5, 7))
    finish(manager, request)


def test_the_last_block_of_one_that_is_no_longer_remembered_is_let_go() -> None:
    manager = make_manager(num_blocks=2 * MAX_PROMPTS)
    manager.free(run(manager, "first", range(3)))
    for number in range(MAX_PROMPTS - 1):
        manager.free(run(manager, f"other{number}", [100 + number] * 5))
    assert manager.usage().cached == MAX_PROMPTS
    manager.free(run(manager, "last", [99] * 5))
    assert manager.usage().cached == MAX_PROMPTS, "one more, and one less"
    assert manager.match(find(manager, "again", range(4))[0]).num_tokens == 0
    assert [event.reason for event in manager.keeper.events.since(0, 1000) if event.kind == "removed"] == ["superseded"]


def test_half_a_block_is_waited_for_and_less_is_not() -> None:
    """What is less is computed sooner than waited for."""
    sim = Sim(num_blocks=64)
    sim.add("a", range(32), 2)
    sim.add("b", [*range(24), 99], 2)
    sim.add("c", [*range(23), 98], 2)
    assert sim.rows(sim.step()) == {"a": (0, 32)}
    output = sim.step()
    assert sim.rows(output) == {"a": (32, 1), "b": (24, 1), "c": (23, 1)}
    assert output.memory.copies == ((1, 3), (1, 4))
    sim.add("d", [*range(50, 57), *range(16)], 2)
    sim.add("e", [*range(50, 57), *range(20, 36)], 2)
    assert list(sim.rows(sim.step())) == ["b", "c", "d", "e"]


def test_what_is_half_computed_is_not_copied() -> None:
    sim = Sim(num_blocks=64, max_num_batched_tokens=30)
    sim.add("a", range(32), 2)
    assert sim.rows(sim.step()) == {"a": (0, 30)}
    sim.add("b", [*range(29), 99], 2)
    assert sim.rows(sim.step()) == {"a": (30, 2)}
    assert sim.rows(sim.step()) == {"a": (32, 1), "b": (29, 1)}
    assert sim.requests["b"].num_cached_tokens == 29


def tails(manager: KVManager) -> dict[int, int]:
    index = manager.index
    return {block_id: index.num_tokens(block_id) for block_id in index.tails_among(list(range(manager.num_blocks)))}


def removed(manager: KVManager) -> list[tuple[str, int]]:
    events = manager.keeper.events.since(0, 100)
    return [(event.reason, len(event.block_hashes)) for event in events if event.kind == "removed"]


def test_who_went_on_behind_the_second_block_of_a_content_is_copied_from() -> None:
    """Two compute one block at once; the later one's has no name, and it is the one that goes on."""
    manager = make_manager()
    (first, hit), (second, other) = find(manager, "first", range(4)), find(manager, "second", range(9))
    start(manager, first, hit)
    start(manager, second, other)
    assert manager.allocate(first, 4)
    assert manager.allocate(second, 4)
    for request in (first, second):
        request.num_computed_tokens = 4
        manager.commit(request)
    assert manager.allocate(second, 4)
    second.num_computed_tokens = 8
    manager.commit(second)
    _, match = find(manager, "third", [*range(6), 99])
    assert (match.num_tokens, match.num_copied, match.copied_from) == (6, 2, (table(manager, second)[1],))
    assert list(match.block_ids[0]) == table(manager, first)


def test_the_last_block_of_who_ended_is_copied_until_a_whole_one_begins_with_it() -> None:
    manager = make_manager()
    manager.free(run(manager, "turn", [*range(10), 11]))
    assert tails(manager) == {2: 3}
    request, match = find(manager, "next", [*range(10), 11, 50, 51])
    assert (match.num_tokens, match.num_copied, match.copied_from) == (11, 3, (2,))
    start(manager, request, match)
    assert manager.allocate(request, 2)
    manager.take_plan()
    finish(manager, request)
    assert (tails(manager), removed(manager)) == ({}, [("superseded", 1)])
    manager.free(request)
    assert manager.num_free_blocks == 8


def test_less_than_half_a_block_is_not_kept() -> None:
    manager = make_manager()
    manager.free(run(manager, "turn", range(9)))
    assert tails(manager) == {}
    assert find(manager, "again", [*range(9), 50])[1].num_tokens == 8


def test_of_two_that_ended_in_one_place_the_later_is_found_and_whole_blocks_besides() -> None:
    manager = make_manager()
    manager.free(run(manager, "whole", [*range(4), 7, 8, 9, 10]))
    manager.free(run(manager, "one", [*range(4), 7, 8, 20]))
    manager.free(run(manager, "other", [*range(4), 30, 31]))
    assert (len(tails(manager)), removed(manager)) == (1, [("superseded", 1)])
    assert find(manager, "a", [*range(4), 30, 31, 50])[1].num_tokens == 6
    assert find(manager, "b", [*range(4), 7, 8, 9, 50])[1].num_tokens == 7
    assert find(manager, "c", [*range(4), 7, 8, 20, 50])[1].num_tokens == 6, "as far as the whole block begins so"
    manager.check_invariants()


def test_what_was_not_computed_in_the_last_step_is_not_kept() -> None:
    sim = Sim(num_blocks=8, block_size=4, max_num_batched_tokens=7)
    sim.add("one", range(20), 2)
    sim.step()
    sim.step(between=lambda: sim.scheduler.abort("one"))
    assert tails(sim.manager) == {}
    sim.add("two", range(50, 70), 2)
    sim.step()
    assert sim.scheduler.abort("two")
    assert list(tails(sim.manager).values()) == [3]


def names_without_a_parent(manager: KVManager, prompt: list[int]) -> list[int]:
    """Blocks that are here and stand behind one that is not."""
    block_ids = manager.index.every(0, manager.hashes_of(prompt, "")[1])
    first = block_ids.index(None) if None in block_ids else len(block_ids)
    return [block_id for block_id in block_ids[first:] if block_id is not None]


@pytest.mark.parametrize("policy", ["lru", "density"])
def test_who_computes_a_block_again_and_goes_on_behind_it_keeps_it(policy: str) -> None:
    """All of the first prompt but its last token is found, so the second computes the rest of that block once more."""
    manager = make_manager(eviction_policy=policy)
    manager.free(run(manager, "first", range(12)))
    prompt = [*range(8), *range(50, 58)]
    request, match = find(manager, "second", range(8))
    assert (match.num_tokens, match.copied_from) == (7, (1,))
    start(manager, request, match)
    assert manager.allocate(request, 1)
    assert manager.take_plan().copies == ((1, 3),)
    finish(manager, request)
    assert manager.index.every(0, manager.hashes_of(prompt, "")[1]) == [0, 3, None, None]
    request.output_token_ids += prompt[8:]
    assert manager.allocate(request, 8)
    finish(manager, request)
    assert manager.usage() == KVUsage(total=8, live=4, cached=1, free=3, evictions=0), "the first block of that content is let go"
    manager.free(request)
    for number in range(8):
        run(manager, f"{number}", [100 * number + 70])
        assert names_without_a_parent(manager, prompt) == []
    assert manager.usage() == KVUsage(total=8, live=8, cached=0, free=0, evictions=5)


@pytest.mark.parametrize("policy", ["lru", "density"])
@pytest.mark.parametrize("evicted", [False, True])
def test_the_second_block_of_a_content_is_found_once_nobody_holds_the_first(policy: str, evicted: bool) -> None:
    manager = make_manager(eviction_policy=policy)
    (first, hit), (second, other) = find(manager, "first", range(4)), find(manager, "second", range(4))
    for request, match in ((first, hit), (second, other)):
        start(manager, request, match)
        assert manager.allocate(request, 4)
    for request in (first, second):
        finish(manager, request)
    second.output_token_ids += range(50, 58)
    assert manager.allocate(second, 8)
    finish(manager, second)
    hashes = manager.hashes_of([*range(4), *range(50, 58)], "")[1]
    assert manager.index.every(0, hashes) == [0, 2, 3]
    manager.free(first)
    if evicted:
        run(manager, "big", range(80, 100))
        assert manager.index.every(0, hashes) == [None, 2, 3]
    manager.free(second)
    assert manager.index.every(0, hashes) == [1, 2, 3]
    manager.check_invariants()
    stored = [list(event.block_hashes) for event in manager.keeper.events.since(0, 99) if event.kind == "stored"]
    assert stored.count([hashes[0]]) == 1 + evicted


@pytest.mark.parametrize("hint", [KVHints(pin=True), KVHints(priority=80)])
def test_the_first_block_of_a_content_stays_the_one_found_if_it_is_claimed(hint: KVHints) -> None:
    manager = make_manager()
    asker = make_request("first", range(8), kv=hint)
    manager.add(asker)
    start(manager, asker, manager.match(asker))
    assert manager.allocate(asker, 8)
    finish(manager, asker)
    manager.free(asker)
    request = run(manager, "second", range(8))
    assert table(manager, request) == [0, 2]
    manager.free(request)
    assert manager.index.every(0, manager.hashes_of(list(range(8)), "")[1]) == [0, 1]
    manager.check_invariants()
