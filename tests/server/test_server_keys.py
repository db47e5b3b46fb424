"""Where keys come from, which one was given, and what follows from it: files that change, damaged ones, salts."""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvist.errors import ConfigError
from kvist.server import keys as keys_module
from kvist.server.keys import KeyRing, make_key, parse_key_file


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def replace(path: Path, text: str) -> None:
    """As an operator should: by renaming."""
    other = path.with_suffix(".new")
    other.write_text(text)
    os.replace(other, path)


def names(ring: KeyRing, *texts: str) -> list[str | None]:
    return [None if (key := ring.find(text.encode())) is None else key.name for text in texts]


def test_a_key_file_has_names_comments_and_empty_lines() -> None:
    keys = parse_key_file("# ours\n\nalice k-1\n  k-2  \r\nbob k-1\n", "F")
    assert [key.name for key in keys] == ["alice", hashlib.sha256(b"k-2").hexdigest()[:8]]


@pytest.mark.parametrize("text", ["ok\na b c\n", "ok\nschlüssel\n", "ok\nname \x7f\n"])
def test_a_bad_line_is_named_and_not_shown(text: str) -> None:
    with pytest.raises(ConfigError, match="line 2") as error:
        parse_key_file(text, "F")
    assert text.split("\n")[1] not in str(error.value)


def test_the_file_is_read_again_when_it_changed_but_not_at_each_request(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    path.write_text("one k1\n")
    ring = KeyRing(["given"], path, clock=clock)
    assert names(ring, "k1", "k2", "given") == ["one", None, make_key("given").name]
    replace(path, "two k2\n")
    clock.now = 0.5
    assert names(ring, "k1", "k2") == ["one", None]
    clock.now = 1.5
    assert names(ring, "k1", "k2", "given") == [None, "two", make_key("given").name]


def test_an_emptied_file_lets_nobody_in_and_a_missing_or_damaged_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "keys", Clock()
    path.write_text("k1\n")
    ring = KeyRing([], path, clock=clock)
    with caplog.at_level(logging.INFO, "kvist.server"):
        path.unlink()
        clock.now += 2
        assert ring.find(b"k1") is not None
        replace(path, "k1 and more\n")
        clock.now += 2
        assert ring.find(b"k1") is not None
        assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
        replace(path, "# nobody\n")
        clock.now += 2
        assert ring.find(b"k1") is None
        assert ring.find(b"") is None
    assert "0 keys" in caplog.messages[-1]
    assert "k1" not in caplog.text


def test_a_file_of_no_keys_is_refused_at_start(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    for text in ("", "# later\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="no key"):
            KeyRing([], path)
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyRing(["k"], tmp_path / "nowhere")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not text"):
        KeyRing([], path)


def test_every_look_up_compares_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = KeyRing([f"k{i}" for i in range(5)])
    compared: list[tuple[bytes, bytes]] = []
    real = keys_module.hmac.compare_digest

    def counting(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return real(one, other)

    monkeypatch.setattr(keys_module.hmac, "compare_digest", counting)
    for given in (b"k0", b"k4", b"nobody", b""):
        compared.clear()
        ring.find(given)
        assert len(compared) == 5
        assert {len(digest) for pair in compared for digest in pair} == {32}


def test_salts_differ_by_key_and_by_the_clients_own_salt_and_stay_the_same() -> None:
    salts = [make_key(key).salt(own) for key in ("a", "b") for own in ("", "x", "y")]
    assert len(set(salts)) == 6
    assert make_key("a", "renamed").salt("x") == salts[1]
