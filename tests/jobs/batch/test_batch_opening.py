"""Preparing a batch job before its rows are answered, and the timeout of waiting for its output."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from manta.actors.batch.dataset.source import open_source
from manta.actors.batch.dataset.storage import Storage
from manta.actors.batch.ledger.job_spec import checkpoint_identity
from manta.actors.engine.uniproc_executor import make_executor
from manta.cluster.batch.row_ranges import count
from manta.cluster.config import EngineConfig
from manta.cluster.errors import ConfigError
from manta.jobs.batch.messages import EngineSetup
from manta.jobs.batch.options import BatchOptions
from manta.jobs.batch.startup import LARGEST_SHARD, LEASE_BYTES, Startup, rows_per_shard, sampled

WAIT_S = 240.0  # a bound of hangs


@pytest.fixture(scope="module")
def model(pair: tuple[Path, Path]) -> Path:
    return pair[0]


def startup(model: Path, folder: Path, prompts: list[str], **changes: Any) -> Startup:
    rows = folder / "rows.jsonl"
    content = "".join(f'{{"prompt": "{prompt}"}}\n' for prompt in prompts)
    if not rows.exists() or rows.read_text() != content:  # else it is another input
        rows.write_text(content)
    options = BatchOptions(input=(str(rows),), output=str(folder / "out"), **changes)
    config = EngineConfig(model=str(model), max_num_seqs=16)
    source = open_source(options.input)
    output = Storage.open(options.output, field="output")
    row_schema = options.row_schema(source, config)
    setup = EngineSetup(
        config=config, source=source, row_schema=row_schema, model_name="m", output=output, make=make_executor
    )
    return Startup(setup, options, print)


def test_an_output_stays_locked_until_it_is_closed_although_waiters_give_up(
    model: Path, tmp_path: Path
) -> None:
    first = startup(model, tmp_path, ["a", "b"])

    async def give_up() -> None:
        waiting = asyncio.wrap_future(first.job)
        waiting.cancel()
        await asyncio.sleep(0)

    asyncio.run(give_up())
    assert count(first.job.result(WAIT_S).rows) == 2
    second = startup(model, tmp_path, ["a", "b"])
    with pytest.raises(ConfigError, match="another job"):
        second.job.result(WAIT_S)
    second.close()
    first.close()
    third = startup(model, tmp_path, ["a", "b"])
    assert third.job.result(WAIT_S).ledger.run == 2
    third.close()


def test_leases_are_small_where_rows_are_large(model: Path, tmp_path: Path) -> None:
    for prompts, largest in ((["a"] * 9, 128), (["a" * (LEASE_BYTES // 8), "b", "c", "d"], 31)):
        job = startup(model, tmp_path, prompts, overwrite=True)
        assert job.job.result(WAIT_S).largest == largest
        job.close()


def test_samples_and_shards_are_the_same_in_every_run() -> None:
    rows = sampled(1000, 10, seed=3)
    assert rows == sampled(1000, 10, seed=3)
    assert rows is not None
    assert count(rows) == 10
    assert sampled(10, 10, seed=3) is None
    assert [rows_per_shard(n) for n in (1, 64 * 100, 10**9)] == [64, 100, LARGEST_SHARD]


def test_a_checkpoint_is_identified_by_its_content_not_its_path(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert checkpoint_identity(copy) == checkpoint_identity(model)
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert checkpoint_identity(copy) != checkpoint_identity(model)
