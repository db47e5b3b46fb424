"""One form for a whole answer, from its parts: thoughts that come first, calls of tools, and what was asked of the text.

It knows how llguidance joins grammars, nothing of tokens or HTTP. Invariant: what stands behind the thoughts has the form that was
asked for, or is calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Literal

from kvist.request import StructuredOutputsParams
from kvist.text.grammar import grammar_source
from kvist.text.reasoning import CLOSES, OPENS

Thoughts = Literal["none", "opened", "possible"]
"""Whether an answer begins inside its thoughts, may open them, or has none."""


def answer_form(
    form: StructuredOutputsParams | None, calls: str | None, thoughts: Thoughts, special: Callable[[str], int | None]
) -> StructuredOutputsParams | None:
    """`calls` are Lark rules with `calls` on top. None: any answer will do. Raises InvalidRequestError for a form that is none."""
    if calls is None and (form is None or thoughts == "none"):
        return form
    answer = " | ".join([*(["calls"] if calls else []), *(["@form"] if form else [])])
    lark = "\n".join(["%llguidance {}", *_start(thoughts, special), f"answer: {answer}", calls or ""])
    if form is None:
        return StructuredOutputsParams(grammar=lark)
    source = grammar_source(form)
    first, *others = json.loads(source)["grammars"] if source.startswith("{") else [{"lark_grammar": source}]
    return StructuredOutputsParams(grammar=json.dumps({"grammars": [{"lark_grammar": lark}, {**first, "name": "form"}, *others]}))


def _start(thoughts: Thoughts, special: Callable[[str], int | None]) -> list[str]:
    if thoughts == "none":
        return ["start: answer"]
    opens, closes = (_mark(text, special) for text in (OPENS, CLOSES))
    start = "start: thoughts answer" if thoughts == "opened" else f"start: ({opens} thoughts)? answer"
    if special(CLOSES) is None:
        return [start, r"thoughts: inner /[ \n]{0,4}/", rf"inner[lazy]: /(.|\n)*/ {closes}"]
    return [start, rf"thoughts: /(.|\n)*/ {closes} /[ \n]{{0,4}}/"]


def _mark(text: str, special: Callable[[str], int | None]) -> str:
    token_id = special(text)
    return json.dumps(text) if token_id is None else f"<[{token_id}]>"
