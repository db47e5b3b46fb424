"""What the served model can do in chat besides text, as its template and the server's options say: call tools, think.

Made once; `plan_answer` says for one request what its prompt shows, what binds its draws and how its answers are read.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from kvist.errors import InvalidRequestError
from kvist.request import StructuredOutputsParams
from kvist.server.answers import Reading
from kvist.server.client import TokenizerClient
from kvist.server.tools import ToolUse
from kvist.text.answer_form import Thoughts, answer_form
from kvist.text.chat_template import knows_tools
from kvist.text.reasoning import CLOSES, OPENS, ReasoningSplitter, opened_by, thinks
from kvist.text.tool_formats import FORMATS, ToolFormat, detect_format, find_format
from kvist.text.tool_prompt import describe_tools

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
TAIL_TOKENS = 16


@dataclass(frozen=True)
class Answering:
    """For one request: the form of its answers, how they are read, and whether special tokens must be seen for that."""

    form: StructuredOutputsParams | None
    reading: Reading | None
    show_special_tokens: bool


@dataclass(frozen=True)
class Abilities:
    template: str | None
    format: ToolFormat | None
    thinks: bool
    tools_in_template: bool
    """The template shows tools itself; otherwise they are written into a system message."""

    @classmethod
    def of(cls, template: object | None, tool_call_parser: str = "auto", reasoning_parser: str = "auto") -> Abilities:
        """The names are those of `ServerOptions`."""
        source = getattr(template, "source", None)
        match tool_call_parser:
            case "auto":
                written = detect_format(source)
            case "none":
                written = None
            case _:
                written = find_format(tool_call_parser, source)
        thinking = thinks(source) if reasoning_parser == "auto" else reasoning_parser != "none"
        return cls(source, written, thinking, knows_tools(source))

    def show_tools(
        self, messages: list[dict[str, Any]], tools: ToolUse | None
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Messages and tools for the template. Raises InvalidRequestError where the model knows no tools."""
        if tools is None:
            return messages, None
        if self.format is None:
            what = "does not say in which form to call them" if self.tools_in_template else "has no place for tools"
            raise InvalidRequestError(
                f"The model's chat template {what}; leave tools out, send tool_choice none, or start the server with "
                f"--tool-call-parser ({', '.join(FORMATS)}).",
                param="tools",
            )
        if self.tools_in_template:
            return messages, tools.told
        return describe_tools(messages, tools.told), None

    def effort_variables(self, effort: str | None) -> dict[str, Any]:
        """`reasoning_effort` in the template's own words. Raises InvalidRequestError where it has none."""
        if effort is None:
            return {}
        if effort not in EFFORTS:
            raise InvalidRequestError(f"reasoning_effort must be one of {', '.join(EFFORTS)}.", param="reasoning_effort")
        source = self.template or ""
        if "reasoning_effort" in source:
            return {"reasoning_effort": effort}
        if "enable_thinking" in source:
            return {"enable_thinking": effort != "none"}
        if effort == "none" and not self.thinks:
            return {}
        raise InvalidRequestError(
            "The model's chat template does not know reasoning_effort; leave it out.", param="reasoning_effort"
        )

    async def plan_answer(
        self, tokenizer: TokenizerClient, prompt: list[int], tools: ToolUse | None, form: StructuredOutputsParams | None
    ) -> Answering:
        """Raises InvalidRequestError for a form that is none."""
        special = tokenizer.special_token_id
        thoughts = self._thoughts(tokenizer, prompt)
        written = self.format if tools is not None else None
        calls = None
        if tools is not None and written is not None:
            calls = tools.calls(written, special, instead=form is not None)
            form = form if tools.choice == "auto" else None
        if form is not None and (calls is not None or thoughts != "none"):
            form = await asyncio.to_thread(answer_form, form, calls, thoughts, special)
        else:
            form = answer_form(form, calls, thoughts, special)
        marks = [OPENS, CLOSES] if self.thinks else []
        if written is not None:
            marks += [written.markup.opens, written.markup.closes, written.markup.arguments_mark]
        reading = None
        if tools is not None or self.thinks:
            reading = Reading(
                (lambda: ReasoningSplitter(opened=thoughts == "opened")) if self.thinks else None,
                None if tools is None or written is None else lambda: tools.parser(written),
                24 if written is None else written.id_length,
                tools is not None and tools.choice == "named",
            )
        return Answering(form, reading, any(mark and special(mark) is not None for mark in marks))

    def _thoughts(self, tokenizer: TokenizerClient, prompt: list[int]) -> Thoughts:
        if not self.thinks:
            return "none"
        tail = tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False)
        if opened_by(tail):
            return "opened"
        return "none" if tail.rstrip().endswith(CLOSES) else "possible"
