"""Without a compiler the install still works, says so once, and kvist runs on its NumPy twin."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from helpers.tiny_models import write_tiny_gguf

ROOT = Path(__file__).parents[2]
BUILT_FROM = ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "src", "csrc")
NO_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false"}
USE = """
from kvist import LLM, SamplingParams
llm = LLM({model!r}, max_model_len=64, num_kv_blocks=8)
output = llm.generate("hello", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
print(len(output[0].outputs[0].token_ids))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The programs' folder of an environment that kvist was installed in with no compiler, and what the installer said.

    Builds from a copy, so that no earlier build's cache knows a compiler. Dependencies are lent by the environment of this test.
    """
    folder = tmp_path_factory.mktemp("fallback")
    source = folder / "source"
    source.mkdir()
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.so", "__pycache__", "build"))
        else:
            shutil.copy(ROOT / name, source / name)
    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv" / "bin"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [programs / "python", "-m", "pip", "install", "-v", "--no-deps", source],
        env=environment | NO_COMPILER,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    site = subprocess.run(
        [programs / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    # Folders named in a .pth file come after the environment's own, so kvist itself is the one just installed.
    Path(site.stdout.strip(), "lent.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return programs, done.stdout + done.stderr


def run(programs: Path, home: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONWARNINGS")}
    return subprocess.run(
        [str(programs / command[0]), *command[1:]],
        env=environment | {"KVIST_CACHE": str(home)},
        cwd=home,
        capture_output=True,
        text=True,
    )


def test_the_installer_warns(installed: tuple[Path, str]) -> None:
    assert installed[1].count("no C++ compiler was found") == 1


def test_doctor_says_what_is_missing_and_fails(installed: tuple[Path, str], tmp_path: Path) -> None:
    done = run(installed[0], tmp_path, "kvist", "doctor", "--json", "--no-measure")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert (report["ok"], report["kernels"]["built"], report["kernels"]["in_use"]) == (False, [], "numpy")
    assert "No native kernels are built" in report["advice"][0]


def test_a_model_runs_with_one_warning(installed: tuple[Path, str], tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    done = run(installed[0], tmp_path, "python", "-c", USE.format(model=str(tmp_path / "tiny.gguf")))
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
    assert done.stderr.count("NumPy twin") == 1
