"""The limits of a process's control groups, both versions, including parents."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from manta.actors.system import host_resources as control_groups
from manta.actors.system import host_resources as machine

GIB = 2**30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Control group hierarchies below `mount`, without groups; this process may use 8 cores."""
    mounts = [f"1 0 0:1 / {tmp_path}/mount rw - cgroup2 none rw"]
    for controllers in ("cpu", "memory"):
        mounts.append(f"1 0 0:1 / {tmp_path}/mount/{controllers} rw - cgroup none rw,{controllers},cpuacct")
    (tmp_path / "mounts").write_text("\n".join(mounts) + "\n")
    monkeypatch.setattr(control_groups, "_MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(control_groups, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    return tmp_path


def write(folder: Path, membership: str, files: dict[str, str]) -> None:
    """Put this process into groups, and write files below the mount."""
    (folder / "membership").write_text(membership)
    for name, text in files.items():
        path = folder / "mount" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_this_machine_has_memory_and_a_core() -> None:
    assert machine.free_ram_bytes() > 2**20
    assert 1 <= machine.owned_cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max", 8), ("50000", 1), ("100000", 1), ("150000", 1), ("190000", 2), ("350000", 3), ("900000", 8)],
)
def test_a_quota_bounds_the_cores(groups: Path, quota: str, cores: int) -> None:
    write(groups, "0::/\n", {"cpu.max": f"{quota} 100000\n"})
    assert machine.owned_cores() == cores


def test_the_smallest_quota_of_all_parent_groups_counts(groups: Path) -> None:
    quotas = {"slice/cpu.max": "200000 100000\n", "slice/job/cpu.max": "max 100000\n"}
    write(groups, "0::/slice/job\n", quotas)
    assert machine.owned_cores() == 2


@pytest.mark.parametrize(
    ("membership", "folder", "quota", "cores"),
    [
        ("5:memory:/\n4:cpu,cpuacct:/job\n3:cpuset:/\n0::/\n", "cpu/job", "300000\n", 3),
        ("5:memory:/\n4:cpu,cpuacct:/job\n3:cpuset:/\n0::/\n", "cpu/job", "-1\n", 8),
        ("4:cpu:/docker/1a2b\n", "cpu", "200000", 2),  # a path of the host means the root
    ],
)
def test_quotas_of_cgroup_version_1_count(
    groups: Path, membership: str, folder: str, quota: str, cores: int
) -> None:
    files = {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "100000\n"}
    write(groups, membership, files)
    assert machine.owned_cores() == cores


def test_available_memory_follows_the_cgroup_without_its_caches(groups: Path) -> None:
    sizes = {"max": f"{GIB}\n", "current": f"{GIB - 2**20}\n", "stat": f"anon 1\ninactive_file {2**22}\n"}
    write(groups, "0::/job\n", {f"job/memory.{name}": text for name, text in sizes.items()})
    assert machine.free_ram_bytes() == 2**20 + 2**22
    assert machine.ram_limit() == (GIB, "the control group's")
    write(groups, "0::/job\n", {"job/memory.max": "max\n"})
    assert machine.free_ram_bytes() > 2**20
    total, owner = machine.ram_limit()
    assert total > machine.resident_bytes() > 2**20 and owner == "the machine's"


@pytest.fixture
def quota_of_half_a_core() -> Iterator[Path]:
    """A real control group of version 1; needs root and kernel support."""
    folder = Path(f"/sys/fs/cgroup/cpu/manta-test-{os.getpid()}")
    try:
        folder.mkdir()
        (folder / "cpu.cfs_quota_us").write_text("50000")
    except OSError:
        folder.is_dir() and folder.rmdir()
        pytest.skip("this process may make no control group")
    yield folder
    folder.rmdir()


def test_a_real_quota_is_found(quota_of_half_a_core: Path) -> None:
    script = f"""
import os, pathlib
pathlib.Path({str(quota_of_half_a_core)!r}, "cgroup.procs").write_text(str(os.getpid()))
from manta.actors.system.host_resources import owned_cores
raise SystemExit(owned_cores())
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=600, check=False).returncode == 1
