"""From what the user named to contenders: which peers are there, what each is given to run, and why another cannot be.

A peer is a Python environment that has the engine, or (llama.cpp) the folder of its programs. Everyone gets the same values: the
GGUF file itself where the engine reads such files, else a folder of the same weights in bfloat16. Where the file's layers are in
4 bits but not in Q4_0, llama.cpp's best such format, the two engines that read GGUF files also get the file requantized to it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvist.bench.compare import Failure
from kvist.bench.machine import cpu_facts
from kvist.bench.model_files import Say, describe_formats, format_bytes_by_type, hf_folder, requantize
from kvist.bench.session import Contender, driver_path, own_python
from kvist.config import EngineOptions
from kvist.errors import KvistError, UsageError
from kvist.machine import available_cpus

MODULES = {"openvino": "openvino_genai", "vllm": "vllm", "transformers": "transformers"}
"""Peers that are Python packages, and the module that tells that one is there."""
PEERS = ("llamacpp", *MODULES)
READS_GGUF = ("llamacpp", "openvino")
BEST_4_BIT = "Q4_0"
ENVIRONMENT = {
    "vllm": ("VLLM_CPU_KVCACHE_SPACE=2", "VLLM_ENABLE_V1_MULTIPROCESSING=0", "VLLM_LOGGING_LEVEL=ERROR", "HF_HUB_OFFLINE=1"),
    "transformers": ("HF_HUB_OFFLINE=1",),
}
"""Settings that a peer reads from its environment only."""


FAST_BF16 = {"avx512_bf16", "amx_tile", "bf16"}
"""Instruction sets without which torch computes in bfloat16 slower than in float32."""


class MissingPeerError(KvistError):
    """A peer is not where the user said; the message says what is missing."""


@dataclass(frozen=True)
class Entry:
    """The contenders of a comparison, kvist first, and the peers that are not among them."""

    contenders: tuple[Contender, ...]
    failures: tuple[Failure, ...]


def parse_peers(texts: Sequence[str]) -> dict[str, Path]:
    """`NAME=FOLDER`, each peer once. Raises UsageError."""
    peers: dict[str, Path] = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        if name not in PEERS or not equals or not folder:
            raise UsageError(f"--peer takes NAME=FOLDER with a name among {', '.join(PEERS)}, not {text!r}.")
        if name in peers:
            raise UsageError(f"--peer {name} is given twice; compare two builds of it in two runs.")
        peers[name] = Path(folder).expanduser().absolute()
    if not peers:
        raise UsageError(f"Name at least one peer with --peer NAME=FOLDER, the name being one of {', '.join(PEERS)}.")
    return peers


def find_python(name: str, folder: Path) -> Path:
    """The Python of an environment that has the peer's package. Raises MissingPeerError."""
    python = folder if folder.is_file() else folder / "bin" / "python"
    if not python.exists():
        raise MissingPeerError(f"there is no Python environment in {folder}")
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({MODULES[name]!r}) is None)"
    try:
        found = subprocess.run([str(python), "-I", "-c", look], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.SubprocessError) as error:
        raise MissingPeerError(f"{python} cannot be run: {error}") from error
    if not found:
        raise MissingPeerError(f"the package {MODULES[name]} is not installed in {folder}")
    return python


def find_server(folder: Path) -> Path:
    """llama.cpp's server program. Raises MissingPeerError."""
    server = folder / "llama-server"
    if not server.is_file():
        raise MissingPeerError(f"there is no llama-server in {folder}")
    return server


def enter(options: EngineOptions, model: Path, peers: Mapping[str, Path], *, also_4_bit: bool, say: Say) -> Entry:
    """Find the peers and make the files that they run. `model`: a GGUF file, or a Hugging Face folder."""
    is_file = model.is_file()
    sizes = format_bytes_by_type(model) if is_file else {}
    file_says = describe_formats(sizes) if is_file else "the folder"
    contenders = [
        Contender(
            "kvist",
            own_python(),
            driver_path("kvist"),
            {"options": {**asdict(options), "model": str(model)}},
            file_says if options.quantization is None else f"{options.quantization}, from {file_says}",
        )
    ]
    failures = []
    four_bit = also_4_bit and next(iter(sizes), "").removeprefix("I").startswith("Q4") and next(iter(sizes)) != BEST_4_BIT
    for name, folder in peers.items():
        labels = [name, f"{name} {BEST_4_BIT}"] if four_bit and name in READS_GGUF else [name]
        for label in labels:
            try:
                program = find_server(folder) if name == "llamacpp" else find_python(name, folder)
                weights = _weights(name, model, file_says, say) if label == name else _requantized(model, peers, say)
                contenders.append(_contender(name, program, weights, options.num_threads, label))
            except KvistError as error:
                failures.append(Failure(label, None, str(error)))
                break
    return Entry(tuple(contenders), tuple(failures))


def _requantized(model: Path, peers: Mapping[str, Path], say: Say) -> tuple[str, str]:
    """The file in llama.cpp's best 4-bit format, and what that is in words. Raises MissingPeerError, UsageError."""
    tool = peers.get("llamacpp", Path()) / "llama-quantize"
    if not tool.is_file():
        raise MissingPeerError("there is no llama-quantize in llama.cpp's folder, which makes the file")
    return str(requantize(model, tool, say)), f"{BEST_4_BIT}, requantized from the file; embedding and head Q8_0"


def _weights(name: str, model: Path, file_says: str, say: Say) -> tuple[str, str]:
    """The path that a peer loads, and what that is in words. Raises MissingPeerError, UnsupportedModelError."""
    if name in READS_GGUF:
        if not model.is_file():
            raise MissingPeerError("it is compared on GGUF files, and the model is a folder")
        return str(model), f"the same file: {file_says}"
    what = f"computed in {torch_dtype()}"
    if not model.is_file():
        return str(model), f"the same folder, {what}"
    return str(hf_folder(model, say)), f"the file's values rounded to bfloat16, {what}"


def torch_dtype() -> str:
    """The faster of the two formats that the torch engines compute in on this processor."""
    return "bfloat16" if FAST_BF16 & set(cpu_facts()["flags"]) else "float32"


def _contender(engine: str, program: Path, weights: tuple[str, str], threads: int | None, name: str) -> Contender:
    path, words = weights
    setup: dict[str, Any] = {"model": path, "threads": threads, "dtype": torch_dtype()}
    if engine == "llamacpp":
        setup |= {"server": str(program), "threads": threads or available_cpus()}
        return Contender(name, own_python(), driver_path(engine), setup, words)
    # -I: the peer's Python shall see its own packages alone, whatever this process was told by its environment.
    bound = (f"VLLM_CPU_OMP_THREADS_BIND=0-{threads - 1}",) if engine == "vllm" and threads else ()
    python = ("env", *ENVIRONMENT.get(engine, ()), *bound, str(program), "-I")
    return Contender(name, python, driver_path(engine), setup, words)
