"""Replicas decide a drafter trial together; shadow trials decode answers again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from manta.actors.serve.drafter_canary import DrafterCanary, ReplicaReport, ReplicaUserConfig
from manta.cluster.config import EngineConfig
from manta.cluster.errors import ConfigError
from manta.cluster.fleet.canary import NO_EVIDENCE, ArmStats, CanaryTrial, Evidence, TrialRules, Verdict
from support.checkpoints.text_pair import VOCAB, LiveServer, make_text_pair
from support.checkpoints.tiny import make_tiny_drafter

CONFIG = {"drafter": "a", "candidate": {"drafter": "b", "auto_promote": True, "min_requests": 10}}


class MemoryBoard:
    """A stand-in for Ray's internal key-value store."""

    def __init__(self) -> None:
        self.wished: dict[str, Any] | None = None
        self.verdicts: dict[str, Verdict] = {}
        self.started_at: dict[str, float] = {}
        self.reports: dict[str, dict[str, ReplicaReport]] = {}

    def desired_config(self) -> dict[str, Any] | None:
        return self.wished

    def began_s(self, trial: str, now_s: float) -> float:
        return self.started_at.setdefault(trial, now_s)

    def report(self, trial: str, replica: str, report: ReplicaReport) -> None:
        self.reports.setdefault(trial, {})[replica] = report

    def all_reports(self, trial: str) -> dict[str, ReplicaReport]:
        return self.reports.get(trial, {})

    def verdict(self, trial: str) -> Verdict | None:
        return self.verdicts.get(trial)

    def set_verdict(self, trial: str, verdict: Verdict) -> Verdict:
        return self.verdicts.setdefault(trial, verdict)


class Engine:
    """A stand-in for an engine that records its drafter; tests set the evidence of its trial."""

    def __init__(self) -> None:
        self.drafter, self.candidate = "a", None
        self.trial: Any = None
        self.loads: Counter[str] = Counter()
        self.found = NO_EVIDENCE

    async def swap_drafter(self, model: str) -> None:
        self.loads[model] += 1
        self.drafter = model

    async def begin_trial(self, model: str, trial: CanaryTrial) -> None:
        if model == "misfit":
            raise ConfigError("It does not fit.", param="speculative_config.model")
        assert self.candidate is None
        self.loads[model] += 1
        self.candidate, self.trial = model, self

    @property
    def evidence(self) -> Evidence:
        return self.found

    async def end_trial(self, verdict: Verdict | None) -> None:
        if verdict == "promoted":
            self.drafter = self.candidate
        self.candidate = self.trial = None


class Replicas:
    """Canaries over one store, and a clock."""

    def __init__(self) -> None:
        self.board, self.now_s = MemoryBoard(), 0.0
        self.engines: list[Engine] = []
        self.desks: list[DrafterCanary] = []

    async def start(self, user_config: dict[str, Any] | None = None) -> Engine:
        engine = Engine()
        self.engines.append(engine)
        name = str(len(self.desks))
        self.desks.append(DrafterCanary(engine, self.board, name, clock=lambda: self.now_s))  # type: ignore[arg-type]
        if user_config is not None:
            await self.desks[-1].configure(user_config)
        return engine

    async def configure(self, user_config: dict[str, Any]) -> None:
        for desk in self.desks:
            await desk.configure(user_config)

    async def look(self) -> None:
        for _ in range(2):  # the first replica sees the others' reports the second time
            for desk in self.desks:
                await desk._poll()

    @property
    def drafters(self) -> list[str | None]:
        return [engine.drafter for engine in self.engines]


def evidence(better: float, requests: int = 10) -> Evidence:
    return Evidence(better, -better, candidate=ArmStats(requests))


def test_replicas_decide_together_and_a_later_one_starts_with_the_verdict() -> None:
    async def run() -> None:
        replicas = Replicas()
        one, other = [await replicas.start(CONFIG) for _ in range(2)]
        assert [one.candidate, other.candidate] == ["b", "b"] and replicas.drafters == ["a", "a"]
        one.found, other.found = evidence(3.0, 5), evidence(1.0, 5)
        await replicas.look()
        assert one.candidate == other.candidate == "b", "e to the 4 is less than 100"
        one.found = evidence(4.0, 5)
        await replicas.look()
        assert replicas.drafters == ["b", "b"] and one.candidate is other.candidate is None
        late = await replicas.start(CONFIG)
        assert late.drafter == "b" and late.candidate is None
        await replicas.configure({"drafter": "a"})
        assert replicas.drafters == ["a", "a", "a"], "rolled back"
        assert one.loads == {"b": 1, "a": 1}, "promotion loads nothing"

    asyncio.run(run())


