"""`manta plan` computes the engine's sizes and the roofline's speeds, and chooses a layout."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manta.actors.targets.families import FAMILIES, read_assistant, read_model
from manta.actors.targets.loading.memory_budget import page_bytes as engine_page_bytes
from manta.actors.targets.loading.resolved_config import ResolvedConfig, resolve_models
from manta.actors.targets.model.assistant import AssistantConfig
from manta.actors.targets.model.model_spec import Axis, ModelSpec
from manta.actors.targets.model.mtp import MtpConfig
from manta.actors.targets.model.tensor_parallel import Sharding
from manta.cluster.config import EngineConfig, SpeculativeConfig
from manta.cluster.errors import CheckpointError, ConfigError, PlacementError
from manta.cluster.hardware.gpu_specs import GPUS, find_gpu
from manta.cluster.hardware.memory_estimate import PAGE_SIZE, estimate_memory, kv_cache_layout, page_bytes
from manta.cluster.hardware.model_pair import LayoutDemand, ModelPair
from manta.cluster.hardware.parallel_layouts import TP_SIZES, ParallelLayout, layouts
from manta.cluster.hardware.roofline import Roofline
from manta.cluster.hardware.step_time import LAUNCH_S, StepTimes
from manta.cluster.pages.kv_cache_groups import KVCacheLayout
from manta.cluster.planner.estimates import LayoutEstimate, LayoutMisfit, check_fitting, choose, estimate
from manta.cluster.simulation.simulated_engine import ReplayResult, Slo, TraceArrival, replay_trace
from manta.cluster.speculation.acceptance_length import survival_of_length
from manta.drafter.card import min_card_length
from manta.drafter.dflash.config import DrafterConfig
from manta.jobs.plan.pair_reader import ReadPair, read_pair
from support.paths import DATA

PUBLISHED = json.loads((DATA / "published_configs.json").read_text())
SERVED = [name for name, config in PUBLISHED.items() if config["architectures"][0] in FAMILIES]
WITH_MTP = ("DeepSeek-V3", "GLM-4.5-Air", "MiMo-V2-Flash", "Qwen3.5-35B-A3B")
H200, H100 = GPUS["h200"], GPUS["h100"]
DEMAND = LayoutDemand(max_model_len=8192, context=1024)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with only a config.json for each published model."""
    root = tmp_path_factory.mktemp("published")
    for name, config in PUBLISHED.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    return root


def read(folders: Path, name: str, drafter: str | None = None, **settings: object) -> ReadPair:
    spec = SpeculativeConfig(model=str(folders / drafter)) if drafter else None
    acceptance = settings.pop("acceptance", None)
    config = EngineConfig(model=str(folders / name), speculative_config=spec, **settings)  # type: ignore[arg-type]
    return read_pair(config, acceptance)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def qwen(folders: Path) -> ReadPair:
    return read(folders, "Qwen3-8B", "Qwen3-8B-DFlash-b16", acceptance="6.5")


def resolved_config(
    folder: Path,
    ranks: int = 1,
    spec: SpeculativeConfig | None = None,
    drafter: tuple[Path | None, Any] = (None, None),  # its folder and config
) -> ResolvedConfig:
    """Return what the engine would load on each rank."""
    settings = {"device": "cpu", "dtype": "bfloat16", "page_size": PAGE_SIZE, "tensor_parallel_size": ranks}
    config = EngineConfig(model=str(folder), speculative_config=spec, **settings)  # type: ignore[arg-type]
    return resolve_models(config, folder, read_model(folder), *drafter, 32768)


def check_pages(pair: ModelPair, layout: ParallelLayout, resolved: ResolvedConfig) -> KVCacheLayout:
    """Check that planned pages are the engine's, and return their layout."""
    pages = kv_cache_layout(pair, layout, 32768)
    assert pages.groups == resolved.pages.groups
    assert page_bytes(pair, layout, pages, target=True) == engine_page_bytes(resolved)
    return pages


