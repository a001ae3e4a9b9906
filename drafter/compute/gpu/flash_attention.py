"""The `flash_attn` package (FlashAttention 2) in our kernel's place: optional, imported only if chosen.

Not for gpt-oss (no sinks), fp32 or batch invariance; and no context is split while blocks are verified, so
that few long requests leave most of a GPU idle. Called like `attention.verify_attention`.

Legend: N rows, B requests, Q query heads, K kv heads, D head dim, P pages, S page size.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ....cluster.errors import ConfigError
from .tiles import AttentionWorkspace, PagedRows

_PAGE_MULTIPLE = 256
_MAX_HEAD_DIM = 256


class FlashAttention:
    """`flash_attn_varlen_func` over pages; an instance is called in `verify_attention`'s place.

    Args:
        page_size, dtype, head_dim: of the caches to come.
        sinks: whether a layer has attention sinks.

    Raises:
        ConfigError: the package is missing or cannot do this; `param` is attention_backend.
    """

    def __init__(self, page_size: int, dtype: torch.dtype, head_dim: int, *, sinks: bool = False) -> None:
        if page_size % _PAGE_MULTIPLE:
            raise _refusal(
                f"reads pages of a multiple of 256 tokens, page_size is {page_size}", "page_size=256"
            )
        if dtype not in (torch.float16, torch.bfloat16):
            raise _refusal(f"computes in float16 and bfloat16, dtype is {dtype}", "dtype=bfloat16")
        if head_dim > _MAX_HEAD_DIM:
            raise _refusal(f"has no head_dim above {_MAX_HEAD_DIM}, this model's is {head_dim}")
        if sinks:
            raise _refusal("has no attention sinks, which this model needs")
        self._attend = _load()

    def __call__(
        self,
        q_NQD: Tensor,
        k_PSKD: Tensor,
        v_PSKD: Tensor,
        rows: PagedRows,
        scale: float,
        *,
        causal: bool = True,
        window: int | None = None,
        sinks_Q: Tensor | None = None,
        workspace: AttentionWorkspace | None = None,
    ) -> Tensor:
        """See `verify_attention`; `workspace` is not used. [N, Q * D], zeros for padding."""
        assert sinks_Q is None, "refused when the backend was chosen"
        ends = rows.cu_rows[-1]
        cu_keys = F.pad(rows.kv_lengths_B.cumsum(0, dtype=torch.int32), (1, 0))
        beside = -1 if window is None else window - 1  # the package counts neighbours, -1 for all
        out_NQD = self._attend(
            q_NQD,
            k_PSKD,
            v_PSKD,
            cu_seqlens_q=rows.cu_rows,
            cu_seqlens_k=cu_keys,  # with a block table only the differences count
            # At 1 it takes row b for request b's, whatever cu_seqlens_q says; padding has none.
            max_seqlen_q=max(rows.max_rows, 2),
            max_seqlen_k=rows.page_table.shape[1] * k_PSKD.shape[1],
            softmax_scale=scale,
            causal=causal,
            window_size=(beside, 0 if causal and window is not None else beside),
            block_table=rows.page_table.index_select(0, rows.slots_B),
        )
        padding_N = torch.arange(len(q_NQD), device=q_NQD.device) >= ends
        return out_NQD.masked_fill_(padding_N[:, None, None], 0.0).view(len(q_NQD), -1)


def _load() -> Callable[..., Tensor]:
    try:
        return importlib.import_module("flash_attn").flash_attn_varlen_func
    except ImportError as error:
        raise _refusal(
            f"needs the package flash_attn ({error})", "pip install 'manta[flash-attn]'"
        ) from error


def _refusal(why: str, remedy: str = "") -> ConfigError:
    remedies = " or ".join(filter(None, (remedy, "attention_backend=triton")))
    return ConfigError(f"attention_backend=flash_attn {why}; use {remedies}.", param="attention_backend")