def test_a_worse_candidate_is_removed_and_its_trial_does_not_start_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        replicas = Replicas()
        engine = await replicas.start(CONFIG)
        engine.found = evidence(-5.0)
        with caplog.at_level(logging.INFO):
            await replicas.look()
        assert engine.candidate is None and replicas.drafters == ["a"]
        assert "the trial of b has ended: rolled_back" in caplog.text
        await replicas.configure(CONFIG)
        assert engine.candidate is None
        again = {**CONFIG, "candidate": {**CONFIG["candidate"], "trial": "again"}}
        engine.found = NO_EVIDENCE
        await replicas.configure(again)
        assert engine.candidate == "b"
        replicas.now_s = 86_400.0
        await replicas.look()
        assert engine.candidate is None and set(replicas.board.verdicts.values()) == {
            "rolled_back",
            "undecided",
        }

    asyncio.run(run())


def test_without_auto_promote_a_better_candidate_waits_for_the_operator() -> None:
    async def run() -> None:
        replicas = Replicas()
        requested = {"drafter": "a", "candidate": {**CONFIG["candidate"], "auto_promote": False}}
        engine = await replicas.start(requested)
        engine.found = evidence(50.0)
        await replicas.look()
        assert engine.drafter == "a" and engine.candidate == "b"
        assert set(replicas.board.verdicts.values()) == {"better"}
        await replicas.configure({"drafter": "b"})
        assert engine.drafter == "b" and engine.loads == {"b": 1}

    asyncio.run(run())


def test_wrong_trials_are_refused_and_nothing_changes(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        replicas = Replicas()
        engine = await replicas.start({"drafter": "a"})
        for wrong in ({"drafter": "misfit"}, {"drafter": "b", "fraction": "10%"}, {"drafter": "a"}, "b"):
            await replicas.configure({"candidate": wrong})
            assert engine.drafter == "a" and engine.candidate is None
        assert caplog.text.count("user_config is refused, and nothing changes") == 4
        (reports,) = replicas.board.reports.values()
        assert reports["0"].refused == "It does not fit."
        await replicas.configure(CONFIG)
        assert engine.candidate == "b"

    asyncio.run(run())


def test_without_user_config_the_stored_candidate_counts() -> None:
    async def run() -> None:
        replicas = Replicas()
        engine = await replicas.start()
        replicas.board.wished = CONFIG
        await replicas.look()
        assert engine.candidate == "b"
        replicas.board.wished = {"drafter": "a"}
        await replicas.look()
        assert engine.candidate is None and engine.drafter == "a"
        replicas.board.wished = CONFIG
        await replicas.configure({"drafter": "a"})
        await replicas.look()
        assert engine.candidate is None, "Serve's own counts"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"candidat": {}}, "user_config.candidat. Did you mean"),
        ({"candidate": {"fraction": 0.1}}, "user_config.candidate.*drafter"),
        ({"candidate": {"drafter": "b", "fration": 0.1}}, "user_config.candidate.fration"),
        ({"candidate": {"drafter": ""}}, "user_config.candidate.drafter"),
        ({"candidate": {"drafter": "b", "trial": 1}}, "user_config.candidate.trial"),
        ({"candidate": {"drafter": "b", "shadow": 1}}, "user_config.candidate.shadow"),
    ],
)
def test_a_wrong_setting_is_named(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ReplicaUserConfig.of(wrong)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    target, drafter = make_text_pair(tmp_path_factory.mktemp("pair"))
    spec = {"model": str(drafter), "adaptive": False}
    small = {"max_num_seqs": 4, "num_pages": 128, "num_threads": 1, "dtype": "float32", "device": "cpu"}
    with LiveServer(
        EngineConfig.from_dict({"model": str(target), "speculative_config": spec, **small})
    ) as up:
        yield up


def test_shadow_trials_decode_answers_again_with_both_drafters_unseen_by_clients(
    server: LiveServer, tmp_path: Path
) -> None:
    other = make_tiny_drafter(tmp_path / "other", vocab_size=VOCAB, seed=2)
    bodies = [
        {"prompt": f"def f{i}(", "max_tokens": 30, "ignore_eos": True, "temperature": i % 2, "seed": i}
        for i in range(4)
    ]

    def texts() -> list[str]:
        return [
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
            for body in bodies
        ]

    def on_loop(work: Coroutine[Any, Any, None]) -> None:
        loop = server.engine._loop
        assert loop is not None
        asyncio.run_coroutine_threadsafe(work, loop).result(60)

    before, trial = texts(), CanaryTrial(TrialRules(shadow=True, fraction=0.5))
    on_loop(server.engine.begin_trial(str(other), trial))
    metrics = httpx.get(f"{server.url}/metrics").text
    assert f'drafter="{other}"' in metrics and 'status="candidate"' in metrics
    assert all(texts() == before for _ in range(4))
    deadline_s = time.monotonic() + 60.0
    while trial.evidence.candidate.requests < 3:  # of 16 answers about half are chosen
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    on_loop(server.engine.end_trial(None))
    reported = trial.evidence
    assert reported.incumbent.requests == reported.candidate.requests
    for tally in (reported.incumbent, reported.candidate):
        assert tally.steps + tally.accepted == 29 * tally.requests, "the same tokens, each once"
    assert texts() == before
