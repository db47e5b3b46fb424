"""The packed cache: what was packed is what is mapped; damage, full disks and other processes never show."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.tiny_models import write_tiny_gguf, write_tiny_hf
from kvist.errors import ModelFormatError
from kvist.kernels.ops import PackedLinear
from kvist.weights import fingerprint as fingerprint_module
from kvist.weights import pack
from kvist.weights.fingerprint import fingerprint_files
from kvist.weights.pack import PackedModel, load_packed, pack_key, packed_path, write_packed
from kvist.weights.packfile import PackWriter
from kvist.weights.source import open_model

FILES = {"tokenizer": b"\x00\x01 some bytes", "empty": b""}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "m.gguf", quant={"default": "Q4_1", "token_embd.weight": "Q8_0"}, arch="qwen2", tied=False)


def packed_file(cache: Path) -> Path:
    (path,) = (cache / "packed").glob("*.kvist")
    return path


def write(path: Path, quantization: Any = None, files: dict[str, bytes] = FILES, dtype: str = "auto") -> PackedModel:
    return write_packed(path, open_model(path), quantization, files, dtype)


def assert_same(model: PackedModel, path: Path, quantization: Any = None, dtype: str = "auto") -> None:
    """`model` is what the files give, array for array."""
    source = open_model(path)
    want = dict(source.packed(quantization, dtype))
    assert model.linears.keys() | model.vectors.keys() == want.keys()
    for name, tensor in want.items():
        if not isinstance(tensor, PackedLinear):
            assert model.vectors[name].tobytes() == tensor.tobytes()
            continue
        got = model.linears[name]
        assert (got.format, got.n, got.k) == (tensor.format, tensor.n, tensor.k)
        for left, right in zip(
            (got.data, got.scale, got.minimum, got.bias), (tensor.data, tensor.scale, tensor.minimum, tensor.bias), strict=True
        ):
            assert (left is None) is (right is None)
            if left is not None and right is not None:
                assert (left.dtype, left.shape) == (right.dtype, right.shape)
                assert left.tobytes() == right.tobytes()
    assert model.config == source.config


def arrays(model: PackedModel) -> list[np.ndarray]:
    linears = [a for linear in model.linears.values() for a in (linear.data, linear.scale, linear.minimum, linear.bias)]
    return [a for a in (*linears, *model.vectors.values()) if a is not None]


@pytest.mark.parametrize(("quantization", "dtype"), [(None, "auto"), (None, "bf16"), ("w8a8", "auto"), ("w4a8", "auto")])
def test_what_is_mapped_is_what_was_packed(tmp_path: Path, quantization: Any, dtype: str) -> None:
    path = write_tiny_hf(tmp_path / "hf", arch="qwen3", config={"sliding_window": 32, "use_sliding_window": True,
                         "max_window_layers": 1})  # fmt: skip
    assert load_packed(path, quantization, dtype) is None
    assert_same(write(path, quantization, dtype=dtype), path, quantization, dtype)
    loaded = load_packed(path, quantization, dtype)
    assert loaded is not None
    assert_same(loaded, path, quantization, dtype)
    assert loaded.config.windows == (None, 32)
    assert dict(loaded.files) == FILES
    assert loaded.key == pack_key(open_model(path).fingerprint, quantization, dtype)


def test_arrays_are_mapped_aligned_and_read_only(model: Path) -> None:
    for array in arrays(write(model)):
        assert not array.flags["WRITEABLE"]
        assert not array.flags["OWNDATA"]
        assert array.ctypes.data % 64 == 0
        assert array.flags["C_CONTIGUOUS"]


def test_each_choice_has_its_own_pack(tmp_path: Path) -> None:
    path = write_tiny_hf(tmp_path / "hf")
    keys = {write(path).key, write(path, "w8a8").key, write(path, "w4a8").key, write(path, dtype="f16").key}
    assert len(keys) == 4
    assert write(path).key in keys
    other = write_tiny_hf(tmp_path / "other", seed=1)
    assert write(other).key not in keys


def test_freq_factors_and_notes_survive(tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": np.array([1, 1.1, 2, 3, 4, 5, 6, 7], np.float32)}
    path = write_tiny_gguf(tmp_path / "m.gguf", extra=extra, omit=["{arch}.context_length"])
    write(path)
    loaded = load_packed(path)
    assert loaded is not None
    assert loaded.config == open_model(path).config
    assert loaded.config.rope.freq_factors is not None
    assert loaded.notes == open_model(path).notes
    assert len(loaded.notes) == 1


def test_notes_tell_where_quantization_did_nothing(model: Path, tmp_path: Path) -> None:
    notes = write(model, "w8a8").notes
    assert notes == ("15 matrices (head ...) are in 4 bits in the file already; w8a8 leaves them so.",)
    odd = write(write_tiny_hf(tmp_path / "odd", hidden=48, heads=3, kv_heads=1), "w4a8").notes
    assert len(odd) == 1
    assert "no multiple of 32 and stay unquantized" in odd[0]


def test_warm_start_opens_no_library_of_model_files(model: Path) -> None:
    write(model)
    code = (
        "import sys; from kvist.weights.pack import load_packed; from kvist.weights.hub import resolve_model; "
        f"assert len(load_packed(resolve_model({str(model)!r})).linears) == 16; "
        "print([m for m in ('gguf', 'safetensors', 'huggingface_hub', 'ml_dtypes', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


RACER = """
import sys, time, pathlib
from kvist.weights import packfile
from kvist.weights.source import open_model
from kvist.weights.pack import write_packed
finished = 0
real = packfile.PackWriter.finish
def finish(self, header):
    global finished
    finished += 1
    time.sleep(0.2)
    real(self, header)
