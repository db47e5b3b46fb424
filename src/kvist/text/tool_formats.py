"""The formats in which chat models write tool calls: which one a template means, and grammars of answers that keep to it.

A format is what its models were trained on: Hermes (Qwen too), Llama 3 JSON, and Mistral, older and newer. It knows no HTTP and no
token ids but those of special tokens, which a grammar has to name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvist.text.chat_template import knows_tools
from kvist.text.grammar import WHITESPACE
from kvist.text.tool_parser import Markup

Schema = Mapping[str, Any]
NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_TEXT = r"/(.|\n)*/"


@dataclass(frozen=True)
class Tool:
    """A function that a model may call. `strict`: arguments must fit the schema even where calling is the model's choice."""

    name: str
    parameters: Schema
    strict: bool = False


@dataclass(frozen=True)
class ToolFormat:
    name: str
    markup: Markup
    arguments: str
    """The key of the arguments in a call's object; "" for a name followed by `markup.arguments_mark`."""
    id_length: int = 24
    """Of the ids that its templates take for calls."""

    def grammar(self, tools: Sequence[Tool], special: Callable[[str], int | None], *, many: bool, free: bool) -> str:
        """Lark rules, `calls` on top, of answers that call `tools`: once, or several times with `many`. With `free` an answer may
        also be plain text, and calls may follow text. `special` gives the id of a special token by its text, else None."""
        mark = _Mark(self.markup.opens, special)
        rules = [f"call_{i}: {self._call(tool, f'arguments_{i}', special)}" for i, tool in enumerate(tools)]
        rules += [f"arguments_{i}: %json {_schema(tool)}" for i, tool in enumerate(tools)]
        any_call = "(" + " | ".join(f"call_{i}" for i in range(len(tools))) + ")"
        body, repeats = self._body(any_call, many)
        if not free:
            opened = any_call if self.markup.bare else f"{mark.lark} {body}"
            start = [f"calls: {opened} (JOINT {opened})*\nJOINT: /\\s?/" if many and repeats else f"calls: {opened}"]
        elif self.markup.bare:
            start = [f"calls: {any_call} | PLAIN", r"PLAIN: /([^{\s](.|\n)*)?/"]
        else:
            start = [f"calls: {'block*' if many else 'block?'} REST", f"REST: {_ANY_TEXT}", *mark.behind_text(body)]
        return "\n".join([*start, *rules]) + "\n"

    def _body(self, any_call: str, many: bool) -> tuple[str, bool]:
        """What stands behind the opening mark, and whether mark and body may be repeated for more calls."""
        if self.markup.closes:
            return f'"\\n" {any_call} {json.dumps(chr(10) + self.markup.closes)}', True
        if self.arguments and self.markup.named:
            return f'"[" {any_call} (", " {any_call})* "]"' if many else f'"[" {any_call} "]"', False
        return any_call, not self.markup.bare

    def _call(self, tool: Tool, arguments: str, special: Callable[[str], int | None]) -> str:
        if not self.arguments:
            return f"{_literal(tool.name)} {_Mark(self.markup.arguments_mark, special).lark} {arguments}"
        head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{self.arguments}": '
        return f'{_literal(head)} {arguments} "}}"'


class _Mark:
    """A mark in a grammar: a special token by its id, other text as it is."""

    def __init__(self, text: str, special: Callable[[str], int | None]) -> None:
        token_id = special(text)
        self._is_token = token_id is not None
        self.lark = _literal(text) if token_id is None else f"<[{token_id}]>"

    def behind_text(self, body: str) -> list[str]:
        """Rules of a `block`: any text up to the mark, the mark, and `body`."""
        if self._is_token:
            return [f"block: REST {self.lark} {body}"]
        return [f"block: lead {body}", f"lead[lazy]: REST {self.lark}"]


HERMES = ToolFormat("hermes", Markup("<tool_call>", "</tool_call>"), "arguments")
LLAMA3 = ToolFormat("llama3_json", Markup("<|python_tag|>", separators=";", bare=True), "parameters")
MISTRAL = ToolFormat("mistral", Markup("[TOOL_CALLS]", named=True), "arguments", id_length=9)
MISTRAL_ARGS = ToolFormat("mistral", Markup("[TOOL_CALLS]", named=True), "", id_length=9)
FORMATS = {format.name: format for format in (HERMES, LLAMA3, MISTRAL)}


def detect_format(template: str | None) -> ToolFormat | None:
    """The format that a chat template teaches; None where it has no tools, or tools in a way that is not known here."""
    if template is None or not knows_tools(template):
        return None
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return HERMES
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return LLAMA3
    return None


def find_format(name: str, template: str | None) -> ToolFormat:
    """The format of that name, in the variant that the template means."""
    detected = detect_format(template)
    return detected if detected is not None and detected.name == name else FORMATS[name]


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _schema(tool: Tool) -> str:
    """The schema of a call's arguments, always those of an object. What llguidance does not know of it is let go for tools that are
    not strict: a call that parses is worth more than none."""
    schema = {"type": "object", **tool.parameters}
    loose = {} if tool.strict else {"lenient": True, "coerce_one_of": True}
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE, **loose, **dict(schema.get("x-guidance") or {})}})
