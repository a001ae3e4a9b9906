"""A simulated node: arithmetic by hand, conservation, monotonicity, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine_core import EngineCore
from manta.cluster.errors import ConfigError, PlacementError
from manta.cluster.hardware.gpu_specs import GPUS, Gpu, Link
from manta.cluster.hardware.layer_shape import ExpertShape, LatentShape, LayerShape
from manta.cluster.hardware.model_pair import ModelPair
from manta.cluster.hardware.model_shape import ModelShape
from manta.cluster.hardware.parallel_layouts import ParallelLayout
from manta.cluster.hardware.roofline import Device
from manta.cluster.hardware.step_time import LAUNCH_S, LAUNCHES_OF_TREES
from manta.cluster.simulation.acceptance_mix import AcceptanceMix
from manta.cluster.simulation.load_driver import LoadDriver, closed_loop, open_loop
from manta.cluster.simulation.simulated_engine import PlanCost
from manta.cluster.simulation.simulated_executor import LinearCost, SimulatedExecutor
from manta.cluster.speculation.acceptance_length import survival_of_length
from manta.cluster.step.dummy_steps import dummy_step
from manta.cluster.step.executor import ExecutorInfo
from manta.cluster.step.scheduler_output import TreeShape
from manta.jobs.cli import main
from manta.jobs.simulate.methods import Method, eagle3_shape, frontier, parse_acceptance, throughput_at
from manta.jobs.simulate.node_engines import DraftAssumptions, NodeEngine, Workload, node_engines
from support.paths import DATA

TARGET = ModelShape.dense(
    layers=36, hidden=4096, inter=12288, heads=32, kv_heads=8, head_dim=128, vocab=151936
)
DRAFTER = ModelShape.dense(
    layers=5, hidden=4096, inter=12288, heads=32, kv_heads=8, head_dim=128, vocab=151936, taps=5
)
PAIR = ModelPair(
    target=TARGET, drafter=DRAFTER, tied=False, tp_sizes=(1, 2, 4, 8), survival=survival_of_length(4.0, 15)
)
H200 = GPUS["h200"]
WORK = Workload(prompt_tokens=200, output_tokens=60, sigma=0.3, max_tokens=4096)


def node_engine(
    method: str,
    gpu: Gpu = H200,
    tp: int = 1,
    drafting: DraftAssumptions = DraftAssumptions(),  # noqa: B008
) -> NodeEngine:
    (found,) = node_engines(PAIR, gpu, tp, (tp,), [Method.parse(method)], drafting, WORK)
    return found


def observe(played: NodeEngine, clients: int, measured: int = 12, work: Workload = WORK):
    return closed_loop(played.engine(), lambda n, share: work.request(n, share), clients, measured)


def test_plain_decoding_of_one_request_equals_a_manual_roofline() -> None:
    """Qwen3-8B on an H200: 6.946 G weights of blocks, 0.622 G of the head, 144 KiB per context token."""
    context, launches = 200 + 30, 6 * 36 + 27
    by_hand_s = (2 * (6.946e9 + 0.6223e9) + context * 147456) / 4.3e12 + launches * LAUNCH_S
    work = replace(WORK, sigma=0.0)
    seen = observe(node_engine("plain"), 1, 4, work)
    assert seen.served[0].tpot_s == pytest.approx(by_hand_s, rel=2e-3)
    assert seen.user_tokens_per_s == pytest.approx(1.0 / by_hand_s, rel=2e-3)


def test_chain_drafts_take_a_pass_each_and_a_block_one() -> None:
    times = {name: node_engine(name).times for name in ("eagle3-3", "eagle3-7", "dflash-3", "dflash-15")}
    three, seven = (
        times[name].draft(1, 1 + n, 1000).total_s for name, n in (("eagle3-3", 3), ("eagle3-7", 7))
    )
    assert seven == pytest.approx(7 / 3 * three)
    head = times["eagle3-3"].draft(1, 2, 1000)
    weights = 4096 * (32 * 128 * 2 + 2 * 8 * 128) + 3 * 4096 * 12288 + 4096 * 32000
    assert head.bytes == pytest.approx((2 * weights + 1001 * 4096) / 4.3e12, rel=1e-3)
    short, whole = times["dflash-3"].draft(1, 4, 1000).total_s, times["dflash-15"].draft(1, 16, 1000).total_s
    assert whole < 1.01 * short, "at one request a block's rows are free"


def test_an_eagle3_head_for_a_target_with_latents_has_the_published_size() -> None:
    """TorchSpec's head for Kimi-K2.5 has 64 heads of 128, with their own keys and values."""
    latent = LatentShape(q_rank=1536, nope_dim=128, rope_dim=64, v_dim=128, rank=512)
    attention = {"heads": 64, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "latent": latent}
    experts = ExpertShape(count=384, chosen=8, inter=2048, num_held=384)
    layers = LayerShape(**attention, inter=18432), LayerShape(**attention, experts=experts)
    head = eagle3_shape(replace(TARGET, hidden=7168, layers=layers))
    assert (head.layers[0].heads, head.layers[0].kv_heads, head.layers[0].head_dim) == (64, 64, 128)
    assert head.layers[0].dense_params(7168) == 7168 * (4 * 64 * 128 + 3 * 18432)


