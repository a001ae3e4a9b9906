"""The shortest run of each benchmark of `tests/benchmarks`: its sides agree, and its figures are complete.

Those that serve or run jobs are run by tests of these: `test_serve_tax.py`, `test_serve_scaling.py`,
`test_serve_chaos.py` and `test_bench_batch.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.cli import app, main
from benchmarks.comparison.compare import run_compare
from benchmarks.comparison.contenders import TransformersTarget
from benchmarks.comparison.couplings import EQUAL, SampledText, walk
from benchmarks.comparison.dflash_loop import LoopDrafter, dflash_loop
from benchmarks.engine.policy_sweep import run_policy_sweep
from benchmarks.options import CompareOptions, PolicySweepOptions
from manta import LLM, SamplingParams
from manta.actors.http.config.settings import ServerSettings
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.cluster.config import EngineConfig
from manta.jobs.bench.common.engine_passes import read_rows
from manta.jobs.bench.sweep.engines import parse_methods
from manta.jobs.bench.sweep.sweep_run import sweep_curves, sweep_pictures
from safetensors.torch import load_file
from support.checkpoints.text_pair import LiveServer
from support.oracles.oracle_dflash import Oracle, decode
from typer.main import get_command

Run = Callable[..., int | str | None]


@pytest.fixture
def run() -> Run:
    """Run a command of the benchmarks; return its exit code, or the error's text."""

    def run_command(*arguments: str) -> int | str | None:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return ended.value.code

    return run_command


