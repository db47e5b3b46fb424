"""Runs kept in a file: a measurement goes on where it stopped, and never with another's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvist.bench.kept import Kept
from kvist.errors import UsageError

HEAD = {"command": "x", "machine": {"cpu": "a"}, "engine": {"windows": (1, 2)}}


def test_what_was_kept_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    kept = Kept(HEAD, path)
    kept.add({"part": "a", "value": 1.5})
    kept.add({"part": "b", "value": (1, 2)})
    assert json.loads(path.read_text())["command"] == "x"
    again = Kept(HEAD, path)
    assert again.runs == kept.runs == [{"part": "a", "value": 1.5}, {"part": "b", "value": [1, 2]}]
    again.add({"part": "a", "value": 2.5})
    assert [run["value"] for run in Kept(HEAD, path).select(part="a")] == [1.5, 2.5]
    assert [file.name for file in tmp_path.iterdir()] == ["runs.json"], "nothing lies about"


def test_without_a_file_runs_are_kept_in_memory() -> None:
    kept = Kept(HEAD)
    kept.add({"part": "a"})
    assert kept.select(part="a") == [{"part": "a"}]
    assert kept.select(part="a", round=1) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "runs.json is no JSON"),
        ("[]", "holds no runs that were kept"),
        (json.dumps(HEAD), "holds no runs that were kept"),
        (json.dumps({**HEAD, "machine": {"cpu": "b"}, "runs": []}), "was kept with another machine"),
        (json.dumps({**HEAD, "command": "y", "runs": []}), "was kept with another command"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "runs.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        Kept(HEAD, path)
    assert path.read_text(encoding="utf-8") == text


def test_a_folder_that_is_not_there_is_named_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"There is no folder .* to keep runs\.json in"):
        Kept(HEAD, tmp_path / "nowhere" / "runs.json")
    with pytest.raises(UsageError, match="Cannot read"):
        Kept(HEAD, tmp_path)
