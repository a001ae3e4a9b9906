"""A tiny pair with a tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from manta.actors.tokenization.tokenizer import Tokenizer
from support.checkpoints.text_pair import make_text_pair


@pytest.fixture(scope="session")
def text_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a target with a byte-level tokenizer and of its drafter, which no test changes."""
    return make_text_pair(tmp_path_factory.mktemp("text-pair"))


@pytest.fixture(scope="session")
def folder(text_pair: tuple[Path, Path]) -> Path:
    """The target's folder."""
    return text_pair[0]


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)