@pytest.mark.parametrize("name", SERVED)
def test_a_ranks_planned_weights_equal_its_loaded_ones(folders: Path, name: str) -> None:
    spec, found = read_model(folders / name), read(folders, name)
    for ranks in found.pair.tp_sizes:
        # Dense products have the mean size over all, although ranks divide packed ones and repeat routers.
        mine = Sharding(spec, 0, ranks)
        assert found.pair.target_bytes(ranks) == pytest.approx(rank_bytes(spec, mine), rel=3e-3)


@pytest.mark.parametrize(("name", "ranks"), list(zip(WITH_MTP, cycle((1, 4)))))
def test_a_targets_own_layer_is_planned_as_the_engine_loads_it(folders: Path, name: str, ranks: int) -> None:
    spec = SpeculativeConfig(method="mtp")
    pair = read_pair(EngineConfig(model=str(folders / name), speculative_config=spec), None).pair
    target, layout = read_model(folders / name), ParallelLayout(ranks, "colocated", 1)
    layer = MtpConfig.of(target, ranks)
    assert layer.num_layers == (3 if name == "MiMo-V2-Flash" else 1)
    combine = ["mtp_combine"] * layer.num_layers
    loaded = rank_bytes(layer.model, Sharding(layer.model, 0, ranks), combine)
    assert pair.drafter_bytes(ranks) + pair.fc_bytes == pytest.approx(loaded, rel=2e-3)
    plan = resolved_config(folders / name, ranks, spec, (None, layer))
    check_pages(pair, layout, plan)
    assert len(pair.survival) == plan.num_speculative_tokens


def test_of_several_own_layers_each_draft_reads_one_and_runs_an_entry_more(folders: Path) -> None:
    spec = SpeculativeConfig(method="mtp")
    found = read_pair(EngineConfig(model=str(folders / "MiMo-V2-Flash"), speculative_config=spec), None)
    times, drafter = (
        StepTimes(found.pair, H200, ParallelLayout(4, "colocated", 2)),
        found.pair.drafter_rank(4),
    )
    assert drafter is not None and found.pair.num_drafts == drafter.num_layers == 3
    read = 2 * ((drafter.linear_params + drafter.fc_params) / 3 + drafter.head_params)
    one, three = times.draft(1, 2, 0), times.draft(1, 4, 0)
    assert one.bytes == pytest.approx(read / H200.device.bytes_per_s, rel=0.01)
    assert three.bytes == pytest.approx(3 * one.bytes, rel=0.01)
    assert three.link > 3 * one.link
    assert found.pair.state_bytes == 3 * 2 * drafter.hidden


GEMMA_ASSISTANT = {
    "architectures": ["Gemma4UnifiedAssistantForCausalLM"],
    "backbone_hidden_size": 3840,
    "dtype": "bfloat16",
    "text_config": {
        **PUBLISHED["gemma-4-12B-it"]["text_config"],
        "hidden_size": 1024,
        "intermediate_size": 8192,
        "num_attention_heads": 16,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
}


@pytest.mark.parametrize("ranks", [1, 4])
def test_an_assistant_is_planned_as_the_engine_loads_it(folders: Path, tmp_path: Path, ranks: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_ASSISTANT))
    spec = SpeculativeConfig(method="mtp", model=str(tmp_path))
    name = "gemma-4-12B-it"
    config = EngineConfig(model=str(folders / name), speculative_config=spec)
    pair, target = read_pair(config, "2.2").pair, read_model(folders / name)
    model = read_assistant(tmp_path)
    assistant = AssistantConfig.of(model, target, ranks, "config.json")
    beside = ["pre_projection", "post_projection", "embedding"]
    loaded = rank_bytes(assistant.model, Sharding(assistant.model, 0, ranks), beside)
    assert pair.drafter_bytes(ranks) + pair.fc_bytes == pytest.approx(loaded, rel=2e-3)
    plan = resolved_config(folders / name, ranks, spec, (tmp_path, assistant))
    layout = ParallelLayout(ranks, "colocated", 1)
    assert check_pages(pair, layout, plan).drafter == plan.pages.drafter
    assert pair.num_drafts == plan.num_speculative_tokens
    times, drafter = StepTimes(pair, H200, layout), pair.drafter_rank(ranks)
    assert drafter is not None and not times.inject(64).total_s
    read = 2 * (drafter.linear_params + drafter.fc_params + drafter.head_params)
    assert times.draft(1, 2, 0).bytes == pytest.approx(read / H200.device.bytes_per_s, rel=0.01)


