"""Thoughts before an answer: models that write `<think> ... </think>` first, split while the text is written.

Knows the two marks and nothing of tokens or HTTP. Invariants: how the text is cut into pieces changes nothing; neither mark, nor
part of one, is shown; white space at the edges of the thoughts is dropped; an answer that begins otherwise comes unchanged.
"""

from __future__ import annotations

from kvist.text.json_call import SPACE

OPENS, CLOSES = "<think>", "</think>"


def thinks(template: str | None) -> bool:
    """Whether a chat template is that of a model that thinks."""
    return template is not None and CLOSES in template


def opened_by(prompt_tail: str) -> bool:
    """Whether the prompt, of which this is the end, has begun the thoughts already."""
    return prompt_tail.rstrip().endswith(OPENS)


class ReasoningSplitter:
    """Reads one answer; `opened`: it begins inside the thoughts."""

    def __init__(self, *, opened: bool) -> None:
        self._text = ""
        self._begun = False
        """Something of the thoughts has been shown."""
        self._space: list[str] = []
        """White space before `_text`, shown with what follows it; pieces, for it may go on for long."""
        self._where = "thoughts" if opened else "start"

    @property
    def thinking(self) -> bool:
        return self._where == "thoughts"

    def push(self, text: str) -> tuple[str, str]:
        """The next pieces of the thoughts and of the answer."""
        if self._where == "answer":
            return "", text
        self._text += text
        thoughts = ""
        if self._where == "start":
            self._decide()
        if self._where == "thoughts":
            thoughts = self._think()
        if self._where == "gap":
            self._text = self._text.lstrip(SPACE)
            self._where = "answer" if self._text else "gap"
        if self._where == "answer":
            answer, self._text = self._text, ""
            return thoughts, answer
        return thoughts, ""

    def finish(self) -> tuple[str, str]:
        """What was held back."""
        text = "".join([*self._space, self._text])
        self._text, self._space = "", []
        if self._where == "thoughts":
            return (text if text.strip(SPACE) else ""), ""
        return "", text if self._where in ("start", "answer") else ""

    def _decide(self) -> None:
        rest = self._text.lstrip(SPACE)
        self._space.append(self._text[: len(self._text) - len(rest)])
        self._text = rest
        if rest.startswith(OPENS):
            self._space = []
            self._where = "thoughts"
        elif not OPENS.startswith(rest):
            self._text, self._space = "".join([*self._space, rest]), []
            self._where = "answer"

    def _think(self) -> str:
        if not self._begun:
            self._text = self._text.lstrip(SPACE)
            if OPENS.startswith(self._text) and self._text != OPENS:
                return ""
            # The prompt may have opened the thoughts, and the model opens them again.
            self._text = self._text.removeprefix(OPENS).lstrip(SPACE)
        at = self._text.find(CLOSES)
        if at >= 0:
            body, self._text, self._where = self._text[:at], self._text[at + len(CLOSES) :], "gap"
        else:
            held = next((n for n in range(len(CLOSES) - 1, 0, -1) if self._text.endswith(CLOSES[:n])), 0)
            cut = len(self._text) - held
            body, self._text = self._text[:cut], self._text[cut:]
        return self._show(body)

    def _show(self, text: str) -> str:
        """The thoughts that `text` adds; its trailing white space waits for what follows, and goes with the thoughts' end."""
        body = text.rstrip(SPACE)
        shown = "".join([*self._space, body]) if body else ""
        if body or self._where == "gap":
            self._space = []
        if self._where == "thoughts":
            self._space.append(text[len(body) :])
        self._begun = self._begun or bool(body)
        return shown
