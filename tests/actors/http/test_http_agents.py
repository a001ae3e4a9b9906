"""/v1/responses and /v1/messages through their own SDKs, over real HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pydantic
import pytest
from manta.actors.http.config.settings import ServerSettings
from manta.cluster.config import EngineConfig
from manta.cluster.step.executor import Executor
from support.checkpoints.text_pair import LiveServer, make_text_pair, tiny_settings
from support.engines.pausable_executor import PausableExecutor
from support.engines.scripted_executor import ScriptedExecutor
from support.waiting import wait_until

NAME = "org/tiny"
TEMPLATE = """\
{%- for t in tools or [] %}<tool_call>{"name": "{{ t['function']['name'] }}", .. {% endfor %}
{%- for m in messages %}<|im_start|>{{ m['role'] }}
{% if m['reasoning_content'] %}<think>
{{ m['reasoning_content'] }}
</think>

{% endif %}{{ m['content'] }}
{%- for c in m['tool_calls'] or [] %}<tool_call>
{{ c['function'] | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def agents_config(folder: Path) -> EngineConfig:
    """A server of a tiny pair with that template."""
    pair = make_text_pair(folder, template=TEMPLATE)
    return EngineConfig.from_dict(tiny_settings(pair, max_num_seqs=2, num_pages=256))


class AgentsStand:
    """Enter `server` to start."""

    def __init__(self, config: EngineConfig) -> None:
        self._models: list[ScriptedExecutor] = []
        self._executors: list[PausableExecutor] = []
        settings = ServerSettings(served_model_name=NAME, api_key="key")
        self.server = LiveServer(config, settings, self._make_model)
        url = self.server.url
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=600)
        self.anthropic = anthropic.Anthropic(base_url=url, api_key="key", max_retries=0, timeout=600)
        self.http = httpx.Client(base_url=url, headers={"x-api-key": "key"}, timeout=600)

    def say(self, text: str) -> None:
        tokenizer = self.server.engine.tokenizer
        assert tokenizer is not None
        self._models[0].script = [
            *tokenizer.encode(text, add_special_tokens=False),
            *tokenizer.encode("<|endoftext|>", add_special_tokens=False),
        ]

    def answer_freely(self) -> dict[str, Any]:
        """Return fields that prevent endless whitespace, which JSON allows, and reasoning."""
        self._models[0].script = ()
        tokenizer = self.server.engine.tokenizer
        assert tokenizer is not None
        ids = [i for i in range(tokenizer.vocab_size) if tokenizer.decode([i]).strip() in ("", "<")]
        return {"extra_body": {"temperature": 0, "logit_bias": dict.fromkeys(map(str, ids), -100)}}

    @property
    def executor(self) -> PausableExecutor:
        return self._executors[0]

    def _make_model(self, config: EngineConfig) -> Executor:
        self._models.append(ScriptedExecutor(config))
        self._executors.append(PausableExecutor(self._models[0]))
        return self.executor


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nRain, perhaps?\n</think>\n\n"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("weather", "clock")]
TOOLS_A = [{"name": name, "input_schema": SCHEMA} for name in ("weather", "clock")]
ASK: dict[str, Any] = {"model": NAME, "input": "Oslo?", "max_output_tokens": 300}
ASK_A: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "Oslo?"}], "max_tokens": 300}
IDLE = {"server_load": 0, "running": 0, "waiting": 0, "kv_usage": 0.0}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return agents_config(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def stand(config: EngineConfig) -> Iterator[AgentsStand]:
    stand = AgentsStand(config)
    with stand.server:
        yield stand


def test_a_response_has_reasoning_text_and_calls_complete_and_streamed(stand: AgentsStand) -> None:
    stand.say(f"{THOUGHT}Let me look.\n{CALL}\n{OTHER}")
    whole = stand.openai.responses.create(**ASK, tools=TOOLS)
    thought, message, *calls = whole.output
    assert thought.type == "reasoning" and thought.content[0].text.strip() == "Rain, perhaps?"
    assert message.type == "message" and whole.output_text.strip() == "Let me look."
    assert [(c.type, c.name, json.loads(c.arguments)) for c in calls] == [
        ("function_call", "weather", {"city": "Oslo"}),
        ("function_call", "clock", {}),
    ]
    assert whole.status == "completed" and whole.id.startswith("resp_")
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    with stand.openai.responses.stream(**ASK, tools=TOOLS) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    assert comparable_output(streamed) == comparable_output(whole)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    check_order(events)


def comparable_output(response: Any) -> list[Any]:
    """A response's output without what is derived from its id."""
    found = []
    for item in response.output:
        fields = item.model_dump(exclude={"id", "call_id", "parsed_arguments"})
        for part in fields.get("content") or ():
            part.pop("parsed", None)
        found.append(fields)
    return found


def check_order(events: list[Any]) -> None:
    """Each item opens, grows and closes before the next, and its pieces add up to it."""
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    open_at, text = None, ""
    for event in events[2:-1]:
        if event.type == "response.output_item.added":
            assert open_at is None
            open_at, text = event.output_index, ""
        assert event.output_index == open_at
        if event.type.endswith(".delta"):
            text += event.delta
        if event.type in ("response.output_text.done", "response.reasoning_text.done"):
            assert event.text == text
        if event.type == "response.function_call_arguments.done":
            assert event.arguments == text
        if event.type == "response.custom_tool_call_input.done":
            assert event.input == text
        if event.type == "response.output_item.done":
            open_at = None
    assert open_at is None


def test_a_message_has_thinking_text_and_calls_complete_and_streamed(stand: AgentsStand) -> None:
    stand.say(f"{THOUGHT}Let me look.\n{CALL}\n{OTHER}")
    whole = stand.anthropic.messages.create(**ASK_A, tools=TOOLS_A)
    thought, text, *calls = whole.content
    assert thought.type == "thinking" and thought.thinking.strip() == "Rain, perhaps?" and thought.signature
    assert text.type == "text" and text.text.strip() == "Let me look."
    assert [(c.type, c.name, c.input) for c in calls] == [
        ("tool_use", "weather", {"city": "Oslo"}),
        ("tool_use", "clock", {}),
    ]
    assert whole.stop_reason == "tool_use" and whole.usage.output_tokens > 20
    with stand.anthropic.messages.stream(**ASK_A, tools=TOOLS_A) as stream:
        kinds = [event.type for event in stream if event.type.startswith(("message", "content"))]
        streamed = stream.get_final_message()
    assert [b.model_dump(exclude={"id", "parsed_output"}) for b in streamed.content] == [
        b.model_dump(exclude={"id", "parsed_output"}) for b in whole.content
    ]
    assert streamed.stop_reason == "tool_use" and streamed.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4


def test_tool_results_are_accepted_and_answered(stand: AgentsStand) -> None:
    """The client's next request, made of the answer as the SDK holds it."""
    stand.say(f"{THOUGHT}{CALL}")
    first = stand.openai.responses.create(**ASK, tools=TOOLS)
    call = next(item for item in first.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    requested = [{"role": "user", "content": "Oslo?"}, *first.output, result]
    stand.say("It rains.")
    second = stand.openai.responses.create(**{**ASK, "input": requested}, tools=TOOLS)
    assert second.output_text == "It rains."
    stand.say(f"{THOUGHT}{CALL}")
    message = stand.anthropic.messages.create(**ASK_A, tools=TOOLS_A)
    use = next(block for block in message.content if block.type == "tool_use")
    talk = [
        *ASK_A["messages"],
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "rain"}]},
    ]
    stand.say("It rains.")
    answer = stand.anthropic.messages.create(**{**ASK_A, "messages": talk}, tools=TOOLS_A)
    assert answer.content[0].text == "It rains." and answer.stop_reason == "end_turn"
    # One prompt, whichever API wrote it; but for the calls' ids, which this template leaves out.
    count = stand.anthropic.messages.count_tokens(model=NAME, messages=talk, tools=TOOLS_A)
    assert count.input_tokens == prompt_tokens(answer.usage) == second.usage.input_tokens


