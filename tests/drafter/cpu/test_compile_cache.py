"""Compiled code is cached on disk as long as its sources are unchanged, and no longer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from manta.drafter.compute.cpu_fused import packed_gemm as products
from manta.drafter.compute.cpu_numba import element_ops as elements
from manta.drafter.compute.cpu_numba.cpu_features import Instructions
from support.jobs.package_copy import copy_package

LOOPS, STEP_LOOPS, COMPILED = (
    "drafter/compute/cpu_numba",
    "drafter/step/cpu_numba",
    "drafter/compute/cpu_fused",
)
# Every line requests a child that imports the package again; PyTorch and Numba are imported once.
RUNS = (
    "LOOPS.noisy_argmax_margin(torch.zeros(1, 20), torch.ones(1, 1), torch.ones(2, 1, 1, dtype=torch.int64))"
)
SCRIPT = """
import json, os, sys

import numba, torch

def look():
    from manta.drafter.step.cpu_numba import gumbel_argmax as loops
    from manta.drafter.step.cpu_numba.step_ops import LOOPS

    opened = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    RUNS
    print(json.dumps([sum(loops.noisy_argmax_margin.stats.cache_hits.values()), opened]), flush=True)

for line in sys.stdin:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, "a child has failed"
    else:
        look()
        os._exit(0)
""".replace("RUNS", RUNS)


class Package:
    """A copy of the package, and the process whose children import it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "manta"
        copy_package(self.folder)
        environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
        environment |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
        self.process = subprocess.Popen([sys.executable, "-c", SCRIPT], **pipes)

    def choose(self) -> tuple[bool, set[str]]:
        """Return whether sampling found its code on disk, and the package's sources that were read for it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        said = self.process.stdout.readline()
        assert said, "what failed stands in the captured stderr"
        hits, opened = json.loads(said)
        paths = [Path(path) for path in opened if path.endswith(".py")]
        return hits > 0, {
            p.relative_to(self.folder).as_posix() for p in paths if p.is_relative_to(self.folder)
        }


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Package]:
    package = Package(tmp_path_factory.mktemp("kept"))
    with package.process:
        assert not package.choose()[0]
        yield package


TOLD = """
from manta.actors.targets.loading.backend_selection import compiles_loops
from manta.cluster.config import EngineConfig
print(compiles_loops(EngineConfig(model="m")))
"""


def test_the_first_start_alone_is_said_to_compile(tmp_path: Path) -> None:
    def told() -> list[str]:
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
        steps = "import torch\nfrom manta.drafter.step.cpu_numba.step_ops import LOOPS\n" + RUNS
        command = [sys.executable, "-c", TOLD + steps]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout.split()

    assert (told(), told()) == (["True"], ["False"])


def test_cached_code_is_found_without_reading_other_folders(package: Package) -> None:
    found, read = package.choose()
    assert found
    assert {Path(path).parent.as_posix() for path in read} == {LOOPS, STEP_LOOPS}


@pytest.mark.parametrize(
    ("file", "old", "new", "stays"),
    [
        (f"{STEP_LOOPS}/gumbel_argmax.py", "score_2[0] - score_2[1]", "score_2[1] - score_2[0]", False),
        (f"{LOOPS}/lane_scans.py", "(i, 64)", "(i, 32)", False),
        ("drafter/step/inputs/gumbel_noise.py", "0x21F0AAAD", "0x21F0AAAF", False),
        ("drafter/step/request_states.py", "A mirror", "A copy", True),
    ],
    ids=[
        "its own file",
        "a file that it is made of",
        "a number that its loops have from elsewhere",
        "another file",
    ],
)
def test_cached_code_depends_on_its_sources(
    package: Package, file: str, old: str, new: str, stays: bool
) -> None:
    """The change stays in the package, so that its code is compiled once for it and not again without it."""
    source = package.folder / file
    text = source.read_text(encoding="utf-8")
    assert old in text
    source.write_text(text.replace(old, new), encoding="utf-8")
    assert package.choose()[0] is stays


def test_cached_code_is_separate_for_each_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba distinguishes CPUs, but not processes with and without AMX."""

    def age(instructions: Instructions | None) -> tuple[str, ...]:
        monkeypatch.setattr(elements, "bf16_instructions", lambda: instructions)
        return elements._age(products._product_task)

    assert len({age(kind) for kind in (*Instructions, None)}) == 1 + len(Instructions)
