"""The product's source files, what they import, and copies of them in another folder."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from functools import cache
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


def imported(path: Path, root: Path = ROOT) -> frozenset[str]:
    """All names that a file imports, including late and type imports; `from a import b` means a.b."""
    package = module_name(path, root).split(".")[: None if path.name == "__init__.py" else -1]
    return named_in(path.read_text(encoding="utf-8"), tuple(package))


@cache  # copies of the package differ in a file or two
def named_in(text: str, package: tuple[str, ...]) -> frozenset[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            names |= {f"{source}.{alias.name}" for alias in node.names}
    return frozenset(names)


def run_python(script: str, *args: object, **environment: str) -> str:
    """Return the output of a script in its own process; an empty variable is removed from the environment."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, args)],
        cwd=ROOT,
        env={k: v for k, v in {**os.environ, **environment}.items() if v},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
