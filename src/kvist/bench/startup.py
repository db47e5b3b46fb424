"""The process whose start `kvist bench latency --startup` measures: load a model, make one token, report on one line, leave.

Run as `python -m kvist.bench.startup OPTIONS`, where OPTIONS is EngineOptions as JSON. It imports nothing that an answer in the
terminal would not import.
"""

from __future__ import annotations

import json
import sys
import time

PROMPT = "The capital of France is"


def main() -> None:
    """Report milliseconds of import and load, and the peak of resident memory in bytes, right after the first token."""
    start = time.perf_counter()
    from kvist import LLM, SamplingParams
    from kvist.errors import KvistError

    imported = time.perf_counter()
    try:
        llm = LLM(**json.loads(sys.argv[1]))
    except KvistError as error:
        sys.exit(str(error))
    loaded = time.perf_counter()
    output = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    import resource

    report = {
        "import_ms": (imported - start) * 1e3,
        "load_ms": (loaded - imported) * 1e3,
        "first_token_ms": (time.perf_counter() - loaded) * 1e3,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "token_id": output[0].outputs[0].token_ids[0],
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
