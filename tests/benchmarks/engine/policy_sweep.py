"""`manta bench sweep` with what judges the policy: a useless drafter, mixed traffic, and a verdict per bar.

    python tests/benchmarks sweep -o docs/benchmarks/sweep-cpu.json --svg docs/benchmarks

The drafter `random` has the shipped one's weights in a random order: the same cost, useless drafts. In mixed
traffic every other request is hard to draft for.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from manta.actors.checkpoints.checkpoint_paths import drafter_folder
from manta.actors.system.atomic_files import write_json
from manta.cluster.config import EngineConfig
from manta.cluster.errors import ConfigError
from manta.jobs.bench.common.engine_passes import Figures
from manta.jobs.bench.common.provenance import options_json
from manta.jobs.bench.common.request_source import LoadRequest, RequestSource
from manta.jobs.bench.sweep.engines import ADAPTIVE
from manta.jobs.bench.sweep.sweep_run import run_sweep
from manta.jobs.common.tables import print_table
from safetensors.torch import load_file, save_file

from ..options import PolicySweepOptions

RANDOM = "random"
HOSTILE = "hostile"  # category of requests whose drafts are rarely accepted
# Drafter and target sample with the same noise, so drafts are accepted at high temperatures, too; at 1 least.
_HOSTILE_TEMPERATURE = 1.0
BEST_LEAST, PLAIN_LEAST, RANDOM_LEAST, MIXED_LEAST = 0.98, 1.0, 0.97, 1.0


class MixedSource(RequestSource):
    """Requests of which every other one has its prompt's tokens shuffled and samples at temperature 1."""

    def __getitem__(self, number: int) -> LoadRequest:
        request = super().__getitem__(number)
        if number % 2 == 0:
            return request
        prompt = random.Random(number).sample(request.prompt, len(request.prompt))
        return replace(request, category=HOSTILE, prompt=prompt, temperature=_HOSTILE_TEMPERATURE)


def run_policy_sweep(config: EngineConfig, options: PolicySweepOptions) -> Figures:
    """Sweep over prompts and over mixed traffic, judge each bar, write the file, and return the figures."""
    spec = config.speculative_config
    if spec is None or spec.model is None:
        raise ConfigError("Give a drafter: --spec-model.", param="speculative_config")
    num_points = len(options.concurrency) * len(options.temperatures)
    share = options.minutes / (num_points + len(options.mixed))
    with TemporaryDirectory(prefix="manta-sweep-") as scratch:
        folder = shuffled(drafter_folder(config, spec.model), Path(scratch))
        given = {name: value for name, value in asdict(spec).items() if value is not None}
        useless = {**given, "adaptive": True, "model": str(folder)}
        one = replace(options, methods={**options.methods, RANDOM: useless})
        figures = run_sweep(config, replace(one, minutes=share * num_points))
        mixed: list[Figures] = []
        if options.mixed:
            minutes = share * len(options.mixed)
            loads = replace(one, concurrency=options.mixed, minutes=minutes, temperatures=(0.0,), output=None)
            mixed = run_sweep(config, loads, MixedSource)["points"]
    judged = verdicts(figures["points"], mixed)
    print_verdicts(judged)
    figures |= {"options": options_json(options), "mixed": mixed, "verdicts": judged}
    if options.output is not None:
        write_json(options.output, figures)
    return figures


def verdicts(points: Sequence[Figures], mixed: Sequence[Figures]) -> list[Figures]:
    """Return for each bar and point the minimum, the measured value, and whether the bar is met."""
    to_plain = ("adaptive to plain", ADAPTIVE, "ratio_to_plain", PLAIN_LEAST)
    random_to_plain = ("random drafter to plain", RANDOM, "ratio_to_plain", RANDOM_LEAST)
    to_best = ("adaptive to the best", ADAPTIVE, "ratio_to_best")
    bars = {
        "prompts": (points, ((*to_best, BEST_LEAST), to_plain, random_to_plain)),
        "mixed": (mixed, ((*to_best, MIXED_LEAST), to_plain)),
    }
    return [
        {
            "bar": bar,
            "where": f"{point['requests']} request(s), T = {point['temperature']:g}, {traffic}",
            "least": minimum,
            "measured": figures[ratio],
            "range": [min(figures[f"rounds_{ratio}"]), max(figures[f"rounds_{ratio}"])],
            "met": figures[ratio] >= minimum,
        }
        for traffic, (measured, of_traffic) in bars.items()
        for point in measured
        for bar, side, ratio, minimum in of_traffic
        if (figures := point["sides"].get(side)) is not None
    ]


def print_verdicts(found: Sequence[Figures]) -> None:
    rows = [
        [
            one["bar"],
            one["where"],
            f"{one['measured']:.3f} ({one['range'][0]:.2f} to {one['range'][1]:.2f})",
            f"{one['least']:.2f}",
            "yes" if one["met"] else "NO",
        ]
        for one in found
    ]
    print_table("bars", ["bar", "where", "measured", "at least", "met"], rows, num_left=2)


def shuffled(drafter: Path, scratch: Path) -> Path:
    """Copy a drafter's folder with the values of every tensor shuffled: same magnitudes, useless drafts."""
    folder = scratch / "random"
    folder.mkdir()
    shuffle = torch.Generator().manual_seed(0)
    for file in drafter.iterdir():
        if file.suffix == ".safetensors":
            tensors = load_file(file)
            mixed = {name: _mixed(tensor, shuffle) for name, tensor in tensors.items()}
            save_file(mixed, folder / file.name)
        elif file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def _mixed(tensor: torch.Tensor, shuffle: torch.Generator) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    order = torch.randperm(tensor.numel(), generator=shuffle)
    return tensor.flatten()[order].view(tensor.shape).contiguous()
