"""The load of one key leaves another key's requests as they are. `make abuse` measures the times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest
from manta.actors.http.config.settings import ServerSettings
from manta.cluster.config import EngineConfig
from openai.types import Batch
from support.checkpoints.text_pair import LiveServer
from support.servers.probed_server import END, ProbedServer, make_executor
from support.servers.server_probes import Serve, openai_client
from support.waiting import wait_until
from trials.abuse.abuse import MODEL
from trials.abuse.abuse_neighbors import (
    CHAT,
    KEYS,
    NEIGHBORS,
    NUM_SLOW,
    TEXT,
    header,
    meet,
    slow_grammar,
    text,
)


@pytest.fixture(scope="module")
def server() -> Iterator[ProbedServer]:
    with ProbedServer(MODEL, {"api_key": KEYS}, has_end_token=True) as server:
        yield server


def test_another_keys_large_grammar_is_answered_beside_large_grammars_that_stay_in_use(
    server: ProbedServer,
) -> None:
    met = meet(server.url, NEIGHBORS[0])
    assert met.status == 200 and met.left == 4, "of the load's eight, four have a slot"
    assert not server.rest().busy(None)


def test_another_keys_grammar_does_not_wait_for_all_slow_grammars(server: ProbedServer) -> None:
    met = meet(server.url, NEIGHBORS[1])
    assert met.status == 200 and met.left > NUM_SLOW // 2
    assert not server.rest().busy(None)


def test_a_key_that_compiled_for_too_long_gets_429_and_keeps_the_grammars_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("manta.actors.structured_outputs.compile_turns.BUDGET_S", 0.5)
    config = EngineConfig.from_dict({"model": str(MODEL), "max_num_seqs": 8})
    make = partial(make_executor, eos_token_ids=(END,))
    with LiveServer(config, ServerSettings(api_key=KEYS), make) as server, httpx.Client(timeout=600) as http:

        def answer(key: str, **fields: object) -> httpx.Response:
            return http.post(server.url + TEXT, json=text(**fields), headers=header(key))

        known = {"structured_outputs": {"regex": "[0-9]{3}"}}
        assert answer(KEYS[0], **known).status_code == 200
        assert answer(KEYS[0], **slow_grammar(0)).status_code == 400
        refused = answer(KEYS[0], **slow_grammar(1))
        assert (refused.status_code, refused.json()["error"]["param"]) == (429, "structured_outputs.grammar")
        assert "Retry-After" in refused.headers
        assert [answer(KEYS[0], **each).status_code for each in (known, slow_grammar(0))] == [200, 400]
        assert answer(KEYS[1], **slow_grammar(1)).status_code == 400


def test_another_keys_batch_is_answered_before_a_keys_many_batches(serve: Serve, tmp_path: Path) -> None:
    batches = "manta.actors.batch.openai.batch_store.MAX_OPEN_BATCHES"
    with (
        pytest.MonkeyPatch.context() as patch,
        serve(api_key=KEYS, batch_storage=str(tmp_path), max_num_seqs=2) as server,
    ):
        patch.setattr(batches, 12)
        load, other = (openai_client(server.url, key) for key in KEYS)
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 30, "ignore_eos": True}

        def submit(client: openai.OpenAI, file_id: str) -> Batch:
            return client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")

        def upload(client: openai.OpenAI, count: int) -> str:
            lines = [
                {"custom_id": f"{i}", "method": "POST", "url": CHAT, "body": {**body, "seed": i}}
                for i in range(count)
            ]
            content = "".join(json.dumps(line) + "\n" for line in lines).encode()
            return client.files.create(file=("in.jsonl", content), purpose="batch").id

        small, big = upload(other, 1), upload(load, 40)
        many = [submit(load, big) for _ in range(12)]
        with pytest.raises(openai.RateLimitError, match="12 batches of this API key"):
            submit(load, big)
        mine = submit(other, small)
        wait_until(lambda: other.batches.retrieve(mine.id).status == "completed")
        left = [each for each in load.batches.list(limit=50) if each.status != "completed"]
        assert len(left) >= 10 and {each.id for each in left} <= {each.id for each in many}
        for each in left:
            with suppress(openai.BadRequestError):  # it has just ended
                load.batches.cancel(each.id)
