"""Tool calls in a model's text, found while it is written: Hermes and Qwen, Llama 3 and Mistral markup.

A `ToolParser` takes one answer's text in pieces and gives its events: text, the start of a call, pieces of its arguments. It knows
no HTTP and no tokens. Invariants:

* how the text is cut into pieces changes nothing but where events are cut;
* no event shows markup of a call, nor part of it; text that only looks like its beginning comes once that is clear, whole;
* an answer without a call comes through unchanged. White space next to calls is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from kvist.text.json_call import SPACE, CallArguments, CallStart, Event, JsonCall, Text, ValueEnd

NAME_LIMIT = 256
_NAME = re.compile(r"[\w.:/-]+")


@dataclass(frozen=True)
class Markup:
    """How a family of models writes calls."""

    opens: str
    """Stands before a call, or before a JSON list of them."""
    closes: str = ""
    """Stands behind a call."""
    separators: str = ""
    """What may stand between two calls besides white space."""
    bare: bool = False
    """An answer that begins with a JSON object is a call without `opens`, if it names a tool."""
    named: bool = False
    """`opens` may be followed by a name, `arguments_mark` and the arguments."""
    arguments_mark: str = "[ARGS]"


class ToolParser:
    """Reads one answer. `names` are those of the tools; `single`: calls after the first are dropped."""

    def __init__(self, markup: Markup, names: frozenset[str], *, single: bool = False) -> None:
        self._markup = markup
        self._names = names
        self._single = single
        self._text = ""
        """Not understood yet."""
        self._seen: list[str] = []
        """Markup since the last event, to be given back as text if it leads to no call. Pieces, as all that may become long: a
        string would be copied for each."""
        self._space: list[str] = []
        """White space that goes with the text after it, and with none before a call."""
        self._state: Callable[[], bool] = self._at_start if markup.bare else self._in_text
        self._in_list = False
        self._call = JsonCall(0)
        self._arguments = ValueEnd()
        self._events: list[Event] = []
        self._ended = False
        self.num_calls = 0

    def push(self, text: str) -> list[Event]:
        self._text += text
        while self._state():
            pass
        return self._take()

    def finish(self) -> list[Event]:
        """What is left at the end. A call whose name had not come yet is dropped with its markup."""
        self._ended = True
        while self._state():
            pass
        if self._state in (self._in_text, self._at_start):
            self._say(*self._seen, self._text)
            self._put(*([] if self.num_calls else self._space))
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        if self._single:
            events = [event for event in events if isinstance(event, Text) or event.index == 0]
        return events

    def _put(self, *pieces: str) -> None:
        if text := "".join(pieces):
            last = self._events[-1] if self._events else None
            if isinstance(last, Text):
                self._events[-1] = Text(last.text + text)
            else:
                self._events.append(Text(text))

    def _say(self, *pieces: str) -> None:
        """Text of the answer; its trailing white space waits for what follows."""
        text = "".join(pieces)
        body = text.rstrip(SPACE)
        if body:
            self._put(*self._space, body)
            self._space = []
        if space := text[len(body) :]:
            self._space.append(space)

    # States. Each takes what it can from the front of `_text`, and says whether another may go on.

    def _at_start(self) -> bool:
        """The first character decides whether a bare call may come."""
        if not self._skip_space():
            return False
        if self._text.startswith("{"):
            self._begin_call(known_only=True)
        else:
            self._give_up()
        return True

    def _in_text(self) -> bool:
        opens = self._markup.opens
        at = self._text.find(opens)
        if at >= 0:
            self._say(self._text[:at])
            self._seen, self._text = [opens], self._text[at + len(opens) :]
            self._state = self._opened
            return True
        held = next((n for n in range(min(len(opens) - 1, len(self._text)), 0, -1) if opens.startswith(self._text[-n:])), 0)
        cut = len(self._text) - held
        self._say(self._text[:cut])
        self._text = self._text[cut:]
        return False

    def _opened(self) -> bool:
        """Behind the opening mark, or at the next item of a list."""
        if not self._skip_space():
            return False
        first = self._text[0]
        if first == "[" and not self._in_list:
            self._in_list = True
            self._skip(1)
        elif self._in_list and first == "]":
            self._leave_list()
        elif first == "{":
            self._begin_call()
        elif self._markup.named and not self._in_list:
            self._state = self._in_name
        else:
            self._give_up()
        return True

    def _in_name(self) -> bool:
        """`name[ARGS]{...}`, or `name{...}`."""
        brace, mark = self._text.find("{"), self._text.find(self._markup.arguments_mark)
        if brace < 0 and mark < 0:
            if len(self._text) > NAME_LIMIT or self._ended:
                self._give_up()
                return True
            return False
        end = mark if mark >= 0 and (brace < 0 or mark < brace) else brace
        name = self._text[:end].split("[CALL_ID]")[0].strip()
        if not _NAME.fullmatch(name):
            self._give_up()
            return True
        self._skip(end + (len(self._markup.arguments_mark) if end == mark else 0))
        self._events.append(CallStart(self.num_calls, name))
        self._start_call()
        self._arguments = ValueEnd()
        self._state = self._in_arguments
        return True

    def _in_arguments(self) -> bool:
        if not self._arguments.begun and not self._skip_space():
            return False
        used = 0
        while used < len(self._text) and not self._arguments.done:
            used += self._arguments.takes(self._text[used])
        if used:
            self._events.append(CallArguments(self.num_calls - 1, self._text[:used]))
            self._text = self._text[used:]
        if self._arguments.done:
            self._state = self._between
        return self._arguments.done

    def _begin_call(self, *, known_only: bool = False) -> None:
        self._call = JsonCall(self.num_calls, self._names if known_only else None)
        self._state = self._in_call

    def _in_call(self) -> bool:
        events, used = self._call.push(self._text)
        if self._call.name is None:
            self._seen.append(self._text[:used])
        self._text = self._text[used:]
        if any(isinstance(event, CallStart) for event in events):
            self._start_call()
        self._events += events
        if self._call.failed and self._call.name is None:
            self._give_up()
        elif self._call.done or self._call.failed:
            self._state = self._between
        else:
            return False
        return True

    def _start_call(self) -> None:
        """What stood before it is markup, and its white space says nothing."""
        self._seen, self._space = [], []
        self.num_calls += 1

    def _between(self) -> bool:
        """Behind a call: its closing mark, a separator, the next call, or text again."""
        if not self._skip_space():
            return False
        closes, separators = self._markup.closes, "," if self._in_list else self._markup.separators
        if self._in_list and self._text[0] == "]":
            self._leave_list()
        elif self._text[0] in separators:
            self._skip(1)
            self._state = self._opened if self._in_list else self._between
        elif self._markup.bare and self._text[0] == "{":
            self._begin_call(known_only=True)
        elif closes and self._text.startswith(closes):
            self._text = self._text[len(closes) :]
            self._state = self._behind
        elif closes.startswith(self._text):
            return False
        else:
            self._state = self._in_text
        self._seen = []
        return True

    def _behind(self) -> bool:
        """Behind a call's markup: the white space before what follows says nothing."""
        if not self._skip_space():
            return False
        self._seen = []
        self._state = self._in_text
        return True

    def _leave_list(self) -> None:
        self._in_list = False
        self._skip(1)
        self._state = self._between

    def _skip_space(self) -> bool:
        """Whether anything but white space is there."""
        rest = self._text.lstrip(SPACE)
        self._skip(len(self._text) - len(rest))
        return bool(rest)

    def _skip(self, count: int) -> None:
        if count:
            self._seen.append(self._text[:count])
            self._text = self._text[count:]

    def _give_up(self) -> None:
        """It was no call: what looked like one is text."""
        self._say(*self._seen)
        self._seen = []
        self._in_list = False
        self._state = self._in_text
