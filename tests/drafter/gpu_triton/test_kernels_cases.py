"""Every case of `manta doctor` in Triton's interpreter, at sizes of a few tiles.

A case that has several dtypes takes one of them in the short form, in turn; `make kernels` runs all.

On a GPU `manta doctor` runs them by itself, at the sizes of models that are served (`make gpu`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from manta.jobs.doctor import cases
from manta.jobs.doctor.cases.checks import Check, examine
from manta.jobs.doctor.cases.operators import operator_checks
from manta.jobs.doctor.cases.subject import BackendCandidate, MachineKind, candidates
from manta.jobs.doctor.doctor_run import kernel_checks
from support.engines.devices import ON_GPU
from support.oracles.sampling_cases import WHOLE

# Long cases, of which `test_kernels_attention.py` and `test_kernels_codes.py` have short ones.
LONG = ("attention, heads of", "attention of prompts", "codes ")


def _with_bf16(machine: MachineKind) -> list[BackendCandidate]:
    """Return the candidates, with the dtype that only the tests' interpreter computes right."""
    return [replace(each, dtypes=(*each.dtypes, torch.bfloat16)) for each in candidates(machine)]


def checks() -> list[Any]:
    if ON_GPU:
        return []
    machine = MachineKind.detect()
    with (
        patch.object(cases.checks, "candidates", _with_bf16),
        patch.object(cases.operators, "candidates", _with_bf16),
    ):
        found = [*operator_checks(machine, quick=False), *kernel_checks(machine, quick=False)]
    if WHOLE:
        return found
    by_name: dict[tuple[str, str], list[Check]] = {}
    for check in found:
        by_name.setdefault((check.group, re.sub(r", b?float\d+$", "", check.name)), []).append(check)
    chosen = [dtypes[i % len(dtypes)] for i, dtypes in enumerate(by_name.values())]
    mark = pytest.mark.if_changed
    return [pytest.param(each, marks=mark) if each.name.startswith(LONG) else each for each in chosen]


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:overflow encountered")  # as on a GPU, infinity is right there
@pytest.mark.parametrize("check", checks(), ids=lambda check: f"{check.group}: {check.name}")
def test_a_kernel_equals_the_definition(check: Check) -> None:
    found = examine(check)
    assert found.status == "ok", found
