"""Engines whose workers are Ray actors: their settings, the requests they run, and their processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine_core import EngineCore
from manta.cluster.request.request import Request, SamplingParams

from support.checkpoints.tiny import TINY_VOCAB
from support.engines.cluster_checker import generate

BASE = EngineConfig(
    model="",
    skip_tokenizer_init=True,
    dtype="float32",
    device="cpu",
    max_model_len=192,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    num_pages=48,
    num_threads=1,
)


def requests() -> list[Request]:
    """Make greedy and sampled requests that end after different numbers of steps."""
    source = np.random.default_rng(5)
    return [
        Request(
            request_id=str(number),
            prompt_token_ids=tuple(source.integers(1, TINY_VOCAB - 1, 4 + 9 * (number % 4)).tolist()),
            params=SamplingParams(
                temperature=0.7 * (number % 2),
                top_p=0.9 if number % 3 == 1 else 1.0,
                max_tokens=20 + 5 * (number % 5),
                seed=number,
                ignore_eos=True,
            ),
        )
        for number in range(10)
    ]


def run_all(
    engine: EngineCore,
    between: Callable[[int], None] = lambda step: None,
    *,
    max_draft_tokens: int | None = None,
) -> list[list[int]]:
    """Return the tokens of all requests; `between` is called with the number of steps before each step."""

    def before_step(steps: int) -> None:
        engine.check_invariants()
        between(steps)

    bounded = (replace(request, max_draft_tokens=max_draft_tokens) for request in requests())
    return list(generate(engine, *bounded, before_step=before_step).values())


def acceptance(engine: EngineCore) -> float:
    """Run all requests; return the tokens of a drafting step, 1 if none drafted."""
    before = engine.stats()
    run_all(engine)
    after = engine.stats()
    drafts = after.num_drafts - before.num_drafts
    return 1 + (after.num_accepted_tokens - before.num_accepted_tokens) / max(drafts, 1)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def actor_pids(kind: str) -> set[int]:
    """Return the processes of the living actors whose class begins so."""
    from ray._private.state import actors  # the public listing needs the dashboard

    living = (actor for actor in actors().values() if actor["State"] == "ALIVE")
    return {actor["Pid"] for actor in living if actor["ActorClassName"].startswith(kind)}
