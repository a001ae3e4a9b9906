"""A batch of `/v1/batches` while the head dies: its state is in its storage, not in Ray."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest
from manta import LLM, SamplingParams
from manta.actors.batch.dataset.row_requests import row_seed
from support.checkpoints.text_pair import make_text_pair
from support.jobs.batch_outputs import num_durable
from support.servers.served import Served
from support.waiting import wait_until

NUM_LINES, MAX_TOKENS = 300, 48
ENGINE = {"dtype": "float32", "device": "cpu", "max_num_seqs": 4, "max_model_len": 256, "num_threads": 1}
END_S = 240.0


@pytest.mark.slow
def test_a_batch_continues_while_the_gcs_is_killed_and_restarted(tmp_path: Path) -> None:
    target, _ = make_text_pair(tmp_path / "pair")
    storage = tmp_path / "batches"
    settings = {"model": str(target), "served_model_name": "tiny", "batch_storage": str(storage), **ENGINE}
    sampling = {"max_tokens": MAX_TOKENS, "temperature": 1.0, "ignore_eos": True}
    prompts = {f"row-{i}": f"say {i}" for i in range(NUM_LINES)}
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "tiny", "prompt": prompt, **sampling},
        }
        for name, prompt in prompts.items()
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    with Served(settings, tmp_path / "log", nodes=(4,), storage=True) as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=60, max_retries=9)
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        wait_until(lambda: num_answered(storage) >= 16, END_S, "no line was answered")
        replica, (gcs,) = served.pids("replica"), served.pids("gcs")
        served.kill(gcs)
        num_before = num_answered(storage)
        wait_until(lambda: num_answered(storage) > num_before, END_S, "nothing is answered without a head")
        served.restart_gcs()
        assert num_answered(storage) < NUM_LINES, "the batch had ended before the head was back"
        assert served.pids("gcs") != [gcs]
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", END_S, "it did not end")
        assert served.pids("replica") == replica, "it was answered where it began"
        batch = client.batches.retrieve(batch.id)
        assert batch.request_counts is not None and batch.output_file_id is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (NUM_LINES, 0)
        answered = list(map(json.loads, client.files.content(batch.output_file_id).text.splitlines()))
        again = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        assert client.batches.cancel(again.id).status in ("cancelling", "cancelled")
    found = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in answered}
    assert len(answered) == len(found) == NUM_LINES
    with LLM(str(target), **ENGINE) as llm:
        params = [SamplingParams(**sampling, seed=row_seed(0, name)) for name in prompts]
        outputs = llm.generate(list(prompts.values()), params, use_tqdm=False)
    assert found == {name: out.outputs[0].text for name, out in zip(prompts, outputs, strict=True)}


def num_answered(storage: Path) -> int:
    """Return the durable lines of all batches."""
    return sum(map(num_durable, storage.glob("work/*/out")))
