"""A backend's operators one by one, and whole passes of it, against fp64 on the same device.

Through the seam that models use (`drafter/compute/backend.py`), so that all backends are asked the same. An
operator is examined by itself where passes are driven from Python; a compiled pass is one call, and is
examined as one (`passes.py`).

Legend: N rows, H hidden, I inner size, O outputs, P parts and R rows of a block of a weight, L layers,
J = Q + 2 K heads, Q query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...drafter.compute.backend import AttentionShape, Operators
from ...drafter.compute.layers import Activation, RMSNorm
from . import references
from .findings import Check, NotHereError, Outcome, off_by, raising, within
from .passes import draft_pass, target_pass
from .subject import Candidate, Contexts, Place, Requests, Subject, candidates

REMEDY = (
    "serve with another backend (--attention-backend torch) until this is mended, and report the line with "
    "its trace (-o FILE); what fails behind a failed launch may be its consequence"
)
_ROWS = 48  # of operators that look at one row at a time
_KINDS = ((True, None), (False, None), (True, 100), (False, 40))  # causal, window


@dataclass(frozen=True, slots=True)
class _Operator:
    """What is asked of a backend.

    Attributes:
        look: returns its error in units of the last place.
        half, fp32: the bounds, where results are rounded to 16 bits, and in fp32: there a sum of 12288 terms
            in a row may be off by 90 units, one of products of tf32 is by thousands.
        alone: asked only where passes are driven from Python.
    """

    name: str
    look: Callable[[Subject], float]
    half: float
    fp32: float
    alone: bool = True


def operator_checks(place: Place, *, quick: bool) -> Iterator[Check]:
    """All that is looked at, of every backend for such a device.

    Args:
        quick: on a GPU only of the first, which is served there; of two dtypes of 16 bits one.
    """
    for candidate in candidates(place)[: 1 if quick and place.device.type == "cuda" else None]:
        for dtype in candidate.examined(quick=quick):
            kind, reason = str(dtype).removeprefix("torch."), candidate.why_not(place, dtype)
            if reason is not None:
                yield raising(candidate.name, kind, NotHereError(f"{candidate.name} {reason}"))
                continue
            for operator in _operators(place):
                if operator.alone and candidate.setting == "compiled":
                    continue
                look = partial(_examine, place, candidate, dtype, operator)
                yield Check(candidate.name, f"{operator.name}, {kind}", look, REMEDY)


def _examine(place: Place, candidate: Candidate, dtype: torch.dtype, operator: _Operator) -> Outcome:
    with torch.inference_mode():
        error = operator.look(Subject(place, candidate, dtype))
    return within(error, operator.fp32 if dtype is torch.float32 else operator.half)


def _operators(place: Place) -> list[_Operator]:
    return [
        _Operator("product", _product, 4, 256, alone=False),
        _Operator("product of blocks", _product_of_blocks, 4, 256, alone=False),
        _Operator("norm", _norm, 2, 8, alone=False),
        _Operator("residual and norm", _residual_norm, 4, 256),
        _Operator("SiLU product", partial(_gate, activation="silu"), 4, 256),
        _Operator("GELU product", partial(_gate, activation="gelu_tanh"), 4, 256),
        *(
            _Operator(f"attention of {kind}", partial(attention, requests=requests), 8, 128)
            for kind, requests in place.requests.items()
        ),
        _Operator("drafter's context K/V", _context, 4, 8),
        _Operator("target's pass", target_pass, 12, 400, alone=False),
        _Operator("drafter's pass", draft_pass, 12, 400, alone=False),
    ]


def _product(subject: Subject) -> float:
    """Of a block's rows."""
    x_NH, weight_IH = subject.randn(16, subject.hidden), subject.weight(subject.inner, subject.hidden)
    exact_NI = references.linear(x_NH, weight_IH)
    return off_by(subject.backend.linear(weight_IH)(x_NH), exact_NI)


def _product_of_blocks(subject: Subject) -> float:
    """As the drafter's context reads its layers' keys and values, which lie within their q, k and v."""
    weight_PLRH = context_blocks(subject)
    x_NH = subject.randn(16, subject.hidden)
    exact_NO = references.linear(x_NH, weight_PLRH.flatten(0, 2))
    return off_by(subject.backend.linear_of_blocks(weight_PLRH)(x_NH), exact_NO)


def _norm(subject: Subject) -> float:
    norm = RMSNorm(subject.norm_weight(subject.hidden), subject.eps)
    x_NH = subject.randn(_ROWS, subject.hidden)
    return off_by(subject.backend.norm(norm, x_NH), references.rms_norm(x_NH, norm.weight_H, norm.eps))


def _residual_norm(subject: Subject) -> float:
    """A product's sum with the residual, and the norm of the sum that was found."""
    norm = RMSNorm(subject.norm_weight(subject.hidden), subject.eps)
    weight_HI = subject.weight(subject.hidden, subject.inner)
    x_NI, residual_NH = subject.randn(_ROWS, subject.inner), subject.randn(_ROWS, subject.hidden)
    exact_NH = references.linear(x_NI, weight_HI) + residual_NH.double()
    backend, project = driven(subject), subject.backend.linear(weight_HI)
    sum_NH, normed_NH = backend.residual_norm(project, x_NI, residual_NH, norm, None)
    of_sum_NH = references.rms_norm(sum_NH, norm.weight_H, norm.eps)
    return max(off_by(sum_NH, exact_NH), off_by(backend.as_tensor(normed_NH), of_sum_NH))


