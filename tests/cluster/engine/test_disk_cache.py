"""Saved measurements are found for the same subject, and for no other."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from manta.cluster.disk_cache import FOREVER_S, DiskCache

SUBJECT = {"machine": "a", "threads": 2}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANTA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_saved_measurements_are_read_only_for_the_same_subject(folder: Path) -> None:
    assert DiskCache("costs", SUBJECT).read() is None, "nothing yet"
    DiskCache("costs", SUBJECT).write([1.5, {"a": 2}])
    assert DiskCache("costs", dict(reversed(SUBJECT.items()))).read() == [1.5, {"a": 2}]
    assert DiskCache("kernels", SUBJECT).read() is None
    assert DiskCache("costs", {**SUBJECT, "threads": 3}).read() is None
    assert [path.suffix for path in folder.iterdir()] == [".json"], "no half-written file is left"


@pytest.mark.parametrize("broken", [b"", b"{", b"\xff\xfe", b"[]", b'{"value": 1}', b"null"])
def test_a_broken_file_is_ignored_and_logged(broken: bytes, caplog: pytest.LogCaptureFixture) -> None:
    kept = DiskCache("costs", SUBJECT)
    kept.write(1)
    kept.path.write_bytes(broken)
    assert kept.read() is None
    assert str(kept.path) in caplog.text
    kept.write(2)
    assert kept.read() == 2


@pytest.mark.parametrize(("changed", "said"), [({"written_s": 0.0}, "old"), ({"subject": {}}, "subject")])
def test_an_old_or_foreign_file_is_ignored(
    changed: dict[str, object], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept = DiskCache("costs", SUBJECT)
    kept.write(1)
    kept.path.write_text(json.dumps(json.loads(kept.path.read_text()) | changed))
    with caplog.at_level(logging.INFO):
        assert kept.read() is None
    assert said in caplog.text


def test_an_unwritable_cache_is_logged_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("a file where the folder should be")
    kept = DiskCache("costs", SUBJECT)
    kept.write(1)
    kept.write(2)
    assert kept.read() is None
    assert caplog.text.count("cannot cache measurements") == 1


def test_of_two_that_measure_at_once_both_use_the_first_value(folder: Path) -> None:
    first, second = (DiskCache("kernels", SUBJECT) for _ in range(2))
    assert (first.read(), second.read()) == (None, None)
    assert first.write_once([True]) == [True]
    assert second.write_once([False]) == [True] == second.read()
    first.path.write_text("{")
    assert second.write_once([False]) == [False] == first.read(), "what cannot be read is replaced"
    assert len(list(folder.iterdir())) == 1


def test_a_value_may_be_kept_forever() -> None:
    kept = DiskCache("kernels", SUBJECT, FOREVER_S)
    kept.write(1)
    kept.path.write_text(json.dumps(json.loads(kept.path.read_text()) | {"written_s": 0.0}))
    assert kept.read() == 1
    assert DiskCache("kernels", SUBJECT).read() is None
