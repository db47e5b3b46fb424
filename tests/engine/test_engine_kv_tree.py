"""The radix view against one that is worked out block by block, from listings whose parts overlap and have holes."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.engine import kv_tree
from kvist.engine.kv_tree import Prefixes
from kvist.errors import InvalidRequestError
from kvist.kv.block import HASH_BYTES, BlockHash
from kvist.kv.stretch import ID_BYTES
from kvist.kv.walks import Listing, Part

SIZE, NOW = 16, 100.0
Path = tuple[int, ...]


def name(path: Path) -> BlockHash:
    return BlockHash(bytes([len(path), *path]).ljust(HASH_BYTES, b"\0"))


ROOT = name(())


def part(*runs: tuple[Path, Path], notes: dict[Path, tuple[int, float]] | None = None, **exceptions: Any) -> Part:
    """Of stretches: the path before each, and how it goes on."""
    paths = [[before + after[: count + 1] for count in range(len(after))] for before, after in runs]
    notes = notes or {}
    last = [notes.get(each[-1], (0, -inf)) for each in paths]
    noted = [tuple((place, *notes[path]) for place, path in enumerate(each[:-1]) if path in notes) for each in paths]
    data = [b"".join(map(name, each)) + bytes(ID_BYTES * len(each)) for each in paths]
    tails = {name(path): count for path, count in exceptions.get("tails", {}).items()}
    holders = {name(path): count for path, count in exceptions.get("holders", {}).items()}
    parents, pinned = [name(before) for before, _ in runs], set(map(name, exceptions.get("pinned", ())))
    return Part(parents, data, [finds for finds, _ in last], [at for _, at in last], noted, tails, holders, pinned)


def tree(parts: list[Part], parent: Path | None = None, limit: int = 100) -> dict[str, Any]:
    return Prefixes(Listing(list(parts), {ROOT}), SIZE, NOW).tree(None if parent is None else name(parent).hex(), limit)


def test_a_fork_in_the_middle_of_a_stretch_ends_a_run() -> None:
    parts = [
        part(((), (0, 0, 0, 0)), ((0, 0), (1,)), notes={(0, 0, 0): (2, 90.0), (0, 0, 1): (1, 95.0)}, tails={(0, 0, 1): 9}),
        part(((), (1,)), ((9,), (9, 9)), pinned=[(1,)]),
    ]
    told = tree(parts)
    assert (told["total"], told["unreachable_blocks"]) == (2, 2)
    assert told["prefixes"] == [
        {
            "first": name((0,)).hex(), "last": name((0, 0)).hex(), "blocks": 2, "tokens": 32, "children": 2, "blocks_below": 3,
            "hits": 3, "used_ago": 5.0, "holders": 0, "pinned": False,
        },
        {
            "first": name((1,)).hex(), "last": name((1,)).hex(), "blocks": 1, "tokens": 16, "children": 0, "blocks_below": 0,
            "hits": 0, "used_ago": None, "holders": 0, "pinned": True,
        },
    ]  # fmt: skip
    below = tree(parts, (0, 0))
    assert [(node["blocks"], node["tokens"], node["hits"], node["used_ago"]) for node in below["prefixes"]] == [
        (2, 32, 2, 10.0),
        (1, 9, 1, 5.0),
    ]
    assert below["unreachable_blocks"] is None
    assert [node["first"] for node in tree(parts, limit=1)["prefixes"]] == [name((0,)).hex()]
    assert tree(parts, (7,)) == {"prefixes": [], "total": 0, "unreachable_blocks": None}
    assert tree([]) == {"prefixes": [], "total": 0, "unreachable_blocks": 0}


def test_of_a_name_that_stands_twice_the_latest_counts() -> None:
    """The stretch was cut in two after it was told, and its blocks were used and let go meanwhile."""
    before = part(((), (0, 0, 0)), notes={(0, 0, 0): (5, 1.0), (0,): (1, 1.0)}, holders={(0,): 2, (0, 0): 2})
    after = part(((0,), (0, 0)), notes={(0, 0): (7, 60.0)}, holders={(0, 0): 1}, pinned=[(0, 0, 0)])
    (node,) = tree([before, after])["prefixes"]
    assert (node["blocks"], node["hits"], node["holders"], node["used_ago"], node["pinned"]) == (3, 8, 2, 0.0, True)


def test_what_is_noted_of_blocks_that_are_gone_is_the_last_ones() -> None:
    one = part(((), (0, 0)), notes={(0, 0): (2, 20.0)})._replace(notes=[((0, 1, 10.0), (5, 4, 50.0))])
    (node,) = tree([one])["prefixes"]
    assert (node["hits"], node["used_ago"]) == (7, 50.0)


def test_a_wrong_name_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="'xyz' is no block hash"):
        Prefixes(Listing([], set()), SIZE, NOW).tree("xyz", 1)


def naive(paths: set[Path], finds: dict[Path, tuple[int, float]], parent: Path | None) -> tuple[list[tuple[Any, ...]], int | None]:
    """(size, run, number of children, hits, last use) of each node, and how many blocks are not reached."""

    def children(path: Path) -> list[Path]:
        return sorted(other for other in paths if other[:-1] == path and len(other) == len(path) + 1)

    nodes, reached = [], 0
    for top in children(parent or ()):
        run = [top]
        while len(following := children(run[-1])) == 1:
            run.append(following[0])
        below = [other for child in following for other in paths if _connected(other, child, paths)]
        notes = [finds[path] for path in (*run, *below) if path in finds]
        last = max((used for _, used in notes), default=-inf)
        nodes.append((len(run) + len(below), run, len(following), sum(hits for hits, _ in notes), last))
        reached += len(run) + len(below)
    nodes.sort(key=lambda node: (-node[0], name(node[1][0])))
    return nodes, len(paths) - reached if parent is None else None


def _connected(path: Path, top: Path, paths: set[Path]) -> bool:
    return path[: len(top)] == top and all(path[:length] in paths for length in range(len(top), len(path)))


PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)


@settings(max_examples=200, deadline=None)
@given(
    runs=st.lists(st.tuples(PATHS, st.integers(0, 5)), max_size=12),
    finds=st.dictionaries(PATHS, st.tuples(st.integers(0, 5), st.sampled_from([10.0, 20.0, 30.0])), max_size=6),
    parent=st.one_of(st.none(), PATHS),
)
def test_the_tree_is_that_of_the_names(
    runs: list[tuple[Path, int]], finds: dict[Path, tuple[int, float]], parent: Path | None
) -> None:
    """Each run is a part of its own: it may begin anywhere, and repeat what others have."""
    parts = [part((path[:cut], path[cut:]), notes=finds) for path, cut in runs if cut < len(path)]
    paths = {path[:length] for path, cut in runs for length in range(cut + 1, len(path) + 1)}
    told = tree(parts, parent)
    nodes, unreachable = naive(paths, finds, parent)
    assert (told["total"], told["unreachable_blocks"]) == (len(nodes), unreachable)
    for node, (size, run, children, hits, last) in zip(told["prefixes"], nodes, strict=True):
        assert (node["first"], node["last"]) == (name(run[0]).hex(), name(run[-1]).hex())
        assert (node["blocks"], node["blocks_below"], node["children"], node["hits"]) == (len(run), size - len(run), children, hits)
        assert node["used_ago"] == (None if last == -inf else NOW - last)


def test_work_on_many_blocks_stops_for_others_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(kv_tree, "AT_ONCE", 4)
    monkeypatch.setattr(kv_tree, "sleep", pauses.append)
    assert tree([part(((), (number,))) for number in range(50)])["total"] == 50
    assert len(pauses) >= 30, "building, telling and letting go"
