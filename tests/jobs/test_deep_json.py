"""What strangers write may be nested deeper than Python can follow: refused, as any other mistake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from manta.actors.tokenization.tokenizer_config import TokenIds
from manta.cluster.disk_cache import DiskCache
from manta.cluster.errors import CheckpointError, ConfigError
from manta.drafter.compute.checkpoint.hf_config import read_json
from manta.drafter.compute.checkpoint.safetensors_reader import TensorFolder
from manta.jobs.common.config_file import read_yaml
from manta.jobs.common.config_loading import parse_speculation
from manta.jobs.common.engine_flags import parse_object

DEEP = '{"a": ' + "[" * 3000 + "]" * 3000 + "}"


@pytest.mark.parametrize(
    ("name", "read", "error"),
    [
        ("config.json", lambda file: read_json(file.parent, param="model"), CheckpointError),
        ("model.safetensors.index.json", lambda file: TensorFolder(file.parent), CheckpointError),
        ("serve.yaml", read_yaml, ConfigError),
        ("a flag", lambda file: parse_object(file.read_text()), ValueError),
        ("speculation", lambda file: parse_speculation(file.read_text()), ConfigError),
    ],
)
def test_deeply_nested_text_is_refused(
    name: str, read: Callable[[Path], Any], error: type[Exception], tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_text(DEEP)
    with pytest.raises(error):
        read(file)


def test_a_deeply_nested_cache_is_measured_again_and_a_tokenizer_is_reported_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANTA_CACHE_DIR", str(tmp_path))
    cache = DiskCache("costs", {"cpu": "any"}, 60.0)
    cache.path.parent.mkdir(parents=True, exist_ok=True)
    cache.path.write_text(DEEP)
    assert cache.read(list) is None
    (tmp_path / "tokenizer.json").write_text(DEEP)
    assert TokenIds.read(tmp_path) is None
