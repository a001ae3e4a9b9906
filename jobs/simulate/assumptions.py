"""Texts of the assumptions of a simulated node, written with its figures."""

from __future__ import annotations

from ...cluster.hardware.gpu_specs import Gpu
from ...cluster.hardware.memory_plan import MAX_ROWS, UTILISATION
from ...cluster.hardware.model_pair import ModelPair
from ...cluster.hardware.step_time import (
    LAUNCH_S,
    LAUNCHES_AROUND,
    LAUNCHES_OF_DRAFT,
    LAUNCHES_OF_EXPERTS,
    LAUNCHES_PER_LAYER,
)
from .methods import EAGLE3_INTER, EAGLE3_TAPS, EAGLE3_VOCAB


def assumptions(gpu: Gpu, pair: ModelPair, spread: float) -> list[str]:
    """Return the assumptions, most important first."""
    device, link, target = gpu.device, gpu.link, pair.target
    packed = ", ".join(f"{experts.weight_bytes:g} bytes" for experts, _ in target.routed)
    return [
        "Acceptance is given, not derived; each draft has the same conditional acceptance probability. A "
        "shortened DFlash block is assumed to equal the beginning of the whole block, which it does not.",
        f"Requests differ in hardness with a standard deviation of {spread:g} "
        "(cluster/simulation/acceptance_mix.py). A draft's margin gives its acceptance probability exactly "
        "(cluster/simulation/simulated_drafts.py), which is the most that a policy can know.",
        f"{device.name} moves {device.bytes_per_s / 1e9:,.0f} GB/s and computes {device.flops / 1e12:,.0f} "
        "TFLOP/s in every product, however few rows it has; published engines reach 40 to 75 % of such "
        "rooflines.",
        f"A kernel launch costs {LAUNCH_S * 1e6:g} µs: {LAUNCHES_PER_LAYER} a layer, {LAUNCHES_OF_EXPERTS} "
        f"more with experts, {LAUNCHES_AROUND} per step, {LAUNCHES_OF_DRAFT} per pass for one draft.",
        f"An all-reduce takes {link.latency_s * 1e6:g} µs plus its bytes at "
        f"{link.bytes_per_s / 1e9:,.0f} GB/s; two per layer. No data-parallel attention and no expert "
        "parallelism.",
        f"Weights and K/V take {target.itemsize} bytes, routed experts {packed or 'the same'}. Products are "
        "in bf16, whatever the format of the weights.",
        "Routing is uniform and independent: E (1 - (1 - k/E)^n) of a layer's E experts are read for n rows.",
        f"EAGLE-3 drafts a chain: a pass of one layer for each draft ({EAGLE3_TAPS} taps, a head of "
        f"{EAGLE3_VOCAB:,} tokens, an MLP like the target's dense ones, or {EAGLE3_INTER} times the hidden "
        "size), replicated on every rank.",
        "A DFlash drafter, too, is replicated on every rank, except for the target's head. "
        f"{UTILISATION:.0%} of a GPU's memory is used. A step has up to {MAX_ROWS} rows; prefill and "
        "decoding share steps. There is no prefix cache.",
        "The host takes no time: a step is scheduled while the previous one is computed.",
    ]
