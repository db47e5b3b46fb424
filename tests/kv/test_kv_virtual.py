"""One span of addresses a request, pages behind it as it grows, prefixes copied from live and kept spans."""

from __future__ import annotations

from helpers.deciders import PAGE, Sim
from kvist.kv.spans import Span
from kvist.kv.virtual import VirtualSpans

BLOCK = 64
"""Bytes: three blocks take two pages."""


def make_spans(num_blocks: int = 12, *, slots: int = 3, kept: int = 2, evicted: list[Span] | None = None) -> VirtualSpans:
    log = evicted if evicted is not None else []
    return VirtualSpans(num_blocks, 1, BLOCK, length=7, num_slots=slots, num_kept_slots=kept, page_bytes=PAGE, on_evict=log.append)


def opened(spans: VirtualSpans, length: int, blocks: int) -> Span:
    span = spans.open(length)
    assert span is not None
    spans.grow(span, blocks)
    return span


def test_runs_begin_on_a_page_and_ids_are_consecutive() -> None:
    spans = make_spans()
    assert spans.num_ids == 9 * 5, "seven blocks, rounded up to whole pages"
    first, second = opened(spans, 7, 1), opened(spans, 7, 1)
    assert (first.starts, second.starts) == ((0,), (9,))
    assert all(start * BLOCK % PAGE == 0 for start in (0, 9, 18, 27, 36))
    spans.check_invariants()


def test_pages_are_committed_with_growth_and_given_back_at_the_end() -> None:
    spans = make_spans(kept=0)
    span = opened(spans, 7, 1)
    assert (spans.committed_bytes, spans.reserved_bytes) == (PAGE, 9 * BLOCK)
    spans.grow(span, 2)
    assert spans.committed_bytes == 2 * PAGE, "three blocks, two pages"
    spans.grow(span, 1)
    assert spans.committed_bytes == 3 * PAGE
    assert spans.take_releases() == []
    spans.close(span, 0, 0)
    assert (spans.committed_bytes, spans.num_free) == (0, 12)
    assert spans.take_releases() == [(0, 3 * PAGE)]
    assert spans.take_releases() == [], "each range is given out once"


def test_a_window_gives_back_the_pages_that_nothing_after_it_touches() -> None:
    spans = make_spans()
    span = opened(spans, 7, 6)
    spans.trim(span, 0, 1)
    assert spans.take_releases() == [], "the second block begins on the first page"
    spans.trim(span, 0, 4)
    assert spans.take_releases() == [(0, 2 * PAGE)]
    assert spans.committed_bytes == 2 * PAGE
    spans.check_invariants()


def test_a_span_that_has_let_all_go_has_no_room_in_the_page_that_it_ended_in() -> None:
    spans = make_spans()
    span = opened(spans, 7, 5)
    spans.trim(span, 0, 5)
    others = [opened(spans, 7, 7), opened(spans, 7, 4)]
    assert spans.committed_bytes == 8 * PAGE, "all there is"
    assert spans.room(span) == 0
    spans.close(others.pop(), 0, 0)
    spans.grow(span, spans.room(span))
    assert span.end == 7
    spans.check_invariants()


def test_the_budget_is_physical_memory() -> None:
    spans = make_spans(num_blocks=6)
    a = opened(spans, 7, 4)
    assert spans.num_free == 1, "three of four pages are in use"
    b = spans.open(7)
    assert b is not None
    assert (spans.room(a), spans.room(b)) == (2, 1)
    assert not spans.can_open(7, 2, ())
    assert spans.can_open(7, 1, ())


def test_kept_spans_go_when_others_need_their_pages_longest_unused_first() -> None:
    evicted: list[Span] = []
    spans = make_spans(num_blocks=9, evicted=evicted)
    a, b = opened(spans, 7, 3), opened(spans, 7, 3)
    spans.close(a, 0, 3)
    spans.close(b, 0, 3)
    assert (spans.num_free, spans.num_kept) == (9, 6)
    spans.touch(a.starts[0])
    c = opened(spans, 7, 5)
    assert evicted == [b]
    assert spans.take_releases() == [(b.starts[0] * BLOCK, b.starts[0] * BLOCK + 2 * PAGE)]
    spans.grow(c, 2)
    assert evicted == [b, a]
    spans.check_invariants()


