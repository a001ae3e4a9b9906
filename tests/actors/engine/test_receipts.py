"""Receipts: attribution of steps, comparison with plain decoding, and what survives a kill."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from manta.actors.http.config.settings import ServerSettings
from manta.actors.observability.usage_store import read_receipts
from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine_core import EngineCore
from manta.cluster.errors import ConfigError, RequestError
from manta.cluster.metrics.metric import NONE, OTHER, UsageAccount
from manta.cluster.request.caller import Tenant
from manta.cluster.scheduler.scheduler_stats import Usage
from manta.cluster.simulation.simulated_executor import LinearCost, SimulatedExecutor, VirtualClock
from manta.cluster.speculation import draft_length_policy
from manta.jobs.cli import app
from support.checkpoints.text_pair import LiveServer, make_text_pair
from support.engines.cluster_checker import make_info, make_request
from support.paths import module_command
from support.servers.simulated_server import simulated
from support.servers.spending_engine import ACME, NOON, SOME, SpendingEngine, keeper
from typer.testing import CliRunner

COST = LinearCost(verify_floor_s=4e-3, verify_row_s=2e-4, draft_floor_s=1e-3, draft_row_s=2e-5)
FACTS = {"num_pages": (8192,), "page_size": 16, "max_model_len": 2048, "eos_token_ids": ()}
OTHERS = UsageAccount("others", NONE)


def an_engine(survival: tuple[float, ...], **spec: Any) -> tuple[EngineCore, VirtualClock]:
    clock = VirtualClock()
    info = make_info(**FACTS, num_speculative_tokens=len(survival))
    executor = SimulatedExecutor(info, survival, COST, clock.advance)
    speculates = {"speculative_config": {"model": "d", **spec}} if survival else {}
    config = EngineConfig.from_dict({"model": "t", "max_num_batched_tokens": 512, **speculates})
    return EngineCore(config, executor, clock), clock


def run(engine: EngineCore, accounts: list[UsageAccount | None], max_tokens: int = 400) -> None:
    for i, account in enumerate(accounts):
        engine.add_request(make_request(f"r{i}", max_tokens=max_tokens, ignore_eos=True, account=account))
    while engine.has_unfinished:
        engine.step()


def total(spent: dict[UsageAccount, Usage], name: str) -> float:
    return sum(getattr(each, name) for each in spent.values())


def test_every_token_step_and_second_is_on_one_receipt() -> None:
    engine, clock = an_engine((0.85, 0.7, 0.5))
    for i, account in enumerate([ACME, OTHERS, None, ACME]):
        engine.add_request(make_request(f"r{i}", max_tokens=200, ignore_eos=True, account=account))
    for _ in range(20):
        engine.step()
    engine.abort("r1")
    engine.add_request(make_request("late", [3] * 40, max_tokens=50, ignore_eos=True, account=OTHERS))
    while engine.has_unfinished:
        engine.step()
    spent, stats = engine.usage_by_account(), engine.stats()
    assert set(spent) == {ACME, OTHERS, UsageAccount()}
    assert total(spent, "tokens") == stats.generation_tokens
    assert total(spent, "tokens") - total(spent, "steps") == stats.num_accepted_tokens, "the steps saved"
    assert total(spent, "engine_s") == pytest.approx(clock.now_s)
    assert spent[ACME].tokens == 400 and spent[UsageAccount()].tokens == 200


@pytest.mark.parametrize("survival", [(0.85, 0.7, 0.55, 0.4), (0.05, 0.0)], ids=["good", "hopeless"])
def test_savings_equal_the_extra_time_of_plain_decoding(survival: tuple[float, ...]) -> None:
    plain, clock = an_engine(())
    run(plain, [None] * 4)
    plain_s = clock.now_s
    engine, clock = an_engine(survival)
    engine.measure_steps(1.0)
    begin_s = clock.now_s
    run(engine, [ACME, OTHERS, ACME, OTHERS])
    seconds, spent = clock.now_s - begin_s, engine.usage_by_account()
    compared, all_s = total(spent, "compared_s"), total(spent, "engine_s")
    assert compared > 0.8 * all_s, "but for prompts, and steps before anything was measured"
    saved = total(spent, "plain_s") - compared
    assert saved == pytest.approx(plain_s - seconds, abs=0.06 * plain_s)
    assert (saved > 0.2 * plain_s) == (len(survival) == 4)
    assert 0.0 <= total(spent, "aged_s") / compared < seconds


def test_unmeasured_savings_are_not_guessed() -> None:
    fixed, _ = an_engine((0.85, 0.7), adaptive=False)
    run(fixed, [ACME])
    assert fixed.usage_by_account()[ACME].engine_s > 0 and fixed.usage_by_account()[ACME].compared_s == 0.0
    plain, _ = an_engine(())
    run(plain, [ACME])
    assert plain.usage_by_account()[ACME].compared_s == 0.0, "an engine that does not speculate saves nothing"


def test_savings_against_an_earlier_starts_measurements_are_separate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draft_length_policy, "_KNOWN", 100.0)  # drafts without a plain step of this process
    before, _ = an_engine((0.9, 0.85, 0.8))
    run(before, [None], max_tokens=1500)
    engine, _ = an_engine((0.9, 0.85, 0.8))
    assert engine.costs is not None and before.costs is not None
    engine.costs.read(before.costs.as_json())
    run(engine, [ACME], max_tokens=30)
    spent = engine.usage_by_account()[ACME]
    assert 0.0 < spent.kept_s <= spent.compared_s and spent.aged_s >= 0.0


def test_nothing_is_counted_without_receipts() -> None:
    engine, _ = an_engine((0.5,))
    run(engine, [None, None])
    assert engine.usage_by_account() == {}


# The folder.


def test_a_receipt_has_device_seconds_and_the_compared_share(tmp_path: Path) -> None:
    engine = SpendingEngine()
    kept = keeper(engine, tmp_path / "made")
    account = kept.account(Tenant("acme", "code"))
    kept.account(Tenant("acme", "code"), begins=False)
    engine.spend(account, SOME)
    engine.spend(OTHERS, SOME._replace(compared_s=0.0, plain_s=0.0, aged_s=0.0))
    kept.write()
    acme, others = read_receipts(tmp_path / "made")
    assert acme == {
        **{"day": "2026-01-31", "model": "m", "tenant": "acme", "category": "code", "requests": 1},
        **{"tokens": 30, "steps": 10, "steps_saved": 20, "device": "GPU", "device_seconds": 4.0},
        **{"device_seconds_saved": 3.0, "compared_device_seconds": 3.0, "plain_device_seconds": 6.0},
        **{"plain_age_seconds": 10.0, "kept_device_seconds": 0.0},
    }
    assert others["device_seconds_saved"] is None and others["plain_device_seconds"] is None


def test_days_are_separate_and_restarts_and_replicas_add_up(tmp_path: Path) -> None:
    for _ in range(2):  # two replicas, or one that started again
        engine, times = SpendingEngine(), [NOON]
        kept = keeper(engine, tmp_path, clock=times)
        for _ in range(3):
            engine.spend(ACME, SOME)
            kept.write()
        times.append(NOON + 86400.0)
        engine.spend(ACME, SOME)
        kept.write()
        kept.write()
    assert [(one["day"], one["tokens"]) for one in read_receipts(tmp_path)] == [
        ("2026-01-31", 180),
        ("2026-02-01", 60),
    ]
    assert [one["tokens"] for one in read_receipts(tmp_path, day="2026-02-01", tenant="acme")] == [60]
    assert read_receipts(tmp_path, tenant="nobody") == []
    for wrong in ("yesterday", "2026-02-30", "20260201", "../x"):
        with pytest.raises(RequestError, match="day"):
            read_receipts(tmp_path, day=wrong)


def test_a_receipts_file_stays_short_and_a_broken_line_is_skipped(tmp_path: Path) -> None:
    engine = SpendingEngine()
    kept = keeper(engine, tmp_path)
    for _ in range(200):
        engine.spend(ACME, SOME)
        kept.write()
    (file,) = tmp_path.glob("*.jsonl")
    lines = file.read_text().splitlines()
    assert len(lines) <= 33 and json.loads(lines[-1])["tokens"] == 6000
    with file.open("a") as broken:
        broken.write(lines[-1].replace("6000", "9000")[:-20])
    (tmp_path / "notes.txt").write_text("not ours")
    assert [one["tokens"] for one in read_receipts(tmp_path)] == [6000]


def test_tenants_are_bounded_and_failed_writes_are_repeated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, folder = SpendingEngine(), tmp_path / "receipts"
    kept = keeper(engine, folder, labels=2)
    for name in ("a", "b", "c", "d d"):
        engine.spend(kept.account(Tenant(name)), SOME)
    folder.rmdir()
    folder.write_text("in the way")
    kept.write()
    kept.write()
    assert len(caplog.records) == 1 and "receipts" in caplog.text
    folder.unlink()
    folder.mkdir()
    kept.write()
    assert {one["tenant"]: one["tokens"] for one in read_receipts(folder)} == {"a": 30, "b": 30, OTHER: 60}
    with pytest.raises(ConfigError, match="--receipts"):
        keeper(engine, next(folder.iterdir()) / "below")


def test_a_kill_loses_no_written_receipt(tmp_path: Path) -> None:
    command = module_command("support.servers.spending_engine", [str(tmp_path)])
    spender = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert spender.stdout is not None
    reported: list[int] = []
    try:
        reported = [int(spender.stdout.readline()) for _ in range(40)]
    finally:
        spender.send_signal(signal.SIGKILL)
        reported += [int(line) for line in spender.stdout.read().split()]
        spender.wait()
    (one,) = read_receipts(tmp_path)
    assert one["tokens"] - reported[-1] in (0, 30), "the last line, or one that it had no time to tell of"


# The server.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("receipts")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    target, drafter = make_text_pair(tmp_path_factory.mktemp("pair"))
    return EngineConfig.from_dict(
        {"model": str(target), "speculative_config": {"model": str(drafter)}, "max_num_seqs": 4}
    )


@pytest.fixture(scope="module")
def http(config: EngineConfig, folder: Path) -> Iterator[httpx.Client]:
    settings = ServerSettings(
        served_model_name="tiny",
        receipts=str(folder),
        api_key="user",
        admin_api_key="root",
        tenants=("acme", "body"),
        categories=("code",),
    )
    with LiveServer(config, settings, simulated) as server:
        headers = {"Authorization": "Bearer root"}
        with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
            yield client


def test_a_server_shows_operators_the_device_seconds_of_each_tenant(http: httpx.Client, folder: Path) -> None:
    body: dict[str, Any] = {"prompt": "ab", "max_tokens": 24}
    assert http.post("/v1/completions", json=body | {"n": 2}, headers={"X-Tenant": "acme"}).is_success
    reported = {"metadata": {"tenant": "body", "category": "code"}, "stream": True}
    assert http.post("/v1/completions", json=body | reported).is_success
    assert http.post("/v1/completions", json=body | {"prompt": ["a", "b"]}).is_success
    found = {one["tenant"]: one for one in http.get("/receipts").json()["data"]}
    assert {name: (one["requests"], one["tokens"]) for name, one in found.items()} == {
        "acme": (1, 48),
        "body": (1, 24),
        NONE: (1, 48),
    }
    assert found["body"]["category"] == "code" and found["body"]["model"] == "tiny"
    assert all(one["device_seconds"] > 0 for one in found.values())
    one = found["acme"]
    assert one["steps_saved"] == one["tokens"] - one["steps"] > 0
    day = one["day"]
    assert http.get("/receipts", params={"day": day, "tenant": "acme"}).json()["data"] == [one]
    assert read_receipts(folder, tenant="acme") == [one], "and it is kept"
    assert http.get("/receipts?day=soon").status_code == 400
    assert http.get("/receipts", headers={"Authorization": "Bearer user"}).status_code == 403


def test_without_a_folder_there_are_no_receipts(config: EngineConfig) -> None:
    with LiveServer(config, ServerSettings(), simulated) as server:
        answer = httpx.get(f"{server.url}/receipts")
        assert answer.status_code == 501 and "--receipts" in answer.text
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}).is_success
        assert server.engine.usage_by_account() == {}
    with pytest.raises(ConfigError, match="absolute"):
        ServerSettings(receipts="out/receipts")


def test_receipts_of_a_folder_or_a_server_are_printed(http: httpx.Client, tmp_path: Path) -> None:
    engine = SpendingEngine()
    kept = keeper(engine, tmp_path)
    engine.spend(ACME, SOME)
    engine.spend(OTHERS, Usage(tokens=5, steps=5, engine_s=1.0))
    kept.write()

    def said(*words: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, ["receipts", *words])
        assert done.exit_code == code, done.output
        return done.output

    table = said(str(tmp_path))
    (acme,), (others,) = (
        [line for line in table.splitlines() if name in line] for name in ("acme", "others")
    )
    assert all(said in acme for said in (" 3.0 ", " 75 % ", " 10 s before ")) and " not measured " in others
    rows = list(csv.DictReader(io.StringIO(said(str(tmp_path), "--csv", "--day", "2026-01-31"))))
    assert [(row["tenant"], row["device_seconds_saved"]) for row in rows] == [("acme", "3.0"), ("others", "")]
    assert json.loads(said(str(tmp_path), "--json", "--tenant", "acme")) == read_receipts(
        tmp_path, tenant="acme"
    )
    requested = said("--url", str(http.base_url), "--api-key", "root", "--json", "--tenant", "nobody")
    assert json.loads(requested) == []
