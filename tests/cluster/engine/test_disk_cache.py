"""Saved measurements are found for the same subject, and for no other."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from manta.cluster.disk_cache import FOREVER_S, DiskCache

SUBJECT = {"machine": "a", "threads": 2}


def same(value: Any) -> Any:  # Any: JSON
    return value


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANTA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_saved_measurements_are_read_only_for_the_same_subject(folder: Path) -> None:
    assert DiskCache("costs", SUBJECT).read(same) is None, "nothing yet"
    DiskCache("costs", SUBJECT).write([1.5, {"a": 2}])
    assert DiskCache("costs", dict(reversed(SUBJECT.items()))).read(same) == [1.5, {"a": 2}]
    assert DiskCache("kernels", SUBJECT).read(same) is None
    assert DiskCache("costs", {**SUBJECT, "threads": 3}).read(same) is None
    assert [path.suffix for path in folder.iterdir()] == [".json"], "no half-written file is left"


HUGE = b'{"subject": {"machine": "a", "threads": 2}, "value": 1, "written_s": 1%s}' % (b"0" * 400)


@pytest.mark.parametrize(
    "broken", [b"", b"{", b"\xff\xfe", b"[]", b'{"value": 1}', b"null", b"[" * 10**5, HUGE]
)
def test_a_broken_file_is_deleted_and_logged(broken: bytes, caplog: pytest.LogCaptureFixture) -> None:
    kept = DiskCache("costs", SUBJECT)
    kept.write(1)
    kept.path.write_bytes(broken)
    assert kept.read(same) is None
    assert str(kept.path) in caplog.text and not kept.path.exists()
    kept.write(2)
    assert kept.read(same) == 2


def test_a_value_that_its_reader_refuses_is_deleted() -> None:
    kept = DiskCache("costs", SUBJECT)
    for refused in ("x", None, 10**400, {}):
        kept.write(refused)
        assert kept.read(lambda value: [float(value), value[0]]) is None
        assert not kept.path.exists()


def test_only_plain_files_of_this_user_are_read(folder: Path, tmp_path: Path) -> None:
    kept = DiskCache("costs", SUBJECT)
    kept.write(1)
    (outside := tmp_path / "outside").write_bytes(kept.path.read_bytes())
    kept.path.chmod(0o666)
    assert kept.read(same) is None, "every user may write it"
    kept.path.symlink_to(outside)
    assert kept.read(same) is None and outside.exists()
    os.mkfifo(kept.path)
    assert kept.read(same) is None, "a pipe without a writer"
    kept.path.mkdir()
    assert kept.read(same) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_not_read() -> None:
    kept = DiskCache("costs", SUBJECT)
    kept.write(1)
    os.chown(kept.path, 65534, 65534)
    assert kept.read(same) is None and not kept.path.exists()


@pytest.mark.parametrize(("changed", "said"), [({"written_s": 0.0}, "old"), ({"subject": {}}, "subject")])
def test_an_old_or_foreign_file_is_ignored(
    changed: dict[str, object], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept = DiskCache("costs", SUBJECT)
    kept.write(1)
    kept.path.write_text(json.dumps(json.loads(kept.path.read_text()) | changed))
    with caplog.at_level(logging.INFO):
        assert kept.read(same) is None
    assert said in caplog.text


def test_an_unwritable_cache_is_logged_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("a file where the folder should be")
    kept = DiskCache("costs", SUBJECT)
    kept.write(1)
    kept.write(2)
    assert kept.read(same) is None
    assert caplog.text.count("cannot cache measurements") == 1


def test_of_two_that_measure_at_once_both_use_the_first_value(folder: Path) -> None:
    first, second = (DiskCache("kernels", SUBJECT) for _ in range(2))
    assert (first.read(same), second.read(same)) == (None, None)
    assert first.write_once([True], same) == [True]
    assert second.write_once([False], same) == [True] == second.read(same)
    first.path.write_text("{")
    assert second.write_once([False], same) == [False] == first.read(same), "what cannot be read is replaced"
    assert len(list(folder.iterdir())) == 1


def test_a_value_may_be_kept_forever() -> None:
    kept = DiskCache("kernels", SUBJECT, FOREVER_S)
    kept.write(1)
    kept.path.write_text(json.dumps(json.loads(kept.path.read_text()) | {"written_s": 0.0}))
    assert kept.read(same) == 1
    assert DiskCache("kernels", SUBJECT).read(same) is None
