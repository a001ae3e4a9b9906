"""A tiny pair with a tokenizer, and what compiles grammars for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.drafter.grammars.compiler import GrammarCompiler
from support.checkpoints.text_pair import VOCAB, make_text_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a target with a tokenizer and of its drafter, which no test changes."""
    return make_text_pair(tmp_path_factory.mktemp("chat-pair"))


@pytest.fixture(scope="session")
def tokenizer(pair: tuple[Path, Path]) -> Tokenizer:
    return Tokenizer.load(pair[0])


@pytest.fixture(scope="session")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    """Compiles grammars over the tokens of the pair."""
    return GrammarCompiler(tokenizer.to_json(), VOCAB, (0, 2))
