"""vLLM on the CPU: a folder of weights, its engine stepped by hand in this process, with its own defaults.

Its environment variables (pool size, one process) are set by who starts this script, before vLLM is imported.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any


def load(setup: dict[str, Any]) -> tuple[Callable[[list[list[int]], int], dict[str, Any]], dict[str, Any]]:
    """Load the folder `setup["model"]`; it has no tokenizer, and needs none for token ids."""
    import vllm

    llm = vllm.LLM(
        setup["model"],
        dtype=setup["dtype"],
        skip_tokenizer_init=True,
        max_model_len=setup["context"],
        enable_prefix_caching=False,
        max_num_seqs=max(setup["max_seqs"], 2),
    )
    engine = llm.llm_engine
    names = itertools.count()

    def generate(prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        params = vllm.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        for prompt in prompts:
            engine.add_request(str(next(names)), {"prompt_token_ids": prompt}, params)
        made: dict[str, int] = {}
        first = None
        while engine.has_unfinished_requests():
            for output in engine.step():
                made[output.request_id] = len(output.outputs[0].token_ids)
            if first is None and len(made) == len(prompts):
                first = time.perf_counter()
        end = time.perf_counter()
        return {"total": end - start, "after_first": None if first is None else end - first, "made": list(made.values())}

    return generate, {"version": vllm.__version__}
