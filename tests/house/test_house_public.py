"""The public names: there, resolvable, cheap to import, and in the words that users of other engines type."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import fields

import kvist
from kvist.config import EngineOptions
from kvist.request import SamplingParams

OPTIONS = (
    "model", "dtype", "quantization", "kv_cache_dtype", "max_model_len", "block_size", "num_kv_blocks", "kv_cache_memory",
    "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "kv_allocator", "num_threads", "isa", "seed", "use_cache",
)  # fmt: skip
PARAMS = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs", "seed",
)  # fmt: skip


def test_every_public_name_resolves() -> None:
    assert {"LLM", "SamplingParams", "RequestOutput", "EngineConfig", "KvistError"} <= set(kvist.__all__)
    assert set(kvist.__all__) <= set(dir(kvist))
    for name in kvist.__all__:
        assert getattr(kvist, name) is not None


def test_options_and_parameters_have_the_usual_words() -> None:
    assert set(OPTIONS) <= {field.name for field in fields(EngineOptions)}
    assert set(PARAMS) <= {field.name for field in fields(SamplingParams)}


def test_importing_kvist_imports_nothing_heavy() -> None:
    code = "import sys, kvist; print([name for name in ('numpy', 'torch', 'fastapi', 'tokenizers', 'gguf') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_an_llm_imports_nothing_that_it_may_never_need() -> None:
    """A process pays for each of these at its start: they come with the first request, model or option that takes them."""
    later = (
        "torch", "transformers", "fastapi", "pydantic", "typer", "rich", "jinja2", "llguidance", "gguf", "safetensors",
        "huggingface_hub", "prometheus_client", "asyncio", "subprocess", "tempfile", "zipfile", "argparse",
        "kvist.engine.async_engine", "kvist.engine.constraints", "kvist.engine.kv_view", "kvist.engine.tiers",
        "kvist.engine.transfers", "kvist.kernels.reference", "kvist.kv.contiguous", "kvist.kv.span_manager", "kvist.kv.virtual",
        "kvist.store.disk", "kvist.store.tier", "kvist.text.build", "kvist.text.grammar", "kvist.text.sandbox",
        "kvist.text.tool_formats", "kvist.text.tool_parser", "kvist.weights.source", "kvist.weights.wheels",
    )  # fmt: skip
    code = f"import sys; from kvist import LLM; print([name for name in {later} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    assert all(importlib.util.find_spec(name) for name in later if name.startswith("kvist."))
