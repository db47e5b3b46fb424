"""The program of one engine under comparison: `python host.py DRIVER`, JSON lines in and out.

The first line in is the setup (model, context, max_seqs, threads, and what else the driver reads); the first line out is what the
driver tells of its engine. Then each line in, `{"prompts": [[id, ...]], "new_tokens": n}`, is answered with
`{"total": seconds, "after_first": seconds or null, "made": [tokens of each]}`, or with `{"error": sentence}`. The end of the input
ends the process. It runs in the engine's own Python and imports neither kvist nor anything outside the standard library. What
libraries print goes to standard error, so that an answer is never mixed with it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from typing import Any


def load_driver(path: str) -> Any:
    """The driver's file as a module."""
    spec = importlib.util.spec_from_file_location("driver", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    def fail(error: Exception) -> None:
        traceback.print_exc()
        answer({"error": " ".join(f"{type(error).__name__}: {error}".split())[:400]})

    try:
        generate, facts = load_driver(sys.argv[1]).load(json.loads(sys.stdin.readline()))
    except Exception as error:
        fail(error)
        sys.exit(1)
    answer(facts)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer(generate(request["prompts"], request["new_tokens"]))
        except Exception as error:
            fail(error)


if __name__ == "__main__":
    main()
