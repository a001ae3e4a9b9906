"""Times one product on a CPU with weights in bf16, int8 and int4, from memory: `benchmarks products`.

As many weights as exceed the CPU's caches are multiplied in turn, as in a decoding step.
"""

from __future__ import annotations

import time

import torch
import typer
from manta.drafter.compute.checkpoint.quantized_matrix import quantize
from manta.drafter.compute.cpu_fused.operators import PackedLinear
from torch import Tensor

KINDS = ("bf16", "int8", "int4")


def main(
    outputs: int = 3072,
    inputs: int = 1024,
    rows: str = "1,2,4,8,16",
    threads: int = 1,
    mib: int = 256,
    rounds: int = 10,
) -> None:
    """Print the shortest time of a product by rows, and its share of that in bf16.

    Args:
        mib: bytes of all weights in bf16, in MiB.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    count = max(mib * 2**20 // (2 * outputs * inputs), 1)
    plain = [0.05 * torch.randn(outputs, inputs) for _ in range(count)]
    layers = {kind: [_packed(weight, kind, threads) for weight in plain] for kind in KINDS}
    typer.echo(f"[{outputs}, {inputs}], {threads} threads, us (speed relative to bf16):")
    for num_rows in map(int, rows.split(",")):
        x = torch.randn(num_rows, inputs).bfloat16()
        best: dict[str, float] = dict.fromkeys(KINDS, float("inf"))
        for _ in range(rounds):  # in turns, as others may use the machine
            for kind, of_kind in layers.items():
                best[kind] = min(best[kind], _seconds(of_kind, x))
        found = (f"{kind} {1e6 * best[kind]:.0f} ({best['bf16'] / best[kind]:.2f})" for kind in KINDS)
        typer.echo(f"{num_rows:3} rows: {', '.join(found)}")


def _packed(weight: Tensor, kind: str, threads: int) -> PackedLinear:
    matrix = weight.bfloat16()
    return PackedLinear(matrix if kind == "bf16" else quantize(matrix, kind), None, threads)  # type: ignore[arg-type]


def _seconds(layers: list[PackedLinear], x: Tensor) -> float:
    begin_s = time.perf_counter()
    for layer in layers:
        layer(x)
    return (time.perf_counter() - begin_s) / len(layers)
