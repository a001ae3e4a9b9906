"""Our own products with all that is fused to them, against fp64: whether this device chooses them or not.

Through the backend's seam (`operators.py`) a product is whosever is sooner here; these are ours, at every
height of a tile, and of more rows than one holds. Imports Triton: `run.py` imports this file where Triton's
backend runs.

    residual, then norm   y = x W^T + residual, with the sums of squares that the next product's norm reads
    norm, then product    that norm on the way in; kept as tensors it must be the same
    norm, then gate       the same, and activation(gate) * up on the way out
    blocks                a weight whose blocks of rows lie apart

Legend: N rows, H hidden, O outputs, I inner size, T tiles of outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from ...drafter.compute.gpu.product_tiles import ProductWorkspace
from ...drafter.compute.gpu.projections import OwnProjection, PendingNorm
from ...drafter.compute.layers import Activation, RMSNorm
from . import references
from .findings import Check, Outcome, off_by, within
from .operators import REMEDY, context_blocks
from .subject import Place, Subject, candidates

_HALF, _FP32 = 6, 256  # bounds in units of the last place
_ROWS = (5, 16, 32, 33, 100)  # tiles of 16, 32 and 64 rows, and two of 64
_FEW_ROWS = (16, 100)

Look = Callable[[Subject, ProductWorkspace, int], float]


def product_checks(place: Place, *, quick: bool) -> Iterator[Check]:
    """Of the served backend's dtypes.

    Args:
        quick: of two dtypes of 16 bits one, and fewer heights of a tile.
    """
    looks: dict[str, Look] = {
        "residual, then norm": _residual,
        "norm, then product": _normed,
        "norm, then SiLU product": partial(_gated, activation="silu"),
        "norm, then GELU product": partial(_gated, activation="gelu_tanh"),
        "blocks": _blocks,
    }
    rows = _FEW_ROWS if quick else _ROWS
    for dtype in candidates(place)[0].examined(quick=quick):
        for name, look in looks.items():
            line = f"{name}, {str(dtype).removeprefix('torch.')}"
            yield Check("own products", line, partial(_examine, place, dtype, look, rows), REMEDY)


def _examine(place: Place, dtype: torch.dtype, look: Look, rows: tuple[int, ...]) -> Outcome:
    """The worst of all numbers of rows; counters must be zeros again behind each."""
    subject, workspace = Subject(place, candidates(place)[0], dtype), ProductWorkspace(place.device)
    with torch.inference_mode():
        error = max(look(subject, workspace, num_rows) for num_rows in rows)
    if bool(workspace.arrived_E.any()):
        return Outcome("counters are not zeros behind a launch", "zeros", passed=False)
    return within(error, _FP32 if dtype is torch.float32 else _HALF)


def _own(weight_OK: Tensor, workspace: ProductWorkspace) -> OwnProjection:
    return OwnProjection(weight_OK[None, None], None, workspace)


def _added(subject: Subject, workspace: ProductWorkspace, num_rows: int) -> tuple[Tensor, PendingNorm, float]:
    """An MLP's end: the new residual, its norm still to be done, and the sum's error."""
    x_NI, residual_NH = subject.randn(num_rows, subject.inner), subject.randn(num_rows, subject.hidden)
    weight_HI = subject.weight(subject.hidden, subject.inner)
    norm = RMSNorm(subject.norm_weight(subject.hidden), subject.eps)
    sum_NH, pending = _own(weight_HI, workspace).added(x_NI, residual_NH, norm)
    exact_NH = references.linear(x_NI, weight_HI) + residual_NH.double()
    return sum_NH, pending, off_by(sum_NH, exact_NH)


def _exact_norm(sum_NH: Tensor, pending: PendingNorm) -> Tensor:
    return references.rms_norm(sum_NH, pending.norm.weight_H, pending.norm.eps)


def _residual(subject: Subject, workspace: ProductWorkspace, num_rows: int) -> float:
    sum_NH, pending, error = _added(subject, workspace, num_rows)
    exact_N = sum_NH.double().square().sum(1)
    if not torch.allclose(pending.squares_NT.double().sum(1), exact_N, rtol=1e-5, atol=0):
        return float("inf")
    return max(error, off_by(pending.tensor(), _exact_norm(sum_NH, pending)))


def _normed(subject: Subject, workspace: ProductWorkspace, num_rows: int) -> float:
    sum_NH, pending, _ = _added(subject, workspace, num_rows)
    of = subject.attention
    weight_OH = subject.weight((of.num_heads + 2 * of.num_kv_heads) * of.head_dim, subject.hidden)
    exact_NO = references.linear(_exact_norm(sum_NH, pending), weight_OH)
    return off_by(_own(weight_OH, workspace)(pending), exact_NO)


def _gated(subject: Subject, workspace: ProductWorkspace, num_rows: int, *, activation: Activation) -> float:
    sum_NH, pending, _ = _added(subject, workspace, num_rows)
    weight_OH = subject.weight(2 * subject.inner, subject.hidden).mul_(3)  # gates large enough to bend
    exact_NI = references.gate(references.linear(_exact_norm(sum_NH, pending), weight_OH), activation)
    return off_by(_own(weight_OH, workspace).gated(pending, activation), exact_NI)


def _blocks(subject: Subject, workspace: ProductWorkspace, num_rows: int) -> float:
    weight_PLRH, x_NH = context_blocks(subject), subject.randn(num_rows, subject.hidden)
    exact_NO = references.linear(x_NH, weight_PLRH.flatten(0, 2))
    return off_by(OwnProjection(weight_PLRH, None, workspace)(x_NH), exact_NO)
