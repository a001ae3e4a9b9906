"""Measures sustained rates: a copy, a large product, and products of a block's rows (weights read).

A known GPU (`cluster/hardware/roofline.py`) must come close to its known copy and product rates; other
figures are only reported. Called by `doctor_run.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Literal

import torch

from ...cluster.hardware.roofline import Device
from ..bench.common.device_rates import measure_device, published_rates, weight_bytes_per_s
from .cases.checks import Check, CheckOutcome
from .cases.experts import ExpertKind, bytes_of, expert_kinds, random_experts, random_rows
from .cases.subject import BackendCandidate, KernelInputs, MachineKind, candidates

_SHARE = 0.85  # minimum share of a known GPU's rates
_ROWS = 16  # rows of a block
_WEIGHT_BYTES = {"cpu": 2**26, "cuda": 2**31}  # larger than the caches
_REMEDY = "check other processes on the GPU, its clocks and throttling with nvidia-smi"


def rate_checks(machine: MachineKind) -> Iterator[Check]:
    """Yield the rates in the dtype of the first backend that runs here."""
    candidate = next(c for c in candidates(machine) if c.why_not(machine, c.dtypes[0]) is None)
    dtype = candidate.dtypes[0]

    @cache
    def measured() -> Device:
        return measure_device("this", machine.device, dtype)

    kind, known = str(dtype).removeprefix("torch."), published_rates(machine.device, dtype)
    yield Check("rates", "copy, read and written", lambda: _rate(measured(), known, "bytes_per_s"), _REMEDY)
    yield Check("rates", f"large product, {kind}", lambda: _rate(measured(), known, "flops"), _REMEDY)
    look = partial(_weights, machine, candidate, dtype, measured)
    yield Check("rates", f"products of {_ROWS} rows, {kind}: weights read", look, _REMEDY)
    if candidate.setting != "triton":
        return  # other backends have no expert kernels of ours
    for experts in expert_kinds(machine):
        look = partial(_experts, machine, candidate, dtype, experts, measured)
        yield Check("rates", f"experts of {_ROWS} rows, {experts.name}: weights read", look, _REMEDY)


def _rate(found: Device, known: Device | None, name: Literal["bytes_per_s", "flops"]) -> CheckOutcome:
    size, unit = (1e9, "GB/s") if name == "bytes_per_s" else (1e12, "TFLOP/s")
    rate: float = getattr(found, name)
    words = f"{rate / size:.3g} {unit}"
    if known is None:
        return CheckOutcome(words)
    minimum = _SHARE * getattr(known, name)
    return CheckOutcome(words, f"{minimum / size:.0f} {unit}", rate >= minimum)


def _weights(
    machine: MachineKind, candidate: BackendCandidate, dtype: torch.dtype, measured: Callable[[], Device]
) -> CheckOutcome:
    """Measure gate and up projections, in enough copies to exceed the caches."""
    inputs = KernelInputs(machine, candidate, dtype)
    shape = (2 * inputs.inner, inputs.hidden)
    bytes_each = shape[0] * shape[1] * dtype.itemsize
    copies = -(-_WEIGHT_BYTES[machine.device.type] // bytes_each)
    with torch.inference_mode():
        products = [inputs.backend.linear(inputs.weight(*shape)) for _ in range(copies)]
        x_NH = inputs.randn(_ROWS, inputs.hidden)
        rate = weight_bytes_per_s(machine.device, products, x_NH, copies * bytes_each)
    return CheckOutcome(f"{rate / 1e9:.0f} GB/s, {rate / measured().bytes_per_s:.0%} of the copy")


def _experts(
    machine: MachineKind,
    candidate: BackendCandidate,
    dtype: torch.dtype,
    kind: ExpertKind,
    measured: Callable[[], Device],
) -> CheckOutcome:
    """Measure the experts that a block's rows choose, with uniform routing."""
    inputs = KernelInputs(machine, candidate, dtype)
    with torch.inference_mode():
        x_NH, ids_Nk, weights_Nk = random_rows(inputs, kind, _ROWS)
        weights = random_experts(inputs, kind)
        chosen = len(ids_Nk.unique()) / kind.experts
        bytes_each = round(chosen * sum(bytes_of(weight) for weight in (weights.gate_up, weights.down)))
        copies = -(-_WEIGHT_BYTES[machine.device.type] // bytes_each)
        layers = [inputs.backend.experts(random_experts(inputs, kind)) for _ in range(copies)]
        products = [partial(layer, expert_ids_Nk=ids_Nk, weights_Nk=weights_Nk) for layer in layers]
        rate = weight_bytes_per_s(machine.device, products, x_NH, copies * bytes_each)
    return CheckOutcome(f"{rate / 1e9:.0f} GB/s, {rate / measured().bytes_per_s:.0%} of the copy")
