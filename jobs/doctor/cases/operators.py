"""A backend's operators one by one, and whole passes, at the sizes of a dense pair.

They are called through the interface that models use (`drafter/compute/backend.py`). Operators are checked
separately where passes are driven from Python; a compiled pass is one call and is checked as one. Every
function here returns the results of a backend for operands that it draws.

Legend: N rows, H hidden, I inner size, O outputs, P parts and R rows of a block of a weight, L layers,
Q query heads, K kv heads, D head dim; T taps and C groups of channels of a convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from ....drafter.compute.block_weights import AttentionShape, BlockWeights, DenseMLP, Normed
from ....drafter.compute.layers.linear import Activation, RMSNorm
from ....drafter.compute.layers.rope import RotaryEmbedding
from .checks import Case, Check, NotHereError, error_of, raising
from .subject import Contexts, KernelInputs, MachineKind, Requests, candidates

_ROWS = 48  # for operators that work on single rows
_KINDS = ((True, None), (False, None), (True, 100), (False, 40))  # causal, window
_NUM_LAYERS = 2  # of a pass, with random weights
_PADDING = 2  # rows without a request after the others, as in captured steps


def operator_checks(machine: MachineKind, *, quick: bool) -> Iterator[Check]:
    """Yield all cases of every backend; if `quick`, of the GPU's preferred one, and one 16-bit dtype."""
    for candidate in candidates(machine)[: 1 if quick and machine.device.type == "cuda" else None]:
        for dtype in candidate.examined(quick=quick):
            kind, reason = str(dtype).removeprefix("torch."), candidate.why_not(machine, dtype)
            if reason is not None:
                yield raising(candidate.name, kind, NotHereError(f"{candidate.name} {reason}"))
                continue
            for case in operator_cases(machine):
                if not case.is_operator or candidate.setting != "compiled":
                    yield case.check(candidate.name, machine, candidate, dtype)


def operator_cases(machine: MachineKind) -> list[Case]:
    def of(compute: Callable[..., list[Tensor]], **how: object) -> Callable[[KernelInputs], float]:
        return partial(error_of, compute=partial(compute, **how))

    return [
        Case("product", of(_product), 4, 256, is_operator=False),
        Case("product of blocks", of(product_of_blocks), 4, 256, is_operator=False),
        Case("norm", of(_norm), 2, 8, is_operator=False),
        Case("residual and norm", of(_residual_norm), 4, 256),
        Case("SiLU product", of(_gate, activation="silu"), 4, 256),
        Case("GELU product", of(_gate, activation="gelu_tanh"), 4, 256),
        *(
            Case(f"attention of {kind}", partial(attention_error, requests=requests), 8, 128)
            for kind, requests in machine.requests.items()
        ),
        Case("drafter's context K/V", of(_context), 4, 8),
        Case("DFlash2's convolutions", of(_convolutions), 4, 16),
        Case("target's pass", of(_target_pass), 12, 400, is_operator=False),
        Case("drafter's pass", of(_draft_pass), 12, 400, is_operator=False),
    ]


def _product(inputs: KernelInputs) -> list[Tensor]:
    x_NH, weight_IH = inputs.randn(16, inputs.hidden), inputs.weight(inputs.inner, inputs.hidden)
    return [inputs.backend.linear(weight_IH)(x_NH)]


def product_of_blocks(inputs: KernelInputs, num_rows: int = 16) -> list[Tensor]:
    """Multiply by the K and V rows within q, k, v weights of all layers, as the drafter's context does."""
    of, num_layers = inputs.attention, inputs.machine.shape.drafter.num_layers
    q_size, kv_size = of.num_heads * of.head_dim, of.num_kv_heads * of.head_dim
    weight_OH = inputs.weight(num_layers * (q_size + 2 * kv_size), inputs.hidden)
    weight_LRH = weight_OH.unflatten(0, (num_layers, -1))[:, q_size:]
    weight_PLRH = weight_LRH.unflatten(1, (2, kv_size)).transpose(0, 1)
    return [inputs.backend.linear_of_blocks(weight_PLRH)(inputs.randn(num_rows, inputs.hidden))]


def _norm(inputs: KernelInputs) -> list[Tensor]:
    norm = _random_norm(inputs)
    return [inputs.backend.norm(norm, inputs.randn(_ROWS, inputs.hidden))]


def _residual_norm(inputs: KernelInputs) -> list[Tensor]:
    sum_NH, normed_NH = add_product(inputs, _ROWS)
    return [sum_NH, inputs.backend.as_tensor(normed_NH)]


def add_product(inputs: KernelInputs, num_rows: int, scale: float = 1.0) -> tuple[Tensor, Normed]:
    """Compute the end of an MLP: the residual and its norm. A scale of 0 leaves the residual unrounded."""
    norm = _random_norm(inputs)
    project = inputs.backend.linear(inputs.weight(inputs.hidden, inputs.inner))
    x_NI = inputs.randn(num_rows, inputs.inner, scale=scale)
    residual_NH = inputs.randn(num_rows, inputs.hidden)
    return inputs.backend.residual_norm(project, x_NI, residual_NH, norm, None)


