"""`manta drafter eval`: coverage of its intervals, the engine's own figures, a card for the hub."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard, ModelCardData
from manta.actors.engine.outputs import TracedStep
from manta.actors.llm import LLM
from manta.actors.tokenization.prompts import encode_prompt
from manta.cluster.config import EngineConfig
from manta.cluster.errors import ConfigError, DatasetError
from manta.cluster.records.confidence_intervals import ratio_of_sums, student_t
from manta.cluster.request.request import SamplingParams
from manta.cluster.simulation.simulated_executor import LinearCost, SimulatedExecutor
from manta.cluster.step.draft_shape import UNBRANCHED, DraftShape
from manta.cluster.step.executor import ExecutorInfo
from manta.drafter.card import min_card_length
from manta.jobs.bench.common.request_source import RequestSource
from manta.jobs.bench.sweep import engines as sides
from manta.jobs.bench.sweep.load_records import AnswerRecord, DraftBlock
from manta.jobs.cli import app
from manta.jobs.drafters.common.options import EvalOptions, ExplainOptions
from manta.jobs.drafters.evaluate import evaluate_drafter as evaluate
from manta.jobs.drafters.evaluate.evaluate_drafter import acceptance_of, blocks_before_repetition, open_suite
from manta.jobs.drafters.evaluate.evaluation_card import read_card, write_card
from manta.jobs.drafters.explain.explain_drafter import explain_drafter
from manta.jobs.drafters.validate.card_check import check_card, compare_acceptance
from support.checkpoints.text_pair import VOCAB
from typer.testing import CliRunner


def run(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["drafter", *map(str, words)])
    return done.exit_code, done.output if done.exception is None or done.exit_code else str(done.exception)


def raised(*words: object) -> str:
    done = CliRunner().invoke(app, ["drafter", *map(str, words)])
    assert isinstance(done.exception, ConfigError | DatasetError), done.output
    return done.exception.message


# How sure figures are.


@pytest.mark.parametrize(
    ("degrees", "table"), [(2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (120, 1.980)]
)
def test_students_quantile_equals_the_tables(degrees: int, table: float) -> None:
    assert student_t(degrees) == pytest.approx(table, rel=0.01)


def test_intervals_cover_correlated_steps_of_different_answers() -> None:
    """Answers are beta-binomial and of different lengths; 60 of 100 drafts are accepted."""
    draws, covered, naive, truth = np.random.default_rng(0), 0, 0, 0.6
    for _ in range(1000):
        steps = draws.integers(10, 60, size=16)
        hits = draws.binomial(steps, draws.beta(6.0, 4.0, size=16))
        found = ratio_of_sums(hits.tolist(), steps.tolist())
        assert found is not None and found.low is not None and found.high is not None
        covered += found.low <= truth <= found.high
        reach = 1.96 * np.sqrt(found.value * (1 - found.value) / steps.sum())
        naive += abs(found.value - truth) <= reach
    assert 0.92 <= covered / 1000 <= 0.97
    assert naive / 1000 < 0.7, "steps are no sample"


def test_too_few_prompts_give_no_interval() -> None:
    assert ratio_of_sums([0, 0], [0, 0]) is None
    two = ratio_of_sums([3, 5, 0], [2, 2, 0])
    assert two is not None and (two.value, two.low, two.num_units) == (2.0, None, 2)
    equal = ratio_of_sums([4, 6, 2], [2, 3, 1])
    assert equal is not None and equal.low == equal.high == 2.0
    bounded = ratio_of_sums([9, 2, 10], [10, 10, 10], 0.0, 1.0)
    assert bounded is not None and (bounded.low, bounded.high) == (0.0, 1.0)


# An evaluation, of engines that compute nothing: it must find the curve that their drafts were made by.

SURVIVAL = (0.85, 0.6, 0.45, 0.3, 0.2)


def executor(config: EngineConfig) -> SimulatedExecutor:
    spec = config.speculative_config
    drafts = () if spec is None else SURVIVAL
    info = ExecutorInfo(
        num_pages=(512,),
        page_size=16,
        max_model_len=512,
        vocab_size=VOCAB,
        eos_token_ids=(),
        num_speculative_tokens=len(drafts),
        dtype="float32",
        device="cpu",
        draft_shape=UNBRANCHED if spec is None else DraftShape(spec.tree_width, spec.tree_size),
    )
    return SimulatedExecutor(info, drafts, LinearCost(verify_floor_s=4e-3, draft_floor_s=1e-3))


@contextmanager
def simulated_engines() -> Iterator[None]:
    """Run evaluations with simulated executors."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (evaluate, sides):
            patch.setattr(module, "make_executor", executor)
        yield


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("suite") / "mine.jsonl"
    rows = [{"id": str(i), "prompt": f"prompt {i}", "category": ("x", "y")[i % 2]} for i in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def card(pair: tuple[Path, Path], suite: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out") / "card"
    words = ["--suite", suite, "-o", folder, "--concurrency", "1,3", "--rounds", 1, "--max-tokens", 96]
    with simulated_engines():
        code, said = run("eval", pair[1], "--target", pair[0], *words, "--json")
    assert code == 0, said
    assert json.loads(said[said.index("{\n") :]) == json.loads((folder / "card.json").read_text())
    return folder


def test_the_acceptance_curve_is_found(card: Path) -> None:
    figures = read_card(card / "card.json")
    assert [at["temperature"] for at in figures["acceptance"]] == [0.0, 1.0]
    for at in figures["acceptance"]:
        counts = {name: reported["prompts"] for name, reported in at["categories"].items()}
        assert counts == {"overall": 24, "x": 12, "y": 12}
        for reported in at["categories"].values():
            shares = [share["value"] for share in reported["by_position"]]
            assert shares == pytest.approx(SURVIVAL, abs=0.1)
            length = reported["tokens_per_step"]
            assert length["low"] < 1 + sum(SURVIVAL) < length["high"]
            assert reported["fresh_tokens_per_step"] == length, "the tokens are random"
            assert reported["fresh_blocks"] == reported["blocks"]
        blocks = [at["categories"][name]["blocks"] for name in ("overall", "x", "y")]
        assert blocks[0] == blocks[1] + blocks[2]


def test_a_block_counts_before_a_repetition_if_its_first_token_does() -> None:
    """The first four tokens come back at index 6; the block of 5 and 6 begins before that."""
    answer = AnswerRecord(0, "x", 0.0, token_ids=[1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 7])
    sizes = [(1, 0), (1, 3), (3, 3), (2, 3), (4, 3), (2, 1)]
    answer.blocks = [DraftBlock(0.0, tokens, drafts, tokens - 1) for tokens, drafts in sizes]
    assert blocks_before_repetition(answer) == answer.blocks[:4]
    fresh = AnswerRecord(1, "x", 0.0, token_ids=[7, 8, 9])
    fresh.blocks = [DraftBlock(0.0, 1, 0, 0), DraftBlock(0.0, 2, 3, 1)]
    assert blocks_before_repetition(fresh) == fresh.blocks
    found = acceptance_of([answer, fresh], depth=3)
    assert found is not None and found.fresh_tokens_per_step is not None
    assert (found.num_prompts, found.num_blocks, found.num_fresh_blocks) == (2, 6, 4)
    assert found.tokens_per_step.value == (1 + 3 + 2 + 4 + 2 + 2) / 6
    assert found.fresh_tokens_per_step.value == (1 + 3 + 2 + 2) / 4


def test_a_bonus_token_that_an_ended_answer_does_not_have_is_not_counted() -> None:
    ended = AnswerRecord(0, "x", 0.0, token_ids=[1, 2, 3])
    ended.blocks = [DraftBlock(0.0, 1, 0, 0), DraftBlock(0.0, 2, 3, 2)]  # two drafts, the second an end token
    found = acceptance_of([ended], depth=3)
    assert found is not None and found.tokens_per_step.value == 2.0


def test_speed_is_measured_in_alternating_turns_at_each_load(card: Path) -> None:
    figures = read_card(card / "card.json")
    assert [point["requests"] for point in figures["points"]] == [1, 3, 1, 3]
    assert all(point["identical"] for point in figures["points"])
    for point in figures["points"]:
        assert point["speedup"]["units"] == point["turns"] >= 1, "each turn of both is a unit"
    assert figures["provenance"]["versions"]["torch"]


def test_the_card_is_readable_by_the_hub_and_the_planner(card: Path) -> None:
    figures = read_card(card / "card.json")
    loaded = ModelCard.load(card / "card.md")
    data = loaded.data
    assert isinstance(data, ModelCardData) and data.model_name == "drafter"
    results = data.eval_results or []
    by_name = {result.metric_name: result.metric_value for result in results}
    overall = [at["categories"]["overall"]["tokens_per_step"]["value"] for at in figures["acceptance"]]
    assert [by_name[f"tokens per step, overall, temperature {t}"] for t in (0, 1)] == overall
    assert by_name["tokens per step before repetitions, overall, temperature 0"] == overall[0]
    assert sum(result.metric_type == "speedup" for result in results) == 4
    (card / "card.md").rename(card / "README.md")
    assert min_card_length(card) == pytest.approx(min(overall), abs=0.006)
    assert str(card.parent.parent) not in (card / "README.md").read_text()
    picture = ElementTree.parse(card / "card.svg").getroot()
    assert picture.tag.endswith("svg") and "overall" in "".join(picture.itertext())


def test_without_matplotlib_the_card_has_figures_and_no_picture(
    card: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("manta.jobs.common.plots.find_spec", lambda name: None)
    write_card(read_card(card / "card.json"), tmp_path)
    assert "pip install matplotlib" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["card.json", "card.md"]
    assert "card.svg" not in (tmp_path / "card.md").read_text()


def test_acceptance_below_the_cards_causes_a_warning(pair: tuple[Path, Path], card: Path) -> None:
    names = str(pair[1]), str(pair[0])
    with simulated_engines():
        assert list(check_card(*names, card / "card.json", device="cpu")) == [], "the same tokens"
    said = read_card(card / "card.json")["acceptance"]
    better: Any = copy.deepcopy(said)
    better[0]["categories"]["y"]["tokens_per_step"] |= {"value": 9.0, "low": 8.5, "high": 9.5}
    better[1]["categories"]["overall"]["by_position"][1] = {"value": 0.99, "low": 0.98, "high": 1.0}
    found = [finding.message for finding in compare_acceptance(better, said)]
    assert len(found) == 2 and "y at temperature 0" in found[0] and "draft 2 at temperature 1" in found[1]
    assert list(compare_acceptance(said, better)) == [], "more is no fault"


def test_a_card_says_that_trees_were_measured(
    pair: tuple[Path, Path], suite: Path, card: Path, tmp_path: Path
) -> None:
    tree = {"tree_width": 3, "tree_size": 12}
    words = ["--suite", suite, "-o", tmp_path, "--concurrency", 3, "--rounds", 0, "--max-tokens", 96]
    with simulated_engines():
        given = ["--temperature", 0, "-sc", json.dumps(tree)]
        code, said = run("eval", pair[1], "--target", pair[0], *words, *given)
    assert code == 0 and "trees of 12 drafts (depth 5, width 3)" in said, said
    figures, chains = read_card(tmp_path / "card.json"), read_card(card / "card.json")
    assert figures["suite"] == chains["suite"] | tree and figures["options"]["speculative_config"] == tree
    write_card(chains, tmp_path / "chains")
    assert chains["suite"]["tree_width"] == 1
    assert "chains of 5 drafts" in (tmp_path / "chains" / "card.md").read_text()
    text = (tmp_path / "card.md").read_text()
    assert json.dumps(tree) in text and "trees of 12 drafts" in text and "tokens per step of trees" in text
    assert figures["points"] == [] and "Speed" not in said + text, "no round was asked for"
    trees = figures["acceptance"][0]["categories"]["overall"]
    assert len(trees["by_position"]) == 5, "by depth, not by node"
    assert trees["tokens_per_step"]["low"] > 1 + sum(SURVIVAL), "alternatives are accepted, too"
    with simulated_engines():
        assert list(check_card(str(pair[1]), str(pair[0]), tmp_path / "card.json", device="cpu")) == []
    explain = ExplainOptions(
        drafter=str(pair[1]), target=str(pair[0]), data=suite, card=tmp_path / "card.json"
    )
    with pytest.raises(ConfigError, match="--speculative-config"):
        explain_drafter(explain)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"tree_width": 3, "tree_size": 31}, {"num_speculative_tokens": 4}])
