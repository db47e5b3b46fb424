"""How a pack lies in memory: mapped in huge pages, and read anew from disk once, so that the system's cache holds it in them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny_models import write_tiny_gguf
from kvist.weights import pack
from kvist.weights.pack import PackedModel, packed_path, write_packed
from kvist.weights.source import open_model


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path / "cache"))
    return write_tiny_gguf(tmp_path / "m.gguf", quant={"default": "Q4_1", "token_embd.weight": "Q8_0"}, arch="qwen2", tied=False)


def write(path: Path) -> PackedModel:
    return write_packed(path, open_model(path), None, {})


def flags_of_mapping(path: Path) -> list[str]:
    """What Linux knows of this process's mapping of a file."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    assert any(line.endswith(str(path)) for line in lines)
    return next(line.split()[1:] for line in lines if line.startswith("VmFlags:"))


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no huge pages to ask for")
def test_a_pack_is_mapped_in_huge_pages(model: Path) -> None:
    packed = write(model)
    assert "hg" in flags_of_mapping(packed_path(packed.key))


def test_a_new_pack_is_forgotten_between_sync_and_rename(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def noted(name: str, call: Any) -> Any:
        def around(*arguments: Any) -> Any:
            seen.append(name)
            return call(*arguments)

        return around

    monkeypatch.setattr(pack.os, "fsync", noted("fsync", os.fsync))
    monkeypatch.setattr(os, "posix_fadvise", noted("forget", os.posix_fadvise))
    monkeypatch.setattr(Path, "replace", noted("replace", Path.replace))
    write(model)
    assert seen[:3] == ["fsync", "forget", "replace"]
