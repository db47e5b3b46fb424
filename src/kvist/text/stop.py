"""Stop strings in text that arrives in pieces.

It knows no tokens: it sees the text that the detokenizer shows, in whatever portions, and its results do not depend on them.

The rule. Of all places in the whole text where a stop string begins, the first counts; of those that begin there, the shortest. The
text is what stands before it (or up to its end, if it is to be included). Nothing is shown that may still turn out to be
part of a stop string: exactly the longest tail that is a proper beginning of one is held back. A stop string that is complete while
another, begun before it, is still open is decided when that one completes or fails; at the latest by `finish`.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Looks for stop strings in one growing output. `include` leaves the found one in the text."""

    def __init__(self, stop: Sequence[str], include: bool = False) -> None:
        assert all(stop), "an empty stop string would match everywhere"
        self._stop = tuple(dict.fromkeys(stop))
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text, once it is decided."""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may now be shown, and the stop string that ended it. After a match nothing more is shown."""
        if self.matched is not None:
            return "", self.matched
        if not self._stop:
            return text, None
        self._held += text
        found = self._first_match()
        open_at = self._open_beginning()
        if found is not None and found[0] <= open_at:
            return self._end(*found), self.matched
        shown, self._held = self._held[:open_at], self._held[open_at:]
        return shown, None

    def finish(self) -> str:
        """The text that was held back, up to a stop string that is complete in it; `matched` then names that one."""
        if self.matched is not None:
            return ""
        if (found := self._first_match()) is not None:
            return self._end(*found)
        shown, self._held = self._held, ""
        return shown

    def _end(self, start: int, stop: str) -> str:
        self.matched = stop
        shown, self._held = self._held[: start + len(stop) if self._include else start], ""
        return shown

    def _first_match(self) -> tuple[int, str] | None:
        """The complete stop string that begins first in the held text, the shortest of those that begin together."""
        found = [(at, len(stop), stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if not found:
            return None
        at, _, stop = min(found)
        return at, stop

    def _open_beginning(self) -> int:
        """Where the longest tail of the held text that is a proper beginning of a stop string begins; else the text's length."""
        held = self._held
        first = len(held)
        for stop in self._stop:
            at = held.find(stop[0], max(0, len(held) - len(stop) + 1))
            while 0 <= at < first:
                if stop.startswith(held[at:]):
                    first = at
                    break
                at = held.find(stop[0], at + 1)
        return first