@pytest.mark.parametrize("method", ["plain", "eagle3-3", "dflash-7", "dflash"])
def test_every_request_ends_once_with_its_tokens_in_time_order(method: str) -> None:
    engines = [node_engine(method).engine() for _ in range(2)]
    arrival_s = np.linspace(0.0, 0.3, 20).tolist()
    seen = open_loop(engines, lambda n, share: WORK.request(n, share), arrival_s)
    assert sorted(int(request.request_id) for request in seen.served) == list(range(20))
    for request in seen.served:
        assert request.num_tokens == WORK.lengths(int(request.request_id))[1]
        assert request.arrival_s < request.first_s <= request.last_s
    assert seen.num_tokens == sum(request.num_tokens for request in seen.served)
    for driven in engines:
        driven.engine.check_invariants()
        assert not driven.engine.has_unfinished and driven.engine.stats().running == 0
    if method != "plain":
        assert seen.num_accepted_tokens <= seen.num_draft_tokens
        assert seen.num_drafts <= seen.num_tokens - seen.num_accepted_tokens


def test_the_same_seed_is_the_same_simulation() -> None:
    first, again = observe(node_engine("dflash"), 4), observe(node_engine("dflash"), 4)
    assert first == again
    other = replace(WORK, seed=1)
    assert observe(node_engine("dflash"), 4, work=other) != first


@pytest.mark.parametrize("method", ["plain", "eagle3-3", "dflash-7"])
def test_a_faster_gpu_is_not_slower(method: str) -> None:
    """Bandwidth, arithmetic and link are raised separately."""
    device, link = H200.device, H200.link
    faster = [
        replace(H200, device=Device("more bytes", 2 * device.bytes_per_s, device.flops)),
        replace(H200, device=Device("more products", device.bytes_per_s, 2 * device.flops)),
        replace(H200, link=Link(2 * link.bytes_per_s, link.latency_s / 2)),
    ]
    for clients in (1, 16):
        slow = observe(node_engine(method, tp=2), clients, 4).tokens_per_s
        for gpu in faster:
            assert observe(node_engine(method, gpu, tp=2), clients, 4).tokens_per_s >= slow * 0.999


def test_methods_draft_and_are_accepted_as_configured() -> None:
    """Requests are equal, so the mean length is that of the curve's first drafts."""
    drafting = DraftAssumptions(dflash="6.0", eagle3="4.0", eagle3_drafts=7, spread=0.0)
    for name, survival in (
        ("dflash-7", survival_of_length(6.0, 15)),
        ("eagle3-3", survival_of_length(4.0, 7)),
    ):
        seen = observe(node_engine(name, drafting=drafting), 16, 16, replace(WORK, output_tokens=400))
        drafts = int(name[-1])
        assert seen.mean_acceptance_length == pytest.approx(1.0 + sum(survival[:drafts]), rel=0.03)
        assert seen.drafts_per_block == pytest.approx(drafts, rel=0.03), "but for the ends of answers"