def test_acceptance_of_a_real_pair_is_that_of_the_engines_steps(
    shipped_pair: tuple[Path, Path], settings: dict[str, int], tmp_path: Path
) -> None:
    target, drafter = map(str, shipped_pair)
    rounds = 0 if settings else 1
    words = ["--num-prompts", 10, "-o", tmp_path, "--concurrency", 1, "--rounds", rounds, "--max-tokens", 60]
    code, said = run("eval", drafter, "-m", target, *words, "-t", 0, "-sc", json.dumps(settings))
    assert code == 0 and "overall" in said, said
    figures = read_card(tmp_path / "card.json")
    spec = {"model": drafter, "adaptive": False, **settings}
    source = RequestSource(open_suite("quick", 10).rows, 60, 0.0)
    rows = [
        source[i] for i in range(10)
    ]  # in this order, as trees depend on what was learned from earlier ones
    with LLM(target, speculative_config=spec, max_num_seqs=1) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=60)
        prompts = [encode_prompt(row.prompt, llm.tokenizer) for row in rows]
        outputs = llm.generate(prompts, params, use_tqdm=False, trace=True)
    for name, reported in figures["acceptance"][0]["categories"].items():
        steps, fresh_steps = list[TracedStep](), list[TracedStep]()
        for row, output in zip(rows, outputs, strict=True):
            if name not in ("overall", row.category):
                continue
            assert output.metrics.trace is not None
            answer, num_before = output.outputs[0].token_ids, 0
            for step in output.metrics.trace:
                steps.append(step)
                if not starts_to_repeat(answer, num_before):
                    fresh_steps.append(step)
                num_before += step.num_tokens
        assert reported["blocks"] == sum(step.num_drafted > 0 for step in steps)
        assert reported["tokens_per_step"]["value"] == tokens_per_step(steps)
        assert reported["fresh_tokens_per_step"]["value"] == tokens_per_step(fresh_steps)
    assert all(point["identical"] for point in figures["points"]) and len(figures["points"]) == rounds
    overall = figures["acceptance"][0]["categories"]["overall"]
    assert len(overall["by_position"]) == figures["suite"]["num_speculative_tokens"]
    assert overall["tokens_per_step"]["value"] > 2 and overall["fresh_blocks"] < overall["blocks"]