def test_each_draft_of_a_targets_own_layer_reads_the_layer_and_the_targets_head(folders: Path) -> None:
    spec = SpeculativeConfig(method="mtp")
    found = read_pair(EngineConfig(model=str(folders / "GLM-4.5-Air"), speculative_config=spec), "2.2")
    pair, layout = found.pair, ParallelLayout(4, "colocated", 2)
    assert (found.acceptance, pair.num_drafts) == ("as given", 3)
    times, drafter = StepTimes(pair, H200, layout), pair.drafter_rank(4)
    assert drafter is not None
    one = times.draft(1, 2, 0)
    chosen = drafter.experts(1).num_bytes
    read = 2 * (drafter.linear_params + drafter.fc_params + drafter.head_params) + chosen
    assert one.bytes == pytest.approx(read / H200.device.bytes_per_s, rel=0.01)
    assert one.link == pytest.approx(4 * H200.link.all_reduce_s(4, 2 * drafter.hidden))
    assert times.draft(1, 4, 0).total_s == pytest.approx(3 * one.total_s)
    assert isinstance(estimate(pair, H200, layout, DEMAND), LayoutEstimate)


def rank_bytes(spec: ModelSpec, sharding: Sharding, beside_layers: Sequence[str] | None = None) -> int:
    """Return the bytes of a rank's tensors, in 16 bits or packed, by the family's own rules.

    `beside_layers`: parts outside of the layers; by default all of a target's.
    """
    whole = ["embedding", "final_norm"] + ["head"] * (not spec.tied_head)
    parts = [(part, 0) for part in (whole if beside_layers is None else beside_layers)]
    parts += [(part, layer) for layer in range(spec.num_layers) for part in spec.layer_parts(layer)]

    def length(axis: Axis, layer: int) -> int:
        mine = sharding.slices_of(axis, layer)
        if axis == "q_and_gate":  # read for the queries and for the gate, each of which keeps its half
            return length("q", layer)
        return sum(each.stop - each.start for each in mine) if mine else spec.axis_size(axis, layer)

    def times(part: str, layer: int) -> int:
        experts = sharding.experts(layer) if "{expert}" in spec.tensors[part].name else slice(0, 1)
        return experts.stop - experts.start

    def itemsize(part: str, layer: int) -> float:
        mlps = (f"{at}{name}" for at in ("", "shared_", "expert_") for name in ("gate", "up", "down"))
        if spec.quantization is not None and part in (*spec.qkv_parts(layer), "o", *mlps):
            module = f"model.{spec.tensors[part].name.format(layer=layer, expert=0)}".removesuffix(".weight")
            form = spec.quantization.packed_form(module)
            return 2 if form is None else form.bytes
        return 1 if part.endswith(("_blocks", "_scales")) else 2

    def size(part: str, layer: int) -> float:
        each = times(part, layer) * itemsize(part, layer)
        return each * math.prod(length(axis, layer) for axis in spec.tensors[part].axes)

    return round(sum(size(part, layer) for part, layer in parts))


@pytest.mark.parametrize(("name", "ranks"), list(zip(SERVED, cycle((1, 4)))))
def test_planned_pages_are_as_large_as_the_engines(folders: Path, name: str, ranks: int) -> None:
    check_pages(
        read(folders, name).pair, ParallelLayout(ranks, None, 1), resolved_config(folders / name, ranks)
    )


