"""Folders of this repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "models"
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
DATA = TESTS / "data"
