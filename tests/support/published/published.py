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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from manta.actors.targets.families import FAMILIES, read_model
from manta.actors.targets.model.model_spec import ModelSpec
from manta.actors.targets.model.weights import target_shapes
from manta.cluster.errors import PlacementError
from manta.cluster.hardware.gpu_specs import GPUS
from manta.cluster.hardware.memory_plan import plan_memory
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
    """A published drafter by its sizes, as third parties read them.

    Attributes:
        source: whose repository.
        windows: of the layers that have one; the others see all.
    """

    source: str
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


@dataclass(frozen=True, kw_only=True)
class Target:
    """A published target.

    Attributes:
        billions: of parameters of the language model, as its publisher says; None: known with images alone.
        kv: bytes of K/V of a token in 16 bits, by window; None is the layers that see all.
        drafter: its largest published drafter whose sizes are known.
    """

    name: str
    billions: float | None
    kv: dict[int | None, int]
    drafter: Drafter | None = None

    @property
    def architecture(self) -> str:
        return CONFIGS[self.name]["architectures"][0]


ZLAB = "z-lab"
TARGETS = (
    Target(
        name="Qwen3-4B",
        billions=4.02,
        kv={None: 147456},
        drafter=Drafter(source=ZLAB, layers=5, inter=9728, heads=32, kv_heads=8, taps=5, block=16),
    ),
    Target(
        name="Qwen3-8B",
        billions=8.19,
        kv={None: 147456},
        drafter=Drafter(source=ZLAB, layers=5, inter=12288, heads=32, kv_heads=8, taps=5, block=16),
    ),
    Target(
        name="Llama-3.1-8B-Instruct",
        billions=8.03,
        kv={None: 131072},
        drafter=Drafter(source=ZLAB, layers=5, inter=14336, heads=32, kv_heads=8, taps=5, block=10),
    ),
    Target(
        name="Qwen3-Coder-30B-A3B-Instruct",
        billions=30.53,
        kv={None: 98304},
        drafter=Drafter(source=ZLAB, layers=8, inter=6144, heads=32, kv_heads=4, taps=5, block=16),
    ),
    Target(name="Qwen3-30B-A3B", billions=30.53, kv={None: 98304}),
    Target(
        name="gpt-oss-20b",
        billions=20.91,
        kv={None: 24576, 128: 24576},
        drafter=Drafter(
            source=ZLAB, layers=8, inter=7680, heads=64, kv_heads=8, taps=5, block=8, head_dim=64
        ),
    ),
    Target(
        name="gpt-oss-120b",
        billions=116.83,
        kv={None: 36864, 128: 36864},
        drafter=Drafter(
            source=ZLAB, layers=8, inter=7680, heads=64, kv_heads=8, taps=5, block=10, head_dim=64
        ),
    ),
    Target(
        name="gemma-4-31B-it",
        billions=30.7,
        kv={None: 81920, 1024: 819200},
        drafter=Drafter(
            source=ZLAB, layers=5, inter=10752, heads=64, kv_heads=8, taps=6, block=16, windows=(2048,) * 4
        ),
    ),
    Target(
        name="gemma-4-26B-A4B-it",
        billions=25.2,
        kv={None: 20480, 1024: 204800},
        drafter=Drafter(
            source=ZLAB, layers=5, inter=5632, heads=32, kv_heads=8, taps=6, block=16, windows=(2048,) * 4
        ),
    ),
    Target(name="gemma-4-12B-it", billions=None, kv={None: 16384, 1024: 327680}),
    Target(name="Muse-Glimmer-30B", billions=None, kv={None: 13312, 2048: 39936}),
    Target(name="MiniMax-M2", billions=228.7, kv={None: 253952}),
    Target(
        name="Qwen3.5-9B",
        billions=None,
        kv={None: 32768},
        drafter=Drafter(
            source=ZLAB, layers=6, inter=12288, heads=32, kv_heads=8, taps=8, block=16, windows=(4096,) * 5
        ),
    ),
    Target(
        name="Qwen3.6-27B",
        billions=None,
        kv={None: 65536},
        drafter=Drafter(
            source=ZLAB, layers=5, inter=17408, heads=32, kv_heads=8, taps=5, block=16, windows=(2048,) * 4
        ),
    ),
    Target(
        name="Qwen3.5-35B-A3B",
        billions=None,
        kv={None: 20480},
        drafter=Drafter(
            source=ZLAB, layers=6, inter=6144, heads=32, kv_heads=8, taps=8, block=16, windows=(4096,) * 5
        ),
    ),
    Target(name="Qwen3-Coder-Next", billions=80.0, kv={None: 24576}),
    Target(name="GLM-4.5", billions=355, kv={None: 376832}),
    Target(name="GLM-4.5-Air", billions=106, kv={None: 188416}),
    Target(name="MiMo-V2-Flash", billions=309, kv={None: 23040, 129: 199680}),
    Target(name="DeepSeek-V3", billions=671, kv={None: 70272}),
    Target(name="Kimi-K2-Instruct", billions=1026, kv={None: 70272}),
    Target(
        name="Kimi-K2.6",
        billions=1026,
        kv={None: 70272},
        drafter=Drafter(source=ZLAB, layers=6, inter=18432, heads=64, kv_heads=8, taps=6, block=8),
    ),
)


@cache
def spec_of(name: str) -> ModelSpec | None:
    """The spec as the family reads its config; None if the family is not served."""
    if CONFIGS[name]["architectures"][0] not in FAMILIES:
        return None
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIGS[name]))
        return read_model(Path(folder))


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
            plan_memory(pair, GPUS["h200"], layout, demand)
        except PlacementError:
            continue
        return ranks
    return None


def table() -> Iterator[str]:
    """Rows of targets whose family is served, and of those that are not."""
    yield "| target | family | parameters | weights GB | K/V KB of a token | drafter | its GB; KB | H200s |"
    yield "|---|---|---|---|---|---|---|---|"
    for target in TARGETS:
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
    return f"{drafter.source}: {drafter.layers} layers, block {drafter.block}", sizes


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
