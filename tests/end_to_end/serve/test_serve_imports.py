"""What processes of `manta serve` import and must not import; errors of models."""

from __future__ import annotations

import subprocess
import sys

import pytest
from manta.actors.http.config.settings_mapping import split_models
from manta.cluster.errors import CheckpointError
from manta.jobs.serve.preloaded_imports import check_models
from support.paths import ROOT

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
        "from manta.actors.http.config.settings_mapping import split_models\n"
        "from manta.jobs.serve.server import find_checkpoints\n"
        f"find_checkpoints(split_models({PAIR!r})[0][0])"
    )
    assert not modules & {"torch", "ray", "numpy", "pyarrow", "transformers"}


def test_fork_servers_import_everything_but_ray() -> None:
    modules = modules_after(
        "from manta.jobs.serve import preloaded_imports as imports\n"
        "imports._import_first()\n"
        "imports._import((*imports.HTTP, *imports.TARGET))"
    )
    assert "torch" in modules and "manta.actors.http.app" in modules
    assert not modules & {"ray", "pandas"}


def test_serve_runs_without_pandas_which_others_can_import() -> None:
    install = "from manta.jobs.serve.preloaded_imports import ServeWithoutPandas as W\nW.install()\n"
    serve = install + "import ray.serve\n"
    assert "pandas" not in modules_after(serve)
    assert "pandas" in modules_after(serve + "import pandas")


def test_model_checks_return_descriptions_and_raise_errors() -> None:
    lines: list[str] = []
    check_models(split_models(PAIR), lines.append, None)
    assert any(line.startswith("drafter: ") for line in lines)
    drafter = PAIR["speculative_config"]["model"]
    with pytest.raises(CheckpointError, match="drafter"):
        check_models(split_models({"model": drafter}), lines.append, None)
