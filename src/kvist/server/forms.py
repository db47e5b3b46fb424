"""What form a request asks of its output: OpenAI's `response_format`, vLLM's `structured_outputs`, and its older `guided_*` names.

Knows the fields' shapes; whether a schema or grammar is one is found when it is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvist.errors import InvalidRequestError
from kvist.request import StructuredOutputsParams

GUIDED = ("json", "regex", "choice", "grammar")


def requested_form(
    response_format: Mapping[str, Any] | None, structured_outputs: Mapping[str, Any] | None, guided: Mapping[str, Any]
) -> StructuredOutputsParams | None:
    """The one form that is asked for, in whichever words; `guided` has the `guided_*` fields by the rest of their names. Raises
    InvalidRequestError."""
    forms = {
        "response_format": None if response_format is None else _of_response_format(response_format),
        "structured_outputs": None if structured_outputs is None else StructuredOutputsParams.of(structured_outputs),
        **{f"guided_{name}": _of_guided(name, guided[name]) for name in GUIDED if guided.get(name) is not None},
    }
    asked = {name: form for name, form in forms.items() if form is not None}
    if len(asked) > 1:
        names = list(asked)
        raise InvalidRequestError(f"{' and '.join(names)} exclude each other; give one of them.", param=names[-1])
    pattern = guided.get("whitespace_pattern")
    if pattern is None:
        return next(iter(asked.values()), None)
    if "guided_json" not in asked:
        raise InvalidRequestError("guided_whitespace_pattern needs guided_json.", param="guided_whitespace_pattern")
    return StructuredOutputsParams(json=guided["json"], whitespace_pattern=pattern)


def _of_guided(name: str, value: Any) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams.of({name: value})
    except InvalidRequestError as error:
        message = str(error).replace(f"structured_outputs.{name}", f"guided_{name}")
        raise InvalidRequestError(message, param=f"guided_{name}") from None


def _of_response_format(value: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """Of json_schema, `name` and `description` are for models that are told of them, and `strict` is always so here."""
    kind = value.get("type")
    match kind:
        case "text":
            _only(value, {"type"}, "response_format")
            return None
        case "json_object":
            _only(value, {"type"}, "response_format")
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            _only(value, {"type", "json_schema"}, "response_format")
            return _of_json_schema(value.get("json_schema"))
    raise InvalidRequestError(
        f"response_format.type must be text, json_object or json_schema, not {kind!r}.", param="response_format"
    )


def _of_json_schema(value: Any) -> StructuredOutputsParams:
    place = "response_format.json_schema"
    if not isinstance(value, Mapping) or not isinstance(value.get("schema"), Mapping | bool):
        raise InvalidRequestError(f"{place} must be an object with a name and a schema.", param=place)
    _only(value, {"name", "description", "strict", "schema"}, place)
    for name, kind in (("name", str), ("description", str), ("strict", bool)):
        if not isinstance(value.get(name), kind | None):
            raise InvalidRequestError(f"{place}.{name} is of the wrong type.", param=f"{place}.{name}")
    return StructuredOutputsParams(json=value["schema"])


def _only(value: Mapping[str, Any], known: set[str], place: str) -> None:
    for name in value:
        if name not in known:
            raise InvalidRequestError(
                f"{place}.{name} is not a field that this server knows; leave it out.", param=f"{place}.{name}"
            )
