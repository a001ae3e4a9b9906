"""Attention over latents by our own kernels against fp64: absorbed for blocks, expanded for long prompts.

The sizes are Kimi K2's on one of eight ranks, on a GPU; small ones in Triton's interpreter. Two requests have
two passes each, the first of prompts; the last is judged. Imports no Triton by itself: `run.py` calls it
where Triton's backend runs.

Legend: N rows, T tokens of a request, J heads, E and R head dims not rotated and rotated, F of values, C
values of a latent, W = C + R.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ...cluster.page_groups import KVGeometry
from ...drafter.compute.backend import AttentionShape, PlacedRows
from ...drafter.compute.kv_cache import PagedKVCache
from ...drafter.compute.latent import Latents
from ...drafter.compute.layers import RMSNorm
from ...drafter.compute.rope import RopeConfig, RotaryEmbedding
from . import references
from .findings import Check, Outcome, off_by, within
from .operators import REMEDY, driven
from .subject import Place, Subject, candidates

_HALF, _FP32 = 16, 512  # bounds in units of the last place


@dataclass(frozen=True, slots=True)
class _Sizes:
    """J, E, R, F, C; rows of a prompt of each of two requests, the second's as few as are expanded; rows of a
    block."""

    heads: int
    nope: int
    rotated: int
    values: int
    rank: int
    prompts: tuple[int, int]
    block: int


_KIMI = _Sizes(
    8, 128, 64, 128, 512, prompts=(2100, 171), block=16
)  # two of them are more keys than one piece
_SMALL = _Sizes(3, 20, 8, 12, 32, prompts=(50, 33), block=5)


def latent_checks(place: Place, *, quick: bool) -> Iterator[Check]:
    """Of the served backend's dtypes.

    Args:
        quick: of two dtypes of 16 bits one.
    """
    sizes = _KIMI if place.device.type == "cuda" else _SMALL
    for dtype in candidates(place)[0].examined(quick=quick):
        passes = {
            "long prompts, expanded": (sizes.prompts, sizes.prompts),
            "short prompts, expanded": (sizes.prompts, (sizes.prompts[1], sizes.prompts[1])),
            "blocks, absorbed": (sizes.prompts, (sizes.block, sizes.block)),
        }
        for name, counts in passes.items():
            line = f"{name}, {str(dtype).removeprefix('torch.')}"
            yield Check("own latents", line, partial(_examine, place, dtype, sizes, counts), REMEDY)


def _examine(place: Place, dtype: torch.dtype, sizes: _Sizes, passes: tuple[tuple[int, int], ...]) -> Outcome:
    """So many rows of each request in each pass."""
    subject = Subject(place, candidates(place)[0], dtype)
    with torch.inference_mode():
        layer = _Layer(subject, sizes, length=max(map(sum, zip(*passes, strict=True))))
        *_, error = [layer.run(counts) for counts in passes]
    return within(error, _FP32 if dtype is torch.float32 else _HALF)


class _Layer:
    """One, and two requests in scattered pages."""

    def __init__(self, subject: Subject, sizes: _Sizes, length: int) -> None:
        device, dtype, width = subject.place.device, subject.dtype, sizes.rank + sizes.rotated
        self._subject, self._sizes = subject, sizes
        up = subject.randn(sizes.heads, sizes.nope + sizes.values, sizes.rank, scale=sizes.rank**-0.5)
        norm = RMSNorm(subject.norm_weight(sizes.rank), subject.eps)
        self._rope = RotaryEmbedding(RopeConfig(sizes.rotated, 1e6, "default", {}), length, dtype, device)
        self._shape = AttentionShape(
            num_heads=sizes.heads,
            num_kv_heads=1,
            head_dim=width,
            v_head_dim=sizes.rank,
            q_norm_D=None,
            k_norm_D=None,
            eps=subject.eps,
            rope=self._rope,
            scale=(sizes.nope + sizes.rotated) ** -0.5,
            latent=Latents(q_norm=None, q_up=None, kv_norm=norm, kv_up_JUC=up, v_dim=sizes.values),
        )
        self._attend = driven(subject).attention(self._shape)
        page = subject.candidate.page_size
        pages = -(-length // page)
        self._pages_RP = np.random.default_rng(0).permutation(2 * pages).reshape(2, pages)
        geometry = KVGeometry(1, width, sizes.rank, v_in_k=True)
        self._cache = PagedKVCache(1, 2 * pages, page, geometry, dtype, device)
        self._cache.kv.fill_(1e4)  # what is seen unwritten must show
        self._computed_R = np.zeros(2, dtype=np.int64)

    def run(self, counts: tuple[int, ...]) -> float:
        """The error of so many further rows of each; keys are compared with what was written of them."""
        sizes, first_R, rows_R = self._sizes, self._computed_R, np.array(counts)
        spans = [np.arange(first, first + rows) for first, rows in zip(first_R, rows_R, strict=True)]
        positions_N = self._put(np.concatenate(spans))
        slots_N = torch.cat([self._slots(r, at) for r, at in enumerate(spans)])
        backend, page = self._subject.backend, self._subject.candidate.page_size
        device = self._subject.place.device
        batch = backend.attention_batch(first_R, rows_R, self._pages_RP, page, device)
        rows = PlacedRows(positions_N, (slots_N,), (batch,))
        q_NJO = self._subject.randn(len(slots_N), sizes.heads, sizes.nope + sizes.rotated)
        latents_NW = self._subject.randn(len(slots_N), sizes.rank + sizes.rotated)
        q_n, q_r = q_NJO.split([sizes.nope, sizes.rotated], dim=-1)
        exact_q_NJO = torch.cat((q_n.double(), references.rotate(q_r, self._rope, positions_N)), dim=-1)
        given = torch.cat((q_NJO.flatten(1), latents_NW), dim=1)
        found = self._attend(given, driven(self._subject).begin(rows), self._cache, 0)
        self._computed_R = first_R + rows_R
        errors = [self._latents_error(latents_NW, positions_N, slots_N)]
        mine = zip(found.split(counts), exact_q_NJO.to(found.dtype).split(counts), strict=True)
        errors += [off_by(found_NO, self._exact(r, q)) for r, (found_NO, q) in enumerate(mine)]
        return max(errors)

    def _latents_error(self, given_NW: Tensor, positions_N: Tensor, slots_N: Tensor) -> float:
        parts, written_NW = self._shape.latent, self._cache.slots(0)[0][slots_N]
        assert parts is not None, "a layer of latents"
        exact_NC = references.rms_norm(given_NW[:, : parts.rank], parts.kv_norm.weight_H, parts.kv_norm.eps)
        exact_N1R = references.rotate(given_NW[:, None, parts.rank :], self._rope, positions_N)
        return max(
            off_by(written_NW[:, : parts.rank], exact_NC),
            off_by(written_NW[:, parts.rank :], exact_N1R[:, 0]),
        )

    def _exact(self, request: int, q_NJO: Tensor) -> Tensor:
        """[N, J * F] of a request's last rows, by the published formulas, in fp64."""
        parts, length = self._shape.latent, int(self._computed_R[request])
        assert parts is not None, "a layer of latents"
        cached_TW = self._cache.slots(0)[0][self._slots(request, np.arange(length))].double()
        c_TC, r_TR = cached_TW.split([parts.rank, self._sizes.rotated], dim=1)
        kv_TJU = torch.einsum("tc,juc->tju", c_TC, parts.kv_up_JUC.double())
        k_TJE, v_TJF = kv_TJU.split([parts.nope_dim, parts.v_dim], dim=-1)
        k_TJO = torch.cat((k_TJE, r_TR[:, None].expand(-1, parts.num_heads, -1)), dim=-1)
        return references.attend(q_NJO, k_TJO, v_TJF, self._shape.scale, causal=True, window=None).flatten(1)

    def _slots(self, request: int, at: np.ndarray) -> Tensor:
        page = self._subject.candidate.page_size
        return self._put(self._pages_RP[request][at // page] * page + at % page)

    def _put(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._subject.place.device)