def test_spread_keeps_the_mean_and_categories_keep_their_lengths() -> None:
    curve = survival_of_length(5.0, 9)
    texts = AcceptanceMix(curve, 0.7, {"code": 6.5, "chat": 3.0})
    base = np.log(texts.survival)
    by_category: dict[str | None, list[float]] = {}
    for number in range(8000):
        hardness = texts.hardness(str(number))
        by_category.setdefault(texts.category(str(number)), []).append(1 + np.exp(hardness * base).sum())
    lengths = {name: float(np.mean(found)) for name, found in by_category.items()}
    assert lengths["code"] == pytest.approx(6.5, rel=0.03) and lengths["chat"] == pytest.approx(3.0, rel=0.03)
    alone = AcceptanceMix(curve, 0.7)
    mean = np.mean([np.exp(alone.hardness(str(n)) * np.log(alone.survival)) for n in range(8000)], axis=0)
    assert mean == pytest.approx(np.array(curve), abs=0.015)
    assert AcceptanceMix(curve).survival == pytest.approx(curve) and AcceptanceMix(curve).hardness("7") == 1.0
    with pytest.raises(ConfigError, match="acceptance of code"):
        AcceptanceMix(curve, 0.5, {"code": 12.0})


def test_a_steps_cost_follows_its_verified_rows_and_prompts() -> None:
    cost = PlanCost(node_engine("dflash").times)
    plain, few, all_of = (
        cost(dummy_step([500] * 64, [1 + drafts] * 64, [drafts] * 64)) for drafts in (0, 3, 15)
    )
    assert plain.draft_s == 0.0 < few.draft_s < all_of.draft_s
    assert plain.verify_s < few.verify_s < all_of.verify_s and plain.inject_s < all_of.inject_s
    ragged = cost(dummy_step([500] * 64, [1] * 32 + [7] * 32, [0] * 32 + [6] * 32))
    assert ragged.verify_s == pytest.approx(few.verify_s), "rows are rows"
    prompt = replace(dummy_step([500] * 64 + [0], [1] * 64 + [2000], [0] * 65))
    assert cost(prompt).verify_s > plain.verify_s + 1e-3
    assert PlanCost(node_engine("dflash").times, free_prompts=True)(prompt).verify_s == plain.verify_s


def test_trees_of_a_drafter_on_its_own_gpu_are_charged_by_block_path_and_nodes() -> None:
    """63 nodes: the drafter computes and keeps as much as for a chain of 15, and sends 16 bytes a node."""
    method = Method.parse("dflash-tree-split")
    (engine,) = node_engines(PAIR, H200, 2, (1,), [method], DraftAssumptions(), WORK)
    assert engine.layout == ParallelLayout(1, "split", 1) and engine.method.draft_shape.branches
    times, cost, link = engine.times, PlanCost(engine.times), H200.link
    tree = replace(dummy_step([500], [64], [63]), tree=TreeShape(15, 4, (1.0,) * 4))
    drafted = times.draft(1, 16, 500) + times.inject(16) + times.transfer(16)
    nodes_s = 63 * 16 / link.bytes_per_s + LAUNCHES_OF_TREES * LAUNCH_S
    expected = times.verify(1, 64, 500) + drafted
    assert cost(tree).verify_s == pytest.approx(expected.total_s + nodes_s)
    chain = dummy_step([500], [16], [15])
    assert cost(chain).verify_s == pytest.approx((times.verify(1, 16, 500) + drafted).total_s)
    two = replace(dummy_step([500] * 2, [64] * 2, [63] * 2), tree=tree.tree)
    assert cost(two).verify_s < 2 * cost(tree).verify_s, "one half is drafted while the other is verified"


def test_the_frontier_contains_the_undominated_points() -> None:
    front = frontier([(100, 10), (50, 20), (60, 15), (55, 12), (100, 8)])
    assert front == [(50, 20), (60, 15), (100, 10)]
    assert throughput_at(front, 20) == 20 and throughput_at(front, 80) == 12.5
    assert throughput_at(front, 101) is None and throughput_at([], 1) is None


def test_an_engine_simulated_at_a_known_cost_takes_the_time_of_its_steps() -> None:
    """The same driver runs on a virtual clock: 20 tokens of one request are one prompt and 19 steps."""
    info = ExecutorInfo((100,), 16, 512, 1000, (), 0, "float32", "cpu")
    executor = SimulatedExecutor(info, (), LinearCost(0.5))
    driven = LoadDriver(EngineCore(EngineConfig(model="m"), executor))
    driven.add(replace(WORK, sigma=0.0, output_tokens=20).request(0), 3.0)
    driven.clock.wait_until(3.0)
    (served,) = driven.run_until(float("inf"))
    assert (served.ttft_s, served.tpot_s, served.e2e_s) == (0.5, 0.5, 10.0)


