"""Gated delta layers by our own kernels against fp64: a prompt, a block of which some stood, what follows.

The sizes are those of models that are served, on a GPU; small ones in Triton's interpreter. Imports no Triton
by itself: `run.py` calls it where Triton's backend runs.

Legend: N rows, K key heads, V value heads, D key dim, F value dim, C channels, T taps, G = V * F.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...cluster.page_groups import KVGeometry
from ...cluster.state_shape import StateGeometry
from ...drafter.compute.backend import PlacedRows
from ...drafter.compute.eager.delta_net import EPS
from ...drafter.compute.kv_cache import PagedKVCache
from ...drafter.compute.recurrent import DeltaNetShape, tell_apart
from ...drafter.compute.state_memory import DeviceStateRows, StateMemory, StateRows
from .findings import Check, Outcome, off_by, within
from .operators import REMEDY, driven
from .subject import Place, Subject, candidates

_HALF, _FP32 = 16, 512  # bounds in units of the last place
_KINDS = {
    "two value heads a key": StateGeometry(16, 32, 128, 128, 4),  # Qwen3.5-9B, 35B-A3B, Coder-Next
    "three value heads a key": StateGeometry(16, 48, 128, 128, 4),  # Qwen3.5-27B
}
_SMALL = {
    "two value heads a key": StateGeometry(1, 2, 16, 16, 4),
    "three value heads a key": StateGeometry(1, 3, 16, 8, 4),
}
_PROMPT, _DRAFTS, _STOOD, _REST = 40, 5, 3, 2


def delta_checks(place: Place, *, quick: bool) -> Iterator[Check]:
    """Of the served backend's dtypes.

    Args:
        quick: of two dtypes of 16 bits one.
    """
    kinds = _KINDS if place.device.type == "cuda" else _SMALL
    for dtype in candidates(place)[0].examined(quick=quick):
        for name, kind in kinds.items():
            line = f"{name}, {str(dtype).removeprefix('torch.')}"
            yield Check("own delta rule", line, partial(_examine, place, dtype, kind), REMEDY)


def _examine(place: Place, dtype: torch.dtype, kind: StateGeometry) -> Outcome:
    """Rows of a sequence, those of rejected drafts left out."""
    subject = Subject(place, candidates(place)[0], dtype)
    with torch.inference_mode():
        shape = _shape(subject, kind)
        width = kind.channels + kind.num_value_heads * (kind.value_dim + 2)
        rows_NO = subject.randn(_PROMPT + 1 + _STOOD + _REST, width)
        exact_NG = _exact(shape, rows_NO.double())
        return within(
            off_by(_found(subject, shape, rows_NO), exact_NG), _FP32 if dtype is torch.float32 else _HALF
        )


def _shape(subject: Subject, kind: StateGeometry) -> DeltaNetShape:
    """Of rates at which a state lives for a few rows."""
    heads = kind.num_value_heads
    return DeltaNetShape(
        kind,
        kernel_CT=subject.randn(kind.channels, kind.taps).float(),
        rate_V=-subject.randn(heads).float().abs(),
        dt_bias_V=subject.randn(heads).float() - 2.0,
        norm_F=subject.norm_weight(kind.value_dim).float(),
        eps=subject.eps,
    )


def _found(subject: Subject, shape: DeltaNetShape, rows_NO: Tensor) -> Tensor:
    """In three passes of a request, in the second of two slots."""
    backend, kind, device = driven(subject), shape.geometry, subject.place.device
    layer = backend.delta_net(shape)
    memory = StateMemory(1, kind, 2, _DRAFTS, subject.dtype, device)
    cache = PagedKVCache(
        1, 1, subject.candidate.page_size, KVGeometry(1, 8, 8), subject.dtype, device, memory
    )
    known = _PROMPT + 1 + _STOOD
    block_NO = torch.cat((rows_NO[_PROMPT:known], -rows_NO[: _DRAFTS - _STOOD]))
    told: list[Tensor] = []
    for given_NO, first, drafts, pending in (
        (rows_NO[:_PROMPT], 0, 0, 0),
        (block_NO, _PROMPT, _DRAFTS, 0),
        (rows_NO[known:], known, 0, _STOOD),
    ):
        slot, count, num_drafts, stood = (np.array([n]) for n in (1, len(given_NO), drafts, pending))
        states = DeviceStateRows.of(StateRows(slot, count, num_drafts, stood), np.array([first]), device)
        placed = PlacedRows(torch.arange(len(given_NO), device=device), (), (), states=states)
        told.append(layer(given_NO.contiguous(), backend.begin(placed), cache, 0))
    told[1] = told[1][: 1 + _STOOD]
    return torch.cat(told)


def _exact(shape: DeltaNetShape, mixed_NO: Tensor) -> Tensor:
    """[N, G] in fp64, row by row."""
    kind = shape.geometry
    x_NC, z_NG, b_NV, a_NV = tell_apart(mixed_NO, kind)
    kernel_C1T = shape.kernel_CT.double().unsqueeze(1)
    y_CN = F.conv1d(F.pad(x_NC.T, (kind.taps - 1, 0)), kernel_C1T, groups=kind.channels)
    keys, group = kind.num_key_heads * kind.key_dim, kind.num_value_heads // kind.num_key_heads
    q_N, k_N, v_N = F.silu(y_CN).T.split([keys, keys, kind.channels - 2 * keys], dim=1)
    q_NVD, k_NVD = (_unit(x.unflatten(1, (-1, kind.key_dim))).repeat_interleave(group, 1) for x in (q_N, k_N))
    v_NVF = v_N.unflatten(1, (-1, kind.value_dim))
    decay_NV = (shape.rate_V.double() * F.softplus(a_NV + shape.dt_bias_V.double())).exp()
    state_VDF = v_NVF.new_zeros(kind.num_value_heads, kind.key_dim, kind.value_dim)
    read_NVF = torch.empty_like(v_NVF)
    for n in range(len(v_NVF)):
        state_VDF = state_VDF * decay_NV[n, :, None, None]
        seen_VF = torch.einsum("vdf,vd->vf", state_VDF, k_NVD[n])
        u_VF = b_NV[n].sigmoid().unsqueeze(1) * (v_NVF[n] - seen_VF)
        state_VDF = state_VDF + torch.einsum("vd,vf->vdf", k_NVD[n], u_VF)
        read_NVF[n] = torch.einsum("vdf,vd->vf", state_VDF, q_NVD[n]) * kind.key_dim**-0.5
    normed_NVF = F.rms_norm(read_NVF, (kind.value_dim,), shape.norm_F.double(), shape.eps)
    return normed_NVF.flatten(1) * F.silu(z_NG)


def _unit(x_NKD: Tensor) -> Tensor:
    return x_NKD * torch.rsqrt(x_NKD.square().sum(-1, keepdim=True) + EPS)
