"""What a checkpoint's files and the settings show is refused before Ray starts, by servers and batch jobs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from manta.actors.http.config.settings_mapping import split_models
from manta.actors.system.host_resources import free_port
from manta.actors.targets.loading import kv_tier
from manta.cluster.config import EngineConfig
from manta.cluster.errors import CheckpointError, ConfigError, MantaError, PlacementError
from manta.jobs.batch import job as batch_job
from manta.jobs.batch.job import run_batch
from manta.jobs.batch.options import BatchOptions
from manta.jobs.common.model_check import check_model
from manta.jobs.serve import server as serving
from manta.jobs.serve.preloaded_imports import check_models
from manta.jobs.serve.server import ServeOptions, start_server
from support.checkpoints.broken_pairs import TARGET, config, copied, cut_config, edit, target, write
from support.engines.thread_ranks import ThreadRanks

Change = Callable[[Path], object]
Settings = dict[str, Any]


class Wrong(NamedTuple):
    """One mistake: in a file of the pair, or in a setting."""

    change: Change | None
    settings: Settings
    words: str


def template(text: str) -> Change:
    return edit("target/tokenizer_config.json", lambda raw: raw.update(chat_template=text))


def generation(**keys: object) -> Change:
    return edit("target/generation_config.json", lambda raw: raw.update(keys))


def cut(name: str) -> Change:
    return lambda pair: write(pair / name, (TARGET / Path(name).name).read_bytes()[:1000])


QUARK = {"quant_method": "quark"}
WRONG = {
    "drafter config": Wrong(cut_config, {}, "cannot be read as JSON"),
    "architecture": Wrong(target(architectures=["MambaForCausalLM"]), {}, "others are not served"),
    "drafter": Wrong(config(hidden_size=256), {}, "trained for this target"),
    "quantization": Wrong(target(quantization_config=QUARK), {}, "others are not served"),
    "weights": Wrong(cut("target/model.safetensors"), {}, "cut short"),
    "tokenizer": Wrong(cut("target/tokenizer.json"), {}, "tokenizer"),
    "template": Wrong(template("{% for each in messages %}{{ each"), {}, "chat_template"),
    "defaults": Wrong(generation(temperature=-1), {}, "temperature"),
    "length": Wrong(None, {"max_model_len": 9999}, "at most 1024"),
    "format": Wrong(None, {"quantization": "awq"}, "the checkpoint is not quantized"),
    "template file": Wrong(None, {"chat_template": "nowhere.jinja"}, "cannot be read"),
}
OF_SERVERS = {
    "memory": Wrong(
        None, {"kv_cache_memory_bytes": 2**20, "dtype": "float32"}, "bytes of K/V pages.*at most 32"
    ),
    "parser": Wrong(None, {"tool_call_parser": "nothing"}, "Known: hermes"),
    "replicas": Wrong(None, {"replicas": 9999}, "replicas=9999: each needs 1.5 CPU"),
}


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (serving, batch_job):
        monkeypatch.setattr(module, "join_or_start_ray", lambda **_: pytest.fail("Ray was started"))


def settings_of(wrong: Wrong, folder: Path) -> Settings:
    pair = copied(folder / "pair")
    if wrong.change is not None:
        wrong.change(pair)
    drafting = {"model": str(pair / "drafter")}
    return {"model": str(pair / "target"), "speculative_config": drafting, "device": "cpu", **wrong.settings}


@pytest.mark.parametrize("name", WRONG | OF_SERVERS)
def test_a_server_refuses_it(name: str, tmp_path: Path, no_ray: None) -> None:
    wrong = (WRONG | OF_SERVERS)[name]
    refusals = (CheckpointError, ConfigError, PlacementError)
    with pytest.raises(refusals, match=wrong.words):
        start_server(settings_of(wrong, tmp_path), ServeOptions(port=free_port()))


@pytest.mark.parametrize("name", WRONG)
def test_a_batch_job_refuses_it(name: str, tmp_path: Path, no_ray: None) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n')
    engine = EngineConfig.from_dict(settings_of(WRONG[name], tmp_path))
    with pytest.raises(MantaError, match=WRONG[name].words):
        run_batch(engine, BatchOptions(input=(str(rows),), output=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_memory_is_not_checked_where_engines_run_on_other_nodes(tmp_path: Path) -> None:
    memory = OF_SERVERS["memory"]
    ((engine, _),) = split_models(settings_of(memory, tmp_path))
    with pytest.raises(ConfigError, match=memory.words):
        check_model(engine)
    assert check_model(engine, elsewhere=True).resolved.max_model_len == 1024


def said_of_pages(folder: Path, **settings: Any) -> list[str]:
    """Return what a server says of K/V pages on disk, whose default folder is below this one."""
    pair = folder / "pair" if (folder / "pair").exists() else copied(folder / "pair")
    drafting = {"model": str(pair / "drafter")}
    given = {"model": str(pair / "target"), "speculative_config": drafting, "device": "cpu", **settings}
    lines: list[str] = []
    check_models(split_models(given), lines.append, None)
    return [line for line in lines if line.startswith("K/V pages that leave memory")]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANTA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_server_says_where_it_keeps_pages_and_takes_a_share_of_the_disk_by_default(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 40 * 2**30
    monkeypatch.setattr(kv_tier.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    (line,) = said_of_pages(tmp_path, kv_tier_path="auto")
    assert f"kept in {cache / 'kv'} (up to 2 GiB" in line and "manta kv-tier clear" in line
    assert (cache / "kv").stat().st_mode & 0o777 == 0o700
    for size, said in ((2**30, "up to 1 GiB"), (2**35, "up to 2 GiB")):
        assert said in said_of_pages(tmp_path, kv_tier_path="auto", kv_tier_bytes=size)[0]
    free = 400 * 2**30
    assert "up to 4 GiB" in said_of_pages(tmp_path, kv_tier_path="auto")[0]
    assert said_of_pages(tmp_path, kv_tier_path="auto", enable_prefix_caching=False) == []
    assert said_of_pages(tmp_path) == said_of_pages(tmp_path, kv_tier_path="none") == []


@pytest.mark.parametrize("fault", ["no folder", "open to others", "full disk"])
def test_a_default_folder_that_cannot_be_used_is_a_line_and_a_given_one_an_error(
    fault: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_ray: None
) -> None:
    free = 100 * 2**20 if fault == "full disk" else 2**40
    monkeypatch.setattr(kv_tier.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    words = {
        "no folder": "not usable: Not a directory",
        "open to others": "closed to others",
        "full disk": "100 MiB of free space",
    }[fault]
    if fault == "no folder":
        cache.touch()
    else:
        (cache / "kv").mkdir(parents=True, mode=0o755 if fault == "open to others" else 0o700)
    (line,) = said_of_pages(tmp_path, kv_tier_path="auto")
    assert line.startswith("K/V pages that leave memory are lost: ") and words in line
    if fault != "full disk":
        given = {"model": str(TARGET), "device": "cpu", "kv_tier_path": str(cache / "kv")}
        with pytest.raises(ConfigError, match=words):
            start_server(given, ServeOptions(port=free_port()))


def test_ranks_agree_on_the_default_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = check_model(EngineConfig(model=str(TARGET), device="cpu", kv_tier_path="auto")).resolved
    sizes = iter([2**30, 2**29])
    monkeypatch.setattr(kv_tier, "_open_default", lambda *_: next(sizes))
    found = ThreadRanks(2).run(lambda rank: kv_tier.with_tier(resolved, rank).config)
    assert [config.kv_tier_bytes for config in found] == [2**29] * 2
    sizes = iter([2**30, 0])
    found = ThreadRanks(2).run(lambda rank: kv_tier.with_tier(resolved, rank).config)
    assert [config.kv_tier_path for config in found] == [None, None]
