"""The Jinja environment that chat templates are written for, closed against templates that misbehave.

It follows what the template language of Hugging Face models offers: blocks trimmed, loop controls, `raise_exception`,
`strftime_now`, a `tojson` that does not escape for HTML, and the `generation` tag (which marks text for training, and here
changes nothing). Templates come with models, from anyone: they run in Jinja's immutable sandbox, and one that multiplies text or
raises powers without measure is stopped. Time is bounded only by what the sandbox allows of loops. This module imports jinja2,
which takes a while: it is imported when the first template is compiled.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEXT = 16 * 2**20
"""Characters that a template may render, or make of one multiplication."""
MAX_EXPONENT = 1024


class GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %}: the body as it stands."""

    tags = {"generation"}  # noqa: RUF012 (the type that jinja2 declares)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with bounded multiplication and powers."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (not isinstance(right, (int, float)) or abs(right) > MAX_EXPONENT):
            raise SecurityError(f"a power with an exponent beyond {MAX_EXPONENT}")
        if operator == "*":
            for sized, times in ((left, right), (right, left)):
                if isinstance(sized, (str, list, tuple)) and isinstance(times, int) and len(sized) * times > MAX_TEXT:
                    raise SecurityError(f"a text repeated beyond {MAX_TEXT} characters")
        return super().call_binop(context, operator, left, right)


def make_environment() -> TemplateSandbox:
    environment = TemplateSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
