"""Whether this machine's products give a row the same bits whatever rows stand beside it.

Measured at start, not assumed: it depends on the CPU, the dtype and the libraries. Where it holds, greedy and
seeded outputs are the same to the last token with speculation on or off and in any batch; where it does not,
they are up to near-ties. Called by whoever loads a target, for the log, and by tests.
"""

from __future__ import annotations

import numpy as np
import torch

from .attention import AttentionBatch, paged_attention
from .kv_cache import PagedKVCache
from .layers import Linear

_ROWS = (1, 2, 3, 5, 8, 16, 17, 32)
_LINEAR_SHAPES = ((384, 192), (768, 256), (256, 768))


def rows_are_invariant(dtype: torch.dtype, device: torch.device | str) -> bool:
    """Compare rows of linear layers and of attention, alone and among others, bit by bit (a few ms)."""
    generator = torch.Generator().manual_seed(0)
    return _linear_is(dtype, device, generator) and _attention_is(dtype, device, generator)


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, g: torch.Generator):
    return torch.randn(shape, generator=g).to(device=device, dtype=dtype)


def _linear_is(dtype: torch.dtype, device: torch.device | str, g: torch.Generator) -> bool:
    for shape in _LINEAR_SHAPES:
        linear = Linear(_random(shape, dtype, device, g))
        x = _random((max(_ROWS), shape[1]), dtype, device, g)
        full = linear(x)
        if not all(torch.equal(linear(x[:rows]), full[:rows]) for rows in _ROWS):
            return False
    return True


def _attention_is(dtype: torch.dtype, device: torch.device | str, g: torch.Generator) -> bool:
    """A block of 16 rows, its rows alone, and it beside a long companion, at several context lengths."""
    cache = PagedKVCache(1, 128, 16, 2, 64, dtype, device)
    cache.kv.copy_(_random(tuple(cache.kv.shape), dtype, device, g))
    pages = np.stack((np.arange(0, 128, 2), np.arange(1, 128, 2)))
    for length in (16, 100, 200, 330, 450, 730):
        q = _random((16, 4, 64), dtype, device, g)
        block = _attend(q, cache, [length - 16], [16], pages[:1], device)
        beside = _attend(torch.cat((q, q[:1])), cache, [length - 16, 900], [16, 1], pages, device)
        alone = [_attend(q[i : i + 1], cache, [length - 16 + i], [1], pages[:1], device) for i in range(16)]
        if not (torch.equal(block, beside[:16]) and torch.equal(block, torch.cat(alone))):
            return False
    return True


def _attend(
    q: torch.Tensor,
    cache: PagedKVCache,
    first: list[int],
    rows: list[int],
    pages: np.ndarray,
    device: torch.device | str,
) -> torch.Tensor:
    batch = AttentionBatch.build(np.array(first), np.array(rows), pages, cache.page_size, device)
    return paged_attention(q, cache, 0, batch, 0.125)