def test_a_colocated_drafters_pages_count(folders: Path, qwen: ReadPair) -> None:
    drafter = DrafterConfig.load(folders / "Qwen3-8B-DFlash-b16")
    plan = resolved_config(folders / "Qwen3-8B", 1, SpeculativeConfig(model="drafter"), (folders, drafter))
    pages = check_pages(qwen.pair, ParallelLayout(1, "colocated", 1), plan)
    shared = page_bytes(qwen.pair, ParallelLayout(1, "shared", 7), pages, target=False)
    assert shared == tuple(7 * size for size in engine_page_bytes(plan, target=False))


def test_qwen3_8b_fits_one_h200_and_a_plain_step_reads_its_weights(qwen: ReadPair) -> None:
    layout = ParallelLayout(1, None, 1)
    room = estimate_memory(qwen.pair, H200, layout, DEMAND)
    assert room.weights_bytes == pytest.approx(16.38e9, rel=1e-3)
    assert 700_000 < room.kv_tokens < 800_000  # (125.8 - 15.3 - 4.3 GiB) / 144 KiB
    spent = StepTimes(qwen.pair, H200, layout).verify(1, 1, 1024)
    without_embedding = room.weights_bytes - 2 * qwen.pair.target.head_params
    assert spent.bound == "bytes"
    assert spent.bytes == pytest.approx(without_embedding / H200.device.bytes_per_s, rel=0.02)


@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (1, 16), (32, 4), (128, 16)])
def test_a_step_on_one_gpu_takes_the_roofline_plus_its_launches(
    qwen: ReadPair, batch: int, rows: int
) -> None:
    assert qwen.pair.drafter is not None
    floor = Roofline(H200.device, qwen.pair.target, qwen.pair.drafter)
    times = StepTimes(qwen.pair, H200, ParallelLayout(1, "colocated", 8))
    spent = times.round(batch, rows, 1024)
    wanted = floor.verify_s(batch, 1, 1024) if rows == 1 else floor.step(batch, rows, 1024).step_s
    assert spent.bytes + spent.arithmetic == pytest.approx(wanted, rel=1e-3)
    assert (spent.link, spent.queue) == (0.0, 0.0) and 0.0 < spent.launches < 1.5e-3


def test_ranks_share_the_bytes_and_pay_for_sums(qwen: ReadPair) -> None:
    alone, four = (
        StepTimes(qwen.pair, H200, ParallelLayout(tp, None, 1)).verify(1, 1, 1024) for tp in (1, 4)
    )
    assert four.bytes == pytest.approx(alone.bytes / 4, rel=1e-3)
    assert four.link == pytest.approx(73 * (8e-6 + 1.5 * 8192 / 360e9))  # 2 x 36 layers and the embedding


def test_halves_are_used_if_they_pay(qwen: ReadPair) -> None:
    """If rows cost, two alternating halves hide the drafter; a batch of 1 cannot be halved."""
    split = StepTimes(qwen.pair, H200, ParallelLayout(1, "split", 4))
    together = StepTimes(qwen.pair, H200, ParallelLayout(1, "colocated", 8))
    assert split.round(128, 16, 1024).total_s < 0.9 * together.round(128, 16, 1024).total_s
    one = split.verify(1, 16, 1024) + split.draft(1, 16, 1024) + split.inject(16) + split.transfer(16)
    assert split.round(1, 16, 1024) == one


def test_a_separate_drafter_costs_no_launches_beside_its_own(qwen: ReadPair) -> None:
    split = StepTimes(qwen.pair, H200, ParallelLayout(1, "split", 4))
    together = StepTimes(qwen.pair, H200, ParallelLayout(1, "colocated", 8))
    assert split.verify(1, 16, 1024) == together.verify(1, 16, 1024)
    assert split.verify(1, 16, 1024).launches == pytest.approx((6 * 36 + 27) * LAUNCH_S)
    assert split.draft(1, 16, 1024).launches == pytest.approx(6 * 5 * LAUNCH_S)


