"""Published targets: the family readers give the sizes that publishers state."""

from __future__ import annotations

import re

import pytest
from manta.actors.targets.families import FAMILIES
from manta.cluster.hardware.gpu_specs import GPUS
from manta.cluster.hardware.parallel_layouts import ParallelLayout
from manta.cluster.hardware.step_time import StepTimes
from manta.jobs.plan.pair_reader import target_shape
from support.published.published import (
    CONFIGS,
    GUIDE,
    TARGETS,
    Target,
    kv_by_window,
    num_params,
    pair_of,
    spec_of,
    with_table,
)

SERVED = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
# Distinct experts that a verify of 1, 8, 16 and 64 rows reads in a layer, and their GB at 1, 8 and 16.
READ = {
    "Qwen3-30B-A3B": ((8, 52, 82, 126), (3.6, 23, 37)),
    "gpt-oss-20b": ((4, 21, 28, 32), (1.3, 6.7, 9.0)),
    "gpt-oss-120b": ((4, 29, 51, 111), (1.9, 14, 24)),
    "Kimi-K2.6": ((8, 60, 110, 284), (12, 88, 163)),
}
# GB of all weights as they are published, packed ones packed: of the files, language model alone.
WEIGHTS_GB = {"gpt-oss-20b": 13.8, "gpt-oss-120b": 65.2, "gemma-4-31B-it": 61.4, "Qwen3-30B-A3B": 61.1}
WEIGHTS_GB |= {"Kimi-K2.6": 594}


def read(name: str):
    spec = spec_of(name)
    if spec is None:
        pytest.skip(f"{CONFIGS[name]['architectures'][0]} is not served yet")
    return spec


@SERVED
def test_a_targets_tensors_add_up_to_the_published_size(target: Target) -> None:
    spec = read(target.name)
    if target.billions is None:
        pytest.skip(f"{target.name}: no size of the language model is published")
    assert num_params(spec) / 1e9 == pytest.approx(target.billions, rel=0.01)


@SERVED
def test_a_tokens_kv_size_follows_from_the_geometry(target: Target) -> None:
    assert kv_by_window(target_shape(read(target.name))) == target.kv


@pytest.mark.parametrize("name", READ)
def test_verification_reads_the_experts_that_its_rows_choose(name: str) -> None:
    distinct, gigabytes = READ[name]
    shape = target_shape(read(name))
    ((experts, times),) = shape.routed
    assert times == sum(layer.experts is not None for layer in shape.layers)
    assert tuple(round(experts.distinct(rows)) for rows in (1, 8, 16, 64)) == distinct
    for rows, wanted in zip((1, 8, 16), gigabytes, strict=True):
        rounded = 0.05 if wanted < 10 else 0.5
        assert shape.experts(rows).num_bytes / 1e9 == pytest.approx(wanted, abs=rounded)


@pytest.mark.parametrize("name", WEIGHTS_GB)
def test_weights_take_their_packed_size(name: str) -> None:
    pair = pair_of(TARGETS[name], read(name))
    assert pair.target_bytes(1) / 1e9 == pytest.approx(WEIGHTS_GB[name], rel=0.01)


def test_rows_cost_more_with_routed_experts() -> None:
    """The comparison is of 16 rows with a plain step on an H200: the draft length depends on it."""

    def cost(name: str) -> float:
        pair = pair_of(TARGETS[name], read(name))
        times = StepTimes(pair, GPUS["h200"], ParallelLayout(1, None, 1))
        return times.verify(1, 16, 1024).bytes / times.verify(1, 1, 1024).bytes

    assert cost("Qwen3-8B") == pytest.approx(1.0, abs=0.01)
    assert cost("Qwen3-30B-A3B") == pytest.approx(6.4, abs=0.3)


def test_the_guides_table_agrees_with_the_family_readers() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    assert with_table(text) == text, "write it anew: python -m support.published.published, in tests/"


def test_targets_listed_as_unsupported_are_refused() -> None:
    _, _, missing = GUIDE.read_text(encoding="utf-8").partition("## Not served")
    named = re.findall(r"`(\w+(?:ForCausalLM|ForConditionalGeneration))`", missing)
    assert named and not set(named) & set(FAMILIES)
