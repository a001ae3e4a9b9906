"""Our own products with all fused operations, whether or not this device would choose them.

Through the backend's interface (`operators.py`) the faster of several products is used; here it is always
ours, at every tile height and with more rows than one tile. Imports Triton.

    residual, then norm   y = x W^T + residual, with the sums of squares for the next product's norm
    norm, then product    the norm applied to the product's input, equal to a separate norm
    norm, then gate       the same, and activation(gate) * up on the output
    blocks                a weight with separate blocks of rows
    codes                 weights of 8 and 4 bits, and, for many rows, the library's product with them

Legend: N rows, H hidden, O outputs; P parts, L layers, R rows of a block of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from ....drafter.compute.checkpoint.quantized_matrix import GROUP, ON_GPUS, Code, QuantizedMatrix
from ....drafter.compute.gpu_triton.backend import TritonBackend
from ....drafter.compute.gpu_triton.linear.gemm_choice import choose_own
from ....drafter.compute.gpu_triton.linear.projections import OwnProjection, PendingNorm
from ....drafter.compute.gpu_triton.linear.skinny_gemm import ProductWorkspace
from ....drafter.compute.layers.linear import Activation
from .checks import Case, Check, checks_of_served, error_of, off_by
from .operators import add_product, product_of_blocks
from .subject import KernelInputs, MachineKind

_HALF, _FP32 = 6, 256  # bounds in units of the last place
_ROWS = (5, 16, 32, 33, 100, 200)  # tiles of 16, 32, 64 and 128 rows, and two tiles
_FEW_ROWS = (16, 100)
_MANY_ROWS = 300  # more than own products of codes take


def product_checks(machine: MachineKind, *, quick: bool) -> Iterator[Check]:
    rows = _FEW_ROWS if quick else _ROWS
    computed: dict[str, Callable[[KernelInputs, int], list[Tensor]]] = {
        "residual, then norm": _residual,
        "norm, then product": _normed,
        "norm, then SiLU product": partial(_gated, activation="silu"),
        "norm, then GELU product": partial(_gated, activation="gelu_tanh"),
        "blocks": product_of_blocks,
    }
    cases = [
        Case(name, partial(_error, compute=compute, rows=rows), _HALF, _FP32)
        for name, compute in computed.items()
    ]
    cases += [
        Case(f"codes {code}", partial(_codes_error, code=code, rows=(*rows, _MANY_ROWS)), _HALF, _FP32)
        for code in sorted(ON_GPUS)
    ]
    yield from checks_of_served("own products", machine, cases, quick=quick)


class OwnProducts(TritonBackend):
    """Triton's backend, always with our own products; they share `workspace`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._choice_of_codes = choose_own
        self.workspace = ProductWorkspace(device)

    def linear(self, weight_OH: Tensor, bias_O: Tensor | None = None) -> OwnProjection:
        return self.linear_of_blocks(weight_OH[None, None], bias_O)

    def linear_of_blocks(self, weight_PLRH: Tensor, bias_O: Tensor | None = None) -> OwnProjection:
        return OwnProjection(weight_PLRH, bias_O, self.workspace)


def _error(
    inputs: KernelInputs, compute: Callable[[KernelInputs, int], list[Tensor]], rows: tuple[int, ...]
) -> float:
    backend = OwnProducts(inputs.machine.device)
    own = KernelInputs(inputs.machine, inputs.candidate, inputs.dtype, backend)
    error = max(error_of(own, lambda each, count=count: compute(each, count)) for count in rows)
    assert not backend.workspace.arrived_E.any(), "counters must be zero after a launch"
    return error


def _codes_error(inputs: KernelInputs, code: Code, rows: tuple[int, ...]) -> float:
    """Return the error of products with random codes in groups of 32 inputs, against their values."""
    most, shape = {"int8": 256, "e4m3": 0x7F}.get(code, 16), (inputs.inner, inputs.hidden)
    device, random = inputs.machine.device, torch.Generator(inputs.machine.device).manual_seed(0)
    codes_OH = torch.randint(most, shape, dtype=torch.uint8, device=device, generator=random)
    scales_OG = torch.rand(shape[0], shape[1] // GROUP, device=device, generator=random) / most
    matrix = QuantizedMatrix(code, codes_OH.view(torch.int8) if code == "int8" else codes_OH, scales_OG)
    project, exact_OH = inputs.backend.linear_of_codes(matrix), matrix.dequantized(inputs.dtype).double()
    rows_of_x = [inputs.randn(count, inputs.hidden) for count in rows]
    return max(off_by(project(x_NH), x_NH.double() @ exact_OH.T) for x_NH in rows_of_x)


def _residual(inputs: KernelInputs, num_rows: int) -> list[Tensor]:
    sum_NH, normed = add_product(inputs, num_rows)
    if isinstance(normed, PendingNorm):
        found_N, exact_N = (x.double().sum(1) for x in (normed.squares_NT, sum_NH.double().square()))
        assert torch.allclose(found_N, exact_N, rtol=1e-5, atol=0), "squares of the new residual"
    return [sum_NH, inputs.backend.as_tensor(normed)]


def _normed(inputs: KernelInputs, num_rows: int) -> list[Tensor]:
    of, (_, normed) = inputs.attention, add_product(inputs, num_rows, scale=0.0)
    weight_OH = inputs.weight((of.num_heads + 2 * of.num_kv_heads) * of.head_dim, inputs.hidden)
    return [inputs.backend.linear(weight_OH)(normed)]


def _gated(inputs: KernelInputs, num_rows: int, *, activation: Activation) -> list[Tensor]:
    _, normed = add_product(inputs, num_rows, scale=0.0)
    weight_OH = inputs.weight(2 * inputs.inner, inputs.hidden, scale=3.0)  # gates in the nonlinear range
    return [inputs.backend.gated(inputs.backend.linear(weight_OH), normed, activation)]
