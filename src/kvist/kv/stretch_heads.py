"""The stretches of one KV group by the names of their first blocks, their heads, in some ten bytes a stretch.

A pool of prompts that share nothing has as many stretches as prompts. A dictionary would keep name, hash and stretch of each, and
leave up to five places empty for one in use where entries come and go: 30 to 120 bytes. Here a place leads to a chain of stretches,
which know their heads themselves: one on average where the table has grown. It grows by a place with each stretch, to which those
of one other place are moved that belong there now (linear hashing: Litwin, VLDB 1980), so nobody waits while a million are moved.
It does not shrink.

Stretches that begin where none would without a fork or a hole are in a dictionary all the same: many names at once are looked for
there. Invariants: no two have one head; each stands in the chain of its head's place.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvist.kv.block import BlockHash
from kvist.kv.stretch import Stretch


class Heads:
    """A stretch begins at each multiple of `every` blocks of a prefix."""

    def __init__(self, every: int) -> None:
        self.inside: dict[BlockHash, Stretch] = {}
        """Those that begin between two of these multiples."""
        self._every = every
        self._first: list[Stretch | None] = [None]
        """Of each place, of all others and of blocks that nothing follows, whatever their number: asked for as number 0."""
        self._mask = 0
        """2**k - 1, with the least k for which it is not below the last place."""
        self._count = 0

    def __iter__(self) -> Iterator[Stretch]:
        for stretch in self._first:
            while stretch is not None:
                yield stretch
                stretch = stretch.next
        yield from self.inside.values()

    @property
    def num_places(self) -> int:
        return len(self._first)

    def _place(self, head: BlockHash) -> int:
        place = hash(head) & self._mask
        return place if place < len(self._first) else place & self._mask >> 1

    def get(self, block: int, head: BlockHash) -> Stretch | None:
        """That which begins with this block, of this number."""
        if block % self._every:
            return self.inside.get(head)
        first, place = self._first, hash(head) & self._mask
        if place >= len(first):
            place &= self._mask >> 1
        stretch = first[place]
        while stretch is not None and not stretch.data.startswith(head):
            stretch = stretch.next
        return stretch

    def add(self, block: int, head: BlockHash, stretch: Stretch) -> None:
        """There is none with this head yet."""
        if block % self._every:
            self.inside[head] = stretch
            return
        first, place = self._first, hash(head) & self._mask
        if place >= len(first):
            place &= self._mask >> 1
        stretch.next, first[place] = first[place], stretch
        self._count += 1
        if self._count > len(first):
            self._grow()

    def _grow(self) -> None:
        new = len(self._first)
        self._first.append(None)
        if new > self._mask:
            self._mask = 2 * self._mask + 1
        old = new & self._mask >> 1
        stretch, self._first[old] = self._first[old], None
        while stretch is not None:
            behind, place = stretch.next, self._place(stretch.name(0))
            stretch.next, self._first[place] = self._first[place], stretch
            stretch = behind

    def remove(self, stretch: Stretch) -> None:
        """Of one that is here."""
        head = stretch.name(0)
        if self.inside and self.inside.pop(head, None) is not None:
            return
        place = self._place(head)
        other = self._first[place]
        if other is stretch:
            self._first[place] = stretch.next
        else:
            while other is not None and other.next is not stretch:
                other = other.next
            assert other is not None, "no such stretch is here"
            other.next = stretch.next
        stretch.next = None
        self._count -= 1

    def check_invariants(self) -> None:
        assert self._mask >> 1 < len(self._first) <= self._mask + 1
        assert all(stretch.name(0) == head and stretch.next is None for head, stretch in self.inside.items())
        heads = [stretch.name(0) for stretch in self]
        assert len(heads) == len(set(heads)) == self._count + len(self.inside)
        assert self._count <= len(self._first)
        for place, stretch in enumerate(self._first):
            while stretch is not None:
                assert self._place(stretch.name(0)) == place
                stretch = stretch.next
