"""The shared flags: one for each field, the same words with dashes, the objects' own defaults and checks."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

import pytest
from click.testing import CliRunner

from kvist.cli.options import engine_options, sampling_params, takes
from kvist.cli.params import make_command, option
from kvist.config import EngineOptions
from kvist.errors import ConfigError, InvalidRequestError
from kvist.request import SamplingParams


def parse(arguments: list[str], **defaults: Any) -> dict[str, Any]:
    """What a command with both bundles and a flag of its own receives."""
    seen: dict[str, Any] = {}

    @takes(engine=engine_options(**defaults), sampling=sampling_params(max_tokens=7))
    def command(engine: EngineOptions, sampling: SamplingParams, own: Annotated[str, option()] = "mine") -> None:
        """Help of the command."""
        seen.update(engine=engine, sampling=sampling, own=own)

    result = CliRunner().invoke(make_command(command, "command"), arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return seen


def test_without_flags_the_objects_own_defaults_hold() -> None:
    seen = parse([])
    assert seen == {"engine": EngineOptions(), "sampling": SamplingParams(max_tokens=7), "own": "mine"}


def test_a_command_may_have_defaults_of_its_own() -> None:
    assert parse([], max_num_seqs=1)["engine"] == EngineOptions(max_num_seqs=1)
    assert parse(["--max-num-seqs", "3"], max_num_seqs=1)["engine"] == EngineOptions(max_num_seqs=3)


def test_every_engine_option_has_its_flag() -> None:
    values: dict[str, tuple[list[str], Any]] = {
        "model": (["--model", "m.gguf"], "m.gguf"),
        "dtype": (["--dtype", "f16"], "f16"),
        "quantization": (["--quantization", "w8a8"], "w8a8"),
        "kv_cache_dtype": (["--kv-cache-dtype", "f32"], "f32"),
        "max_model_len": (["--max-model-len", "256"], 256),
        "block_size": (["--block-size", "32"], 32),
        "num_kv_blocks": (["--num-kv-blocks", "9"], 9),
        "kv_cache_memory": (["--kv-cache-memory", "2GiB"], "2GiB"),
        "max_num_seqs": (["--max-num-seqs", "2"], 2),
        "max_num_batched_tokens": (["--max-num-batched-tokens", "128"], 128),
        "enable_prefix_caching": (["--no-enable-prefix-caching"], False),
        "kv_allocator": (["--kv-allocator", "paged"], "paged"),
        "eviction_policy": (["--eviction-policy", "lru"], "lru"),
        "kv_pin_budget": (["--kv-pin-budget", "0.1"], 0.1),
        "kv_priority_budget": (["--kv-priority-budget", "0.2"], 0.2),
        "num_threads": (["--num-threads", "1"], 1),
        "pin_threads": (["--pin-threads"], True),
        "isa": (["--isa", "numpy"], "numpy"),
        "seed": (["--seed", "5"], 5),
        "use_cache": (["--no-use-cache"], False),
        "watermark": (["--watermark", "0.2"], 0.2),
        "kv_tiers": (["--kv-tiers", "disk=1GiB:/tmp/kvist-tier"], "disk=1GiB:/tmp/kvist-tier"),
        "kv_tier_fsync": (["--kv-tiers", "disk=1GiB:/tmp/kvist-tier", "--kv-tier-fsync", "never"], "never"),
    }
    assert set(values) == {field.name for field in fields(EngineOptions)}
    for name, (flags, value) in values.items():
        assert getattr(parse(flags)["engine"], name) == value


def test_sampling_flags() -> None:
    flags = ["--temperature", "0.5", "--top-p", "0.9", "--top-k", "3", "--min-p", "0.1", "--max-tokens", "4"]
    flags += ["--repetition-penalty", "1.2", "--stop", "a", "--stop", "b"]
    assert parse(flags)["sampling"] == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, max_tokens=4, repetition_penalty=1.2, stop=("a", "b")
    )


@pytest.mark.parametrize(
    ("flags", "error", "words"),
    [
        (["--isa", "sse9"], ConfigError, "isa must be one of auto, avx512bf16, avx512, avx2, portable, numpy, not 'sse9'"),
        (["--block-size", "7"], ConfigError, "block_size must be a multiple of 16"),
        (["--block-size", "65536"], ConfigError, "at most 8,192, not 65536"),
        (["--num-kv-blocks", "4", "--kv-cache-memory", "1GiB"], ConfigError, "num_kv_blocks and kv_cache_memory"),
        (["--top-p", "nan"], InvalidRequestError, "top_p must be a number in (0, 1]"),
        (["--temperature", "-1"], InvalidRequestError, "temperature must be a number"),
    ],
)
def test_a_bad_value_is_refused_by_the_object_before_anything_is_loaded(
    flags: list[str], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as raised:
        parse(flags)
    assert words in str(raised.value)
