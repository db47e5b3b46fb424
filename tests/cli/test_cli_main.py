"""The console script: which statuses it leaves with, what it says, and what it does not import."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from click.exceptions import Exit

from kvist.cli import main as cli
from kvist.cli.params import make_command
from kvist.errors import ConfigError, DownloadError, InvalidRequestError, KvistError, ModelNotFoundError

HEAVY = ("numpy", "torch", "fastapi", "uvicorn", "tokenizers", "gguf", "transformers", "pydantic_core", "jinja2", "rich")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "kvist.cli.main", *arguments], capture_output=True, text=True)


def status(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    return int(left.value.code or 0)


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom kvist.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as left:\n    assert left.code == 0\n"
        f"print('HEAVY', [name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"
    for command in cli.COMMANDS:
        assert f"\n  {command.name} " in done.stdout
        assert command.summary in done.stdout


@pytest.mark.parametrize("name", [command.name for command in cli.COMMANDS])
def test_a_commands_help_imports_nothing_heavy(name: str) -> None:
    code = (
        f"import sys\nfrom kvist.cli.main import main\ntry:\n    main([{name!r}, '--help'])\nexcept SystemExit:\n    pass\n"
        f"print('HEAVY', [name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_version() -> None:
    from kvist import __version__

    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"kvist {__version__}\n")


def test_without_a_command_the_help_is_shown_as_bad_usage() -> None:
    done = run()
    assert done.returncode == 2
    assert "Usage: kvist" in done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [["sevre"], ["--nonsense"], ["doctor", "--nonsense"], ["bench", "nonsense"]])
def test_bad_usage_is_status_2_without_a_traceback(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert status(arguments) == 2
    told = capsys.readouterr().err
    assert "No such" in told
    assert "Traceback" not in told


def test_a_misspelt_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["sevre"]) == 2
    assert "Did you mean 'serve'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KvistError("It broke."), 1),
        (ModelNotFoundError("No model x."), 1),
        (DownloadError("No network."), 1),
        (ConfigError("isa and isa."), 2),
        (InvalidRequestError("top_p is odd."), 2),
    ],
)
def test_our_errors_become_one_sentence_and_a_status(error: KvistError, expected: int, capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        raise error

    with pytest.raises(Exit) as left:
        cli.guarded(command)()
    assert left.value.exit_code == expected
    assert capsys.readouterr().err == f"kvist: {error}\n"


def test_a_file_error_names_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        Path("/nonexistent/file").read_text()

    with pytest.raises(Exit) as left:
        cli.guarded(command)()
    assert left.value.exit_code == 1
    assert capsys.readouterr().err == "kvist: /nonexistent/file: No such file or directory.\n"


def test_a_full_disk_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        Path("/dev/full").write_text("x")

    with pytest.raises(Exit) as left:
        cli.guarded(command)()
    assert left.value.exit_code == 1
    assert capsys.readouterr().err == "kvist: the disk is full; free some of it and try again.\n"


def test_an_interrupt_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        raise KeyboardInterrupt

    with pytest.raises(Exit) as left:
        cli.guarded(command)()
    assert left.value.exit_code == 130
    assert capsys.readouterr() == ("", "")


def test_a_warning_is_a_sentence_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        warnings.warn("It is slow here.", RuntimeWarning, stacklevel=1)

    monkeypatch.setattr(cli, "build_app", lambda wanted: make_command(command, "kvist"))
    before = warnings.showwarning
    assert status([]) == 0
    assert capsys.readouterr().err == "kvist: warning: It is slow here.\n"
    assert warnings.showwarning is before


def test_a_bug_keeps_its_traceback() -> None:
    def command() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cli.guarded(command)()


def test_only_the_command_asked_for_is_imported() -> None:
    code = (
        "import sys\nfrom kvist.cli.main import build_app\nbuild_app('bench')\n"
        "print(sorted(name for name in sys.modules if name.startswith('kvist.cli.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    parts = ("compare", "fragmentation", "memory", "prefix", "sweep", "tiers")
    names = ("bench", *(f"bench_{part}" for part in parts), "fetching", "main", "options", "params", "terminal")
    assert done.stdout == f"{[f'kvist.cli.{name}' for name in names]}\n"


def test_an_interrupt_while_the_command_line_is_imported_is_quiet() -> None:
    code = "import sys\nsys.modules['click'] = None\nimport kvist.cli\n"
    code += "class Stop:\n    def find_spec(self, name, *rest):\n        if name == 'kvist.cli.main': raise KeyboardInterrupt\n"
    code += "sys.meta_path.insert(0, Stop())\nkvist.cli.run()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", b"? ?\n"), ("utf-8", "\u6f22 ?\n".encode())])
def test_a_character_that_cannot_be_shown_is_a_question_mark(encoding: str, shown: bytes) -> None:
    code = (
        "from kvist.cli import main as cli\n"
        "def show() -> None: print('\\u6f22', '\\ud800')\n"
        "cli.build_app = lambda wanted: cli.make_command(show, 'kvist')\ncli.main([])"
    )
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert (done.stdout, done.stderr) == (shown, b"")


@pytest.mark.parametrize("name", [command.name for command in cli.COMMANDS])
def test_every_command_has_a_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status([name, "--help"]) == 0
    assert f"Usage: kvist {name}" in capsys.readouterr().out