def starts_to_repeat(answer: Sequence[int], place: int) -> bool:
    """Whether four tokens that begin at this place, or before it, occurred before."""
    grams = [tuple(answer[i : i + 4]) for i in range(len(answer) - 3)][: place + 1]
    return len(set(grams)) < len(grams)


def tokens_per_step(steps: Sequence[TracedStep]) -> float:
    tokens = [step.num_tokens for step in steps if step.num_drafted]
    return round(sum(tokens) / len(tokens), 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_validation_at_level_gpu_needs_a_gpu(pair: tuple[Path, Path]) -> None:
    code, said = run("validate", pair[1], "--target", pair[0], "--level", "gpu")
    assert code == 2 and "GPU" in said and "--level cpu" in said


def test_wrong_arguments_are_named(
    pair: tuple[Path, Path], suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("eval", pair[1], "--target", pair[0], "--suite")
    assert "suite='nothing' must be quick, chats or a JSONL" in raised(*words, "nothing")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt"')
    assert "bad.jsonl" in raised(*words, "bad.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "no prompt" in raised(*words, "empty.jsonl")
    assert "concurrency" in raised(*words, suite, "--concurrency", "0")
    assert "temperature" in raised(*words, suite, "--temperature", "-1")
    code, said = run(*words, suite, "--temperature", "warm")
    assert code == 2 and "temperature" in said
    for wrong in (tmp_path / "none.json", suite):
        with pytest.raises(ConfigError, match="card"):
            read_card(wrong)
    for name, value in (("adaptive", False), ("model", "other")):
        assert name in raised(*words, suite, "-sc", json.dumps({name: value}))
    assert "tree_width" in raised(*words, suite, "-sc", '{"tree_width": 0}')
    with pytest.raises(ConfigError, match="rounds"):
        EvalOptions(drafter="d", target="t", rounds=-1)


def test_suites_of_the_package_are_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, num_categories, num_prompts in (("quick", 5, 8), ("chats", 12, 20)):
        found = open_suite(name)
        counts = Counter(row.category for row in found.rows)
        assert set(counts.values()) == {num_prompts} and len(counts) == num_categories
        assert found.name == name and not found.path.is_absolute(), "the card names it on every machine"
        assert [row.name for row in open_suite(str(found.path), len(found.rows)).rows] == [
            row.name for row in found.rows
        ]
    assert len(open_suite("quick", 5).rows) == 5
