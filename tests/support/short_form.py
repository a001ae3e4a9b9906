"""Which tests `make test` leaves out: cases of `one_in`, and those of `if_changed` if nothing has changed.

`MANTA_GRID=whole` and node ids with parameters leave out none.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

from support.changes import changed_files

WHOLE = os.environ.get("MANTA_GRID") == "whole" or os.environ.get("MANTA_TEST_DEVICE") == "cuda"
# What else the tests of a folder test, besides the folder's own name without "tests/" and `_EVERYWHERE`.
_TESTED = {
    "tests/actors/targets/": ("drafter/",),
    "tests/actors/workers/": ("drafter/", "jobs/doctor/"),
    "tests/cluster/speculation/": ("cluster/scheduler/", "cluster/simulation/"),
    "tests/drafter/gpu_triton/": ("drafter/step/gpu_triton/", "jobs/doctor/"),
    "tests/drafter/step/": ("drafter/dflash/",),
    "tests/drafter/cpu/": ("drafter/step/cpu_numba/",),
    "tests/end_to_end/gpu_start/": ("drafter/", "actors/targets/", "actors/workers/"),
    "tests/end_to_end/lossless/": (
        "drafter/",
        "actors/targets/",
        "cluster/scheduler/",
        "cluster/speculation/",
    ),
    "tests/jobs/bench/": ("tests/benchmarks/",),
    "tests/jobs/compile/": ("drafter/step/gpu_triton/", "actors/targets/"),
    "tests/jobs/drafters/": ("jobs/training/", "drafter/dflash/"),
    "tests/jobs/training/": ("drafter/dflash/", "drafter/eagle3/", "models/recipe/"),
}
_EVERYWHERE = ("drafter/compute/", "pyproject.toml", "tests/support/")


def chosen_tests(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the tests of the short form, in their order."""
    cases = _Cases()
    return [item for item in items if cases.include(item) and (not _waits(item) or _is_changed(item))]


def _waits(item: pytest.Item) -> bool:
    return item.get_closest_marker("if_changed") is not None


def _is_changed(item: pytest.Item) -> bool:
    """Return whether the folder of a test, or what it tests, has changed since the merge base."""
    folder = f"{item.nodeid.partition('::')[0].rpartition('/')[0]}/"
    tested = (folder, folder.removeprefix("tests/"), *_TESTED.get(folder, ()), *_EVERYWHERE)
    return any(path.startswith(tested) for path in changed_files())


class _Cases:
    """Chooses the cases for which the places of parameters in their lists add up to a multiple of `one_in`.

    Every value is in some of these cases, and any two values meet if there is a third list of that length.
    """

    def __init__(self) -> None:
        # by test and names: places of values
        self._lists: dict[tuple[str, ...], dict[tuple[int, ...], int]] = {}

    def include(self, item: pytest.Item) -> bool:
        mark = item.get_closest_marker("one_in")
        call: Any = getattr(item, "callspec", None)
        if mark is None or call is None:
            return True
        function, place = item.nodeid.partition("[")[0], 0
        for names in _lists_of_names(item, call.params):
            values = self._lists.setdefault((function, *names), {})
            place += values.setdefault(tuple(id(call.params[name]) for name in names), len(values))
        return place % mark.args[0] == 0


def _lists_of_names(item: pytest.Item, params: dict[str, object]) -> list[list[str]]:
    """Return the names of parameters, those together that have a list of values in common."""
    given = [each.args[0] for each in item.iter_markers("parametrize")]
    together = [names.replace(",", " ").split() if isinstance(names, str) else list(names) for names in given]
    own = {name for names in together for name in names}
    return [*together, *([name] for name in params if name not in own)]
