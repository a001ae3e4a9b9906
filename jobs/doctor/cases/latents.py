"""Attention over latents (MLA) with our own kernels: absorbed for blocks, expanded for long prompts.

Sizes are those of Kimi K2 on one of eight ranks on a GPU, and small ones in Triton's interpreter. Two
requests run two passes, of which the first is the prefill and the second is compared.

Legend: N rows, J heads, E and R head dims without and with rotary embedding, F of values, C values of a
latent, W = C + R, O = E + R.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ....cluster.pages.kv_cache_groups import KVCacheSpec
from ....drafter.compute.backend import PlacedRows
from ....drafter.compute.block_weights import AttentionShape
from ....drafter.compute.layers.linear import RMSNorm
from ....drafter.compute.layers.mla import MLALayer
from .checks import Case, Check, checks_of_served, error_of
from .subject import Contexts, KernelInputs, MachineKind

_HALF, _FP32 = 16, 512  # bounds in units of the last place


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes J, E, R, F, C; prompt rows of two requests (the second: the fewest that expand); block rows."""

    heads: int
    nope: int
    rotated: int
    values: int
    rank: int
    prompts: tuple[int, int]
    block: int


# Two prompts have more keys than one chunk of the expansion.
_KIMI = _Sizes(8, 128, 64, 128, 512, prompts=(2100, 171), block=16)
_SMALL = _Sizes(3, 20, 8, 12, 32, prompts=(50, 33), block=5)


def latent_checks(machine: MachineKind, *, quick: bool) -> Iterator[Check]:
    sizes = _KIMI if machine.device.type == "cuda" else _SMALL
    counts = {
        "long prompts, expanded": sizes.prompts,
        "short prompts, expanded": (sizes.prompts[1], sizes.prompts[1]),
        "blocks, absorbed": (sizes.block, sizes.block),
    }
    cases = [
        Case(name, partial(error_of, compute=partial(_attend, sizes=sizes, rows=rows)), _HALF, _FP32)
        for name, rows in counts.items()
    ]
    yield from checks_of_served("own latents", machine, cases, quick=quick)


def _attend(inputs: KernelInputs, *, sizes: _Sizes, rows: tuple[int, int]) -> list[Tensor]:
    """Attend with `rows` of each request after its prompt; return the written K/V and the results."""
    width, rank = sizes.rank + sizes.rotated, sizes.rank
    requests = tuple(zip(sizes.prompts, rows, strict=True))
    contexts = Contexts(inputs, requests, 1, KVCacheSpec(1, width, rank, v_in_k=True))
    shape = AttentionShape(
        num_heads=sizes.heads,
        num_kv_heads=1,
        head_dim=width,
        v_head_dim=rank,
        q_norm_D=None,
        k_norm_D=None,
        eps=inputs.eps,
        rope=inputs.rope(contexts.length, sizes.rotated),
        scale=(sizes.nope + sizes.rotated) ** -0.5,
        latent=MLALayer(
            q_norm=None,
            q_up=None,
            kv_norm=RMSNorm(inputs.norm_weight(rank), inputs.eps),
            kv_up_JUC=inputs.randn(sizes.heads, sizes.nope + sizes.values, rank, scale=rank**-0.5),
            v_dim=sizes.values,
        ),
    )
    backend, attention = inputs.backend, inputs.backend.attention(shape)

    def attend(placed: PlacedRows) -> Tensor:
        given_NO = inputs.randn(len(placed.positions_N), sizes.heads * (sizes.nope + sizes.rotated) + width)
        return attention(given_NO, backend.begin(placed), contexts.cache, 0)

    attend(contexts.pending_rows())
    found_NO = attend(contexts.rows())
    written_NW = contexts.cache.slots(0)[0][contexts.rows().kv_slots[0]]
    return [written_NW[:, :rank], written_NW[:, rank:], *contexts.split(found_NO)]
