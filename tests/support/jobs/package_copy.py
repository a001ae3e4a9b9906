"""The product's source files, and copies of them in another folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from support.paths import ROOT

FLOORS = ("cluster", "drafter", "actors", "jobs")


def sources(root: Path = ROOT) -> list[Path]:
    return [path for floor in FLOORS for path in sorted((root / floor).rglob("*.py"))]


def module_name(path: Path, root: Path = ROOT) -> str:
    return ".".join(("manta", *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")


def copy_package(folder: Path) -> None:
    for path in [ROOT / "__init__.py", *sources()]:
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
