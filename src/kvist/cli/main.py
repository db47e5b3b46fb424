"""The console script: finds the command, runs it, and turns errors into one sentence and an exit status.

A command's module is imported only when that command is asked for, so that `kvist --help` imports no arrays, no server and no
engine. Exit status: 0, 1 (failed), 2 (bad usage), 130 (interrupted). This module knows the commands' names, modules and one-line
summaries; what they do and which flags they take stays with them.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from io import TextIOWrapper
from typing import Any

import click

from kvist import __version__
from kvist.cli.params import CONTEXT, Group, make_command
from kvist.errors import KvistError, UsageError

EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Command:
    """Where a command lives: `attribute` of `module` is a function, or functions by the names of commands of its own."""

    name: str
    module: str
    attribute: str
    summary: str


COMMANDS = (
    Command("pull", "kvist.cli.pull", "pull", "Fetch a model and keep it in the cache folder."),
    Command("models", "kvist.cli.pull", "models", "List the models that kvist knows by name, and which are here."),
    Command("chat", "kvist.cli.chat", "chat", "Talk to a model in the terminal."),
    Command("generate", "kvist.cli.generate", "generate", "Complete many prompts as raw text, JSON lines out."),
    Command("serve", "kvist.cli.serve", "serve", "Serve a model over an OpenAI-compatible HTTP API."),
    Command("bench", "kvist.cli.bench", "COMMANDS", "Measure this machine, options, KV memory, and other engines."),
    Command("doctor", "kvist.cli.doctor", "doctor", "Tell what this machine offers and what is missing."),
)


def report(error: KvistError | OSError) -> int:
    """Print the one sentence and return the exit status."""
    message = str(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        message = f"{where}{'the disk is full; free some of it and try again' if full else error.strerror or error}."
    print(f"kvist: {message}", file=sys.stderr)
    return 2 if isinstance(error, UsageError) else 1


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning as a sentence, without the line of code that gave it."""
    print(f"kvist: warning: {message}", file=sys.stderr)


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A command whose known errors end in a sentence instead of a traceback. Unknown ones are bugs and keep theirs."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BrokenPipeError:
            # The reader has seen enough (`kvist generate | head`). Python would complain once more when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise click.exceptions.Exit(1) from None
        except (KvistError, OSError) as error:
            raise click.exceptions.Exit(report(error)) from None
        except KeyboardInterrupt:
            raise click.exceptions.Exit(EXIT_INTERRUPTED) from None

    return run


def build_app(wanted: str | None) -> click.Group:
    """The application with every command named and only `wanted` (None: none) loaded."""
    commands: list[click.Command] = []
    for command in COMMANDS:
        if command.name != wanted:
            commands.append(click.Command(command.name, short_help=command.summary))
            continue
        loaded = getattr(import_module(command.module), command.attribute)
        if isinstance(loaded, Mapping):
            parts = [make_command(guarded(function), name) for name, function in loaded.items()]
            commands.append(Group(command.name, commands=parts, help=command.summary, context_settings=CONTEXT))
        else:
            commands.append(make_command(guarded(loaded), command.name, command.summary))
    summary = "An exact LLM inference and serving engine built around the KV cache."
    version = click.version_option(__version__, message="kvist %(version)s", help="Print the version.")
    return version(Group("kvist", commands=commands, help=summary, context_settings=CONTEXT))


def _forgive_characters() -> None:
    """Bytes that are no text are refused where they are used; a character that the terminal lacks shows as a question mark."""
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `kvist ARGUMENTS` (default: the process's own) and leave through SystemExit."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _forgive_characters()
    wanted = next((argument for argument in arguments if not argument.startswith("-")), None)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show_warning
            build_app(wanted)(args=arguments, prog_name="kvist")
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
