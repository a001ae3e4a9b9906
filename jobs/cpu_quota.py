"""The CPU quota of this process's control group: how long one held us up, and a narrower one for a while.

Linux's control groups in both versions; elsewhere there is none. Read by `idleness.py`; `bench_busy.py` runs
below a quota of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..cluster.errors import ConfigError

PERIOD_US = 100_000  # the kernel's own default


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """This process's place in the hierarchy that shares out CPU time: `folder`, at or below `mount`."""

    folder: Path
    mount: Path
    version: int

    @classmethod
    def of_this_process(cls) -> ControlGroup | None:
        """None where nothing of the kind is mounted."""
        try:
            places = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
            mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
        except OSError:
            return None
        paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in places)}
        v1 = next((path for names, path in paths.items() if "cpu" in names.split(",")), None)
        path, version = (v1, 1) if v1 is not None else (paths.get(""), 2)
        found = _mounted(mounts, version)
        if path is None or found is None:
            return None
        root, mount = found
        below = path.removeprefix(root.rstrip("/")).strip("/")  # a container sees its own group as the root
        folder = mount / below
        return cls(folder if folder.is_dir() else mount, mount, version)

    def throttled_s(self) -> float | None:
        """How long quotas have held up this group and those above it, summed over cores; None: no quota."""
        found: list[float] = []
        folder = self.folder
        while True:
            held_s = _throttled_s(folder / "cpu.stat")
            if held_s is not None:
                found.append(held_s)
            if folder == self.mount:
                return sum(found) if found else None
            folder = folder.parent


class QuotaGroup:
    """A group with a quota that this process may enter and leave. Made by `quota_group`."""

    def __init__(self, home: ControlGroup, folder: Path, cores: float) -> None:
        self._home, self._folder = home, folder
        quota_us = str(int(cores * PERIOD_US))
        if home.version == 1:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(quota_us)
        else:
            (folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """All threads of this process stand below the quota."""
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield
        finally:
            (self._home.folder / "cgroup.procs").write_text(str(os.getpid()))


@contextmanager
def quota_group(cores: float) -> Iterator[QuotaGroup]:
    """A new group, below or beside our own, with a quota of `cores`, removed at the end.

    Raises:
        ConfigError: the system does not let this process make one.
    """
    home = ControlGroup.of_this_process()
    if home is None:
        raise _cannot(cores, "no control groups that share out CPU time are mounted")
    # In version 2 only leaves hold processes: the new group stands beside ours, but for the root's.
    is_inner = home.version == 1 or home.folder == home.mount
    folder = (home.folder if is_inner else home.folder.parent) / f"manta-{os.getpid()}-{cores:g}"
    try:
        folder.mkdir()
    except OSError as error:
        raise _cannot(cores, str(error)) from None
    try:
        try:
            group = QuotaGroup(home, folder, cores)
            with group.entered():  # whether that is allowed too, before anything is measured
                pass
        except OSError as error:
            raise _cannot(cores, str(error)) from None
        yield group
    finally:
        folder.rmdir()


def _cannot(cores: float, why: str) -> ConfigError:
    return ConfigError(
        f"cpu_quota={cores:g} cannot be set up: {why}. Run as root on a Linux host, or leave --cpu-quota out "
        f"and start the benchmark in a container that has the quota.",
        param="cpu_quota",
    )


def _mounted(mounts: list[str], version: int) -> tuple[str, Path] | None:
    """Which group the mount shows as its root, and where it is."""
    for line in mounts:
        before, after = line.split(" - ", 1)
        root, where = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2" if version == 2 else kind == "cgroup" and "cpu" in options.split(","):
            return root, Path(where)
    return None


def _throttled_s(stat: Path) -> float | None:
    try:
        lines = stat.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    facts = dict(line.split() for line in lines)
    if "throttled_usec" in facts:
        return int(facts["throttled_usec"]) / 1e6
    return int(facts["throttled_time"]) / 1e9 if "throttled_time" in facts else None
