"""The record of events is bounded, and what a prompt has in common with known ones is exact."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from kvist.kv.block import BlockHash, prompt_hashes, root_hash
from kvist.kv.history import MAX_EVENTS, EventLog, Seen, nearest, rewritten

ROOT = root_hash(b"", "bf16", 4, "")
NAME = BlockHash(bytes(32))


def seen(prompt: list[int], output: list[int]) -> Seen:
    tokens = prompt + output
    return Seen(ROOT, prompt_hashes(ROOT, tokens, 4), array("I", tokens), (), num_prompt_tokens=len(prompt), time=1.0)


def test_events_are_bounded_by_count_and_by_blocks() -> None:
    log = EventLog(1000)
    for _ in range(MAX_EVENTS + 50):
        log.add(0.0, "stored", "", (ROOT,), ())
    assert log.next_number == 0, "nothing stored is no event"
    for _ in range(300):
        log.add(0.0, "stored", "", (ROOT,), [NAME] * 10)
    kept = log.since(0, 10_000)
    assert [event.number for event in kept] == list(range(200, 300))
    assert [event.number for event in log.since(295, 2)] == [295, 296]


def test_events_are_told_with_their_own_blocks_and_owners() -> None:
    log, other = EventLog(1000), BlockHash(bytes([1] * 32))
    log.add_of(1.0, "stored", "", ROOT, [NAME])
    log.add_packed(2.0, "removed", "evicted", ROOT, NAME + other)
    log.add(3.0, "retained", "", (ROOT, other), [NAME, other])
    log.add_packed(4.0, "removed", "evicted", other, other)
    log.add_of(5.0, "stored", "", other, [NAME, other])
    told = [(event.kind, event.owners, list(event.block_hashes)) for event in log.since(0, 10)]
    assert told == [
        ("stored", (ROOT,), [NAME]),
        ("removed", (ROOT,), [NAME, other]),
        ("retained", (ROOT, other), [NAME, other]),
        ("removed", (other,), [other]),
        ("stored", (other,), [NAME, other]),
    ]


def test_the_nearest_is_found_to_the_token() -> None:
    prompts = [seen([number] * 6, [1, 2, 3]) for number in range(70)]
    asked = [50] * 6 + [1, 2, 9, 9, 9, 9]
    found = nearest(prompts, ROOT, asked, prompt_hashes(ROOT, asked, 4), 4)
    assert found == (prompts[50], 8)
    assert nearest(prompts, NAME, asked, prompt_hashes(NAME, asked, 4), 4) is None
    assert nearest(prompts[:50], ROOT, asked, prompt_hashes(ROOT, asked, 4), 4) is None
    other = [50] * 5 + [8] * 7
    assert rewritten(prompts, ROOT, other, prompt_hashes(ROOT, other, 4), 4, slack=0) is None
    brought = [replace(one, num_prompt_tokens=None) for one in prompts]
    assert nearest(brought, ROOT, asked, prompt_hashes(ROOT, asked, 4), 4) is None, "no request"
    assert rewritten(brought, ROOT, asked, prompt_hashes(ROOT, asked, 4), 4, slack=0) is None


def test_of_those_that_share_as_much_the_latest_is_the_nearest() -> None:
    prompts = [seen([7] * 6, [1, 2, number]) for number in range(3)]
    asked = [7] * 6 + [1, 2, 9]
    found = nearest(prompts, ROOT, asked, prompt_hashes(ROOT, asked, 4), 4)
    assert found is not None
    assert found[0] is prompts[2]
    assert found[1] == 8


@pytest.mark.parametrize(
    ("behind", "place"),
    [
        # A thought is left out, and what was said after it follows.
        ([5, 6, 7, 8, 9, 30, 31], 20),
        # It is cut, and goes on with something else.
        ([1, 2, 3, 4, 30, 31], 24),
        ([1, 2, 3, 30, 31], None),
        # Said, but by somebody else, and later.
        ([30] * 60 + [5, 6, 7, 8], 20),
        ([30] * 61 + [5, 6, 7, 8], None),
        ([30, 31, 32, 33], None),
        ([], None),
    ],
)
def test_a_history_is_rewritten_where_a_part_of_its_answer_stands(behind: list[int], place: int | None) -> None:
    asked = [7] * 20 + behind
    known = [seen([7] * 20, [1, 2, 3, 4, 5, 6, 7, 8, 9])]
    assert rewritten(known, ROOT, asked, prompt_hashes(ROOT, asked, 4), 4, slack=0) == place


def test_a_history_may_be_rewritten_from_the_last_words_of_its_prompt_on() -> None:
    """These are the template's, perhaps; what is before them is another question."""
    asked = [7] * 5 + [1, 2, 3]
    hashes = prompt_hashes(ROOT, asked, 4)
    assert rewritten([seen([7] * 6, [1, 2, 3])], ROOT, asked, hashes, 4, slack=1) == 5
    assert rewritten([seen([7] * 7, [1, 2, 3])], ROOT, asked, hashes, 4, slack=1) is None
    assert rewritten([seen([7] * 6, [1, 2, 4])], ROOT, asked, hashes, 4, slack=1) is None, "a new question"
