"""Which files a model is made of, found without opening any library: for the fingerprint and for the opener.

It knows file names, not formats (but for the index of a sharded folder, which is a list of file names). Invariants: the list is in
a fixed order and holds everything that decides weights, shape and tokenizer; nothing outside the folder is ever named.
"""

from __future__ import annotations

import json
from pathlib import Path

from kvist.errors import ModelFormatError, ModelNotFoundError

INDEX = "model.safetensors.index.json"
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


def content_files(path: Path) -> list[Path]:
    """The files of the model at `path` (a GGUF file or a folder), config.json first. Raises ModelNotFoundError or
    ModelFormatError."""
    try:
        return _content_files(path)
    except OSError as error:
        raise ModelFormatError(f"{path} cannot be read ({error.strerror or error}); check the path and its permissions.") from error


def _content_files(path: Path) -> list[Path]:
    if path.is_dir():
        if not (path / "config.json").exists():
            return [single_gguf(path)]
        return [path / name for name in SMALL_FILES if (path / name).exists()] + weight_files(path)
    if not path.exists():
        raise ModelNotFoundError(f"There is no file or folder {path}; give the path of a GGUF file or of a Hugging Face folder.")
    if not path.is_file():
        raise ModelFormatError(f"{path} is neither a file nor a folder; give the path of a GGUF file or of a Hugging Face folder.")
    return [path]


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards that the index names. Raises ModelFormatError."""
    whole = folder / "model.safetensors"
    if whole.exists():
        return [whole]
    index = folder / INDEX
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except FileNotFoundError:
        held = "weights in another format than safetensors; convert them" if any(folder.glob("*.bin")) else "no weights"
        raise ModelFormatError(f"{folder} has neither model.safetensors nor {INDEX}: it holds {held}.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFormatError(f"{index} is damaged ({error}); fetch the folder again.") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            raise ModelFormatError(f"{folder} lacks the file {name!r} that its index names; fetch the folder again.")
    return [folder / name for name in names]


def single_gguf(folder: Path) -> Path:
    """The one GGUF file of a folder without config.json. Raises ModelNotFoundError."""
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise ModelNotFoundError(f"{folder} holds several GGUF files ({names}); give the path of one of them.")
    raise ModelNotFoundError(f"{folder} holds neither config.json nor a GGUF file; give a Hugging Face folder or a GGUF file.")