@pytest.mark.parametrize(
    "name", ["dflash-0", "plain-3", "plain-split", "eagle3-tree", "medusa", "dflash-x", ""]
)
def test_an_unknown_method_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="must be plain, dflash, dflash-tree, eagle3"):
        Method.parse(name)


def test_acceptance_is_one_length_or_one_by_category() -> None:
    curve, lengths = parse_acceptance("code=5, chat=3", 15)
    assert 1 + sum(curve) == pytest.approx(4.0) and lengths == {"code": 5.0, "chat": 3.0}
    assert parse_acceptance("4", 15) == (survival_of_length(4.0, 15), {})
    for wrong in ("fast", "4,5", "code=x", "17"):
        with pytest.raises(ConfigError, match="acceptance"):
            parse_acceptance(wrong, 15)


def test_a_node_that_does_not_fit_is_refused_with_the_missing_memory() -> None:
    small = replace(H200, memory_bytes=8 * 2**30)
    with pytest.raises(PlacementError, match="GiB are missing"):
        node_engine("plain", small)
    with pytest.raises(ConfigError, match="the node has 2 GPUs"):
        list(node_engines(PAIR, H200, 2, (4,), [Method.parse("plain")], DraftAssumptions(), WORK))
    with pytest.raises(ConfigError, match="at most 15"):
        node_engine("dflash-16")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    published = json.loads((DATA / "published_configs.json").read_text())
    root = tmp_path_factory.mktemp("published")
    for name in ("Qwen3-8B", "Qwen3-8B-DFlash-b16"):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(published[name]))
    return root


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_command_writes_points_assumptions_and_a_picture(folders: Path, capsys: Any) -> None:
    output, plot = folders / "node.json", folders / "node.svg"
    flags = ["--gpu", "h200", "--gpus", "2", "--concurrency", "1", "--concurrency", "8"]
    flags += ["--prompt-tokens", "100", "--output-tokens", "24", "--max-model-len", "4k"]
    pair = ["-m", str(folders / "Qwen3-8B"), "--drafter", str(folders / "Qwen3-8B-DFlash-b16")]
    assert run("node", *pair, *flags, "-o", str(output), "--plot", str(plot)) == 0
    figures = json.loads(output.read_text())
    points = figures["points"]
    assert {(p["method"], p["tp"]) for p in points} == {
        (method, tp) for method in ("plain", "eagle3-3", "dflash") for tp in (1, 2)
    }
    by = {(p["method"], p["tp"], p["load"]): p for p in points}
    assert by["dflash", 1, 1]["user_tokens_per_s"] > 2 * by["plain", 1, 1]["user_tokens_per_s"]
    assert by["plain", 2, 1]["user_tokens_per_s"] > by["plain", 1, 1]["user_tokens_per_s"]
    assert any("Acceptance is given" in line for line in figures["assumptions"])
    edge = max(p["user_tokens_per_s"] for p in points if p["method"] == "plain")
    (row,) = [row for row in figures["matched_speed"] if row["user_tokens_per_s"] == edge]
    assert row["tokens_per_s_per_gpu"]["dflash"] > row["tokens_per_s_per_gpu"]["plain"]
    assert plot.read_text().lstrip().startswith("<?xml") and "tok/s a GPU" in capsys.readouterr().out
    assert run("node", "-m", str(folders / "Qwen3-8B"), "--method", "dflash") == 1
    assert "--drafter" in capsys.readouterr().err


def test_a_trace_is_replayed_over_all_engines_of_a_node(folders: Path) -> None:
    trace, output = folders / "trace.jsonl", folders / "traced.json"
    rows = [{"arrival_s": 0.05 * n, "prompt_tokens": 50 + n, "output_tokens": 10 + n} for n in range(12)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    target = ["-m", str(folders / "Qwen3-8B"), "--gpu", "h200", "--gpus", "2", "--tp", "1"]
    assert run("node", *target, "--trace", str(trace), "-o", str(output)) == 0
    (point,) = json.loads(output.read_text())["points"]
    tokens, last_s = sum(10 + n for n in range(12)), 0.55 + point["e2e_s"]["p99"]
    assert point["requests"] == 12 and point["replicas"] == 2
    assert point["tokens_per_s_per_gpu"] == pytest.approx(tokens / 2 / last_s, rel=0.1)
