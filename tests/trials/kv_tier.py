"""What a tier below the K/V pages saves, and that no death of an engine changes a token.

    python tests/trials kv_tier FILE.json [TARGET DRAFTER [PROMPT_TOKENS [SESSIONS]]]      (`make kv-tier`)

1. Sessions take turns, twice as many as the pages hold, so that each one's pages are evicted before its next
   turn. The prompt tokens that are computed are counted with a tier and without.
2. An engine that saves and reads pages all the time is killed with SIGKILL at random points. The answers of
   each engine are compared with those of one without a tier, the files with the folder's bound.

Counts only, so the machine need not be idle. Exit status 1: a bar is not held. Tests run a short form
(`test_tier_trial.py`).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from manta import LLM, SamplingParams
from manta.actors.tokenization.prompts import load_tokenizer
from manta.cluster.config import EngineConfig
from manta.jobs.bench.common.provenance import provenance
from support.paths import MODELS, ROOT, module_command

FEWER_BAR = 3.0  # times fewer computed prompt tokens
PAGE_SIZE = 16
ANSWER_TOKENS, QUESTION_TOKENS = 16, 16  # of a turn
NUM_KILLS, KILLED_PROMPTS, KILLED_PROMPT_TOKENS = 20, 12, 512
_AT_ONCE = 3  # prompts of an engine that is killed
_SHARE_KEPT = 0.8  # of the pages of all prompts, that the folder may hold then: some are deleted, too

Settings = dict[str, Any]  # Any: fields of EngineConfig


@dataclass(frozen=True)
class Sessions:
    """Sessions that take turns, and how many of them the pages hold."""

    num_sessions: int = 32
    num_cached: int = 16
    prompt_tokens: int = 768
    turns: int = 4

    @property
    def num_pages(self) -> int:
        longest = self.prompt_tokens + self.turns * (ANSWER_TOKENS + QUESTION_TOKENS)
        return self.num_cached * -(-longest // PAGE_SIZE)


@dataclass
class Savings:
    """Prompt tokens that were computed, and how many answers are the same with a tier."""

    sessions: Sessions
    computed: int
    computed_with_tier: int
    answers: int
    same_answers: int

    @property
    def fewer(self) -> float:
        return self.computed / self.computed_with_tier

    @property
    def held(self) -> bool:
        return self.fewer >= FEWER_BAR and self.same_answers == self.answers


@dataclass
class Deaths:
    """What engines did that were killed one after another.

    Attributes:
        answers, wrong: answers of all engines, and those with other tokens than without a tier.
        read_tokens: prompt tokens that they read from files.
        torn: files that the killed engines left unfinished.
        remaining: those that the next engine did not delete.
        largest_bytes: of the folder after a death.
    """

    bound_bytes: int
    kills: int = 0
    answers: int = 0
    wrong: int = 0
    read_tokens: int = 0
    torn: int = 0
    remaining: list[str] = field(default_factory=list)
    largest_bytes: int = 0

    @property
    def held(self) -> bool:
        is_within = self.largest_bytes <= self.bound_bytes
        return is_within and not self.wrong and not self.remaining and self.read_tokens > 0


def settings_of(target: str, drafter: str) -> Settings:
    # Adaptive lengths may end drafting, and pages are not saved without the drafter's context.
    drafting = {"model": drafter, "adaptive": False}
    return {"model": target, "speculative_config": drafting, "device": "cpu", "page_size": PAGE_SIZE}


def read_tokens(target: str, count: int) -> list[int]:
    """Return this many tokens of this repository's text."""
    tokenizer = load_tokenizer(EngineConfig(model=target))
    assert tokenizer is not None, "the model has a tokenizer"
    files = [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "cluster").rglob("*.py"))]
    tokens: list[int] = []
    for file in files:
        tokens += tokenizer.encode(file.read_text(encoding="utf-8"), add_special_tokens=False)
        if len(tokens) >= count:
            return tokens[:count]
    raise AssertionError(f"the text has {len(tokens)} tokens, not {count}")


def split(tokens: Sequence[int], length: int) -> list[list[int]]:
    return [list(tokens[begin : begin + length]) for begin in range(0, len(tokens), length)]


def run_sessions(
    settings: Settings, sessions: Sessions, tokens: Sequence[int]
) -> tuple[int, list[list[int]]]:
    """Return how many prompt tokens were computed, and the answers of all turns."""
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    computed, answers, histories = 0, list[list[int]](), split(tokens, sessions.prompt_tokens)
    with LLM(**settings, num_pages=sessions.num_pages) as llm:
        for _ in range(sessions.turns):
            for history in histories:
                (output,) = llm.generate({"prompt_token_ids": history}, params)
                computed += len(history) - output.metrics.num_cached_tokens
                answers.append(output.outputs[0].token_ids)
                history += [*answers[-1], *history[:QUESTION_TOKENS]]
    return computed, answers


