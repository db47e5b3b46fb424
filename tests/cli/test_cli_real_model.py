"""The commands as a newcomer types them first, on the default model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.model


def kvist(*arguments: str, told: str | None = None) -> str:
    command = [sys.executable, "-m", "kvist.cli.main", *arguments, "--num-kv-blocks", "64", "--temperature", "0"]
    done = subprocess.run(command, input=told, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_generate_knows_the_capital_of_france() -> None:
    result = json.loads(kvist("generate", "The capital of France is", "--max-tokens", "2"))
    assert result["outputs"][0]["text"] == " Paris."
    assert result["outputs"][0]["token_ids"] == [7042, 30]
    assert result["usage"] == {"prompt_tokens": 5, "cached_tokens": 0, "completion_tokens": 2}


def test_chat_over_a_pipe_finds_the_first_turn_again() -> None:
    out = kvist("chat", "--json", "--max-tokens", "20", told="Hi, my name is Ada.\nWhat is my name?\n")
    first, second = (json.loads(line)["usage"] for line in out.splitlines())
    assert (first["prompt_tokens"], first["cached_tokens"]) == (37, 0)
    # The blocks of the first turn, prompt and answer, as far as the second turn repeats them.
    assert 32 <= second["cached_tokens"] < second["prompt_tokens"]