SLIPS = (
    '{"city": "Os\nlo"}',
    '{"city": NaN}',
    "{'city': 'Oslo'}",
    '{"city": "\\ud83d"}',
    '{"city": "Oslo",}',
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("slip", SLIPS)
def test_a_streamed_call_that_is_no_json_raises_nowhere_and_is_accepted_back(
    stand: AgentsStand, slip: str
) -> None:
    stand.say(f'<tool_call>\n{{"name": "weather", "arguments": {slip}}}\n</tool_call>{OTHER}')
    whole = stand.anthropic.messages.create(**ASK_A, tools=TOOLS_A)
    with stand.anthropic.messages.stream(**ASK_A, tools=TOOLS_A) as stream:
        deltas = [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    wanted = {"city": "\ufffd"} if "ud83d" in slip else {"INVALID_JSON": slip}
    calls = [block for block in message.content if block.type == "tool_use"]
    assert [call.input for call in calls] == [wanted, {}] and json.loads("".join(deltas)) == wanted
    assert [block.input for block in whole.content if block.type == "tool_use"] == [wanted, {}]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "wrong", "is_error": True}
        for call in calls
    ]
    talk = [
        *ASK_A["messages"],
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": results},
    ]
    stand.say("It rains.")
    answer = stand.anthropic.messages.create(**{**ASK_A, "messages": talk}, tools=TOOLS_A)
    assert answer.content[0].text == "It rains."


