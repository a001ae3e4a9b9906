"""Two whole passes of a backend: a target's and a drafter's, with two random layers each.

The backend itself computes or writes their contexts, whatever its page layout. Called by `operators.py`.

    target's pass    prompts, then the rows of a step after them                   causal
    drafter's pass   context K/V of `context` tokens, then the rows after it       not causal, with a window

Legend: N rows, L layers, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....drafter.compute.backend import AttentionShape, BlockWeights, DenseMLP
from ....drafter.compute.layers.linear import RMSNorm
from ....drafter.compute.layers.rope import RotaryEmbedding
from .subject import Contexts, KernelInputs, Requests

_NUM_LAYERS = 2


def target_pass(inputs: KernelInputs) -> list[Tensor]:
    """Return the normed hidden states of the prompts' rows and of the step's rows."""
    contexts = Contexts(inputs, _requests(inputs), _NUM_LAYERS)
    rope = inputs.rope(contexts.length)
    stack = inputs.backend.stack(
        [_random_block(inputs, rope, causal=True) for _ in range(_NUM_LAYERS)], _random_norm(inputs)
    )
    return [
        stack(inputs.randn(len(rows.positions_N), inputs.hidden), rows, contexts.cache)[0]
        for rows in (contexts.known_rows(), contexts.rows())
    ]


def draft_pass(inputs: KernelInputs) -> list[Tensor]:
    """Return the normed hidden states of each request's rows after a written context."""
    of, window = inputs.attention, inputs.place.context // 2
    contexts = Contexts(inputs, _requests(inputs), _NUM_LAYERS)
    rope = inputs.rope(contexts.length)
    blocks = [_random_block(inputs, rope, causal=False, window=window) for _ in range(_NUM_LAYERS)]
    stack = inputs.backend.stack(blocks, _random_norm(inputs))
    norms = [shape.k_norm_D for shape, _ in blocks if shape.k_norm_D is not None]
    write = inputs.backend.context_writer(torch.stack(norms), inputs.eps, of.num_kv_heads)
    known, rows = contexts.known_rows(), contexts.rows(window)
    kv_NO = inputs.randn(len(known.positions_N), 2 * _NUM_LAYERS * of.num_kv_heads * of.head_dim)
    write(kv_NO, rope, known, contexts.cache, 0)
    x_NH = inputs.randn(len(rows.positions_N), inputs.hidden)
    return contexts.split(stack(x_NH, rows, contexts.cache)[0])


def _requests(inputs: KernelInputs) -> Requests:
    """Return a request with a long context and one with a short context."""
    return ((inputs.place.context, 16), (17, 3))


def _random_norm(inputs: KernelInputs) -> RMSNorm:
    return RMSNorm(inputs.norm_weight(inputs.hidden), inputs.eps)


def _random_block(
    inputs: KernelInputs, rope: RotaryEmbedding, *, causal: bool, window: int | None = None
) -> tuple[AttentionShape, BlockWeights]:
    of, hidden, inner, linear = inputs.attention, inputs.hidden, inputs.inner, inputs.backend.linear
    q_size = of.num_heads * of.head_dim
    shape = inputs.attention_shape(rope, causal=causal, window=window)
    return shape, BlockWeights(
        attention_norm=_random_norm(inputs),
        qkv=linear(inputs.weight(q_size + 2 * of.num_kv_heads * of.head_dim, hidden)),
        o=linear(inputs.weight(hidden, q_size)),
        mlp_norm=_random_norm(inputs),
        mlp=DenseMLP(
            gate_up=linear(inputs.weight(2 * inner, hidden)), down=linear(inputs.weight(hidden, inner))
        ),
    )
