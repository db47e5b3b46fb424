"""Hugging Face transformers: a folder of weights, `generate` with its default cache, on torch's CPU kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class _FirstToken:
    """A streamer that notes when the first new token came; the prompt is put first, then a token at a time."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


def load(setup: dict[str, Any]) -> tuple[Callable[[list[list[int]], int], dict[str, Any]], dict[str, Any]]:
    """Load the folder `setup["model"]`."""
    import torch
    import transformers

    if setup["threads"]:
        torch.set_num_threads(setup["threads"])
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(setup["model"], dtype=getattr(torch, setup["dtype"])).eval()

    def generate(prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        ids = torch.tensor(prompts)
        # Streamers take one sequence; more than one are only timed as a whole.
        streamer = _FirstToken() if len(prompts) == 1 else None
        start = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
                streamer=streamer,
            )
        end = time.perf_counter()
        return {
            "total": end - start,
            "after_first": end - streamer.times[1] if streamer else None,
            "made": [len(row) - ids.shape[1] for row in output],
        }

    return generate, {"version": f"{transformers.__version__}, torch {torch.__version__}"}
