"""A temporary CPU quota: a control group that this process enters and leaves. Used by `busy.py`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from manta.actors.system.host_resources import ControlGroup
from manta.cluster.errors import ConfigError

PERIOD_US = 100_000  # the kernel's default


class QuotaGroup:
    """A control group with a quota. Made by `quota_group`."""

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
        """Apply the quota to all threads of this process for the duration of the `with` block."""
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield
        finally:
            (self._home.folder / "cgroup.procs").write_text(str(os.getpid()))


@contextmanager
def quota_group(cores: float) -> Iterator[QuotaGroup]:
    """Create a group with a quota of `cores`, and remove it at the end of the `with` block.

    Raises:
        ConfigError: the system does not allow it.
    """
    home = ControlGroup.of_this_process()
    if home is None:
        raise _cannot(cores, "no control groups for CPU time are mounted")
    # In version 2 only leaves contain processes: the new group is a sibling of ours, except below the root.
    is_inner = home.version == 1 or home.folder == home.mount
    folder = (home.folder if is_inner else home.folder.parent) / f"manta-{os.getpid()}-{cores:g}"
    try:
        folder.mkdir()
    except OSError as error:
        raise _cannot(cores, str(error)) from None
    try:
        try:
            group = QuotaGroup(home, folder, cores)
            with group.entered():  # checks the permission before anything is measured
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
