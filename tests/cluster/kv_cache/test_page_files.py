"""Files of pages: what is read is what was written, or nothing; two writers, torn files, a full disk."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from manta.cluster.errors import ConfigError
from manta.cluster.pages.page_files import PageFiles, PageFolder, clear_tier, open_tier

SIZE = 3000
KEY = bytes(range(16))


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


@pytest.fixture
def files(tmp_path: Path) -> PageFiles:
    return open_files(tmp_path / "tier")


def open_files(tier: Path, max_bytes: int = 2**20, subject: str = "model") -> PageFiles:
    open_tier(tier)
    return PageFiles(tier, PageFolder(tier / subject / "0"), max_bytes)


def page(seed: int = 1) -> list[memoryview]:
    """A page in three planes."""
    content = bytes((seed * 31 + i) % 251 for i in range(SIZE))
    return [memoryview(bytearray(content[i : i + 1000])) for i in (0, 1000, 2000)]


def read(files: PageFiles, digest: bytes = KEY, group: int = 0) -> list[memoryview] | None:
    found = [memoryview(bytearray(1000)) for _ in range(3)]
    return found if files.read(group, digest, found, 0.0) else None


def test_a_page_is_read_as_it_was_written_by_its_group_and_digest(files: PageFiles) -> None:
    assert read(files) is None and not files.folder.has(0, KEY)
    assert files.write(0, KEY, page(), 0.0) and files.folder.has(0, KEY)
    assert read(files) == page()
    assert read(files, group=1) is None and read(files, key(9)) is None
    assert not list(files.folder.path.glob(".*")), "nothing unfinished is left"


def test_a_page_of_more_planes_than_the_system_reads_at_once(files: PageFiles) -> None:
    planes = [memoryview(bytearray([i % 256, i // 256])) for i in range(2500)]
    found = [memoryview(bytearray(2)) for _ in range(2500)]
    assert files.write(0, KEY, planes, 0.0) and files.read(0, KEY, found, 0.0)
    assert found == planes


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def point_elsewhere(path: Path) -> None:
    other = path.with_name("other")
    path.rename(other)
    path.symlink_to(other)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "torn": lambda path: os.truncate(path, 1700),
    "empty": lambda path: os.truncate(path, 0),
    "zeros after a crash": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "another bit": flip_a_bit,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "an older format": lambda path: path.write_bytes(b"mantakv0" + path.read_bytes()[8:]),
    "of another group": lambda path: path.write_bytes(path.read_bytes()[:8] + b"\7" + path.read_bytes()[9:]),
    "a link": point_elsewhere,
    "not readable": lambda path: path.unlink() or path.mkdir(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_not_whole_is_not_used_and_written_anew(
    files: PageFiles, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    files.write(0, KEY, page(), 0.0)
    DAMAGE[damage](files.folder.file(0, KEY))
    assert read(files) is None
    assert "a page of the K/V tier is not used" in caplog.text
    if damage != "not readable":
        assert not files.folder.has(0, KEY)
        assert files.write(0, KEY, page(), 0.0) and read(files) == page()


def test_the_folder_stays_within_its_bound_and_the_least_worth_goes_first(tmp_path: Path) -> None:
    files = open_files(tmp_path / "tier", max_bytes=20 * SIZE)
    for number in range(60):
        assert files.write(0, key(number), page(number), -float(number % 2) * 1000)
        assert sum(file.stat().st_size for file in (tmp_path / "tier").rglob("*-*")) <= 20 * SIZE
    kept = [number for number in range(60) if files.folder.has(0, key(number))]
    assert len(kept) >= 15 and all(number % 2 == 0 for number in kept[:-1])


def test_a_page_that_is_used_is_kept_and_files_of_other_models_count(tmp_path: Path) -> None:
    files = open_files(tmp_path / "tier", max_bytes=10 * SIZE)
    other = open_files(tmp_path / "tier", max_bytes=10 * SIZE, subject="other model")
    for number in range(8):
        other.write(0, key(number), page(), -1000.0)
    assert read(other, key(3)) is not None  # used now
    for number in range(6):
        files.write(0, key(number), page(), 1000.0)
    kept = {number for number in range(8) if other.folder.has(0, key(number))}
    assert 3 in kept and len(kept) <= 3 and all(files.folder.has(0, key(number)) for number in range(6))


def test_two_processes_write_the_same_pages_and_one_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[2]); from test_page_files import *\n"
        "files = open_files(Path(sys.argv[1]), 40 * SIZE)\n"
        "print('ready', flush=True)\n"
        "while True:\n    for number in range(60): files.write(0, key(number), page(number), 0.0)\n"
    )
    tier, here = tmp_path / "tier", str(Path(__file__).parent)
    command = [sys.executable, "-c", script, str(tier), here]
    writers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        files = open_files(tier, 40 * SIZE)
        found = 0
        while found < 300:
            for number in range(60):
                if (content := read(files, key(number))) is not None:
                    assert content == page(number)
                    found += 1
            if found > 100:
                writers[0].send_signal(signal.SIGKILL)
            assert writers[1].poll() is None
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    for file in tier.rglob(".*-*"):  # of the killed ones; as old as files are that no one finishes
        os.utime(file, (1, 1))
    open_files(tier, 40 * SIZE).write(0, key(99), page(), 0.0)
    assert sum(file.stat().st_size for file in tier.rglob("*-*")) <= 40 * SIZE


def test_an_old_unfinished_file_is_deleted_though_the_folder_is_not_full(tmp_path: Path) -> None:
    files = open_files(tmp_path / "tier", max_bytes=1000 * SIZE)
    files.write(0, KEY, page(), 0.0)
    old, new = (files.folder.path / f".{files.folder.file(0, key(2)).name}.{pid}" for pid in (1, 2))
    for file in (old, new):
        file.write_bytes(b"torn")
    os.utime(old, (1, 1))
    open_files(tmp_path / "tier", max_bytes=1000 * SIZE).write(0, key(3), page(3), 0.0)
    assert not old.exists() and new.exists() and read(files) == page()


def test_a_full_disk_pauses_writing_and_loses_nothing(
    files: PageFiles, caplog: pytest.LogCaptureFixture
) -> None:
    files.write(0, KEY, page(), 0.0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # as a disk that takes a part
    try:
        assert not files.write(0, key(2), page(), 0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "pages are not written to the K/V tier for 60 s" in caplog.text
    assert not files.write(0, key(3), page(), 0.0), "it pauses"
    assert read(files) == page()
    assert [file.name for file in files.folder.path.iterdir()] == [files.folder.file(0, KEY).name]


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match=r"kv_tier_path=.* closed to others.*chmod 700"):
        open_tier(tmp_path)


def test_a_folder_that_is_a_file_is_refused_and_a_new_one_is_closed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"kv_tier_path=.* is not usable: File exists"):
        open_tier(tmp_path / "file")
    files = open_files(tmp_path / "a" / "tier")
    files.write(0, KEY, page(), 0.0)
    assert (tmp_path / "a" / "tier").stat().st_mode & 0o777 == 0o700
    assert files.folder.file(0, KEY).stat().st_mode & 0o777 == 0o600


def test_clearing_deletes_pages_and_nothing_else(tmp_path: Path) -> None:
    files = open_files(tmp_path / "tier")
    for number in range(3):
        files.write(0, key(number), page(), 0.0)
    mine = files.folder.path / "notes-of-mine.txt"
    mine.touch()
    assert clear_tier(tmp_path / "tier") > 3 * SIZE
    assert list(files.folder.path.iterdir()) == [mine]
    assert files.write(0, KEY, page(), 0.0) and read(files) == page()