def test_an_eager_tools_arguments_are_streamed_as_the_model_writes_them(stand: AgentsStand) -> None:
    tools = [{**tool, "eager_input_streaming": tool["name"] == "weather"} for tool in TOOLS_A]
    stand.say(f'<tool_call>\n{{"name": "weather", "arguments": {SLIPS[0]}}}\n</tool_call>{CALL}')
    body = {**ASK_A, "tools": tools, "stream": True}
    written: dict[int, list[str]] = {}
    for line in stand.http.post("/v1/messages", json=body).text.splitlines():
        event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
        if event.get("type") == "content_block_delta":
            written.setdefault(event["index"], []).append(event["delta"]["partial_json"])
    broken, good = written.values()
    assert "".join(broken) == SLIPS[0] and json.loads("".join(good)) == {"city": "Oslo"}
    assert len(broken) > 1


def test_tools_count_in_a_conversations_tokens(stand: AgentsStand) -> None:
    requested = {"model": NAME, "messages": ASK_A["messages"]}
    bare = stand.anthropic.messages.count_tokens(**requested).input_tokens
    with_tools = stand.anthropic.messages.count_tokens(**requested, tools=TOOLS_A).input_tokens
    tools = [{"type": "function", "function": {k: v for k, v in t.items() if k != "type"}} for t in TOOLS]
    listed = [
        stand.http.post("/tokenize", json={**requested, **extra}).json() for extra in ({}, {"tools": tools})
    ]
    assert [each["count"] for each in listed] == [bare, with_tools] and bare < with_tools
    text = stand.http.post("/detokenize", json={"tokens": listed[1]["tokens"]}).json()["prompt"]
    assert "weather" in text and "clock" in text


def prompt_tokens(usage: Any) -> int:
    """Anthropic counts cached tokens separately."""
    return usage.input_tokens + usage.cache_read_input_tokens


CODEX_TOOLS: list[dict[str, Any]] = [
    TOOLS[0],
    {
        "type": "namespace",
        "name": "agents",
        "description": "Other agents.",
        "tools": [{"type": "function", "name": "close", "description": "Close one.", "parameters": SCHEMA}],
    },
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin"'},
    },
    {"type": "local_shell"},
    {"type": "web_search", "external_web_access": True},
]
PATCH = '*** x\n"y"'


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_client_side_tools_are_called_as_their_own_items(stand: AgentsStand) -> None:
    ask = {**ASK, "extra_body": {"truncate_prompt_tokens": 100}, "tools": CODEX_TOOLS}
    stand.say(
        called("agents__close", city="a")
        + called("apply_patch", input=PATCH)
        + called("local_shell", command=["ls", "-l"], timeout_ms=5)
    )
    made = stand.openai.responses.with_raw_response.create(**ask)
    assert made.headers["X-Ignored-Params"] == "tools.web_search"
    whole = made.parse()
    namespaced, patch, shell = whole.output
    assert (namespaced.type, namespaced.namespace, namespaced.name) == ("function_call", "agents", "close")
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "apply_patch", PATCH)
    assert (shell.type, shell.action.command, shell.action.timeout_ms) == (
        "local_shell_call",
        ["ls", "-l"],
        5,
    )
    with stand.openai.responses.stream(**ask) as stream:
        events = list(stream)
    assert comparable_output(events[-1].response) == comparable_output(whole)
    check_order(events)
    (done,) = (e for e in events if e.type == "response.custom_tool_call_input.done")
    assert done.input == PATCH
    # The next turn, with results and with items that say nothing here.
    kinds = {"custom_tool_call": "custom_tool_call_output", "function_call": "function_call_output"}
    results = [
        {"type": kinds[item.type], "call_id": item.call_id, "output": "done"}
        for item in whole.output
        if item.type in kinds
    ]
    results.append({"type": "local_shell_call_output", "id": shell.call_id, "output": "a b"})
    others = [
        {"type": "compaction", "id": "cmp_1", "encrypted_content": "x"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "ghost_snapshot", "commit": {}},
        {"type": "ghost_snapshot", "commit": {}},
    ]
    talk = [{"role": "user", "content": "Oslo?"}, *(i.model_dump() for i in whole.output), *results, *others]
    stand.say("Done.")
    made = stand.openai.responses.with_raw_response.create(
        **{**ask, "input": talk, "tools": CODEX_TOOLS[:-1]}
    )
    assert made.parse().output_text == "Done."
    assert made.headers["X-Ignored-Params"] == "input.compaction,input.web_search_call,input.ghost_snapshot"


