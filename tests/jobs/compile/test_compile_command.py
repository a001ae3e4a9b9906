"""`manta compile`: a start with the same settings finds each of its kernels in Triton's cache."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from manta.cluster.config import EngineConfig, SpeculativeConfig
from manta.cluster.errors import ConfigError, MantaError
from manta.jobs.common.options import CompileOptions
from manta.jobs.compile.compile_run import run_compile
from manta.jobs.compile.device_guard import compile_guard
from support.paths import ROOT

pytest.importorskip("triton")

PAIR = ("models/target", "--drafter", "models/drafter", "--max-num-seqs", "2")
# Instead of a start: two launches of a kernel.
TWO_LAUNCHES = """
import sys
from types import SimpleNamespace

def start_first_rank(config, gpu):
    import torch
    from manta.drafter.compute.gpu_triton.common.element_ops import rms_norm
    from manta.jobs.compile.pretended_gpu import fake_tensors

    dtype = torch.bfloat16 if config.dtype == "auto" else getattr(torch, config.dtype)
    with fake_tensors(gpu):
        for kind in (dtype, torch.float32):
            x_NH = torch.zeros((4, 64), dtype=kind, device="cuda")
            rms_norm(x_NH, x_NH[0], 1e-6)

sys.modules["manta.jobs.compile.pretended_start"] = SimpleNamespace(start_first_rank=start_first_rank)
"""
COMMAND = """
import sys
from manta.jobs.cli import main
if __name__ == "__main__":
    main(sys.argv[1:])
"""
# Triton itself looks kernels up and compiles them in the start, instead of the processes that compile.
BY_ITSELF = """
from manta.drafter.compute.gpu_triton.common.compilations import count_compilations
from manta.jobs.compile import pretended_gpu
from triton.runtime.jit import JITFunction

compiles, pretends = JITFunction._do_compile, pretended_gpu.pretend

def pretend(gpu):
    pretends(gpu)
    JITFunction._do_compile = compiles

pretended_gpu.pretend = pretend
with count_compilations() as found:
    try:
        main(sys.argv[1:])
    finally:
        print(found.num_kernels)
"""


def run(program: str, cache: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program, "compile", *flags],
        env={**environment, "TRITON_CACHE_DIR": str(cache)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def compiled(program: str, cache: Path, *flags: str) -> tuple[int, int]:
    """Return how many kernels the command has compiled, and how many were there."""
    line = run(program, cache, *flags).stderr.splitlines()[-1]
    found = re.fullmatch(
        rf"(\d+) kernels for \w+ are in {cache} \([\d.]+ MB\): (\d+) compiled in \d+ s, (\d+) were there",
        line,
    )
    assert found is not None, line
    count, new, there = map(int, found.groups())
    assert count == new + there
    return new, there


@pytest.mark.parametrize(
    ("start", "gpu", "least"),
    [
        pytest.param(TWO_LAUNCHES, "h200", 2, id="two launches"),
        pytest.param("", "h200", 40, id="a pair on h200", marks=pytest.mark.if_changed),
        pytest.param("", "b300", 40, id="a pair on b300", marks=pytest.mark.if_changed),
    ],
)
def test_a_start_compiles_nothing_after_the_command(start: str, gpu: str, least: int, tmp_path: Path) -> None:
    flags, command = ("--gpu", gpu, *PAIR), start + COMMAND
    count, there = compiled(command, tmp_path, *flags)
    assert count >= least and there == 0
    assert compiled(command, tmp_path, *flags) == (0, count)
    assert int(run(command.partition("if __name__")[0] + BY_ITSELF, tmp_path, *flags).stdout) == 0
    other, same = compiled(command, tmp_path, *flags, "--dtype", "float16")
    assert other > 0 and same > 0, "kernels of integers and fp32 are the same"
    kinds = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert ".cubin" in kinds and not kinds & {".ttir", ".ttgir", ".llir", ".ptx"}


@pytest.mark.parametrize(
    ("settings", "gpu", "said"),
    [
        ({}, "h20", r"gpu='h20' is not known.*h200"),
        ({"device": "cpu"}, "h200", "device"),
        ({"attention_backend": "torch"}, "h200", "attention_backend"),
        (
            {"speculative_config": SpeculativeConfig(model="models/drafter", placement="shared")},
            "h200",
            "placement",
        ),
    ],
)
def test_what_is_not_compiled_is_refused(settings: dict[str, Any], gpu: str, said: str) -> None:
    with pytest.raises(MantaError, match=said):
        run_compile(EngineConfig(model="models/target", **settings), CompileOptions(gpu=gpu))


def test_a_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"Triton is not installed.*\[gpu\]"):
        run_compile(EngineConfig(model="models/target"), CompileOptions(gpu="h200"))


def test_a_compiler_that_is_missing_or_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler.*apt-get install g\+\+"):
        compile_guard(tmp_path)
    fails = tmp_path / "g++"
    fails.write_text("#!/bin/sh\necho 'no <atomic>' >&2\nexit 1\n")
    fails.chmod(0o755)
    assert shutil.which("g++") == str(fails)
    with pytest.raises(ConfigError, match=r"g\+\+ cannot compile.*no <atomic>"):
        compile_guard(tmp_path)
