"""Stretches by their heads against a dictionary, and what the table takes."""

from __future__ import annotations

from hashlib import sha256

from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.kv.block import HASH_BYTES, BlockHash
from kvist.kv.stretch import Family, Stretch
from kvist.kv.stretch_heads import Heads

EVERY = 4
ORIGIN = Family(0, BlockHash(bytes(HASH_BYTES))).origin


def head(number: int) -> BlockHash:
    return BlockHash(sha256(number.to_bytes(4, "little")).digest())


def stretch(number: int) -> Stretch:
    return Stretch(ORIGIN, [head(number), head(number + 1)], [2 * number, 2 * number + 1])


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 39), st.booleans()), max_size=120))
def test_what_comes_and_goes_is_found_while_it_is_here(steps: list[tuple[int, bool]]) -> None:
    """A number stands for a head and for that of its block."""
    heads, here = Heads(EVERY), dict[int, Stretch]()
    for number, comes in steps:
        if not comes and number in here:
            heads.remove(here.pop(number))
        elif comes and number not in here:
            here[number] = stretch(number)
            heads.add(number, head(number), here[number])
        heads.check_invariants()
        assert set(heads) == set(here.values())
        for other in range(40):
            assert heads.get(other, head(other)) is here.get(other)
    assert heads.inside.keys() == {head(number) for number in here if number % EVERY}


def test_it_grows_with_each_and_does_not_when_as_many_come_as_go() -> None:
    heads, here = Heads(EVERY), [stretch(number) for number in range(3000)]
    for number, each in enumerate(here[:1000]):
        heads.add(0, head(number), each)
        assert heads.num_places == number + 1
    heads.check_invariants()
    for number, each in enumerate(here[1000:], 1000):
        heads.remove(here[number - 1000])
        heads.add(0, head(number), each)
    heads.check_invariants()
    assert heads.num_places == 1000
    assert [heads.get(0, head(number)) for number in (1999, 2000, 2999, 3000)] == [None, *here[2000::999], None]