@pytest.mark.parametrize("name", sorted(get_command(app).commands))  # type: ignore[attr-defined]
def test_every_benchmark_explains_itself(name: str, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(name, "--help") == 0
    assert f"benchmarks {name}" in capsys.readouterr().out


def test_speed_bench_is_converted_to_a_file_that_every_benchmark_reads(tmp_path: Path, run: Run) -> None:
    source, output = tmp_path / "qualitative.jsonl", tmp_path / "out" / "prompts.jsonl"
    placeholder = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    rows = [
        {"question_id": "a", "category": "coding", "turns": ["def f():", "and more"]},
        {"question_id": "b", "category": "math", "turns": [placeholder]},
        {"question_id": "c", "category": "math", "messages": [{"role": "user", "content": "1 + 1?"}]},
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ("speed-bench", "--from", str(source), "-o", str(output))
    assert run(*command) == 0
    assert [(row.name, row.category) for row in read_rows(output)] == [("a", "coding"), ("c", "math")]
    assert read_rows(output)[0].prompt.messages[0]["content"] == "def f():"
    source.write_text(json.dumps(rows[1]) + "\n")
    assert "none with a prompt" in str(run(*command))


@pytest.mark.if_changed
def test_all_contenders_give_the_same_tokens(config: EngineConfig, prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "compare.json"
    with LiveServer(config, ServerSettings(served_model_name="tiny")) as server:
        small = {"num_prompts": 2, "concurrency": (2,), "rounds": 1, "max_tokens": 4}
        run_compare(config, CompareOptions(prompts=prompts, server=server.url, output=output, **small))
    figures = json.loads(output.read_text())
    assert {"command", "cpu", "cores", "versions", "git_sha"} <= set(figures["provenance"])
    (point,) = figures["points"]
    names = [side["name"] for side in point["contenders"]]
    assert names[:3] == ["Manta, DFlash", "Manta, plain", "Hugging Face generate"]
    assert names[3] == "unbatched DFlash loop" and names[4].startswith("tiny at 127.0.0.1")
    for side in point["contenders"]:
        assert side["identical"] is True and side["tokens"] == 2 * 4
        fastest = max(side["trial_tokens_per_s"], key=side["trial_tokens_per_s"].get)
        together = "one by one" if side["at_once"] == 1 else f"{side['at_once']} at once"
        assert fastest == ", ".join(filter(None, (side["dtype"], side["detail"], together)))


@pytest.mark.if_changed
def test_the_plain_loop_accepts_as_many_drafts_as_the_oracle(shipped_pair: tuple[Path, Path]) -> None:
    target_folder, drafter_folder = shipped_pair
    target = TransformersTarget(target_folder, torch.device("cpu")).load("float32")
    head = target.get_output_embeddings()
    assert head is not None
    tensors = {name: each.float() for name, each in load_file(drafter_folder / "model.safetensors").items()}
    drafter_config = json.loads((drafter_folder / "config.json").read_text())
    oracle = Oracle(drafter_config, tensors, target.get_input_embeddings().weight, head.weight)
    prompt = Tokenizer.load(target_folder).encode("def read_lines(path):\n")
    tokens, steps = decode(target, oracle, prompt, 12, block=16)
    answer = dflash_loop(target, LoopDrafter(drafter_folder, target), prompt, 12)
    assert answer.token_ids == tokens[:12]
    assert answer.num_steps == len(steps) < 11


@pytest.mark.if_changed
def test_offline_couplings_take_the_engines_steps_over_the_engines_text(
    shipped_pair: tuple[Path, Path],
) -> None:
    target_folder, drafter_folder = shipped_pair
    target = TransformersTarget(target_folder, torch.device("cpu")).load("float32")
    drafter = LoopDrafter(drafter_folder, target)
    prompt, num_tokens = Tokenizer.load(target_folder).encode("def read_lines(path):\n"), 40
    with torch.inference_mode():
        text = SampledText(target, drafter, prompt, num_tokens, 1.0, seed=7)
        acceptances = text.acceptances(drafter, 5)
    spec = {"model": str(drafter_folder), "adaptive": False, "num_speculative_tokens": 5}
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=num_tokens, ignore_eos=True)
    with LLM(str(target_folder), speculative_config=spec, dtype="float32", max_model_len=128) as llm:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params)
    assert list(output.outputs[0].token_ids) == text.ids[len(prompt) :]
    equal = acceptances[EQUAL] > 0
    assert output.metrics.num_steps == walk(equal, np.zeros_like(equal)) < num_tokens
    best, greedy = acceptances["best"], acceptances["greedy drafts"]
    assert best.min() >= 0 and best.max() <= 1 and set(np.unique(greedy)) <= {0.0, 1.0}


def test_a_walk_takes_accepted_drafts_and_one_token_more() -> None:
    accepted = np.array([[1, 1, 0], [0, 0, 0], [0, 1, 1], [1, 1, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]], bool)
    none = np.zeros_like(accepted)
    assert walk(accepted, none) == 2  # from 0 three tokens, from 3 four
    assert walk(none, none) == 7
    second = none.copy()
    second[0, 2] = second[3, 0] = True
    assert walk(accepted, second) == 4  # from 0 all four; then one by one


@pytest.mark.if_changed
def test_a_sweep_compares_all_sides_and_judges_every_bar(
    config: EngineConfig, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = PolicySweepOptions(
        prompts=prompts,
        concurrency=(2,),
        mixed=(2,),
        temperatures=(0.0,),
        rounds=1,
        max_tokens=4,
        minutes=0.01,
        methods=parse_methods(['{"method": "no-such-method", "model": "x"}', "mixed"]),
    )
    spec = replace(config.speculative_config, num_speculative_tokens=3)
    figures = run_policy_sweep(replace(config, speculative_config=spec), options)
    assert set(figures["refused"]) == {"no-such-method"}
    names = ["adaptive", "plain", "dflash-1", "dflash-3", "mixed", "random"]
    (point,), (mixed,) = figures["points"], figures["mixed"]
    for sides in (point["sides"], mixed["sides"]):
        assert list(sides) == names and all(side["identical"] for side in sides.values())
        assert sides["plain"]["ratio_to_plain"] == 1.0 and sides["plain"]["mean_acceptance_length"] is None
        assert {"draft", "verify"} <= set(sides["dflash-3"]["step_seconds"])
    assert point["sides"][point["best"]]["ratio_to_best"] == 1.0 and point["best"] in names[1:4]
    judged = Counter(one["bar"] for one in figures["verdicts"])
    assert judged == {"adaptive to the best": 2, "adaptive to plain": 2, "random drafter to plain": 1}
    assert all(one["met"] == (one["measured"] >= one["least"]) for one in figures["verdicts"])
    assert "no-such-method was refused" in capsys.readouterr().out
    curves = sweep_curves(figures)
    assert list(curves) == ["plain", "dflash", "mixed"]
    side = point["sides"]["adaptive"]
    both = {name: side[name] for name in ("user_tokens_per_s", "tokens_per_s")}
    assert curves["dflash"] == [{"requests": 2, **both}]
    assert [picture.name for picture in sweep_pictures(figures)] == ["pareto", "speedup-by-load"]


@pytest.mark.if_changed
def test_a_widened_pair_gives_the_answers_and_drafts_of_the_narrow_one(
    tiny_qwen3: Path, tiny_drafter: Path, tmp_path: Path, run: Run
) -> None:
    wide = tmp_path / "wide"
    sizes = {"hidden": 256, "inter": 160, "heads": 12, "kv-heads": 3, "layers": 6, "drafter-layers": 3}
    flags = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    given = ("--target", str(tiny_qwen3), "--drafter", str(tiny_drafter), *flags)
    assert run("widen", "-o", str(wide), *given) == 0
    narrow = _answers(tiny_qwen3, tiny_drafter)
    assert _answers(wide / "target", wide / "drafter") == narrow
    assert "is not empty" in str(run("widen", "-o", str(wide), *given))


def _answers(target: Path, drafter: Path) -> list[tuple[list[int], int, int]]:
    """Return tokens, accepted drafts and steps of two requests."""
    spec = {"model": str(drafter), "adaptive": False}
    small: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 128, "num_threads": 1}
    with LLM(str(target), speculative_config=spec, dtype="float32", **small) as llm:
        given = [{"prompt_token_ids": [5, 17, 3, 99, 4, 42, 8]}, {"prompt_token_ids": [7, 7, 7]}]
        outputs = llm.generate(given, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    return [(o.outputs[0].token_ids, o.metrics.num_accepted_tokens, o.metrics.num_steps) for o in outputs]