packfile.PackWriter.finish = finish
path = pathlib.Path(sys.argv[1])
source = open_model(path)
print("ready", flush=True)
sys.stdin.readline()
model = write_packed(path, source, None, {"f": b"x"})
print(finished, len(model.linears), model.notes)
"""


def test_two_processes_pack_once(model: Path, cache: Path) -> None:
    racers = [
        subprocess.Popen([sys.executable, "-c", RACER, str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    outputs = []
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    for racer in racers:
        outputs.append(racer.communicate(timeout=60)[0].strip())
        assert racer.returncode == 0
    assert sorted(outputs) == ["0 16 ()", "1 16 ()"]
    loaded = load_packed(model)
    assert loaded is not None
    assert_same(loaded, model)
    assert [path.suffix for path in sorted((cache / "packed").iterdir())] == [".kvist", ".lock"]


def test_a_damaged_pack_is_made_again(model: Path, cache: Path) -> None:
    write(model)
    path = packed_file(cache)
    sound = path.read_bytes()
    header = int.from_bytes(sound[16:24], "little")
    damaged = [sound[:cut] for cut in (0, 1, 63, 64, 100, header, len(sound) - 1)]
    damaged += [sound + b"x", b"GGUF" + sound[4:], bytes(len(sound))]
    for at in (0, 8, 16, 24, 32, 63, header, header + 10, len(sound) - 1):
        damaged.append(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
    for raw in damaged:
        path.unlink()
        path.write_bytes(raw)
        assert load_packed(model) is None
    again = write(model)
    assert_same(again, model)
    assert path.read_bytes() == sound


def test_a_damaged_file_inside_is_noticed(model: Path, cache: Path) -> None:
    write(model)
    path = packed_file(cache)
    raw = path.read_bytes()
    at = raw.index(FILES["tokenizer"])
    path.unlink()
    path.write_bytes(raw[:at] + b"!" + raw[at + 1 :])
    assert load_packed(model) is None


def test_a_header_of_another_shape_is_no_pack(model: Path, cache: Path) -> None:
    write(model)
    path = packed_file(cache)
    for header in ({}, {"linears": {"q": [1]}}, {"linears": {}, "vectors": {"n": [64, "object", [1]]}, "files": {}, "config": {}}):
        with path.open("wb") as file:
            PackWriter(file).finish(header)
        assert load_packed(model) is None


def test_other_files_replace_the_pack(model: Path) -> None:
    write(model, files={"tokenizer": b"old"})
    assert dict(write(model, files={"tokenizer": b"new"}).files) == {"tokenizer": b"new"}
    loaded = load_packed(model)
    assert loaded is not None
    assert dict(loaded.files) == {"tokenizer": b"new"}


class Replaced:
    """A source whose file is replaced while its tensors are read."""

    def __init__(self, path: Path, other: bytes) -> None:
        self._source, self._path, self._other = open_model(path), path, other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def packed(self, quantization: Any = None, dtype: str = "auto") -> Any:
        yield from self._source.packed(quantization, dtype)
        new = self._path.with_suffix(".new")
        new.write_bytes(self._other)
        new.replace(self._path)


@pytest.mark.parametrize("writable", [True, False])
def test_a_file_replaced_while_it_is_packed_is_refused(model: Path, cache: Path, tmp_path: Path, writable: bool) -> None:
    if not writable:
        cache.write_bytes(b"no folder")
    other = write_tiny_gguf(tmp_path / "other.gguf", seed=9).read_bytes()
    source: Any = Replaced(model, other)
    with pytest.raises(ModelFormatError, match="changed while it was being read"):
        write_packed(model, source, None, FILES)
    assert load_packed(model) is None
    assert list(cache.rglob("*.kvist")) + list(cache.rglob("*.tmp")) == []
    assert_same(write(model), model)


def test_a_file_replaced_after_it_was_opened_keeps_its_key(model: Path, tmp_path: Path) -> None:
    source = open_model(model)
    write_tiny_gguf(tmp_path / "other.gguf", seed=9).replace(model)
    assert source.fingerprint != open_model(model).fingerprint


def test_names_that_are_no_unicode(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"m\xff")
    folder.mkdir()
    for path in (write_tiny_gguf(folder / "m.gguf"), write_tiny_hf(folder / os.fsdecode(b"hf\xfe"), shards=2)):
        assert load_packed(path) is None
        assert_same(write(path), path)
        assert load_packed(path) is not None


def test_only_files_and_folders_are_models(tmp_path: Path) -> None:
    pipe = tmp_path / "m.gguf"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(ModelFormatError, match="neither a file nor a folder"):
            load_packed(path)


def test_what_a_dead_process_left_is_swept(model: Path, cache: Path) -> None:
    target = packed_path(pack_key(open_model(model).fingerprint, None, "auto"))
    target.parent.mkdir(parents=True)
    leftover = target.with_name(f"{target.stem}.999999.tmp")
    leftover.write_bytes(b"half a pack")
    write(model)
    assert not leftover.exists()
    assert packed_file(cache) == target


class FullDisk:
    """Fails the n-th call of write, fsync or replace; counts the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail_at: int, code: int) -> None:
        self.calls, self.fail_at, self.code = 0, fail_at, code
        monkeypatch.setattr(PackWriter, "_write", self._around(PackWriter._write))
        monkeypatch.setattr(pack.os, "fsync", self._around(os.fsync))
        monkeypatch.setattr(pack.Path, "replace", self._around(Path.replace))

    def _around(self, real: Any) -> Any:
        def call(*args: Any) -> Any:
            self.calls += 1
            if self.calls == self.fail_at:
                raise OSError(self.code, os.strerror(self.code))
            return real(*args)

        return call