def _gate(subject: Subject, activation: Activation) -> float:
    """A product's halves, that of the gate large enough to bend."""
    x_NH = subject.randn(_ROWS, subject.hidden, scale=3.0)
    weight_OH = subject.weight(2 * subject.inner, subject.hidden)
    exact_NI = references.gate(references.linear(x_NH, weight_OH), activation)
    project = subject.backend.linear(weight_OH)
    return off_by(driven(subject).gated(project, x_NH, activation), exact_NI)


def attention(subject: Subject, requests: Requests) -> float:
    """Every kind over the same requests; an error in units of the last place."""
    return max(_attend(subject, requests, causal, window) for causal, window in _KINDS)


def _attend(subject: Subject, requests: Requests, causal: bool, window: int | None) -> float:
    """Head norm, rotation, K/V write and attention.

    Attention is compared over fp64's queries, rounded, and over the keys that were written: what rounding
    them does to a score is not its error.
    """
    contexts = Contexts(subject, requests, num_layers=2)
    contexts.fill(subject, contexts.first_R)
    shape, rows = _shape(subject, contexts.length, causal, window), contexts.rows(window)
    num_q, num_kv = shape.num_heads, shape.num_kv_heads
    qkv_NJD = subject.randn(len(rows.positions_N), num_q + 2 * num_kv, shape.head_dim)
    exact_NJD = _exact_heads(qkv_NJD[:, : num_q + num_kv], shape, rows.positions_N)
    exact_v_NKD = qkv_NJD[:, num_q + num_kv :].double()
    backend = driven(subject)
    found_NO = backend.attention(shape)(qkv_NJD.flatten(1), backend.begin(rows), contexts.cache, 1)
    written_N2KD = contexts.kv(1, rows.kv_slots[0])[0]
    errors = [off_by(written_N2KD[:, 0], exact_NJD[:, num_q:]), off_by(written_N2KD[:, 1], exact_v_NKD)]
    q_NQD, found_NQD = exact_NJD[:, :num_q].to(subject.dtype), found_NO.unflatten(1, (num_q, -1))
    for mine, k_TKD, v_TKD in contexts.of_each():
        exact_NQD = references.attend(q_NQD[mine], k_TKD, v_TKD, shape.scale, causal=causal, window=window)
        errors.append(off_by(found_NQD[mine], exact_NQD))
    return max(errors)


def _shape(subject: Subject, length: int, causal: bool, window: int | None) -> AttentionShape:
    of = subject.attention
    return AttentionShape(
        num_heads=of.num_heads,
        num_kv_heads=of.num_kv_heads,
        head_dim=of.head_dim,
        v_head_dim=of.head_dim,
        q_norm_D=subject.norm_weight(of.head_dim),
        k_norm_D=subject.norm_weight(of.head_dim),
        eps=subject.eps,
        rope=subject.rope(length),
        scale=of.scale,
        causal=causal,
        window=window,
    )


def _exact_heads(qk_NJD: Tensor, shape: AttentionShape, positions_N: Tensor) -> Tensor:
    """Queries and keys, normed and rotated."""
    norm_JD = shape.head_norm()
    assert norm_JD is not None and shape.rope is not None, "both were given"
    return references.rotate(references.rms_norm(qk_NJD, norm_JD, shape.eps), shape.rope, positions_N)


def _context(subject: Subject) -> float:
    """K and V of all layers of the drafter, from one product."""
    of, num_layers = subject.attention, subject.place.shape.drafter.num_layers
    contexts = Contexts(subject, subject.place.requests["blocks"], num_layers)
    rows, rope = contexts.rows(), subject.rope(contexts.length)
    norm_LD = subject.norm_weight(num_layers, of.head_dim)
    kv_NO = subject.randn(len(rows.positions_N), 2 * num_layers * of.num_kv_heads * of.head_dim)
    k_NLKD, v_NLKD = kv_NO.clone().unflatten(1, (2, num_layers, of.num_kv_heads, of.head_dim)).unbind(1)
    subject.backend.context_writer(norm_LD, subject.eps, of.num_kv_heads)(
        kv_NO, rope, rows, contexts.cache, 0
    )
    written_LN2KD = contexts.kv(num_layers, rows.kv_slots[0])
    normed_NLKD = references.rms_norm(k_NLKD, norm_LD[:, None], subject.eps)
    rotated_NJD = references.rotate(normed_NLKD.flatten(1, 2), rope, rows.positions_N)
    exact_LNKD = rotated_NJD.unflatten(1, (num_layers, -1)).transpose(0, 1)
    values = off_by(written_LN2KD[:, :, 1], v_NLKD.transpose(0, 1).double())
    return max(off_by(written_LN2KD[:, :, 0], exact_LNKD), values)


def context_blocks(subject: Subject) -> Tensor:
    """Keys', then values' weights of the drafter's layers, [2, L, K * D, H]: views of one memory."""
    of, num_layers = subject.attention, subject.place.shape.drafter.num_layers
    q_size, kv_size = of.num_heads * of.head_dim, of.num_kv_heads * of.head_dim
    qkv_LOH = subject.weight(num_layers * (q_size + 2 * kv_size), subject.hidden).unflatten(
        0, (num_layers, -1)
    )
    return qkv_LOH[:, q_size:].unflatten(1, (2, kv_size)).transpose(0, 1)


def driven(subject: Subject) -> Operators:
    """Its backend, whose passes are driven from Python."""
    return subject.backend  # type: ignore[return-value]
