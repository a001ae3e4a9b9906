"""Attention by the `flash_attn` package (FlashAttention 2): optional, imported only if chosen.

Not for gpt-oss (no sinks), fp32 or batch invariance; and contexts are not split when blocks are verified, so
a few long requests leave most of a GPU idle. A `backend.PagedAttention`.

Legend: N rows, B requests, Q query heads, K kv heads, D head dim, F that of values, P pages, S page size.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..backend import DeviceCapabilities, ModelStackSpec
from . import backend
from .attention.attention_tiles import AttentionKind, PagedRows

_PAGE_MULTIPLE = 256
_MAX_HEAD_DIM = 256


def why_not(spec: ModelStackSpec, machine: DeviceCapabilities) -> str | None:
    try:
        _load()
    except ImportError as error:
        return f"needs the package flash_attn ({error}): pip install 'manta[flash-attn]'"
    if machine.page_size % _PAGE_MULTIPLE:
        return f"reads pages of a multiple of 256 tokens (page_size=256), page_size is {machine.page_size}"
    if machine.dtype not in (torch.float16, torch.bfloat16):
        return f"computes in float16 and bfloat16 (dtype=bfloat16), dtype is {machine.dtype}"
    if "attention sinks" in spec.features:
        return f"has no attention sinks, which the {spec.name} needs"
    if "latent attention" in spec.features:
        return f"has no latent attention, which the {spec.name} needs"
    if "keys from the second position on" in spec.features:
        return f"sees keys from the first position on, which the {spec.name} must not"
    wide = sorted(dim for dim in spec.head_dims if dim > _MAX_HEAD_DIM)
    if "values of another size than keys" in spec.features:
        return f"has no values of another size than keys, which the {spec.name} needs"
    if wide:
        return f"has no head_dim above {_MAX_HEAD_DIM}, the {spec.name}'s is {wide[0]}"
    return backend.why_not(spec, machine)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A pass's arguments of the package, for layers of one kind: pages, and keys before each request."""

    kind: AttentionKind
    cu_keys: Tensor
    pages_BP: Tensor


class FlashAttention:
    """`flash_attn_varlen_func` over pages."""

    def __init__(self) -> None:
        self._attend = _load()

    def reserve(self, v_head_dim: int) -> None:
        """Do nothing: the package allocates on demand."""

    def prepare(self, kind: AttentionKind, rows: PagedRows) -> _Prepared:
        cu_keys = F.pad(rows.kv_lengths_B.cumsum(0, dtype=torch.int32), (1, 0))
        return _Prepared(kind, cu_keys, rows.page_table.index_select(0, rows.slots_B))

    def __call__(
        self,
        q_NQD: Tensor,
        k_PSKD: Tensor,
        v_PSKF: Tensor,
        rows: PagedRows,
        prepared: _Prepared,
        scale: float,
        sinks_Q: Tensor | None = None,
    ) -> Tensor:
        """Attend; see `paged_attention.verify_attention`. Returns [N, Q * D], zeros for padding."""
        assert sinks_Q is None, "refused before a weight was read"
        kind, window = prepared.kind, prepared.kind.window
        neighbors = -1 if window is None else window - 1  # the package counts neighbors, -1 for unlimited
        out_NQD = self._attend(
            q_NQD,
            k_PSKD,
            v_PSKF,
            cu_seqlens_q=rows.cu_rows,
            cu_seqlens_k=prepared.cu_keys,  # with a block table only the differences matter
            # At 1 the package would use row b as request b's and ignore cu_seqlens_q; padding has none.
            max_seqlen_q=max(rows.max_rows, 2),
            max_seqlen_k=rows.page_table.shape[1] * k_PSKD.shape[1],
            softmax_scale=scale,
            causal=kind.causal,
            window_size=(neighbors, 0 if kind.causal and window is not None else neighbors),
            block_table=prepared.pages_BP,
        )
        padding_N = torch.arange(len(q_NQD), device=q_NQD.device) >= rows.cu_rows[-1]
        return out_NQD.masked_fill_(padding_N[:, None, None], 0.0).view(len(q_NQD), -1)


def _load() -> Callable[..., Tensor]:
    return importlib.import_module("flash_attn").flash_attn_varlen_func
