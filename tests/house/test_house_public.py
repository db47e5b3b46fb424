"""The public names: there, resolvable, cheap to import, and in the words that users of other engines type."""

from __future__ import annotations

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


def test_making_an_llm_imports_no_torch_and_no_server() -> None:
    code = (
        "import sys; from kvist import LLM; print([name for name in ('torch', 'fastapi', 'transformers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