def compare_sessions(settings: Settings, sessions: Sessions, tier: Path) -> Savings:
    tokens = read_tokens(settings["model"], sessions.num_sessions * sessions.prompt_tokens)
    computed, answers = run_sessions(settings, sessions, tokens)
    with_tier = {**settings, "kv_tier_path": str(tier), "kv_tier_bytes": 16 * 2**30}
    computed_with_tier, others = run_sessions(with_tier, sessions, tokens)
    same = sum(answer == other for answer, other in zip(answers, others, strict=True))
    return Savings(sessions, computed, computed_with_tier, len(answers), same)


def kill_engines(settings: Settings, prompts: list[list[int]], num_kills: int, tier: Path) -> Deaths:
    """Kill engines with this tier, one after another, whose pages hold half of the prompts."""
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    pages = sum(-(-(len(prompt) + ANSWER_TOKENS) // PAGE_SIZE) for prompt in prompts)
    longest = max(map(len, prompts)) + ANSWER_TOKENS
    settings = {**settings, "num_pages": pages // 2, "max_num_seqs": _AT_ONCE, "max_model_len": longest}
    with LLM(**settings) as llm:
        begin_s = time.monotonic()
        outputs = [llm.generate({"prompt_token_ids": prompt}, params)[0] for prompt in prompts]
        answer_s = (time.monotonic() - begin_s) / len(prompts)
    expected = [output.outputs[0].token_ids for output in outputs]
    with LLM(**settings, kv_tier_path=str(tier)) as llm:
        assert llm.info.kv_tier is not None, "it has a tier"
        bound = int(_SHARE_KEPT * pages * sum(llm.info.kv_tier.page_bytes))
    settings |= {"kv_tier_path": str(tier), "kv_tier_bytes": bound}
    task = {"settings": settings, "prompts": prompts, "max_tokens": ANSWER_TOKENS, "at_once": _AT_ONCE}
    points, deaths = random.Random(0), Deaths(bound)
    torn: list[Path] = []
    for kill in range(num_kills + 1):  # the last one shows what the one before has left
        is_last = kill == num_kills
        num_answers = 2 * len(prompts) if is_last else points.randint(1, 2 * len(prompts))
        wait_s = points.uniform(0.0, _AT_ONCE * answer_s)
        _kill_one(task, expected, num_answers, wait_s, deaths)
        deaths.remaining += [file.name for file in torn if file.exists()]
        torn = list(tier.rglob(".*-*"))
        deaths.torn += len(torn)
        for file in torn:
            os.utime(file, (1, 1))  # as old as files are that no engine finishes
    return deaths


def _kill_one(
    task: dict[str, Any], expected: list[list[int]], num_answers: int, wait_s: float, deaths: Deaths
) -> None:
    """Start an engine, kill it some time after a number of answers, and compare them all."""
    command = module_command("support.engines.endless_answers")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdin is not None and engine.stdout is not None
        try:
            engine.stdin.write(json.dumps(task) + "\n")
            engine.stdin.flush()
            lines = [engine.stdout.readline() for _ in range(num_answers)]
            time.sleep(wait_s)
        finally:
            engine.kill()
        lines += engine.stdout.readlines()
    answers = [json.loads(line) for line in lines if line.endswith("\n")]
    assert len(answers) >= num_answers, "the engine has ended"
    deaths.kills += 1
    deaths.answers += len(answers)
    deaths.wrong += sum(answer["tokens"] != expected[answer["prompt"]] for answer in answers)
    deaths.read_tokens += answers[-1]["read"]
    files = [file.stat().st_size for file in Path(task["settings"]["kv_tier_path"]).rglob("*-*")]
    deaths.largest_bytes = max(deaths.largest_bytes, sum(files))


def main(output: Path, target: str, drafter: str, sessions: Sessions) -> int:
    made_by, settings = provenance(), settings_of(target, drafter)
    tokens = read_tokens(target, KILLED_PROMPTS * KILLED_PROMPT_TOKENS)
    prompts = split(tokens, KILLED_PROMPT_TOKENS)
    with tempfile.TemporaryDirectory() as scratch:
        savings = compare_sessions(settings, sessions, Path(scratch, "sessions"))
        print(savings, flush=True)
        deaths = kill_engines(settings, prompts, NUM_KILLS, Path(scratch, "deaths"))
        print(deaths, flush=True)
    figures = {
        "provenance": made_by,
        "savings": {**asdict(savings), "fewer": round(savings.fewer, 2), "held": savings.held},
        "deaths": {**asdict(deaths), "held": deaths.held},
    }
    output.write_text(json.dumps(figures, indent=1) + "\n")
    return int(not (savings.held and deaths.held))


if __name__ == "__main__":
    pair = sys.argv[2:4] or [str(MODELS / "target"), str(MODELS / "drafter")]
    length, count, *_ = [*map(int, sys.argv[4:]), *(768, 32)[len(sys.argv[4:]) :]]
    sys.exit(main(Path(sys.argv[1]), *pair, Sessions(count, count // 2, length)))
