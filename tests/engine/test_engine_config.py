"""Options resolved: sizes of the pool, limits of the machine, and a sentence for every combination that cannot be."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from kvist.config import EngineOptions, ModelConfig, check_options, describe_pool, resolve
from kvist.errors import ConfigError
from kvist.machine import available_cpus, available_memory
from kvist.sizes import format_bytes, parse_memory

MODEL = ModelConfig("llama", 49152, 576, 30, 9, 3, 64, 1536, 8192)
BLOCK = 16 * 30 * 2 * 3 * 64 * 2


def resolved(model=MODEL, *, free_memory=10 * 2**30, isa="avx2", **options):
    return resolve(EngineOptions(**options), model, isa=isa, profile="p", num_threads=2, free_memory=free_memory)


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (123456, 123456),
        ("123456", 123456),
        ("2GiB", 2**31),
        ("2g", 2**31),
        ("2GB", 2 * 10**9),
        ("1.5 MiB", 3 * 2**19),
        ("40%", 400),
        ("0.4", 400),
        (0.4, 400),
        ("1.0", 1000),
        ("100%", 1000),
    ],
)
def test_memory_in_words(value, size):
    assert parse_memory(value, free=1000) == size


@pytest.mark.parametrize("value", ["", "lots", "-1", "0", "0%", "101%", "1.5", "2XB", "nan", "1e9", True])
def test_memory_refused(value):
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        parse_memory(value, free=1000)


def test_pool_by_blocks_by_bytes_and_by_share():
    assert resolved(num_kv_blocks=77).num_kv_blocks == 77
    assert resolved(kv_cache_memory=10 * BLOCK + 5).num_kv_blocks == 10
    assert resolved(kv_cache_memory="50%", free_memory=40 * BLOCK).num_kv_blocks == 20


def test_default_pool_is_what_is_needed_or_a_share_of_what_is_free():
    assert resolved(max_num_seqs=2, max_model_len=160, free_memory=10**12).num_kv_blocks == 20
    assert resolved(free_memory=100 * BLOCK).num_kv_blocks == 40


def test_a_small_pool_starts_and_says_what_it_holds():
    config = resolved(num_kv_blocks=10)
    assert (config.max_model_len, config.pool_tokens, config.effective_max_len) == (8192, 160, 160)
    text = describe_pool(config)
    for part in ("10 blocks", "160 tokens", "bf16", format_bytes(10 * BLOCK), "8,192", "at most"):
        assert part in text
    assert "at most" not in describe_pool(resolved(max_model_len=100, num_kv_blocks=10))


@pytest.mark.parametrize("options", [{"num_kv_blocks": 41}, {"kv_cache_memory": 41 * BLOCK}, {"num_kv_blocks": 10**12}])
def test_a_pool_beyond_the_free_memory_is_refused(options):
    with pytest.raises(ConfigError, match=rf"KV pool of .* is more than the {format_bytes(40 * BLOCK)} .* lower num_kv_blocks"):
        resolved(free_memory=40 * BLOCK, **options)
    assert resolved(free_memory=40 * BLOCK, num_kv_blocks=40).num_kv_blocks == 40


def test_a_pool_without_room_for_one_block_is_refused():
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        resolved(kv_cache_memory=BLOCK - 1)


def test_windowed_layers_share_the_pool_in_groups():
    model = replace(MODEL, layer_windows=(512, 512, None) * 10)
    config = resolved(model, num_kv_blocks=30)
    assert len(config.spec.groups) == 3
    assert config.spec.block_bytes == BLOCK // 3
    # A group whose window is 512 never holds more than 33 blocks; the full group grows on.
    assert config.pool_tokens == 160
    assert resolved(model, num_kv_blocks=300).pool_tokens == 234 * 16
    assert resolved(model, max_num_seqs=2, free_memory=10**12).num_kv_blocks == 2 * (512 + 2 * 33)
    assert "room for 1.5 sequences of 8,192 tokens" in describe_pool(resolved(model, num_kv_blocks=900))


def test_context_beyond_the_models_own():
    with pytest.raises(ConfigError, match=r"9000.*8192"):
        resolved(max_model_len=9000)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_size": 24}, "block_size"),
        ({"block_size": 0}, "block_size"),
        ({"isa": "sse9"}, "isa"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype"),
        ({"quantization": "w1"}, "quantization"),
        ({"quantization": "w4a8", "dtype": "bf16"}, "dtype"),
        ({"dtype": "f8"}, "dtype"),
        ({"kv_allocator": "buddy"}, "kv_allocator"),
        ({"eviction_policy": "mru"}, "eviction_policy"),
        (
            {"kv_allocator": "virtual", "eviction_policy": "density"},
            "eviction_policy is for paged memory, not kv_allocator=virtual",
        ),
        ({"kv_allocator": "virtual", "kv_pin_budget": 0.25}, "kv_pin_budget is for paged memory"),
        ({"kv_allocator": "virtual", "kv_priority_budget": 0.5}, "kv_priority_budget is for paged memory"),
        ({"kv_pin_budget": float("nan")}, "kv_pin_budget is the share"),
        ({"kv_priority_budget": 0.0}, "kv_priority_budget is the share"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": True}, "max_num_batched_tokens"),
        ({"num_threads": -1}, "num_threads"),
        ({"num_threads": 100_000}, "num_threads"),
        ({"num_kv_blocks": 0}, "num_kv_blocks"),
        ({"num_kv_blocks": 5, "kv_cache_memory": "1GiB"}, "kv_cache_memory"),
        ({"kv_cache_memory": "some"}, "kv_cache_memory"),
        ({"watermark": float("nan")}, "watermark"),
        ({"watermark": 1.0}, "watermark"),
        ({"seed": "x"}, "seed"),
        ({"model": 5}, "model"),
        ({"model": None}, "model"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching"),
        ({"use_cache": 0}, "use_cache"),
    ],
)
def test_refusals_name_the_option(options, words):
    with pytest.raises(ConfigError, match=words):
        check_options(EngineOptions(**options))


def test_native_kernels_want_heads_in_pieces():
    model = replace(MODEL, head_dim=20)
    with pytest.raises(ConfigError, match=r"head_dim is 20.*isa=numpy"):
        resolved(model)
    assert resolved(model, isa="numpy").spec.head_dim == 20


def machine(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:       1000 kB\nMemAvailable:    800 kB\n"


def test_memory_of_the_machine(tmp_path):
    assert available_memory(machine(tmp_path, {"proc/meminfo": MEMINFO})) == 800 * 1024


def test_memory_of_a_container_version_2(tmp_path):
    """The tightest of the cgroup and its parents counts; file pages that can be dropped are not in use."""
    group = "sys/fs/cgroup"
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/a/b\n",
        f"{group}/a/b/memory.max": "max\n",
        f"{group}/a/b/memory.current": "1000\n",
        f"{group}/a/memory.max": "300000\n",
        f"{group}/a/memory.current": "200000\n",
        f"{group}/a/memory.stat": "anon 5\ninactive_file 50000\n",
    }
    assert available_memory(machine(tmp_path, files)) == 150000


def test_memory_of_a_container_version_1(tmp_path):
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "5:memory:/box\n1:cpu,cpuacct:/box\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "400000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "390000\n",
    }
    assert available_memory(machine(tmp_path, files)) == 10000


def test_cpus_by_quota(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert available_cpus(tmp_path) == 8
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}
    assert available_cpus(machine(tmp_path, files)) == 3
    machine(tmp_path, {"sys/fs/cgroup/cpu.max": "max 100000\n"})
    assert available_cpus(tmp_path) == 8


def test_importing_kvist_is_cheap():
    code = "import sys, kvist; print(sorted(set(sys.modules) & {'numpy', 'pydantic', 'jinja2', 'tokenizers', 'kvist.engine'}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_public_names_are_all_there():
    import kvist

    assert len(kvist.__all__) == 25
    assert all(getattr(kvist, name) is not None for name in kvist.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = kvist.nothing