def test_a_use_makes_a_kept_span_younger_after_its_copy_too() -> None:
    evicted: list[Span] = []
    spans = make_spans(num_blocks=9, evicted=evicted)
    a, b = opened(spans, 7, 3), opened(spans, 7, 3)
    spans.close(a, 0, 3)
    spans.close(b, 0, 3)
    spans.touch(a.starts[0])
    spans.take_releases()
    opened(spans, 7, 5)
    assert evicted == [b]


def test_what_is_being_copied_from_is_not_evicted() -> None:
    spans = make_spans(num_blocks=9)
    a = opened(spans, 7, 3)
    spans.close(a, 0, 3)
    spans.touch(a.starts[0])
    b = spans.open(7)
    assert b is not None
    assert spans.room(b) == 6, "two pages of six are pinned"
    assert not spans.can_open(7, 7, ())
    spans.take_releases()
    assert spans.room(b) == 7


def test_only_the_blocks_worth_keeping_are_kept() -> None:
    spans = make_spans()
    span = opened(spans, 7, 7)
    spans.close(span, 2, 5)
    assert spans.num_kept == 3
    assert spans.take_releases() == [(0, PAGE), (4 * PAGE, 5 * PAGE)]
    spans.check_invariants()


def test_a_prefix_is_copied_out_of_a_live_and_out_of_a_kept_span() -> None:
    sim = Sim(num_blocks=40, block_size=4, max_model_len=48, max_num_seqs=4, allocator="virtual")
    first = sim.add("first", range(20), 8)
    sim.step()
    second = sim.add("second", [*range(17), 99], 4)
    output = sim.step()
    assert second.num_cached_tokens == 17
    theirs, ours = sim.manager.block_tables(first)[0], sim.manager.block_tables(second)[0]
    assert output.memory.copies == tuple(zip([theirs[4], *theirs[:4]], [ours[4], *ours[:4]], strict=True))
    assert not set(theirs) & set(ours), "nothing is shared in place"
    sim.run()
    assert sim.manager.account(()).held == 0
    third = sim.add("third", [*range(12), 7], 4)
    sim.run()
    assert third.num_cached_tokens == 12
    assert sim.manager.num_free_blocks == 40


def test_the_last_block_of_who_ended_is_copied_too() -> None:
    sim = Sim(num_blocks=40, block_size=4, max_model_len=64, max_num_seqs=2, allocator="virtual")
    first = sim.generate("first", range(20), 4)
    following = [*range(20), *first.output_token_ids, 7]
    second = sim.generate("second", following, 4)
    assert second.num_cached_tokens == 23
    assert second.output_token_ids == Sim(num_blocks=40, block_size=4).generate("alone", following, 4).output_token_ids


def test_a_prefix_that_leaves_no_room_for_its_copy_is_computed() -> None:
    """The kept span takes six pages of eight; the request needs six, and could get them only where it copies from."""
    sim = Sim(num_blocks=6, block_size=16, max_model_len=96, max_num_seqs=2, allocator="virtual")
    sim.generate("first", range(54), 2)
    assert sim.manager.usage().cached == 3
    request = sim.generate("second", [*range(48), *range(100, 120)], 2)
    assert request.num_cached_tokens == 0
    assert len(request.output_token_ids) == 2


def test_the_largest_request_fits_though_each_run_ends_within_a_page() -> None:
    """Three runs of eight blocks end within a page each, and take two pages more than their bytes."""
    sim = Sim(None, 5, 13, num_blocks=24, block_size=8, max_model_len=160, max_num_seqs=2, allocator="virtual")
    request = sim.generate("large", range(61), 3)
    assert len(request.output_token_ids) == 3


def test_a_span_whose_later_blocks_another_has_named_is_kept_as_far_as_its_own_names_go() -> None:
    """The second request's prompt is the first one's answer, so it overtakes it, and the first one's window lies past its names."""
    answer = Sim(None, 5, num_blocks=200, block_size=4).generate("alone", range(9), 40).output_token_ids
    sim = Sim(None, 5, num_blocks=200, block_size=4, max_num_seqs=2, max_model_len=96, allocator="virtual")
    first = sim.add("first", range(9), 40)
    sim.step()
    sim.add("second", [*range(9), *answer, 99], 1)
    for _ in range(3):
        sim.step()
        sim.scheduler.check_invariants()
    sim.run()
    assert first.output_token_ids == answer
    assert sim.manager.usage().cached > 0
