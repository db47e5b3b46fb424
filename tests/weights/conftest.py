"""Keeps the fingerprints of the tests' own files out of the user's cache folder."""

from __future__ import annotations

import pytest

from kvist.weights import fingerprint


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "TICK_NS", 10**18)
