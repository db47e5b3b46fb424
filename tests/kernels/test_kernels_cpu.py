"""Which native builds a processor can run, and in what order they are preferred, without such a processor."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvist.errors import ConfigError
from kvist.kernels import cpu

FLAGS = cpu.REQUIRED_FLAGS["avx512bf16"]


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Everything is built; the flags, and how the 16-bit dot product rounds, are the test's."""
    self = SimpleNamespace(flags=FLAGS, as_defined=True)
    monkeypatch.setattr(cpu, "built", lambda: tuple(cpu.REQUIRED_FLAGS))
    monkeypatch.setattr(cpu, "cpu_flags", lambda: self.flags)
    monkeypatch.setattr(cpu, "_import", lambda isa: SimpleNamespace(bf16_dot_as_defined=lambda: self.as_defined))
    return self


def test_a_build_needs_all_of_its_flags(processor: SimpleNamespace) -> None:
    for flags, expected in (
        ((), ("portable",)),
        (cpu.REQUIRED_FLAGS["avx2"], ("avx2", "portable")),
        (cpu.REQUIRED_FLAGS["avx512"], ("avx512", "avx2", "portable")),
        (cpu.REQUIRED_FLAGS["avx512"][:-1], ("avx2", "portable")),
    ):
        processor.flags = flags
        assert cpu.available() == expected


def test_16_bit_dot_products_come_first_only_where_they_are_fast(processor: SimpleNamespace) -> None:
    assert cpu.available() == ("avx512", "avx512bf16", "avx2", "portable")
    processor.flags = (*FLAGS, cpu.FAST_BF16_DOT)
    assert cpu.available() == ("avx512bf16", "avx512", "avx2", "portable")


def test_16_bit_dot_products_that_round_otherwise_are_not_used(processor: SimpleNamespace) -> None:
    processor.flags, processor.as_defined = (*FLAGS, cpu.FAST_BF16_DOT), False
    assert cpu.available() == ("avx512", "avx2", "portable")
    with pytest.raises(ConfigError, match="isa=avx512bf16 relies on a rounding"):
        cpu.make_ops("avx512bf16", 1)


def test_missing_flags_are_named(processor: SimpleNamespace) -> None:
    processor.flags = cpu.REQUIRED_FLAGS["avx512"]
    with pytest.raises(ConfigError, match=r"isa=avx512bf16 needs CPU flags that this machine lacks \(avx512bf16\)"):
        cpu.make_ops("avx512bf16", 1)


def test_every_build_here_has_the_dot_product_of_its_definition() -> None:
    for isa in cpu.available():
        module = cpu._import(isa)
        assert module is not None
        assert module.bf16_dot_as_defined()
