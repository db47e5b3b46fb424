"""The tools of a request: `tools`, `tool_choice` and `parallel_tool_calls`, checked, and what they ask of prompt, draws and answer.

Knows OpenAI's fields; formats of calls are `text.tool_formats`'. A tool's schema binds the arguments where a call is certain
(`required`, or a named function), and where the tool is `strict`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvist.errors import InvalidRequestError
from kvist.text.grammar import MAX_OPTIONAL, num_optional
from kvist.text.tool_formats import NO_ARGUMENTS, Tool, ToolFormat
from kvist.text.tool_parser import ToolParser

_NAME = re.compile(r"[\w.:/-]{1,128}")
MAX_TOOLS = 512
_ANY_ARGUMENTS = {"type": "object"}


@dataclass(frozen=True)
class ToolUse:
    """What a request may or must call."""

    tools: tuple[Tool, ...]
    told: list[dict[str, Any]]
    """As the client sent them, for the prompt."""
    choice: Literal["auto", "required", "named"]
    many: bool

    def calls(self, written: ToolFormat, special: Callable[[str], int | None], *, instead: bool) -> str | None:
        """Rules for the calls of an answer; None where any text will do. `instead`: the answer has a form where it has no calls."""
        free = self.choice == "auto" and not instead
        if free and not any(tool.strict for tool in self.tools):
            return None
        bound = self.choice != "auto"
        tools = [tool if bound or tool.strict else Tool(tool.name, _ANY_ARGUMENTS) for tool in self.tools]
        return written.grammar(tools, special, many=self.many, free=free)

    def parser(self, written: ToolFormat) -> ToolParser:
        return ToolParser(written.markup, frozenset(tool.name for tool in self.tools), single=not self.many)


def requested_tools(
    tools: Sequence[Any] | None, tool_choice: str | Mapping[str, Any] | None, parallel_tool_calls: bool
) -> ToolUse | None:
    """None: nothing may be called. Raises InvalidRequestError naming the place."""
    if not tools:
        if tool_choice not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice asks for a call, but there are no tools; give tools.", param="tool_choice")
        return None
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools takes at most {MAX_TOOLS} tools, not {len(tools)}.", param="tools")
    checked = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    names = [tool.name for tool in checked]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequestError(f"Two tools are named {twice!r}; give each a name of its own.", param="tools")
    told = [dict(tool) for tool in tools]
    match tool_choice:
        case None | "auto":
            return ToolUse(tuple(checked), told, "auto", parallel_tool_calls)
        case "none":
            return None
        case "required":
            return ToolUse(tuple(checked), told, "required", parallel_tool_calls)
        case str():
            raise InvalidRequestError(
                f"tool_choice must be auto, none, required or a function by name, not {tool_choice!r}.", param="tool_choice"
            )
    name = _named(tool_choice)
    if name not in names:
        raise InvalidRequestError(f"tool_choice names {name!r}, which is none of the tools.", param="tool_choice")
    return ToolUse((checked[names.index(name)],), told, "named", False)


def _named(choice: Mapping[str, Any]) -> str:
    function = choice.get("function")
    if choice.get("type") != "function":
        raise InvalidRequestError(
            f"tool_choice of type {choice.get('type')!r} is not offered; give a function by name.", param="tool_choice"
        )
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError("tool_choice.function must be an object with a name.", param="tool_choice.function")
    return str(function["name"])


def _tool(tool: Any, place: str) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("function"), Mapping):
        raise InvalidRequestError(f"{place} must be of type function; other tools are not offered.", param=place)
    function, place = tool["function"], f"{place}.function"
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{place}.name must be 1 to 128 letters, digits, underscores, dashes, dots, slashes or colons, not {str(name)[:40]!r}.",
            param=f"{place}.name",
        )
    if not isinstance(function.get("description"), str | None):
        raise InvalidRequestError(f"{place}.description must be a string.", param=f"{place}.description")
    if not isinstance(function.get("strict"), bool | None):
        raise InvalidRequestError(f"{place}.strict must be true or false.", param=f"{place}.strict")
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping | None) or (parameters or {}).get("type", "object") != "object":
        raise InvalidRequestError(f"{place}.parameters must be the JSON schema of an object.", param=f"{place}.parameters")
    if not isinstance((parameters or {}).get("x-guidance"), Mapping | None):
        raise InvalidRequestError(f"{place}.parameters.x-guidance must be an object.", param=f"{place}.parameters")
    if (optional := num_optional(parameters)) > MAX_OPTIONAL:
        raise InvalidRequestError(
            f"{place}.parameters has {optional} properties that are not required, and {MAX_OPTIONAL} are the most.",
            param=f"{place}.parameters",
        )
    return Tool(name, NO_ARGUMENTS if parameters is None else parameters, bool(function.get("strict")))
