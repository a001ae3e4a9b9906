"""Records become requests (ids, prompts, sampling fields, seeds), and answers become rows."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from manta.actors.batch import row_answerer as answering
from manta.actors.batch.dataset.row_reader import Row, RowReader
from manta.actors.batch.dataset.row_requests import (
    RowSchema,
    category_of,
    content_id,
    parse_line,
    read_request,
    row_id,
    row_seed,
)
from manta.actors.batch.dataset.source import check_columns, open_source
from manta.actors.batch.row_answerer import WIRE_SCHEMA, Result, RowAnswerer, failure, wire_schema
from manta.actors.batch.row_index import index_rows
from manta.actors.engine.async_engine import AsyncEngine
from manta.actors.http.protocol.chat_completion import ChatRequest
from manta.actors.http.protocol.completion import CompletionRequest
from manta.actors.tokenization.generation_config import GenerationDefaults
from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine_core import EngineCore
from manta.cluster.errors import ConfigError, DatasetError, EngineDeadError, RequestError
from manta.cluster.request.request import Request
from support.checkpoints.text_pair import tiny_settings

DATASET = RowSchema()
OPENAI = RowSchema(kind="openai", lines=True)
NO_DEFAULTS = GenerationDefaults()
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
T = TypeVar("T")


def openai_line(**changes: object) -> dict[str, object]:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", **CHAT}}
    return {**line, **changes}


def test_a_prompt_becomes_a_completion_and_messages_a_chat() -> None:
    completion = read_request({"prompt": "def f("}, DATASET, NO_DEFAULTS)
    assert isinstance(completion.body, CompletionRequest)
    assert completion.body.prompt == ["def f("]
    chat = read_request({"messages": [{"role": "user", "content": "hi", "name": None}]}, DATASET, NO_DEFAULTS)
    assert isinstance(chat.body, ChatRequest)
    ids = read_request({"prompt": [1, 2, 3]}, DATASET, NO_DEFAULTS)
    assert isinstance(ids.body, CompletionRequest)
    assert ids.body.prompt == [[1, 2, 3]]


def test_fields_of_a_row_override_flags_unless_they_are_empty() -> None:
    row_schema = RowSchema(defaults={"temperature": 0.5, "max_tokens": 9})
    row = {"prompt": "x", "temperature": 0.0, "max_tokens": None, "top_p": float("nan")}
    params = read_request(row, row_schema, NO_DEFAULTS).params
    assert (params.temperature, params.max_tokens, params.top_p) == (0.0, 9, 1.0)


WEATHER = {"name": "weather", "description": "d", "parameters": {"city": {"type": "str", "default": "x"}}}
OPENAI_WEATHER = {**WEATHER, "parameters": {"type": "object", "properties": WEATHER["parameters"]}}
TURNS = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
SAID = [("system", "s"), ("user", "q"), ("assistant", "a")]
CHAT_OF = {"template": "{instruction}\n\n{input}", "chat": True}
# Rows as public data sets have them: fields of the schema, row, roles and texts, columns without effect.
PUBLIC_ROWS: dict[str, tuple[dict[str, Any], dict[str, Any], list[tuple[str, Any]], set[str]]] = {
    "ShareGPT": ({}, {"id": "QWJhYvA_0", "conversations": TURNS}, SAID, set()),
    "Hermes' calls": (
        {},
        {"id": "x", "conversations": TURNS, "tools": json.dumps([{"type": "function", "function": WEATHER}]),
         "category": "IoT", "task": "t"},
        SAID,
        {"category", "task"},
    ),
    "xLAM": (
        {"prompt_column": "query", "chat": True},
        {"id": 3, "query": "q", "answers": "[]", "tools": json.dumps([WEATHER])},
        [("user", "q")],
        {"answers"},
    ),
    "UltraChat": (
        {},
        {"prompt": "q", "prompt_id": "f2", "messages": [{"role": "user", "content": "q"}]},
        [("user", "q")],
        {"prompt", "prompt_id"},
    ),
    "OpenAI's fine-tuning": (
        {"system": "unused"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
         "tools": [{"type": "function", "function": OPENAI_WEATHER}], "parallel_tool_calls": False},
        SAID[:2],
        set(),
    ),
    "GSM8K": (
        {"prompt_column": "question", "chat": True, "system": "s"},
        {"question": "q", "answer": "#### 4"},
        SAID[:2],
        {"answer"},
    ),
    "Alpaca": (CHAT_OF, {"instruction": "q", "input": "", "output": "a"}, [("user", "q\n\n")], {"output"}),
    "WildChat": (
        {"category_column": "model", "columns": ("turn",)},
        {"conversation_hash": "c", "model": "m", "turn": 1, "toxic": None,
         "conversation": [{"role": "user", "content": "q", "country": "NL"}]},
        [("user", "q")],
        {"conversation_hash"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC_ROWS)
@pytest.mark.parametrize("lines", [True, False], ids=["JSON", "Parquet"])
def test_rows_of_public_data_sets_become_chats_with_their_tools(name: str, lines: bool) -> None:
    fields, row, said, ignored = PUBLIC_ROWS[name]
    row_schema = RowSchema(lines=lines, **fields)
    request = read_request(row, row_schema, NO_DEFAULTS)
    body = request.body
    assert isinstance(body, ChatRequest)
    assert [(message.role, message.content) for message in body.messages] == said
    assert set(request.ignored) == ignored
    assert bool(body.tools) == ("tools" in row)
    for tool in body.tools or ():
        assert tool.function.name == "weather"
        assert name != "xLAM" or tool.function.parameters == OPENAI_WEATHER["parameters"]


def test_a_text_is_a_chat_only_where_the_layout_says_so() -> None:
    row = {"question": "q", "logprobs": 2, "temperature": 0.5}
    for chat in (False, True):
        request = read_request(row, RowSchema(prompt_column="question", chat=chat), NO_DEFAULTS)
        assert isinstance(request.body, ChatRequest) == chat
        assert (request.params.logprobs, request.params.temperature) == (2, 0.5)
    ids = read_request({"question": [1, 2]}, RowSchema(prompt_column="question", chat=True), NO_DEFAULTS)
    assert isinstance(ids.body, CompletionRequest)
    for wrong in ({"chat": True}, {"system": "s"}):
        with pytest.raises(ConfigError, match="OpenAI batch lines say it"):
            RowSchema(kind="openai", lines=True, **wrong)


def test_fields_of_chats_are_read_from_columns_and_those_that_a_flag_names_are_not() -> None:
    row = {
        **CHAT,
        "tools": [{"type": "function", "function": OPENAI_WEATHER}],
        "n": 2,
        "user": "u",
        "score": 1,
    }
    row |= {"tool_choice": '{"type": "function", "function": {"name": "weather"}}', "reasoning_effort": "low"}
    request = read_request(row, DATASET, NO_DEFAULTS)
    body = request.body
    assert isinstance(body, ChatRequest)
    assert (body.choice, body.reasoning_effort, request.params.n) == ("required", "low", 2)
    assert request.ignored == ("user", "score")
    named = read_request({"x": "q", "n": 9, "tools": []}, RowSchema(template="{x}{n}"), NO_DEFAULTS)
    assert (named.params.n, named.ignored) == (1, ("tools",))  # a completion has no tools
    with pytest.raises(RequestError, match='from="wizard" is not known') as refused:
        read_request({"conversations": [{"from": "wizard", "value": "x"}]}, DATASET, NO_DEFAULTS)
    assert refused.value.param == "from"


def test_nulls_are_data_in_json_and_no_value_in_parquet() -> None:
    schema = {"properties": {"a": {"default": None, "enum": [1, None]}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": None}}}
    row = {
        "messages": [{"role": "assistant", "content": "", "tool_calls": [call]}],
        "chat_template_kwargs": {"x": None},
    }
    row["structured_outputs"] = {"json": schema}
    as_text = {name: json.dumps(value) for name, value in row.items()}
    read = [read_request(each, RowSchema(lines=lines), NO_DEFAULTS).body for each, lines in (
        (row, True), (as_text, False), (row, False))]  # fmt: skip
    for body, kept in zip(read, (True, True, False), strict=True):
        assert isinstance(body, ChatRequest) and body.messages[0].tool_calls and body.structured_outputs
        assert body.chat_template_kwargs == ({"x": None} if kept else {})
        assert body.messages[0].tool_calls[0].function.arguments == ({"a": None} if kept else {})
        assert ("default" in str(body.structured_outputs)) == kept


def test_a_job_that_was_begun_with_version_1_reads_its_rows_as_before() -> None:
    before = RowSchema(version=1, lines=True)
    row = {**CHAT, "tools": "no JSON", "n": 3, "chat_template_kwargs": {"x": None, "y": 1}}
    request = read_request(row, before, NO_DEFAULTS)
    assert isinstance(request.body, ChatRequest) and request.body.tools is None
    assert (request.params.n, request.body.chat_template_kwargs) == (1, {"y": 1})
    assert request.ignored == ("tools", "n")
    with pytest.raises(RequestError, match="has no messages or prompt"):
        read_request({"conversations": TURNS}, before, NO_DEFAULTS)


def test_a_row_without_a_seed_gets_one_from_the_job_and_its_id() -> None:
    first, again = ({"id": 7, "prompt": text} for text in ("x", "another"))
    row_schema = RowSchema(seed=3)
    seeds = [read_request(row, row_schema, NO_DEFAULTS).params.seed for row in (first, again)]
    assert seeds == [row_seed(3, "7")] * 2
    assert row_seed(3, "7") != row_seed(4, "7")
    assert read_request({"prompt": "x", "seed": 5}, row_schema, NO_DEFAULTS).params.seed == 5


def test_ids_come_from_the_row_or_from_its_content() -> None:
    assert row_id({"custom_id": "c", "id": "i"}, DATASET) == "c"
    assert row_id({"id": 4}, DATASET) == "4"
    assert row_id({"key": "k", "id": "i"}, RowSchema(id_column="key")) == "k"
    hashed = row_id({"prompt": "x", "n": 1}, DATASET)
    assert hashed == row_id({"n": 1, "prompt": "x"}, DATASET)
    assert hashed != row_id({"n": 1, "prompt": "y"}, DATASET)


@pytest.mark.parametrize(
    ("record", "row_schema", "param"),
    [
        ({"text": "x"}, DATASET, "messages or prompt"),
        ({"prompt": 5}, DATASET, "prompt"),
        ({"prompt": ["a", "b"]}, DATASET, "prompt"),
        ({"prompt": "x", "temperature": -1}, DATASET, "temperature"),
        ({"prompt": "x", "temperature": "warm"}, DATASET, "temperature"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, DATASET, "messages.0.role"),
        (openai_line(url="/v1/embeddings"), OPENAI, "url"),
        (openai_line(body="x"), OPENAI, "body"),
        (openai_line(custom_id=None), OPENAI, "custom_id"),
        (openai_line(body={**CHAT, "stream": True}), OPENAI, "body.stream"),
        (openai_line(body={**CHAT, "logprobs": 3}), OPENAI, "logprobs"),
    ],
)
def test_a_bad_record_is_refused_with_the_name_of_its_field(
    record: dict[str, object], row_schema: RowSchema, param: str
) -> None:
    with pytest.raises(RequestError) as refused:
        read_request(record, row_schema, NO_DEFAULTS)
    assert refused.value.param == param


def test_openai_lines_keep_openais_limits() -> None:
    chat = read_request(openai_line(), OPENAI, NO_DEFAULTS)
    assert chat.params.max_tokens is None
    line = openai_line(url="/v1/completions", body={"prompt": "x", "n": 2})
    completion = read_request(line, OPENAI, NO_DEFAULTS)
    assert (completion.params.max_tokens, completion.params.n) == (16, 2)


def test_a_lone_surrogate_is_read_as_the_replacement_character() -> None:
    line = r'{"custom_id": "\ud800", "url": "/v1/chat/completions", "x": NaN, "body": {"messages": ['
    record = parse_line(line + r'{"role": "user", "content": "a\udc00"}]}}')
    assert record["custom_id"] == "\ufffd"
    requested = [record["body"], {"messages": r'[{"role": "user", "content": "a\udc00"}]'}]
    for row, row_schema in zip((record, requested[1]), (OPENAI, DATASET), strict=True):
        body = read_request(row, row_schema, NO_DEFAULTS).body
        assert isinstance(body, ChatRequest) and body.messages[0].content == "a\ufffd"


def write_lines(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def test_the_format_is_found_from_suffix_and_content(tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", ["{broken", {"prompt": "x"}, ""])
    source = open_source([rows])
    assert (source.format, source.lines) == ("jsonl", True)
    assert open_source([write_lines(tmp_path / "o.jsonl", [openai_line()])]).format == "openai"
    pq.write_table(pa.table({"prompt": ["a", "b"]}), tmp_path / "rows.parquet")
    source = open_source([tmp_path / "rows.parquet"])
    assert (source.format, source.lines) == ("parquet", False)


def test_an_unreadable_dataset_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "table.xyz").write_text("prompt\nx\n")
    (tmp_path / "rows.parquet.gz").write_bytes(b"")
    (tmp_path / "array.json").write_text('[{"prompt": "x"}]')
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(random.randbytes(5000).hex().encode())[:-99])
    (tmp_path / "not.jsonl.zst").write_bytes(b"plain")
    (tmp_path / "folder").mkdir()
    for name, said in (
        ("nowhere.jsonl", "cannot be read"),
        ("broken.parquet", "not a readable Parquet"),
        ("latin.jsonl", "not UTF-8"),
        ("empty.jsonl", "no rows"),
        ("table.xyz", ".xyz"),
        ("rows.parquet.gz", ".gz"),
        ("array.json", "one JSON array"),
        ("cut.jsonl.gz", "Truncated"),
        ("not.jsonl.zst", "cannot be read"),
        ("folder", "files"),
        (".", "--input-format"),
    ):
        with pytest.raises(DatasetError, match=said) as refused:
            source = open_source([tmp_path / name])
            index_rows(source, DATASET, duplicates="number")
        assert refused.value.param == "input"


def test_a_missing_column_is_named_with_the_existing_ones(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_text("")  # and nothing is known by it
    write_lines(tmp_path / "1.jsonl", [{"question": "x", "key": 1}])
    source = open_source([tmp_path])
    for row_schema, param in (
        (DATASET, "prompt_column"),
        (RowSchema(prompt_column="ask"), "prompt_column"),
        (RowSchema(prompt_column="question", id_column="uid"), "id_column"),
    ):
        with pytest.raises(DatasetError, match="question") as refused:
            check_columns(source, row_schema)
        assert refused.value.param == param
    check_columns(source, RowSchema(prompt_column="question", id_column="key"))


def test_a_template_makes_a_prompt_of_columns() -> None:
    row_schema = RowSchema(template="{{{question}}} of {n} in {list}: {naïve name}")
    record = {"question": "why?", "n": 3, "list": ["é"], "naïve name": "", "prompt": "unused", "top_k": 5}
    request = read_request(record, row_schema, NO_DEFAULTS)
    assert isinstance(request.body, CompletionRequest)
    assert request.body.prompt == ['{why?} of 3 in ["é"]: ']
    assert request.params.top_k == 5
    for missing in ({}, {"question": None}):
        with pytest.raises(RequestError, match="has no question") as refused:
            read_request({"quest": "x"} | missing, row_schema, NO_DEFAULTS)
        assert refused.value.param == "question"
    for wrong in ("{", "}", "{}", "{a!r}", "{a:5}", "{a"):
        with pytest.raises(ConfigError, match=r"Write \{column\}") as bad:
            RowSchema(template=wrong)
        assert bad.value.param == "template"


def test_a_templates_columns_are_checked_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("question,lang\nx,y\n")
    source = open_source([tmp_path / "rows.csv"])
    check_columns(source, RowSchema(template="{question} in {lang}"))
    with pytest.raises(DatasetError, match="no column 'language' in the data") as refused:
        check_columns(source, RowSchema(template="{question} in {language}"))
    assert refused.value.param == "template"


def test_a_template_is_the_only_prompt() -> None:
    for more in ({"kind": "openai", "lines": True}, {"prompt_column": "x"}):
        with pytest.raises(ConfigError, match="the prompt already") as refused:
            RowSchema(template="{x}", **more)
        assert refused.value.param == "template"


def test_csv_text_is_converted_to_the_fields_type(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(
        "messages,max_tokens,temperature,top_k,ignore_eos,stop,stop_token_ids,seed,chat_template_kwargs\n"
        '"[{""role"": ""user"", ""content"": ""hi, you""}]",7,0.5,3,true,"[""a"", ""b""]","[1, 2]",9,'
        '"{""style"": 1}"\n'
        '"[{""role"": ""user"", ""content"": ""x""}]",,,,,[,,,\n'
        "[{,,,,,,,,\n"
    )
    source = open_source([tmp_path / "rows.csv"])
    found = index_rows(source, DATASET, duplicates="refuse")
    first, second, third = RowReader(source, DATASET).read(found.spans(((0, 3),)))
    request = read_request(first.record, DATASET, NO_DEFAULTS)
    assert isinstance(request.body, ChatRequest)
    assert (request.body.messages[0].content, request.body.chat_template_kwargs) == ("hi, you", {"style": 1})
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_k, params.seed) == (7, 0.5, 3, 9)
    assert (params.ignore_eos, params.stop, params.stop_token_ids) == (True, ("a", "b"), (1, 2))
    assert read_request(second.record, DATASET, NO_DEFAULTS).params.stop == ("[",)
    with pytest.raises(RequestError, match="messages: the text is not valid JSON") as refused:
        read_request(third.record, DATASET, NO_DEFAULTS)
    assert refused.value.param == "messages"


def test_schemas_of_rows_are_passed_to_the_endpoints_models() -> None:
    def constraint(**column: object) -> object:
        requested = read_request({"prompt": "x", **column}, DATASET, NO_DEFAULTS).params.structured_outputs
        return requested and requested.constraint

    assert constraint(response_format={"type": "text", "json_schema": None}) is None
    assert constraint(response_format={"type": "json_object"}) == "json_object"
    assert constraint(structured_outputs='{"regex": "a+"}') == "regex"
    with pytest.raises(RequestError, match="one of") as refused:
        constraint(structured_outputs='{"regex": "a", "choice": ["b"]}')
    assert refused.value.param == "structured_outputs"


@pytest.fixture(scope="module")
def text_pair_config(pair: tuple[Path, Path]) -> EngineConfig:
    spec = {"model": str(pair[1]), "adaptive": False}
    small = {"max_num_seqs": 4, "max_model_len": 128}
    return EngineConfig.from_dict(tiny_settings(pair, **small, speculative_config=spec))


def answered(config: EngineConfig, answer: Callable[[AsyncEngine], Awaitable[T]]) -> T:
    async def run() -> T:
        engine = AsyncEngine(config)
        await engine.start()
        try:
            return await answer(engine)
        finally:
            engine.close()

    return asyncio.run(run())


def test_results_have_their_rows_id_and_columns_even_if_the_row_fails(
    text_pair_config: EngineConfig, tmp_path: Path
) -> None:
    records: list[Any] = [
        {"id": "a", "prompt": "def main(", "max_tokens": 4, "kind": "code", "n_ref": 1},
        {"id": "a", "prompt": "def main(", "max_tokens": 4, "temperature": 1.0, "kind": None, "n_ref": 2.5},
        {"id": "long", "prompt": "word " * 100_000, "kind": "long"},
        {"id": "hot", "prompt": "x", "temperature": -1, "kind": "bad"},
    ]
    source = open_source([write_lines(tmp_path / "rows.jsonl", [*records, "{broken"])])
    row_schema = RowSchema(lines=True, columns=("kind", "n_ref"))
    found = index_rows(source, row_schema, duplicates="number")
    rows = RowReader(source, row_schema).read(found.spans(((0, 5),)))

    async def answer(engine: AsyncEngine) -> list[Result]:
        answerer = RowAnswerer(engine, row_schema, NO_DEFAULTS, "tiny", found.columns)
        return await asyncio.gather(*(answerer.answer(row) for row in rows))

    results = answered(text_pair_config, answer)
    table = pa.Table.from_pylist(results, schema=wire_schema(found.columns))
    first, second, long, hot, broken = table.to_pylist()
    assert [row["row"] for row in results] == [0, 1, 2, 3, 4]
    assert [row["id"] for row in results] == ["a", "a-2", "long", "hot", content_id("{broken")]
    assert first["num_draft_tokens"] > 0 and second["num_draft_tokens"] > 0
    assert [row["seed"] for row in (first, second)] == [row_seed(0, "a"), row_seed(0, "a-2")]
    assert [row["kind"] for row in (first, second, long, hot, broken)] == ["code", None, "long", "bad", None]
    assert [first["n_ref"], second["n_ref"], hot["n_ref"]] == [1.0, 2.5, None]
    params = [row["error"] and row["error"]["param"] for row in table.to_pylist()]
    assert params == [None, None, "prompt", "temperature", None]
    assert "not valid JSON" in broken["error"]["message"]
    assert (broken["input"], json.loads(hot["input"])) == ("{broken", records[3])
    assert {row["error"]["attempts"] for row in (long, hot, broken)} == {1}


def test_a_rows_log_probabilities_are_a_column_and_its_echo_is_in_the_text(
    text_pair_config: EngineConfig,
) -> None:
    """The echo exists only in OpenAI's form: there is no such column."""
    body = {"prompt": "ab", "max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    lines = [
        {"custom_id": name, "url": "/v1/completions", "body": {**body, "echo": True, **more}}
        for name, more in (("c", {"logprobs": 0}), ("d", {"max_tokens": 0, "prompt_logprobs": 1}))
    ]

    async def answer(engine: AsyncEngine) -> list[Result]:
        plain, openai = (
            RowAnswerer(engine, row_schema, NO_DEFAULTS, "tiny", prefix=f"{row_schema.kind}-")
            for row_schema in (DATASET, OPENAI)
        )
        rows = [Row(0, {"id": "a", **body}), Row(1, {"id": "b", **body, "logprobs": None})]
        reported = [openai.answer(Row(2 + i, {"text": json.dumps(line)})) for i, line in enumerate(lines)]
        return await asyncio.gather(*(plain.answer(row) for row in rows), *reported)

    results = answered(text_pair_config, answer)
    reported, plain, echoed, alone = pa.Table.from_pylist(results, schema=WIRE_SCHEMA).to_pylist()
    assert plain["logprobs"] is None and reported["token_ids"] == plain["token_ids"]
    for token_id, place in zip(reported["token_ids"], reported["logprobs"], strict=True):
        assert (place["rank"], place["top_token_ids"][0]) == (1, token_id), "greedy takes the likeliest"
        assert place["top_logprobs"][0] == place["logprob"] > place["top_logprobs"][1]
    (choice,) = json.loads(echoed["response"])["choices"]
    assert choice["text"] == echoed["text"] == "ab" + plain["text"]
    assert len(choice["logprobs"]["tokens"]) == echoed["prompt_tokens"] + 4
    (choice,) = json.loads(alone["response"])["choices"]
    assert (choice["text"], alone["text"], alone["token_ids"]) == ("ab", "ab", [])
    assert len(choice["prompt_logprobs"]) == alone["prompt_tokens"] == len(choice["logprobs"]["tokens"])


