"""`kvist pull` and `kvist models`: fetch a model by name, and list the names.

Results go to standard output, progress and terms to standard error. What a name means and how it is fetched is `weights/hub.py`'s.
"""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import Annotated

import click

from kvist.cli.fetching import pull_bar
from kvist.cli.params import argument, option
from kvist.config import DEFAULT_MODEL
from kvist.errors import DownloadError
from kvist.sizes import format_bytes
from kvist.weights.hub import Accept, list_models, resolve_model
from kvist.weights.presets import Terms


def _at_terminal() -> bool:
    return sys.stdin.isatty()


def _ask(accepted: bool, name: str) -> Accept:
    def accept(terms: Terms) -> bool:
        print(f"{terms.title}\n\n{terms.text}\n", file=sys.stderr)
        if accepted:
            return True
        if not _at_terminal():
            raise DownloadError(f"{name} needs the {terms.title} accepted: run this in a terminal, or add --accept-terms.")
        return click.confirm(f"Do you accept the {terms.title}?", err=True)

    return accept


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def pull(
    name: Annotated[
        str, argument(help="smollm2:135m, gemma3:270m, or a hub name: org/name or org/name:file.gguf.")
    ] = DEFAULT_MODEL,
    json: Annotated[bool, option("--json", help="Print the result as JSON.")] = False,
    accept_terms: Annotated[bool, option("--accept-terms", help="Accept the terms that the model comes under.")] = False,
) -> None:
    """Fetch a model and keep it in the cache folder; print where it is."""
    accept = _ask(accept_terms, name)
    with pull_bar() as progress:
        path = resolve_model(name, progress=progress, accept=accept, refresh=True)
    if json:
        print(json_module.dumps({"name": name, "path": str(path), "size": _size(path)}))
    else:
        print(f"{name}: {path} ({format_bytes(_size(path))})")


def models(json: Annotated[bool, option("--json", help="Print the list as JSON.")] = False) -> None:
    """List the models that kvist knows by name, and which are here."""
    known = list_models()
    if json:
        rows = [
            {
                "name": model.name,
                "description": model.description,
                "license": model.license,
                "size": model.size,
                "pulled": model.path is not None,
                "path": None if model.path is None else str(model.path),
            }
            for model in known
        ]
        print(json_module.dumps(rows))
        return
    for model in known:
        state = str(model.path) if model.path is not None else f"not here; kvist pull {model.name}"
        print(f"{model.name:<16} {format_bytes(model.size):>10}  {model.description}\n{'':<16} {'':>10}  {state}")
    print("\nAny GGUF file or Hugging Face folder works by path, and any hub name as org/name or org/name:file.gguf.")
