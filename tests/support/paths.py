"""Folders of this repository."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "models"
TESTS = ROOT / "tests"
DATA = TESTS / "data"


def module_command(module: str, arguments: Sequence[str] = ()) -> list[str]:
    """Return the command that runs a module of `tests` as a script, e.g. "support.jobs.chaos_job"."""
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(TESTS)!r});"
        f" runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-c", code, *arguments]
