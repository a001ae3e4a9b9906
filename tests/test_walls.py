"""Who may name what: the walls of pyproject.toml hold, and each of them would fall if it were breached."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT

FLOORS = ("cluster", "drafter", "actors", "jobs")
# A module that must not name something, and the line that does; by contract.
BREACHES = {
    "The floors: jobs -> actors -> drafter -> cluster": ("cluster/pages.py", "from ..jobs import tables"),
    "The drafter's rooms: dflash -> step -> compute": (
        "drafter/compute/rope.py",
        "from ..dflash import config as _",
    ),
    "cluster decides without torch and Ray": ("cluster/sequence.py", "import torch"),
    "Ray is named where processes are placed: replica, workers, metrics, jobs": (
        "actors/engine.py",
        "import ray",
    ),
    "Numba and LLVM compile loops, and nothing else": ("drafter/compute/eager/backend.py", "import numba"),
    "Triton is for GPUs": ("drafter/compute/loops/rows.py", "import triton"),
}


def sources(root: Path = ROOT) -> list[Path]:
    return [path for floor in FLOORS for path in sorted((root / floor).rglob("*.py"))]


def test_every_wall_falls_when_it_is_breached(tmp_path: Path) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(BREACHES) == {c["name"] for c in settings["tool"]["importlinter"]["contracts"]}
    package = tmp_path / "manta"
    for path in [ROOT / "__init__.py", *sources()]:
        copy = package / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    for file, line in BREACHES.values():
        with (package / file).open("a", encoding="utf-8") as text:
            text.write(f"\n{line}\n")
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--config", ROOT / "pyproject.toml", "--no-cache"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    for name in BREACHES:
        assert f"{name} BROKEN" in done.stdout


def imported(path: Path) -> set[str]:
    """All modules that a file names, late imports included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_torch_distributed_is_named_by_workers_alone() -> None:
    naming = {path for path in sources() if any(n.startswith("torch.distributed") for n in imported(path))}
    assert naming, "the look finds what it looks for"
    assert {path.relative_to(ROOT).parent.as_posix() for path in naming} == {"actors/workers"}


SCRIPT = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("manta.drafter.compute.compiled"):
            raise ModuleNotFoundError(name)

if sys.argv[1] == "hidden":
    sys.meta_path.insert(0, Hidden())
from manta import LLM, SamplingParams
from manta.cluster.errors import ConfigError

pair = {"speculative_config": {"model": "models/drafter"}, "num_threads": 1}
with LLM("models/target", dtype="float32", **pair) as llm:
    (output,) = llm.generate("def read_lines(path):", SamplingParams(temperature=0, max_tokens=24))
print(output.outputs[0].token_ids)
if sys.argv[1] == "hidden":
    with LLM("models/target", dtype="bfloat16", **pair) as llm:
        assert llm.generate("def read_lines(path):", SamplingParams(temperature=0, max_tokens=4))
    try:
        LLM("models/target", dtype="bfloat16", attention_backend="compiled", **pair)
    except ConfigError as error:
        assert "is not part of this installation" in error.message, error.message
    else:
        raise SystemExit("it was not refused")
    assert not any(name.startswith("manta.drafter.compute.compiled") for name in sys.modules)
"""


@pytest.mark.timeout(280)
def test_the_compiled_pass_may_be_taken_away() -> None:
    texts = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT, mode],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=250,
            check=True,
        ).stdout
        for mode in ("there", "hidden")
    ]
    assert texts[0].startswith("[") and texts[0] == texts[1]
