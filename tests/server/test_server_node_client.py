"""The official `openai` package for Node, pointed at kvist over a real socket; its checks are in `node_client.mjs`.

Needs `node` and `npm`, and npm's registry once: the package is installed into a folder of this test run. Where they are missing the
test is skipped, unless KVIST_REQUIRE_NODE is set, as `.ci/run` does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from server_fakes import FakeEngine, serving, wait_until

from kvist.server.options import ServerOptions

SCRIPT = Path(__file__).with_name("node_client.mjs")
PACKAGE = "openai@6"


def unavailable(reason: str) -> None:
    if os.environ.get("KVIST_REQUIRE_NODE"):
        pytest.fail(f"{reason}, and KVIST_REQUIRE_NODE is set")
    pytest.skip(reason)


@pytest.fixture(scope="module")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package and the script."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            unavailable(f"{program} is not installed")
    folder = tmp_path_factory.mktemp("node")
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(folder), PACKAGE]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
    except subprocess.TimeoutExpired:
        unavailable("npm did not fetch the package in time")
    else:
        if result.returncode:
            unavailable(f"npm could not fetch {PACKAGE}: {result.stderr.strip()[-200:]}")
    shutil.copy(SCRIPT, folder)
    return folder


def test_the_official_node_package_works_unchanged(node_folder: Path) -> None:
    options = ServerOptions(api_keys=("key",), warm_up=False)
    engine = FakeEngine()
    # No answer but that which is left is so long.
    with serving(engine, options) as server, engine.held(after=300):
        command = ["node", SCRIPT.name, f"{server.url}/v1", "key"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=node_folder)
        assert result.returncode == 0, result.stdout + result.stderr
        wait_until(
            lambda: engine.running == engine.waiting == 0 and len(engine.aborted) == 1, "the stream that was left is aborted"
        )
    checks = re.findall(r"^  async (\w+)\(", SCRIPT.read_text(), re.MULTILINE)
    assert result.stdout.split() == [word for name in checks for word in ("ok", name)]
    assert len(checks) >= 7
