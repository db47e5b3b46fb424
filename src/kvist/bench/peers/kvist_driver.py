"""kvist as a contender, through its public class; the one driver that imports kvist.

`setup["options"]` are EngineOptions' fields as the user gave them; a pool for `context` tokens is what a peer is given too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def load(setup: dict[str, Any]) -> tuple[Callable[[list[list[int]], int], dict[str, Any]], dict[str, Any]]:
    """Load the model; `setup["cold"]` asks for a context of `setup["context"]` where the user named none."""
    from kvist import LLM, SamplingParams, __version__

    options = dict(setup["options"])
    if setup["cold"] and options["max_model_len"] is None:
        options["max_model_len"] = setup["context"]
    llm = LLM(**options)

    def generate(prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        total = time.perf_counter() - start
        first = max(output.usage.time_to_first_token if output.usage else total for output in outputs)
        return {"total": total, "after_first": total - first, "made": [len(output.outputs[0].token_ids) for output in outputs]}

    config = llm.engine.config
    return generate, {"version": __version__, "isa": config.isa, "profile": config.profile, "threads": config.num_threads}
