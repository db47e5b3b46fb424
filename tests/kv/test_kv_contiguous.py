"""Spans reserved whole: first fit, holes that merge, and requests that find bytes enough and no hole long enough."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from helpers.deciders import Sim
from kvist.kv.contiguous import ContiguousSpans
from kvist.kv.spans import Span


def opened(spans: ContiguousSpans, length: int) -> Span:
    span = spans.open(length)
    assert span is not None
    return span


def test_first_fit_takes_the_lowest_hole_that_is_long_enough() -> None:
    spans = ContiguousSpans(20, 1, 100)
    a, b, c, d = (opened(spans, length) for length in (4, 2, 6, 3))
    assert [span.starts for span in (a, b, c, d)] == [(0,), (4,), (6,), (12,)]
    spans.close(b, 0, 0)
    spans.close(c, 0, 0)
    assert opened(spans, 8).starts == (4,), "two neighbours became one hole"
    assert opened(spans, 5).starts == (15,)
    assert spans.num_free == 0
    assert spans.open(1) is None
    spans.check_invariants()


def test_free_blocks_are_enough_and_no_hole_is() -> None:
    spans = ContiguousSpans(12, 1, 100)
    taken = [opened(spans, 3) for _ in range(4)]
    spans.close(taken[0], 0, 0)
    spans.close(taken[2], 0, 0)
    assert spans.num_free == 6
    assert not spans.can_open(4, 1, ())
    assert spans.open(4) is None
    assert spans.external_fragmentation == 0.5
    spans.close(taken[1], 0, 0)
    assert spans.external_fragmentation == 0.0
    assert opened(spans, 9).starts == (0,)


def test_every_group_has_a_run_of_its_own_or_none_has() -> None:
    spans = ContiguousSpans(10, 3, 100)
    span = opened(spans, 3)
    assert span.starts == (0, 3, 6)
    assert spans.open(1) is None
    assert spans.num_free == 1
    spans.check_invariants()


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 7)), max_size=60), st.integers(1, 3))
def test_spans_never_overlap_and_all_memory_comes_back(moves: list[tuple[bool, int]], groups: int) -> None:
    spans = ContiguousSpans(30, groups, 8)
    live: list[Span] = []
    for opens, number in moves:
        if opens:
            expected = spans.can_open(number, number, ())
            span = spans.open(number)
            assert (span is not None) is expected
            if span is not None:
                live.append(span)
        elif live:
            spans.close(live.pop(number % len(live)), 0, 0)
        spans.check_invariants()
        assert spans.num_free == 30 - sum(span.length * groups for span in live)
    for span in live:
        spans.close(span, 0, 0)
    assert spans.num_free == 30
    assert spans.external_fragmentation == 0.0


def test_a_request_reserves_its_longest_length_and_waits_for_a_hole() -> None:
    """4 blocks of 4 tokens each are reserved from the start; what is not used is internal fragmentation."""
    sim = Sim(num_blocks=12, block_size=4, max_model_len=48, allocator="contiguous")
    short = [sim.add(name, range(4), 12) for name in ("a", "b", "c")]
    sim.step()
    assert [list(sim.manager.block_tables(request)[0]) for request in short] == [[0], [4], [8]]
    assert sim.manager.num_free_blocks == 0
    account = sim.manager.account(sim.scheduler.running)
    block = sim.spec.block_bytes
    assert (account.reserved, account.held, account.committed) == (12 * block, 12 * block, 9 * block)
    assert account.used == 3 * block
    assert account.internal_fragmentation == 0.75
    sim.end("a")
    sim.end("c")
    long = sim.add("long", range(4), 16)
    sim.step()
    assert sim.manager.num_free_blocks == 8
    assert sim.manager.account(sim.scheduler.running).external_fragmentation == 0.5
    assert long in sim.scheduler.waiting, "eight blocks are free, five are asked for, and no hole has five"
    sim.run()
    assert len(long.output_token_ids) == 16
    assert sim.scheduler.stats().num_preemptions == 0, "what is reserved need never be taken back"
