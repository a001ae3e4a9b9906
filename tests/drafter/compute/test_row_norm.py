"""Norms of whole queries and keys: every backend equals RMSNorm, in any batch.

test_target_parallel.py tests how ranks share one (MiniMax-M2, also on more ranks than K/V heads).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from manta.actors.targets.families import read_model
from manta.actors.targets.model.decoder import RowNorm
from manta.actors.targets.model.tensor_parallel import Sharding, SingleRank
from manta.drafter.compute.backend import Backend
from manta.drafter.compute.cpu_numba.backend import NumbaBackend
from manta.drafter.compute.eager.backend import EagerBackend
from manta.drafter.compute.gpu_triton.backend import TritonBackend
from manta.drafter.compute.layers.linear import RMSNorm
from support.checkpoints.tiny import make_tiny_target
from support.engines.devices import DEVICE

BACKENDS: dict[str, tuple[Callable[[], Backend], torch.device]] = {
    "eager": (EagerBackend, torch.device("cpu")),
    "loops": (NumbaBackend, torch.device("cpu")),
    "triton": (lambda: TritonBackend(DEVICE), DEVICE),
}
# More than a turn of the kernel, and no multiple of one.
HEADS, KV_HEADS, HEAD_DIM, EPS = 9, 3, 128, 1e-2


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.one_in(2)
def test_each_part_of_a_row_is_normed_separately(tmp_path, name: str, rows: int) -> None:
    make, device = BACKENDS[name]
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
    spec = read_model(make_tiny_target(tmp_path, "minimax_m2", num_hidden_layers=1, **heads))
    random = torch.Generator().manual_seed(0)
    q_width, k_width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    weight = (1 + 0.1 * torch.randn(q_width + k_width, generator=random)).to(device)
    qkv = torch.randn(rows, q_width + 2 * k_width, generator=random).to(device)
    norm = RowNorm(weight[:q_width], weight[q_width:], EPS, Sharding(spec, 0, 1), 0, SingleRank(), make())
    q, k, v = qkv.split((q_width, k_width, k_width), dim=1)
    expected = torch.cat((RMSNorm(weight[:q_width], EPS)(q), RMSNorm(weight[q_width:], EPS)(k), v), dim=1)
    found = norm(qkv.clone())
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6)
    for row in range(rows):
        assert torch.equal(norm(qkv[row : row + 1].clone()), found[row : row + 1]), "its bits are its own"