def test_more_engines_on_a_drafter_wait_longer(qwen: ReadPair) -> None:
    rounds = [
        StepTimes(qwen.pair, H200, ParallelLayout(1, "shared", n)).round(8, 16, 1024) for n in (2, 4, 7, 40)
    ]
    assert [r.queue for r in rounds] == sorted(r.queue for r in rounds) and rounds[0].queue > 0.0
    busy_s = StepTimes(qwen.pair, H200, ParallelLayout(1, "shared", 40)).draft(8, 16, 1024).total_s
    assert rounds[-1].total_s >= 40 * busy_s, "no drafter does more than one thing at a time"


def test_a_70b_target_is_refused_on_one_80_gb_gpu_with_the_missing_memory_and_a_remedy(folders: Path) -> None:
    pair = read(folders, "Llama-3.1-70B-Instruct").pair
    found = [estimate(pair, H100, layout, DEMAND) for layout in layouts(1, (1,), drafter=False)]
    with pytest.raises(
        PlacementError, match=r"13\d\.\d GiB on each H100, which gives 71\.2 GiB .* 6\d\.\d GiB"
    ) as e:
        check_fitting(found)
    assert "shard it over 2 GPUs" in e.value.message and e.value.param == "gpus"
    assert isinstance(estimate(pair, H100, ParallelLayout(4, None, 2), DEMAND), LayoutEstimate)


def test_an_overlong_sequence_is_refused_with_the_length_that_fits(folders: Path) -> None:
    pair = read(folders, "Llama-3.1-70B-Instruct").pair
    long = LayoutDemand(max_model_len=131072, context=4096)
    misfit = estimate(pair, H100, ParallelLayout(2, None, 4), long)
    assert isinstance(misfit, LayoutMisfit)
    fits = int(misfit.error.message.partition("at most ")[2].partition(",")[0])
    assert misfit.error.param == "max_model_len"
    assert estimate_memory(
        pair, H100, ParallelLayout(2, None, 4), replace(long, max_model_len=fits, context=64)
    )
    with pytest.raises(PlacementError):
        estimate_memory(
            pair, H100, ParallelLayout(2, None, 4), replace(long, max_model_len=fits + PAGE_SIZE, context=64)
        )


def test_layers_with_a_window_leave_memory_for_more_sequences(folders: Path) -> None:
    pair = read(folders, "gemma-3-27b-it").pair
    full = replace(
        pair,
        target=replace(
            pair.target, layers=tuple(replace(layer, window=None) for layer in pair.target.layers)
        ),
    )
    demand = LayoutDemand(max_model_len=131072, context=32768)
    sliding, seeing_all = (estimate_memory(p, H200, ParallelLayout(1, None, 1), demand) for p in (pair, full))
    assert sliding.largest_batch > 2 * seeing_all.largest_batch


def test_unsupported_families_are_refused(tmp_path: Path) -> None:
    (tmp_path / "indexed").mkdir()
    (tmp_path / "indexed" / "config.json").write_text('{"architectures": ["GlmMoeDsaForCausalLM"]}')
    with pytest.raises(CheckpointError, match=r"GlmMoeDsaForCausalLM has an indexer .* is not served"):
        read(tmp_path, "indexed")


def test_a_drafter_of_another_target_is_refused(folders: Path) -> None:
    with pytest.raises(CheckpointError, match="hidden_size"):
        read(folders, "Llama-3.1-70B-Instruct", "Qwen3-8B-DFlash-b16")


@given(st.integers(1, 16), st.booleans())
def test_layouts_fill_the_gpus_and_never_more(num_gpus: int, drafter: bool) -> None:
    found = list(layouts(num_gpus, TP_SIZES, drafter=drafter))
    assert len(set(found)) == len(found)
    for layout in found:
        assert layout.num_gpus <= num_gpus < replace(layout, replicas=layout.replicas + 1).num_gpus
        assert drafter or layout.placement is None
        assert layout.placement != "shared" or layout.replicas > 1


@given(st.floats(1.0, 16.0))
def test_a_length_becomes_a_curve_of_that_length(length: float) -> None:
    assert 1.0 + sum(survival_of_length(length, 15)) == pytest.approx(length, abs=1e-6)


