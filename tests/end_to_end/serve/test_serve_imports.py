"""What processes of `manta serve` import, and what they must not; how what is wrong with a model is told."""

from __future__ import annotations

import subprocess
import sys

import pytest
from manta.actors.http.config.settings import split_models
from manta.cluster.errors import CheckpointError
from manta.jobs.serve.preloaded_imports import check_models
from paths import ROOT

PAIR = {
    "model": str(ROOT / "models/target"),
    "speculative_config": {"model": str(ROOT / "models/drafter")},
}


def modules_after(code: str) -> set[str]:
    """Return what a fresh process has imported after `code`."""
    script = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_checkpoints_are_found_without_pytorch_and_ray() -> None:
    modules = modules_after(
        "from manta.actors.http.config.settings import split_models\n"
        "from manta.jobs.serve.server import find_checkpoints\n"
        f"find_checkpoints(split_models({PAIR!r})[0][0])"
    )
    assert not modules & {"torch", "ray", "numpy", "pyarrow", "transformers"}


def test_fork_servers_import_all_but_ray() -> None:
    modules = modules_after(
        "from manta.jobs.serve import preloaded_imports as imports\n"
        "imports._import_first()\n"
        "imports._import((*imports.HTTP, *imports.TARGET))"
    )
    assert "torch" in modules and "manta.actors.http.app" in modules
    assert not modules & {"ray", "pandas"}


def test_serve_does_without_pandas_and_others_have_it() -> None:
    install = "from manta.jobs.serve.preloaded_imports import ServeWithoutPandas as W\nW.install()\n"
    serve = install + "import ray.serve\n"
    assert "pandas" not in modules_after(serve)
    assert "pandas" in modules_after(serve + "import pandas")


def test_models_are_told_and_what_is_wrong_with_one_is_raised() -> None:
    lines: list[str] = []
    check_models(split_models(PAIR), lines.append, None)
    assert any(line.startswith("drafter: ") for line in lines)
    drafter = PAIR["speculative_config"]["model"]
    with pytest.raises(CheckpointError, match="drafter"):
        check_models(split_models({"model": drafter}), lines.append, None)
