"""Makes `helpers` importable from every test folder (pytest puts this file's folder on the path), and lends the machines.

`ops` runs a test once for every instruction-set build that this machine can run, the NumPy twin included.
"""

from __future__ import annotations

import pytest

from helpers.machines import ISAS, make_ops
from kvist.kernels.ops import Ops


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-requests", type=int, default=200, help="How many requests the soak sends; the long form is 10000.")


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ops(isa: str) -> Ops:
    return make_ops(isa)
