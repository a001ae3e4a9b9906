"""Published targets and their drafters, as in docs/families.md: facts, and the table made of them.

Configurations are in published_configs.json, written by hand from model cards and third parties' readings: no
published file was at hand. `python -m support.published.published`, run in tests/, writes the table again;
test_published_targets.py sees that it is what the readers of families and `manta plan`'s arithmetic make of
them.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from manta.actors.targets.families import FAMILIES, read_model
from manta.actors.targets.model.model_spec import ModelSpec
from manta.actors.targets.model.weights import target_shapes
from manta.cluster.errors import PlacementError
from manta.cluster.hardware.gpu_specs import GPUS
from manta.cluster.hardware.memory_estimate import estimate_memory
from manta.cluster.hardware.model_pair import LayoutDemand, ModelPair
from manta.cluster.hardware.model_shape import ModelShape
from manta.cluster.hardware.parallel_layouts import TP_SIZES, ParallelLayout
from manta.jobs.plan.pair_reader import divides, target_shape

from support.paths import DATA, ROOT

CONFIGS = json.loads((DATA / "published_configs.json").read_text())
GUIDE = ROOT / "docs" / "families.md"
CONTEXT = 32768
BEGIN, END = "<!-- written by tests/support/published/published.py -->", "<!-- to here -->"


@dataclass(frozen=True, kw_only=True)
class Drafter:
    """A drafter that z-lab has published, by its sizes, as third parties read them.

    Attributes:
        windows: of the layers that have one; the others see all.
    """

    layers: int
    inter: int
    heads: int
    kv_heads: int
    taps: int
    block: int
    head_dim: int = 128
    windows: tuple[int, ...] = ()

    def shape(self, target: ModelShape) -> ModelShape:
        windows = (*self.windows, *[None] * (self.layers - len(self.windows)))
        return ModelShape.dense(
            layers=self.layers,
            hidden=target.hidden,
            inter=self.inter,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab=target.vocab,
            taps=self.taps,
            windows=windows,
        )


@dataclass(frozen=True)
class Target:
    """A published target.

    Attributes:
        billions: of parameters of the language model, as its publisher says; None: known with images alone.
        kv: bytes of K/V of a token in 16 bits, by window; None is the layers that see all.
    """

    name: str
    billions: float | None
    kv: dict[int | None, int]

    @property
    def drafter(self) -> Drafter | None:
        """Its largest published drafter with known sizes."""
        return DRAFTERS.get(self.name)

    @property
    def architecture(self) -> str:
        return CONFIGS[self.name]["architectures"][0]


DRAFTERS = {
    "Qwen3-4B": Drafter(layers=5, inter=9728, heads=32, kv_heads=8, taps=5, block=16),
    "Qwen3-8B": Drafter(layers=5, inter=12288, heads=32, kv_heads=8, taps=5, block=16),
    "Llama-3.1-8B-Instruct": Drafter(layers=5, inter=14336, heads=32, kv_heads=8, taps=5, block=10),
    "Qwen3-Coder-30B-A3B-Instruct": Drafter(layers=8, inter=6144, heads=32, kv_heads=4, taps=5, block=16),
    "gpt-oss-20b": Drafter(layers=8, inter=7680, heads=64, kv_heads=8, taps=5, block=8, head_dim=64),
    "gpt-oss-120b": Drafter(layers=8, inter=7680, heads=64, kv_heads=8, taps=5, block=10, head_dim=64),
    "gemma-4-31B-it": Drafter(
        layers=5, inter=10752, heads=64, kv_heads=8, taps=6, block=16, windows=(2048,) * 4
    ),
    "gemma-4-26B-A4B-it": Drafter(
        layers=5, inter=5632, heads=32, kv_heads=8, taps=6, block=16, windows=(2048,) * 4
    ),
    "Qwen3.5-9B": Drafter(layers=6, inter=12288, heads=32, kv_heads=8, taps=8, block=16, windows=(4096,) * 5),
    "Qwen3.6-27B": Drafter(
        layers=5, inter=17408, heads=32, kv_heads=8, taps=5, block=16, windows=(2048,) * 4
    ),
    "Qwen3.5-35B-A3B": Drafter(
        layers=6, inter=6144, heads=32, kv_heads=8, taps=8, block=16, windows=(4096,) * 5
    ),
    "Kimi-K2.6": Drafter(layers=6, inter=18432, heads=64, kv_heads=8, taps=6, block=8),
}
TARGETS = {
    target.name: target
    for target in (
        Target("Qwen3-4B", 4.02, {None: 147456}),
        Target("Qwen3-8B", 8.19, {None: 147456}),
        Target("Llama-3.1-8B-Instruct", 8.03, {None: 131072}),
        Target("Qwen3-Coder-30B-A3B-Instruct", 30.53, {None: 98304}),
        Target("Qwen3-30B-A3B", 30.53, {None: 98304}),
        Target("gpt-oss-20b", 20.91, {None: 24576, 128: 24576}),
        Target("gpt-oss-120b", 116.83, {None: 36864, 128: 36864}),
        Target("gemma-4-31B-it", 30.7, {None: 81920, 1024: 819200}),
        Target("gemma-4-26B-A4B-it", 25.2, {None: 20480, 1024: 204800}),
        Target("gemma-4-12B-it", None, {None: 16384, 1024: 327680}),
        Target("Muse-Glimmer-30B", None, {None: 13312, 2048: 39936}),
        Target("MiniMax-M2", 228.7, {None: 253952}),
        Target("Qwen3.5-9B", None, {None: 32768}),
        Target("Qwen3.6-27B", None, {None: 65536}),
        Target("Qwen3.5-35B-A3B", None, {None: 20480}),
        Target("Qwen3-Coder-Next", 80.0, {None: 24576}),
        Target("GLM-4.5", 355, {None: 376832}),
        Target("GLM-4.5-Air", 106, {None: 188416}),
        Target("MiMo-V2-Flash", 309, {None: 23040, 129: 199680}),
        Target("DeepSeek-V3", 671, {None: 70272}),
        Target("Kimi-K2-Instruct", 1026, {None: 70272}),
        Target("Kimi-K2.6", 1026, {None: 70272}),
    )
}


@cache
def spec_of(name: str) -> ModelSpec | None:
    """The spec as the family reads its config; None if the family is not served."""
    if CONFIGS[name]["architectures"][0] not in FAMILIES:
        return None
    with TemporaryDirectory() as folder:
        return spec_of_config(CONFIGS[name], Path(folder))


def published_spec(name: str) -> ModelSpec:
    """The spec of a config whose family is served."""
    spec = spec_of(name)
    assert spec is not None, f"{CONFIGS[name]['architectures'][0]} is not served yet"
    return spec


def spec_of_config(config: Mapping[str, object], folder: Path) -> ModelSpec:
    """The spec of a config.json, which is written to an empty folder."""
    (folder / "config.json").write_text(json.dumps(config))
    return read_model(folder)


def num_params(spec: ModelSpec) -> int:
    """Bytes of all tensors that the family reads."""
    per_element = {"_blocks": 2, "_scales": 0}  # of packed weights: two in a byte
    return sum(
        per_element.get(name[-7:], 1) * math.prod(shape) for name, shape in target_shapes(spec).items()
    )


def kv_by_window(shape: ModelShape) -> dict[int | None, int]:
    found: dict[int | None, int] = {}
    for layer in shape.layers:
        found[layer.window] = found.get(layer.window, 0) + layer.kv.width * shape.itemsize
    return found


def pair_of(target: Target, spec: ModelSpec) -> ModelPair:
    shape = target_shape(spec)
    return ModelPair(
        target=shape,
        drafter=None if target.drafter is None else target.drafter.shape(shape),
        tied=spec.tied_head,
        tp_sizes=tuple(tp for tp in TP_SIZES if divides(spec, tp)),
        survival=() if target.drafter is None else (0.5,) * (target.drafter.block - 1),
    )


def min_gpus(pair: ModelPair, spec: ModelSpec) -> int | None:
    """H200s of one node that hold the pair and one sequence of CONTEXT tokens; None: more than any has."""
    length = min(CONTEXT, spec.max_position_embeddings)
    placement = None if pair.drafter is None else "colocated"
    for ranks in pair.tp_sizes:
        layout, demand = (
            ParallelLayout(ranks, placement, 1),
            LayoutDemand(max_model_len=length, context=length),
        )
        try:
            estimate_memory(pair, GPUS["h200"], layout, demand)
        except PlacementError:
            continue
        return ranks
    return None


def table() -> Iterator[str]:
    """Rows of targets whose family is served, and of those that are not."""
    yield "| target | family | parameters | weights GB | K/V KB of a token | drafter | its GB; KB | H200s |"
    yield "|---|---|---|---|---|---|---|---|"
    for target in TARGETS.values():
        spec = spec_of(target.name)
        cells = [target.name, f"not served yet: {target.architecture}"] + [""] * 6
        if spec is not None:
            pair = pair_of(target, spec)
            weights = f"{pair.target_bytes(1) / 1e9:.1f}"
            gpus = str(min_gpus(pair, spec) or f"more than {TP_SIZES[-1]}")
            params = f"{num_params(spec) / 1e9:.1f} B"
            cells = [target.name, _file(target), params, weights, _kv(pair), *_drafter(target, pair), gpus]
        yield f"| {' | '.join(cells)} |"


def _file(target: Target) -> str:
    name = FAMILIES[target.architecture].__module__.rpartition(".")[2]
    return f"[{name}.py](../actors/targets/families/{name}.py)"


def _kv(pair: ModelPair) -> str:
    sizes = sorted(kv_by_window(pair.target).items(), key=lambda item: item[0] or 0)
    reported = " + ".join(
        f"{size / 1e3:.0f}" + ("" if window is None else f" in windows of {window}")
        for window, size in sizes
        if size
    )
    states = pair.target.state_bytes(0)
    return f"{reported}, and states of {states / 1e6:.0f} MB" if states else reported


def _drafter(target: Target, pair: ModelPair) -> tuple[str, str]:
    drafter, shape = target.drafter, pair.drafter
    if drafter is None or shape is None:
        return "", ""
    sizes = f"{(pair.drafter_bytes(1) + pair.fc_bytes) / 1e9:.1f}; {shape.kv_bytes / 1e3:.0f}"
    return f"z-lab: {drafter.layers} layers, block {drafter.block}", sizes


def with_table(text: str) -> str:
    """The guide with its table written again."""
    return replace_between(text, BEGIN, END, table())


def replace_between(text: str, begin: str, end: str, lines: Iterable[str]) -> str:
    """Return a text with the lines between two marks replaced."""
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return "\n".join([f"{head}{begin}", "", *lines, "", f"{end}{tail}"])


if __name__ == "__main__":
    GUIDE.write_text(with_table(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"written: {GUIDE}\n")
