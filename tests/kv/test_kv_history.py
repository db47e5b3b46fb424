"""The records of events and prompts are bounded, and what a prompt has in common with known ones is exact."""

from __future__ import annotations

from array import array

from kvist.kv.block import BlockHash, prompt_hashes, root_hash
from kvist.kv.history import MAX_EVENTS, MAX_PROMPTS, EventLog, SeenPrompt, SeenPrompts

ROOT = root_hash(b"", "bf16", 4, "")
NAME = BlockHash(bytes(32))


def seen(prompt: list[int], output: list[int], root: BlockHash = ROOT) -> SeenPrompt:
    return SeenPrompt(root, array("I", prompt + output), len(prompt), prompt_hashes(root, prompt + output, 4), 1.0)


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


def test_prompts_are_bounded_and_the_nearest_is_found_to_the_token() -> None:
    prompts = SeenPrompts(10_000)
    for number in range(MAX_PROMPTS + 10):
        prompts.add(seen([number] * 6, [1, 2, 3]))
    assert prompts.nearest(ROOT, [5] * 6, prompt_hashes(ROOT, [5] * 6, 4), 4) is None, "the first have been forgotten"
    asked = [50] * 6 + [1, 2, 9, 9, 9, 9]
    found = prompts.nearest(ROOT, asked, prompt_hashes(ROOT, asked, 4), 4)
    assert found is not None
    assert (found[0].tokens[0], found[1]) == (50, 8)
    assert prompts.nearest(NAME, asked, prompt_hashes(NAME, asked, 4), 4) is None
    assert prompts.rewritten(ROOT, asked, prompt_hashes(ROOT, asked, 4), 4, slack=0) == 8
    other = [50] * 5 + [8] * 7
    assert prompts.rewritten(ROOT, other, prompt_hashes(ROOT, other, 4), 4, slack=0) is None
    few = SeenPrompts(10)
    few.add(seen([1] * 8, []))
    few.add(seen([2] * 8, []))
    assert few.nearest(ROOT, [1] * 8, prompt_hashes(ROOT, [1] * 8, 4), 4) is None