def _gate(inputs: KernelInputs, *, activation: Activation) -> list[Tensor]:
    """Compute the gated product, with gates in the nonlinear range."""
    project = inputs.backend.linear(inputs.weight(2 * inputs.inner, inputs.hidden))
    return [inputs.backend.gated(project, inputs.randn(_ROWS, inputs.hidden, scale=3.0), activation)]


def attention_error(inputs: KernelInputs, requests: Requests) -> float:
    """Return the largest error over all kinds of attention for the same requests."""
    return max(
        error_of(inputs, partial(attend, requests=requests, causal=causal, window=window))
        for causal, window in _KINDS
    )


def attend(
    inputs: KernelInputs,
    *,
    requests: Requests,
    causal: bool = True,
    window: int | None = None,
    has_sinks: bool = False,
) -> list[Tensor]:
    """Run head norm, rotary embedding, K/V write and attention.

    Returns the written keys and values, and each request's rows separately, since their magnitude depends on
    the context. With sinks it is gpt-oss's attention in a captured step, with padding rows.
    """
    of, contexts = inputs.attention, Contexts(inputs, requests, num_layers=2)
    contexts.fill(inputs)
    sinks_Q = torch.linspace(-2, 2, of.num_heads, device=inputs.machine.device)
    shape = inputs.attention_shape(
        inputs.rope(contexts.length),
        causal=causal,
        window=window,
        sinks_Q=inputs.wide(sinks_Q) if has_sinks else None,
    )
    num_rows = int(contexts.rows_R.sum())
    qkv_NO = inputs.randn(num_rows, (of.num_heads + 2 * of.num_kv_heads) * of.head_dim)
    padding = _PADDING if has_sinks and inputs.candidate.setting == "triton" and inputs.is_examined else 0
    rows, backend = contexts.rows(window, padding), inputs.backend
    qkv_NO = torch.cat((qkv_NO, torch.full_like(qkv_NO[:padding], torch.nan)))
    found_NO = backend.attention(shape)(qkv_NO, backend.begin(rows), contexts.cache, 1)
    assert not found_NO[num_rows:].any(), "padding rows must be zero"
    return [*contexts.kv(1, rows.kv_slots[0][:num_rows]).unbind(), *contexts.split(found_NO[:num_rows])]


def _context(inputs: KernelInputs) -> list[Tensor]:
    of, num_layers = inputs.attention, inputs.machine.shape.drafter.num_layers
    contexts = Contexts(inputs, inputs.machine.requests["blocks"], num_layers)
    rows, rope = contexts.rows(), inputs.rope(contexts.length)
    write = inputs.backend.context_writer(
        inputs.norm_weight(num_layers, of.head_dim), inputs.eps, of.num_kv_heads
    )
    kv_NO = inputs.randn(len(rows.positions_N), 2 * num_layers * of.num_kv_heads * of.head_dim)
    write(kv_NO, rope, rows, contexts.cache, 0)
    return list(contexts.kv(num_layers, rows.kv_slots[0]))


def _convolutions(inputs: KernelInputs) -> list[Tensor]:
    """Convolve before and after a sublayer: 4 taps, 16 groups of channels, blocks of 7 rows."""
    x_NH, residual_NH, base_TH = (inputs.randn(rows, inputs.hidden) for rows in (_ROWS, _ROWS, 4))
    dynamic_NTC, owners_N = inputs.randn(_ROWS, 4, 16), torch.arange(_ROWS, device=x_NH.device) // 7
    given = (x_NH, dynamic_NTC, base_TH, owners_N)
    return [inputs.backend.convolve(*given, rest) for rest in (None, residual_NH)]


def _target_pass(inputs: KernelInputs) -> list[Tensor]:
    contexts = Contexts(inputs, _requests(inputs), _NUM_LAYERS)
    rope = inputs.rope(contexts.length)
    stack = inputs.backend.stack(
        [_random_block(inputs, rope, causal=True) for _ in range(_NUM_LAYERS)], _random_norm(inputs)
    )
    return [
        stack(inputs.randn(len(rows.positions_N), inputs.hidden), rows, contexts.cache)[0]
        for rows in (contexts.pending_rows(), contexts.rows())
    ]


def _draft_pass(inputs: KernelInputs) -> list[Tensor]:
    of, window = inputs.attention, inputs.machine.context // 2
    contexts = Contexts(inputs, _requests(inputs), _NUM_LAYERS)
    rope = inputs.rope(contexts.length)
    blocks = [_random_block(inputs, rope, causal=False, window=window) for _ in range(_NUM_LAYERS)]
    stack = inputs.backend.stack(blocks, _random_norm(inputs))
    norms = [shape.k_norm_D for shape, _ in blocks if shape.k_norm_D is not None]
    write = inputs.backend.context_writer(torch.stack(norms), inputs.eps, of.num_kv_heads)
    known, rows = contexts.pending_rows(), contexts.rows(window)
    kv_NO = inputs.randn(len(known.positions_N), 2 * _NUM_LAYERS * of.num_kv_heads * of.head_dim)
    write(kv_NO, rope, known, contexts.cache, 0)
    x_NH = inputs.randn(len(rows.positions_N), inputs.hidden)
    return contexts.split(stack(x_NH, rows, contexts.cache)[0])


def _requests(inputs: KernelInputs) -> Requests:
    return ((inputs.machine.context, 16), (17, 3))


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