def test_the_nth_write_fails_for_every_n(tmp_path: Path, cache: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", layers=1)
    failures = 0
    for n in range(1, 1000):
        with pytest.MonkeyPatch.context() as patch:
            disk = FullDisk(patch, n, errno.ENOSPC)
            model = write(path)
            failed = disk.calls >= n
        names = {file.suffix for file in (cache / "packed").iterdir()}
        assert ".tmp" not in names
        assert_same(model, path)
        assert dict(model.files) == FILES
        if not failed:
            break
        failures += 1
        if ".kvist" in names:
            # Only the folder's own sync failed: the pack is whole, and a crash could at worst lose it.
            packed_file(cache).unlink()
            assert model.notes == ()
            continue
        assert len(model.notes) == 1
        assert "the disk is full; free some space, or set KVIST_CACHE" in model.notes[0]
    assert failures > 25
    assert model.notes == ()


def test_a_cache_folder_that_cannot_be_made(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path / "file"))
    assert load_packed(model) is None
    packed = write(model)
    assert_same(packed, model)
    assert len(packed.notes) == 1
    assert "set KVIST_CACHE to a folder that can be written" in packed.notes[0]
    assert packed.key == pack_key(open_model(model).fingerprint, None, "auto")


def test_packing_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    path = write_tiny_hf(tmp_path / "hf", layers=12, hidden=256, heads=4, kv_heads=4, intermediate=512)
    source = open_model(path)
    largest = 512 * 256 * 4
    tracemalloc.start()
    write_packed(path, source, None, {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (path / "model.safetensors").stat().st_size > 50 * largest
    assert peak < 8 * largest


# The fingerprint and its memory.


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were really read."""
    names: list[str] = []
    real = fingerprint_module._hash

    def count(paths: Any) -> str:
        names.extend(path.name for path in paths)
        return real(paths)

    monkeypatch.setattr(fingerprint_module, "_hash", count)
    monkeypatch.setattr(fingerprint_module, "TICK_NS", 0)
    return names


def test_a_file_is_read_once(tmp_path: Path, hashed: list[str]) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"abc")
    want = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert fingerprint_files([path]) == want == fingerprint_files([path])
    assert hashed == ["a.bin"]
    link = tmp_path / "link.bin"
    link.symlink_to(path)
    assert fingerprint_files([link]) == want


def test_any_change_is_noticed(tmp_path: Path, hashed: list[str]) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"abc")
    before = fingerprint_files([path])
    stat = path.stat()
    path.write_bytes(b"abd")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert fingerprint_files([path]) != before
    assert hashed == ["a.bin", "a.bin"]


def test_a_file_changed_just_now_is_not_remembered(tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint_module, "TICK_NS", 10**15)
    path = tmp_path / "a.bin"
    path.write_bytes(b"abc")
    assert fingerprint_files([path]) == fingerprint_files([path])
    assert hashed == ["a.bin", "a.bin"]


def test_a_damaged_memory_only_costs_the_hashing(tmp_path: Path, cache: Path, hashed: list[str]) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"abc")
    want = fingerprint_files([path])
    (memory,) = (cache / "fingerprints").iterdir()
    for text in ("", "zz" * 32, "\xff"):
        memory.write_text(text)
        assert fingerprint_files([path]) == want
    assert len(hashed) == 4


def test_a_memory_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, cache: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str, **_: Any) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "a.bin"
    path.write_bytes(b"abc")
    monkeypatch.setattr(Path, "write_text", full)
    assert fingerprint_files([path]) == fingerprint_files([path])
    assert (hashed, list((cache / "fingerprints").iterdir())) == (["a.bin", "a.bin"], [])


def test_every_file_of_a_folder_counts(tmp_path: Path) -> None:
    folder = write_tiny_hf(tmp_path / "hf", shards=2)
    seen = {open_model(folder).fingerprint}
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        text = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**text, "_": 0}))
        seen.add(open_model(folder).fingerprint)
    (folder / "chat_template.jinja").write_text("x")
    seen.add(open_model(folder).fingerprint)
    assert len(seen) == 6
    (folder / "README.md").write_text("x")
    assert open_model(folder).fingerprint in seen