def test_a_row_with_several_completions_has_all_in_its_response(text_pair_config: EngineConfig) -> None:
    rows = [{"id": name, **CHAT, "max_tokens": 4, "n": n} for name, n in (("one", 1), ("two", 2))]

    async def answer(engine: AsyncEngine) -> list[Result]:
        answerers = [
            RowAnswerer(engine, RowSchema(version=version), NO_DEFAULTS, "tiny", prefix=f"v{version}-")
            for version in (1, 2)
        ]
        given = [(each, row) for each in answerers for row in rows]
        return await asyncio.gather(*(each.answer(Row(i, row)) for i, (each, row) in enumerate(given)))

    *earlier, one, two = pa.Table.from_pylist(
        answered(text_pair_config, answer), schema=WIRE_SCHEMA
    ).to_pylist()
    assert [row["response"] for row in (*earlier, one)] == [None] * 3
    body = json.loads(two["response"])
    assert body["object"] == "chat.completion" and body["usage"]["completion_tokens"] == 8
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert texts[0] == two["text"] == earlier[1]["text"] and len(texts) == 2
    assert (earlier[1]["ignored"], two["ignored"]) == (["n"], [])


def test_a_rows_options_of_speculation_reach_its_request(
    text_pair_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = {"max_tokens": 1, "tpot_ms": 50, "adaptive": False}
    rows = [
        {"id": name, "prompt": "x", "max_tokens": 2, "speculative": given}
        for name, given in (("bounded", bounds), ("plain", {"enabled": False}))
    ]
    made: list[Request] = []
    add_requests = EngineCore.add_requests

    def noted(self: EngineCore, requests: Sequence[Request]) -> None:
        made.extend(requests)
        add_requests(self, requests)

    async def answer(engine: AsyncEngine) -> list[Result]:
        answerer = RowAnswerer(engine, DATASET, NO_DEFAULTS, "tiny")
        return [await answerer.answer(Row(i, row)) for i, row in enumerate(rows)]

    monkeypatch.setattr(EngineCore, "add_requests", noted)
    assert [row["finish_reason"] for row in answered(text_pair_config, answer)] == ["length"] * 2
    bounded, plain = made
    assert (bounded.max_draft_tokens, bounded.tpot_ms, bounded.adaptive_drafts) == (1, 50, False)
    assert (plain.max_draft_tokens, plain.tpot_ms, plain.adaptive_drafts) == (0, None, True)


def test_only_an_engines_death_is_not_attributed_to_the_row(
    text_pair_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other errors of a row become its result."""
    row = Row(7, {"id": "a", "prompt": "x"})

    def divide(*_: object) -> None:
        raise ZeroDivisionError("by zero")

    async def answer(engine: AsyncEngine) -> Result:
        answerer = RowAnswerer(engine, DATASET, NO_DEFAULTS, "tiny")
        with monkeypatch.context() as patch:
            patch.setattr(answering, "read_request", divide)
            failed = await answerer.answer(row)
        engine.close()
        with pytest.raises(EngineDeadError):
            await answerer.answer(row)
        return failed

    failed = answered(text_pair_config, answer)
    assert (failed["row"], failed["id"], failed["error"]["type"]) == (7, "a", "InternalServerError")
    assert failed["error"]["message"] == "ZeroDivisionError in the engine: by zero."


def test_an_abandoned_row_reports_its_number_of_attempts() -> None:
    row = Row(3, {"id": "x", "prompt": "p", "kind": "k"})
    columns = pa.schema([("kind", pa.string())])
    said = failure(row, EngineDeadError("It ends engines."), DATASET, columns, attempts=3)
    assert (said["row"], said["id"], said["kind"], said["attempts"]) == (3, "x", "k", 3)
    assert (said["error"]["attempts"], json.loads(said["input"])) == (3, dict(row.record))


def test_a_line_is_counted_by_its_metadata_and_a_row_by_its_column() -> None:
    lines = RowSchema(kind="openai", lines=True)
    body = {"prompt": "x", "metadata": {"category": "code", "tenant": "t"}}
    assert category_of({"body": body}, lines) == "code"
    for wrong in (None, {"metadata": "code"}, {"metadata": {"category": 3}}):
        assert category_of({}, lines) is category_of({"body": wrong}, lines) is None
    named = RowSchema(kind="openai", lines=True, category_column="kind")
    assert category_of({"body": body, "kind": "mine"}, named) == "mine"
    assert category_of({"body": body, "kind": 3}, RowSchema(category_column="kind")) == "3"
