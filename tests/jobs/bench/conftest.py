"""Prompts and an engine's settings for benchmarks of a tiny pair with a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from manta.cluster.config import EngineConfig


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file of nine prompts of different lengths, and a conversation."""
    rows: list[dict[str, Any]] = [{"id": str(i), "prompt": f"def f{i}(" + "x" * i} for i in range(9)]
    rows.append({"id": "chat", "messages": [{"role": "user", "content": "hi"}]})
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def config(pair: tuple[Path, Path]) -> EngineConfig:
    """Settings with which some draft is verified in every step, however long steps take."""
    spec = {"model": str(pair[1]), "adaptive": False}
    settings = {"model": str(pair[0]), "speculative_config": spec, "num_threads": 1, "max_model_len": 256}
    return EngineConfig.from_dict({**settings, "dtype": "float32"})