@pytest.mark.parametrize("text", ["17", "0.5", "fast", "0.9,0.8", "-1"])
def test_an_impossible_acceptance_is_refused(folders: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="acceptance"):
        read(folders, "Qwen3-8B", "Qwen3-8B-DFlash-b16", acceptance=text)


def test_acceptance_comes_from_the_flag_else_the_card_else_an_assumption(
    folders: Path, shipped_pair: tuple[Path, Path]
) -> None:
    assert min_card_length(shipped_pair[1]) == 2.30, "the least of its line of totals"
    assert min_card_length(folders / "Qwen3-8B") is None
    assumed = read(folders, "Qwen3-8B", "Qwen3-8B-DFlash-b16")
    assert 1 + sum(assumed.pair.survival) == pytest.approx(4.0) and "assumption" in assumed.acceptance


def all_of(pair: ReadPair, demand: LayoutDemand) -> list[LayoutEstimate]:
    places = layouts(8, pair.pair.tp_sizes, drafter=True)
    return check_fitting([estimate(pair.pair, H200, layout, demand) for layout in places])


def test_the_choice_is_fastest_per_gpu_within_the_slo(qwen: ReadPair) -> None:
    free, _ = choose(all_of(qwen, DEMAND), DEMAND, 8)
    tight_demand = replace(DEMAND, slo_tpot_s=0.7e-3)
    found = all_of(qwen, tight_demand)
    tight, why = choose(found, tight_demand, 8)
    assert free.layout == ParallelLayout(1, "colocated", 8), "one GPU each wastes no sums"
    assert tight.layout.tp > 1 and tight.best.tpot_s <= 0.7e-3 and "within 0.7 ms" in why
    held = [each for each in found if not each.misses]
    assert tight.best.node_tokens_per_s >= 0.98 * max(each.best.node_tokens_per_s for each in held)
    impossible = replace(DEMAND, slo_tpot_s=1e-5)
    with pytest.raises(ConfigError, match=r"slo_tpot_ms=0\.01: the fastest layout") as refused:
        choose(all_of(qwen, impossible), impossible, 8)
    assert refused.value.param == "slo_tpot_ms"


def test_a_given_batch_is_spread_over_the_engines(qwen: ReadPair) -> None:
    demand = replace(DEMAND, batch=100)
    for each in all_of(qwen, demand):
        assert each.best.batch == math.ceil(100 / each.layout.replicas)
    too_many = replace(DEMAND, batch=100_000)
    with pytest.raises(ConfigError, match="no layout holds more than"):
        choose(all_of(qwen, too_many), too_many, 8)


def test_a_light_trace_runs_at_the_estimated_speed_and_a_heavy_one_misses(qwen: ReadPair) -> None:
    layout = ParallelLayout(4, "colocated", 2)
    found = estimate(qwen.pair, H200, layout, DEMAND)
    assert isinstance(found, LayoutEstimate)
    times = StepTimes(qwen.pair, H200, layout)

    def outcome(count: int, gap_s: float, slo: Slo) -> ReplayResult:
        trace = [TraceArrival(n * gap_s, 1024, 200) for n in range(count)]
        return replay_trace(trace, times, qwen.pair, layout, found.memory, DEMAND, slo)

    light = outcome(12, 1.0, Slo(tpot_s=2e-3, ttft_s=0.05))
    assert light.kept == 1.0
    assert light.tpot_s == pytest.approx(found.alone.tpot_s, rel=0.35)
    assert light.goodput == pytest.approx(200, rel=0.15), "tokens that come in a second"
    heavy = outcome(64, 0.0, Slo(tpot_s=light.tpot_s))
    assert heavy.kept < 0.5 and heavy.tpot_s > light.tpot_s and heavy.ttft_s > light.ttft_s


def test_an_unknown_gpu_is_refused_with_the_nearest() -> None:
    assert find_gpu("H200") is H200
    with pytest.raises(ConfigError, match="Did you mean h200"):
        find_gpu("h201")
