"""The replay of a trace: what is found is exact, and the clairvoyant rule bounds every policy."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from kvist.bench import eviction
from kvist.bench.eviction import CLAIRVOYANT, TracedPrompt, compare, conversations, distinct_blocks, index_hits, replay
from kvist.errors import UsageError
from kvist.kv.eviction import POLICIES

TRACE = conversations(150, seed=3)


def prompt(*blocks: int) -> TracedPrompt:
    return TracedPrompt(0.0, blocks)


def test_a_trace_is_counted_by_the_engines_rules() -> None:
    trace = [prompt(0, 1, 2), prompt(0, 1, 2), prompt(0, 1, 5, 6), prompt(0, 9, 2)]
    assert (index_hits(trace), distinct_blocks(trace)) == (3 + 2 + 1, 6)
    # The second prompt's last block is computed all the same.
    assert sum(replay(trace, 6, "lru")) == eviction.replay_clairvoyant(trace, 6) == 2 + 2 + 1


def test_with_room_for_all_every_policy_finds_everything() -> None:
    room = distinct_blocks(TRACE)
    expected = eviction.replay_clairvoyant(TRACE, room)
    assert expected > 300
    assert {name: sum(replay(TRACE, room, name)) for name in POLICIES} == dict.fromkeys(POLICIES, expected)


def test_no_policy_passes_the_clairvoyant_and_the_same_trace_gives_the_same_hits() -> None:
    shares = (0.02, 0.1, 0.3)
    rows = list(compare(TRACE, [*POLICIES, CLAIRVOYANT], shares))
    assert rows == list(compare(conversations(150, seed=3), [*POLICIES, CLAIRVOYANT], shares))
    best = {row.share: row.hits for row in rows if row.policy == CLAIRVOYANT}
    assert all(0 < row.hits <= best[row.share] for row in rows)
    assert all(a.hits <= b.hits for a, b in itertools.pairwise(rows) if a.policy == b.policy == CLAIRVOYANT)


def test_lru_reuses_tails_first() -> None:
    # Room for five: the third prompt takes the tails of the first one, 3 and then 2.
    trace = [prompt(0, 1, 2, 3), prompt(10), prompt(20, 21), prompt(0, 1, 2, 3)]
    assert sum(replay(trace, 5, "lru")) == 2


def test_prompts_beyond_the_pool_are_missed() -> None:
    assert replay([prompt(0, 1, 2), prompt(0, 1, 2), prompt(0, 5), prompt(0, 5)], 2, "density") == [0, 0, 0, 1]


def test_traces_are_read_and_damaged_ones_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"timestamp": 1500, "hash_ids": [4, 5]}) + "\n")
    assert eviction.read_trace(path) == [TracedPrompt(1.5, (4, 5))]
    for text in ("{}", "nonsense", '{"hash_ids": []}', '{"hash_ids": ["a"]}', "[]"):
        path.write_text(json.dumps({"hash_ids": [1]}) + "\n" + text + "\n")
        with pytest.raises(UsageError, match="line 2"):
            eviction.read_trace(path)
    with pytest.raises(UsageError, match="Cannot read"):
        eviction.read_trace(tmp_path / "none")
    path.write_text("")
    with pytest.raises(UsageError, match="no requests"):
        eviction.read_trace(path)
