"""Whatever the bytes of a GGUF file, the outcome is a model or one sentence; never another exception, nor a hang."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from helpers.tiny_models import write_tiny_gguf
from kvist.errors import ModelError, ModelFormatError, UnsupportedModelError
from kvist.weights.gguf_file import read_gguf
from kvist.weights.source import open_model


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_tiny_gguf(tmp_path_factory.mktemp("sound") / "m.gguf", quant="Q4_0", layers=1).read_bytes()


def header_size(path: Path) -> int:
    return min(info.start for info in read_gguf(path).tensors.values())


def outcome(path: Path) -> str:
    """ "ok", or the name of the error; packs too, as damage may show only there."""
    try:
        for _ in open_model(path).packed():
            pass
    except ModelError as caught:
        error = caught
    else:
        return "ok"
    assert str(path) in str(error)
    assert "\n" not in str(error)
    return type(error).__name__


def test_every_truncation_is_one_sentence(sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(sound)
    header = header_size(path)
    assert outcome(path) == "ok"
    cuts = [*range(64), *range(64, header, 61), *range(header, len(sound), 9973), len(sound) - 1]
    for cut in cuts:
        path.write_bytes(sound[:cut])
        with pytest.raises(ModelFormatError, match=r"m\.gguf is no sound GGUF file: .*; fetch it again or convert it anew\.$"):
            open_model(path)


def test_random_flips_in_the_header_never_give_another_error(sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(sound)
    header = header_size(path)
    rng = np.random.default_rng(7)
    seen, traced = set(), 40
    tracemalloc.start()
    for i in range(250):
        raw = bytearray(sound)
        for at in rng.integers(0, header, size=rng.integers(1, 4)):
            raw[at] = rng.integers(0, 256)
        path.write_bytes(raw)
        seen.add(outcome(path))
        if i == traced:
            # Tracing is slow: the others run without it.
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    assert {"ok", "ModelFormatError", "UnsupportedModelError"} >= seen >= {"ok", "ModelFormatError"}
    assert peak < 200 << 20


def test_every_byte_of_the_first_kilobyte_set_to_ones(sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    outcomes = []
    for at in range(0, 1024, 4):
        raw = bytearray(sound)
        raw[at] = 255
        path.write_bytes(raw)
        outcomes.append(outcome(path))
    assert outcomes[:4] == ["ModelFormatError"] * 4
    assert outcomes.count("ModelFormatError") > 80


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "does not begin with the letters GGUF"),
        (b"PK\x03\x04 a zip file of some length", "does not begin with the letters GGUF"),
        (b"GGUF", "ends inside its header"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1, and 2 and 3 are known"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "announces 1152921504606846976 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "announces 1152921504606846976 metadata entries"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62) + bytes(64), "bytes of text, more than it has room for"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 4, 2**61) + bytes(64), "values, more than it has room for"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 9, 1) + b"\x09\0\0\0\x01\0\0\0\0\0\0\0" * 9, "unknown type 9"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"\xff", 4) + bytes(64), "not text"),
    ],
)
def test_foreign_and_lying_files(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    with pytest.raises(ModelFormatError, match=message):
        open_model(path)


def test_no_architecture_is_unsupported(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + bytes(64))
    with pytest.raises(UnsupportedModelError, match="names no architecture"):
        open_model(path)


def test_a_folder_named_like_a_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").mkdir()
    with pytest.raises(ModelError, match=r"neither config\.json nor a GGUF file"):
        open_model(tmp_path / "m.gguf")
