"""The process whose start `kvist doctor --startup` takes apart: load a model, make one token, say when each part ended, leave.

Run as `python -m kvist.cli.startup_child OPTIONS`, where OPTIONS is EngineOptions as JSON. Times are seconds of the monotonic
clock, which the process that started this one shares. It imports nothing that an answer in the terminal would not import.
"""

from __future__ import annotations

import json
import sys
import time

PROMPT = "The capital of France is"


def main() -> None:
    ends = [("interpreter", time.monotonic())]

    def done(part: str) -> None:
        ends.append((part, time.monotonic()))

    from kvist.config import EngineOptions
    from kvist.engine.engine import Engine
    from kvist.engine.loader import load
    from kvist.errors import KvistError
    from kvist.request import SamplingParams

    done("import")
    try:
        engine = Engine(load(EngineOptions(**json.loads(sys.argv[1])), done=done))
    except KvistError as error:
        sys.exit(str(error))
    prompt = engine.tokenizer.encode(PROMPT)
    done("encode")
    engine.add_request("startup", prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    while engine.has_work:
        engine.step()
    done("first token")
    print(json.dumps(ends), flush=True)


if __name__ == "__main__":
    main()
