"""What was measured is found again by the same question of the same subject, and by no other."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from manta.cluster.disk_cache import DiskCache

SUBJECT = {"machine": "a", "threads": 2}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANTA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_is_written_is_read_by_the_same_subject_alone(folder: Path) -> None:
    assert DiskCache("costs", SUBJECT).read() is None, "nothing yet"
    DiskCache("costs", SUBJECT).write([1.5, {"a": 2}])
    assert DiskCache("costs", dict(reversed(SUBJECT.items()))).read() == [1.5, {"a": 2}]
    assert DiskCache("kernels", SUBJECT).read() is None
    assert DiskCache("costs", {**SUBJECT, "threads": 3}).read() is None
    assert [path.suffix for path in folder.iterdir()] == [".json"], "no half-written file is left"


@pytest.mark.parametrize("broken", [b"", b"{", b"\xff\xfe", b"[]", b'{"value": 1}', b"null"])
def test_a_broken_file_is_as_good_as_none_and_the_log_says_so(
    broken: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    kept = DiskCache("costs", SUBJECT)
    kept.write(1)
    kept.path.write_bytes(broken)
    assert kept.read() is None
    assert str(kept.path) in caplog.text
    kept.write(2)
    assert kept.read() == 2


@pytest.mark.parametrize(("changed", "said"), [({"written_s": 0.0}, "old"), ({"subject": {}}, "subject")])
def test_a_file_that_is_old_or_anothers_is_as_good_as_none(
    changed: dict[str, object], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept = DiskCache("costs", SUBJECT)
    kept.write(1)
    kept.path.write_text(json.dumps(json.loads(kept.path.read_text()) | changed))
    with caplog.at_level(logging.INFO):
        assert kept.read() is None
    assert said in caplog.text


def test_where_nothing_can_be_kept_that_is_said_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("a file where the folder should be")
    kept = DiskCache("costs", SUBJECT)
    kept.write(1)
    kept.write(2)
    assert kept.read() is None
    assert caplog.text.count("cannot cache measurements") == 1
