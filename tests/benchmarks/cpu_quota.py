"""A CPU quota for a while: a control group that this process enters and leaves. Used by `busy.py`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from manta.actors.control_groups import ControlGroup
from manta.cluster.errors import ConfigError

PERIOD_US = 100_000  # the kernel's own default


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
