"""A command from a function: each parameter `Annotated[type, option(...)]` becomes a flag of it, over click.

The type says what is read (str, int, float, bool, Path, a list of them; `| None` where nothing need be given), the default what
holds without it, the docstring is the help, in which flags stand by their panel. This module knows no command and no flag.
It is what typer does with such a signature; typer checks each flag by a model of pydantic's, and importing that and building them
takes longer than all the rest of a command's start.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class _Option(NamedTuple):
    flags: tuple[str, ...]
    help: str
    metavar: str | None
    panel: str
    min: float | None


class _Argument(NamedTuple):
    help: str
    metavar: str | None


class _Flag(click.Option):
    panel = "Options"


class _Positional(click.Argument):
    told = ""
    """Its help, under a name that no version of click writes into a section of its own."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.make_metavar(ctx), self.told


class _Command(click.Command):
    """Help with what is given without a flag first, then flags by their panels, in the order in which these come."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            title = "Arguments" if isinstance(parameter, _Positional) else getattr(parameter, "panel", "Options")
            if (record := parameter.get_help_record(ctx)) is not None:
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class Group(click.Group):
    """Lists its commands in their own order."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def option(*flags: str, help: str = "", metavar: str | None = None, panel: str = "Options", min: float | None = None) -> _Option:
    """A flag, named `flags` where its names are not the parameter's own with dashes; "--on/--off" for a switch, as one that is on
    without a flag has by itself. `min` bounds a number, `panel` is where the help has it."""
    return _Option(flags, help, metavar, panel, min)


def argument(*, help: str = "", metavar: str | None = None) -> _Argument:
    """What is given without a flag."""
    return _Argument(help, metavar)


def make_command(function: Callable[..., None], name: str, summary: str | None = None) -> click.Command:
    """The command that calls `function` with what it reads. `summary` stands in its group's list, else the help's beginning."""
    text = inspect.cleandoc(function.__doc__ or "")
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = [
        _parameter(parameter.name, hints[parameter.name], parameter.default)
        for parameter in inspect.signature(function).parameters.values()
    ]

    def run(**values: Any) -> None:
        # Lists as lists, and none where nothing was given, as the signature says.
        function(**{key: (list(value) or None) if isinstance(value, tuple) else value for key, value in values.items()})

    return _Command(
        name,
        callback=run,
        params=parameters,
        help=text,
        short_help=summary or " ".join(text.partition("\n\n")[0].split()),
        context_settings=dict(CONTEXT),
    )


def _parameter(name: str, hint: Any, default: Any) -> click.Parameter:
    annotated, *metadata = typing.get_args(hint)
    item = next(one for one in metadata if isinstance(one, (_Option, _Argument)))
    kind, several = _kind(annotated)
    required = default is inspect.Parameter.empty
    settings: dict[str, Any] = {"required": True} if required else {"required": False, "default": default}
    if isinstance(item, _Argument):
        positional = _Positional([name], type=_click_type(kind, None), nargs=-1 if several else 1, metavar=item.metavar, **settings)
        positional.told = item.help
        return positional
    dashed = name.replace("_", "-")
    # What is on without a flag needs one that turns it off.
    names = item.flags or ((f"--{dashed}/--no-{dashed}",) if default is True else (f"--{dashed}",))
    if kind is bool:
        shown = any("/" in text for text in names)
        settings["is_flag"] = True
    else:
        shown = not required and default is not None
        settings |= {"type": _click_type(kind, item.min), "multiple": several, "metavar": item.metavar}
    flag = _Flag([name, *names], help=item.help, show_default=shown, **settings)
    flag.panel = item.panel
    return flag


def _kind(annotation: Any) -> tuple[type, bool]:
    """The type of one value, and whether there may be several."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        (annotation,) = (part for part in typing.get_args(annotation) if part is not types.NoneType)
    if typing.get_origin(annotation) is list:
        return typing.get_args(annotation)[0], True
    return annotation, False


def _click_type(kind: type, least: float | None) -> click.ParamType[Any]:
    if kind is Path:
        return click.Path(path_type=Path)
    if least is not None:
        return click.IntRange(min=int(least)) if kind is int else click.FloatRange(min=least)
    return {str: click.STRING, int: click.INT, float: click.FLOAT}[kind]