def test_a_truncated_answer_says_so(stand: AgentsStand) -> None:
    stand.say(f"{THOUGHT}Let me look, and look, and look again.")
    cut = stand.openai.responses.create(**{**ASK, "max_output_tokens": 30})
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    assert cut.output[-1].status == "incomplete" and cut.usage.output_tokens == 30
    kinds = [
        event.type for event in stand.openai.responses.create(**{**ASK, "max_output_tokens": 30}, stream=True)
    ]
    assert kinds[-1] == "response.incomplete"
    assert stand.anthropic.messages.create(**{**ASK_A, "max_tokens": 30}).stop_reason == "max_tokens"
    stand.say("One, two, three.")
    stopped = stand.anthropic.messages.create(**ASK_A, stop_sequences=[", th"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", ", th")
    assert stopped.content[0].text == "One, two"


def test_a_message_with_max_tokens_beyond_the_context_ends_at_the_context(stand: AgentsStand) -> None:
    requested = {**ASK_A, "max_tokens": 513}
    stand.say("On and on. " * 200)
    whole = stand.anthropic.messages.create(**{**requested, "max_tokens": 32_000})
    assert whole.stop_reason == "model_context_window_exceeded"
    assert prompt_tokens(whole.usage) + whole.usage.output_tokens == 512
    with stand.anthropic.messages.stream(**requested) as stream:
        assert stream.get_final_message().stop_reason == "model_context_window_exceeded"
    fits = {**requested, "max_tokens": 512 - prompt_tokens(whole.usage)}
    assert stand.anthropic.messages.create(**fits).stop_reason == "max_tokens"
    stand.say("It rains.")
    assert stand.anthropic.messages.create(**requested).stop_reason == "end_turn"
    with pytest.raises(anthropic.BadRequestError, match="prompt"):
        long = {"role": "user", "content": "On and on. " * 200}
        stand.anthropic.messages.create(**{**requested, "messages": [long]})


def test_answers_are_constrained_to_schemas_and_calls_are_forced(stand: AgentsStand) -> None:
    """Random text of the model, constrained by grammars."""

    class Weather(pydantic.BaseModel):
        rain: bool

    freely = stand.answer_freely()
    parsed = stand.openai.responses.parse(**ASK, text_format=Weather, **freely)
    assert isinstance(parsed.output_parsed, Weather)
    format = {"type": "json_schema", "schema": {**Weather.model_json_schema(), "additionalProperties": False}}
    message = stand.anthropic.messages.create(**ASK_A, output_config={"format": format}, **freely)
    assert isinstance(Weather.model_validate_json(message.content[-1].text), Weather)
    tool = {"type": "function", "name": "weather", "parameters": Weather.model_json_schema()}
    (call,) = stand.openai.responses.create(
        **ASK, tools=[tool], tool_choice="required", parallel_tool_calls=False, **freely
    ).output
    assert call.type == "function_call" and Weather.model_validate_json(call.arguments)
    named = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    used = stand.anthropic.messages.create(
        **ASK_A, tools=[{"name": "weather", "input_schema": tool["parameters"]}], tool_choice=named, **freely
    )
    assert used.stop_reason == "tool_use" and Weather.model_validate(used.content[-1].input)
    with pytest.raises(openai.BadRequestError) as wrong:
        bad = {"type": "json_schema", "name": "x", "schema": {"$ref": "#/nowhere"}}
        stand.openai.responses.create(**ASK, text={"format": bad})
    assert wrong.value.param == "text.format.schema.$ref"


def test_an_empty_answer_is_an_empty_text(stand: AgentsStand) -> None:
    stand.say("")
    assert stand.openai.responses.create(**ASK).output[0].content[0].text == ""
    assert stand.anthropic.messages.create(**ASK_A).content[0].text == ""


def test_wrong_requests_raise_the_sdks_own_errors(stand: AgentsStand) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        stand.openai.responses.create(**ASK, previous_response_id="resp_1")
    assert bad.value.param == "previous_response_id" and "keeps no responses" in bad.value.message
    with pytest.raises(openai.NotFoundError, match="stores none"):
        stand.openai.responses.retrieve("resp_1")
    with pytest.raises(openai.NotFoundError, match="stores none"):
        stand.openai.responses.cancel("resp_1")
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0") as wrong:
        stand.anthropic.messages.create(
            **{**ASK_A, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}
        )
    assert wrong.value.body["error"]["type"] == "invalid_request_error" and wrong.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        stand.anthropic.messages.create(**{**ASK_A, "model": "other"})
    with pytest.raises(anthropic.AuthenticationError):
        stand.anthropic.with_options(api_key="wrong").messages.create(**ASK_A)
    for path, status in (("/v1/messages/none", 404), ("/v1/messages", 405)):
        refused = stand.http.get(path)
        assert refused.status_code == status and refused.json()["type"] == "error"


def test_a_disconnect_ends_the_request(stand: AgentsStand) -> None:
    def load() -> dict[str, Any]:
        return stand.http.get("/load").json()

    stand.say("On and on. " * 80)
    with (
        stand.executor.paused_after(4),
        ThreadPoolExecutor(1) as pool,
        stand.openai.responses.create(**ASK, stream=True) as response,
    ):
        next(iter(response))
        other = pool.submit(stand.anthropic.messages.create, **ASK_A, stream=True)
        wait_until(lambda: load()["server_load"] == 2)
        stand.executor.step_until(other.done)
        with other.result() as message:
            next(iter(message))
            assert load()["running"] == 2
    wait_until(lambda: load() == IDLE)


def test_a_death_during_a_stream_of_responses_is_an_error_event(config: EngineConfig) -> None:
    stand = AgentsStand(config)
    with stand.server:
        stand.say("On and on. " * 80)
        stand.executor.allow_steps(4)
        responses = iter(stand.openai.responses.create(**ASK, stream=True))
        assert next(responses).type == "response.created"
        stand.executor.die()
        *_, last = responses
        assert last.type == "response.failed" and last.response.error.code == "server_error"
        assert last.response.status == "failed" and "Retry" in last.response.error.message
        with pytest.raises(openai.InternalServerError) as refused:  # before the first token: a status
            stand.openai.responses.create(**ASK, stream=True)
        assert refused.value.status_code == 503


def test_a_death_during_a_stream_of_messages_is_an_error_event(config: EngineConfig) -> None:
    stand = AgentsStand(config)
    with stand.server:
        stand.say("On and on. " * 80)
        stand.executor.allow_steps(4)
        messages = iter(stand.anthropic.messages.create(**ASK_A, stream=True))
        assert next(messages).type == "message_start"
        stand.executor.die()
        with pytest.raises(anthropic.APIStatusError) as lost:
            list(messages)
        assert lost.value.body["error"]["type"] == "overloaded_error"
        with pytest.raises(anthropic.APIStatusError) as dead:
            stand.anthropic.messages.create(**ASK_A, stream=True)
        assert dead.value.status_code == 503 and dead.value.body["error"]["type"] == "overloaded_error"


def test_models_and_load_are_reported(stand: AgentsStand) -> None:
    card = stand.openai.models.retrieve(NAME)
    assert (card.id, card.root, card.parent, card.max_model_len) == (NAME, NAME, None, 512)
    assert stand.anthropic.models.retrieve(NAME).id == NAME
    assert stand.http.get("/load").json() == IDLE
