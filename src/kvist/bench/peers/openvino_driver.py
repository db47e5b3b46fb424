"""OpenVINO GenAI: a GGUF file (or a folder of its own format) in its continuous batching pipeline, stepped by hand.

KV cache in the engine's own default format; a fixed pool where many requests run, one that grows where memory is measured.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

POOL_GIB = 2


def load(setup: dict[str, Any]) -> tuple[Callable[[list[list[int]], int], dict[str, Any]], dict[str, Any]]:
    """Load `setup["model"]`."""
    import numpy
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = 2048
    scheduler.cache_size = 0 if setup["cold"] else POOL_GIB
    properties = {"INFERENCE_NUM_THREADS": setup["threads"]} if setup["threads"] else {}
    pipeline = openvino_genai.ContinuousBatchingPipeline(setup["model"], scheduler, "CPU", properties)
    names = itertools.count()

    def generate(prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new_tokens, True, False
        tensors = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
        start = time.perf_counter()
        handles = [pipeline.add_request(next(names), tensor, config) for tensor in tensors]
        first = None
        while pipeline.has_non_finished_requests():
            pipeline.step()
            if first is None and all(handle.can_read() for handle in handles):
                first = time.perf_counter()
        end = time.perf_counter()
        made = [sum(len(output.generated_ids) for output in handle.read_all()) for handle in handles]
        return {"total": end - start, "after_first": None if first is None else end - first, "made": made}

    return generate, {"version": openvino_genai.__version__}
