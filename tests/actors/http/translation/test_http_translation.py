"""Bodies of the Responses and the Messages API become a chat; errors name the body's own fields."""

from __future__ import annotations

import json
import typing
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import typing_extensions
from anthropic.types.beta import BetaContentBlockParam, BetaMemoryTool20250818Command
from manta.actors.http.anthropic.request import MessagesRequest
from manta.actors.http.generation.chat_adapter import SupportedOptions, rename_error_fields
from manta.actors.http.protocol.chat_completion import ChatRequest, NamedTool, conversation
from manta.actors.http.protocol.protocol import constraint_of
from manta.actors.http.responses.request import ResponsesRequest
from manta.actors.tokenization.client_messages import parse_arguments
from manta.cluster.errors import RequestError

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
ANSWER = {"role": "assistant", "content": "Let me look.", "reasoning_content": "Hm.", "tool_calls": [CALL]}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Oslo?"},
    ANSWER,
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    {"role": "user", "content": "So?"},
]
USER = {"role": "user", "content": "x"}
ALL = SupportedOptions(effort=True, switch=True, thinks=True)
NONE = SupportedOptions(effort=False, switch=False, thinks=False)


def responses(*, supported: SupportedOptions = ALL, **body: Any) -> ChatRequest:
    request = ResponsesRequest.model_validate(body)
    return request.for_chat(request.conversation(), supported)


def messages(*, supported: SupportedOptions = ALL, **body: Any) -> ChatRequest:
    request = MessagesRequest.model_validate({"max_tokens": 9, **body})
    return request.for_chat(request.conversation(), supported)


def said(chat: ChatRequest) -> list[dict[str, Any]]:
    """Return what a template gets; reasoning has several names there."""
    messages = [message.for_template(f"messages.{i}") for i, message in enumerate(chat.messages)]
    shown = parse_arguments(messages)
    return [{k: v for k, v in each.items() if k not in ("reasoning", "thinking")} for each in shown]


def parts(*texts: str, kind: str = "text") -> list[dict[str, Any]]:
    return [{"type": kind, "text": text} for text in texts]


def items(*given: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a turn with a call, as a client returns it."""
    return [
        {"role": "user", "content": [{"type": "input_text", "text": "Oslo?"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Let me look.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"Oslo"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        *given,
    ]


def test_items_of_an_answer_are_one_message() -> None:
    chat = responses(input=items({"role": "user", "content": "So?"}), instructions="Be brief.")
    assert said(chat) == TALK


def test_blocks_of_an_answer_are_one_message_and_results_are_separate() -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "rain"}]}
    chat = messages(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": "Oslo?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "text", "text": "Let me look."},
                    {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}},
                ],
            },
            {"role": "user", "content": [result]},
            {"role": "user", "content": [{"type": "text", "text": "So?"}]},
        ],
    )
    assert said(chat) == TALK


def test_answers_of_different_turns_stay_separate() -> None:
    chat = responses(
        input=[
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "assistant", "content": "c"},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "d"}]},
            {"role": "assistant", "content": "e"},
        ]
    )
    assert [message["content"] for message in said(chat)] == ["a", "b", "c", "e"]
    assert len(said(chat)[2]["tool_calls"]) == 2 and said(chat)[3]["reasoning_content"] == "d"


TEXT = {"type": "text", "text": "found"}
SOURCE = {"type": "text", "media_type": "text/plain", "data": "page"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
NO_IMAGE = "[image: left out, this model reads text only]"
RETURNED: list[tuple[Any, str]] = [
    (None, ""),
    ("rain", "rain"),
    ([TEXT, TEXT], "found\nfound"),
    ([{"type": "tool_reference", "tool_name": "weather"}, TEXT], "weather\nfound"),
    ([{"type": "search_result", "source": "s", "title": "t", "content": [TEXT]}], "t\ns\nfound"),
    ([{"type": "document", "title": "t", "context": "c", "source": SOURCE}], "t\nc\npage"),
    ([{"type": "document", "source": {"type": "content", "content": [TEXT, IMAGE]}}], f"found\n{NO_IMAGE}"),
    ([{"type": "document", "source": {"type": "content", "content": "page"}}], "page"),
    (
        [{"type": "document", "title": "t", "source": {"type": "url", "url": "u"}}],
        NO_IMAGE.replace("image", "document t"),
    ),
    ([IMAGE, TEXT], f"{NO_IMAGE}\nfound"),
    ([{"type": "image_url", "image_url": {"url": "u"}}], NO_IMAGE),
    ([{"type": "input_image", "image_url": "u"}, {"type": "input_text", "text": "x"}], f"{NO_IMAGE}\nx"),
    ([{"type": "input_file", "filename": "a.pdf"}], NO_IMAGE.replace("image", "file a.pdf")),
    ([{"type": "of_next_year", "x": {"y": 1}}], NO_IMAGE.replace("image", "of_next_year")),
]


@pytest.mark.parametrize(("returned", "text"), RETURNED)
def test_tool_results_are_read_or_named_in_every_form(returned: Any, text: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": returned}
    message = {"role": "tool", "tool_call_id": "c1", "content": returned}
    output = {"type": "function_call_output", "call_id": "c1", "output": returned}
    chats = [
        messages(messages=[{"role": "user", "content": [result]}]),
        responses(input=[output]),
        ChatRequest.model_validate({"messages": [message]}),
    ]
    wanted = [{"role": "tool", "tool_call_id": "c1", "content": text}]
    assert [said(chat) for chat in chats] == [wanted] * 3
    failed = messages(messages=[{"role": "user", "content": [{**result, "is_error": True}]}])
    assert said(failed)[0]["content"] == f"Error: {text}".rstrip()


def test_a_users_documents_are_read_and_images_are_refused() -> None:
    document = {"type": "document", "title": "t", "source": SOURCE}
    chat = messages(messages=[{"role": "user", "content": [document, {**TEXT, "text": "So?"}]}])
    assert said(chat) == [{"role": "user", "content": parts("t\npage", "So?")}]
    for block in (IMAGE, {**document, "source": IMAGE["source"]}):
        with pytest.raises(RequestError, match="This model reads text") as refused:
            messages(messages=[{"role": "user", "content": [TEXT, block]}])
        assert refused.value.param == "messages.0.content.1"


def test_text_after_a_call_continues_the_text_before_it() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"Oslo"}'}
    use = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}}
    items = [{"role": "assistant", "content": text} for text in ("a ", "b")]
    blocks = [{"type": "text", "text": text} for text in ("a ", "b")]
    one = responses(input=[items[0], call, items[1]])
    other = messages(messages=[{"role": "assistant", "content": [blocks[0], use, blocks[1]]}])
    assert said(one) == said(other) == [{"role": "assistant", "content": "a b", "tool_calls": [CALL]}]


def test_tools_choices_and_formats_are_translated_to_a_chats() -> None:
    tool = {"type": "function", "name": "weather", "description": "d", "parameters": SCHEMA, "strict": True}
    one = responses(
        input="x",
        tools=[tool],
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}},
        reasoning={"effort": "low"},
        max_output_tokens=5,
        top_k=3,
    )
    other = messages(
        messages=[{"role": "user", "content": "x"}],
        tools=[{"name": "weather", "description": "d", "input_schema": SCHEMA, "strict": True}],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"},
        max_tokens=5,
        top_k=3,
    )
    for chat in (one, other):
        assert chat.tools is not None and chat.tools[0].function.parameters == SCHEMA
        assert chat.tools[0].function.strict and chat.tools[0].function.description == "d"
        assert chat.tool_choice is not None and not isinstance(chat.tool_choice, str)
        assert chat.tool_choice.function.name == "weather" and not chat.parallel_tool_calls
        assert chat.reasoning_effort == "low" and chat.top_k == 3
        assert (chat.max_completion_tokens or chat.max_tokens) == 5
        wanted = chat.response_format
        assert wanted is not None and wanted.json_schema is not None
        assert wanted.json_schema.json_schema == SCHEMA
    requested = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"name": "f", "input_schema": SCHEMA}],
    }
    assert messages(**requested, tool_choice={"type": "any"}).tool_choice == "required"


def test_client_side_tools_become_functions() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: A"}
    inner = {"type": "custom", "name": "patch", "description": "Edits.", "format": grammar}
    tools = [
        {"type": "namespace", "name": "n", "description": "About n.", "tools": [inner]},
        {"type": "namespace", "name": "mcp__s__", "tools": [{"type": "function", "name": "f"}]},
        {"type": "local_shell"},
        {"type": "web_search"},
        {"type": "mcp", "server_label": "s"},
        {"type": "web_search"},
    ]
    body = {"input": "x", "tools": tools}
    chat = responses(**body)
    assert chat.tools is not None
    patch, other, shell = (tool.function for tool in chat.tools)
    assert [tool.name for tool in (patch, other, shell)] == ["n__patch", "mcp__s__f", "local_shell"]
    assert patch.description == (
        "Edits.\n\nThe input follows this lark grammar:\nstart: A\n\n(Tools n__*: About n.)"
    )
    assert patch.parameters is not None and patch.parameters["required"] == ["input"]
    request = ResponsesRequest.model_validate(body)
    assert request.ignored(NONE) == ["tools.web_search", "tools.mcp"]
    unread = request.client_tools.called("n__patch").call_item("c1", '{"patch": "x"}')
    assert (unread["type"], unread["input"]) == ("custom_tool_call", '{"patch": "x"}')
    unfit = request.client_tools.called("local_shell").call_item("c1", '{"command": "ls"}')
    assert (unfit["type"], unfit["arguments"]) == ("function_call", '{"command": "ls"}')
    for choice, name in (
        ({"type": "custom", "name": "patch"}, "n__patch"),
        ({"type": "function", "name": "f", "namespace": "mcp__s__"}, "mcp__s__f"),
        ({"type": "local_shell"}, "local_shell"),
    ):
        named = responses(**body, tool_choice=choice).tool_choice
        assert named is not None and not isinstance(named, str) and named.function.name == name


def test_the_shell_and_patches_are_functions_whose_calls_are_read_back() -> None:
    tools = [{"type": "shell", "environment": {"type": "local"}}, {"type": "apply_patch"}]
    request = ResponsesRequest.model_validate({"input": "x", "tools": tools})
    commands = {"commands": ["ls", "pwd"], "timeout_ms": 5}
    patch = {"type": "update_file", "path": "a", "diff": "@@\n-x\n+y"}
    given = [
        request.client_tools.called(name).call_item("c1", json.dumps(arguments))
        for name, arguments in (("shell", commands), ("apply_patch", patch))
    ]
    assert [item["type"] for item in given] == ["shell_call", "apply_patch_call"]
    (answer,) = said(responses(input=given, tools=tools))
    assert [call["function"]["arguments"] for call in answer["tool_calls"]] == [commands, patch]
    chosen = responses(input="x", tools=tools, tool_choice={"type": "apply_patch"}).tool_choice
    assert isinstance(chosen, NamedTool) and chosen.function.name == "apply_patch"
    without_diff = request.client_tools.called("apply_patch").call_item("c1", '{"type": "update_file"}')
    assert without_diff["type"] == "function_call"
    hosted = {"type": "shell", "environment": {"type": "container_auto"}}
    assert ResponsesRequest.model_validate({"input": "x", "tools": [hosted]}).ignored(NONE) == ["tools.shell"]


MEMORY_COMMANDS = typing.get_args(typing.get_args(BetaMemoryTool20250818Command)[0])


@pytest.mark.parametrize(
    "kind", ["bash_20250124", "text_editor_20241022", "text_editor_20250728", "memory_20250818"]
)
def test_tools_that_anthropic_defines_and_clients_run_are_functions(kind: str) -> None:
    chat = messages(messages=[USER], tools=[{"type": kind, "name": kind[:6], "strict": True}])
    assert chat.tools is not None
    (tool,) = (each.function for each in chat.tools)
    assert tool.name == kind[:6] and tool.strict and tool.description and tool.parameters is not None
    jsonschema.Draft202012Validator.check_schema(tool.parameters)
    if kind.startswith("memory"):
        fields = {name for command in MEMORY_COMMANDS for name in command.model_fields}
        assert set(tool.parameters["properties"]) == fields
        assert set(tool.parameters["properties"]["command"]["enum"]) == {
            typing.get_args(command.model_fields["command"].annotation)[0] for command in MEMORY_COMMANDS
        }
    is_old = kind == "text_editor_20241022"
    assert ("undo_edit" in str(tool.parameters)) == is_old


def test_blocks_of_anthropics_servers_are_skipped_and_named_and_texts_are_kept() -> None:
    kinds = {
        typing.get_args(typing.get_type_hints(each)["type"])[0]
        for each in typing.get_args(BetaContentBlockParam)
        if typing_extensions.is_typeddict(each)
    }
    named = kinds - {"text", "thinking", "tool_use", "search_result"}
    assert len(named) == 20
    blocks = [{"type": kind, "id": "x", "tool_use_id": "x"} for kind in sorted(named)]
    body: dict[str, Any] = {
        "max_tokens": 9,
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "a"}, *blocks, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": [{"type": "compaction", "content": "Before that, x."}]},
        ],
    }
    read = MessagesRequest.model_validate(body).conversation()
    assert sorted(read.skipped) == sorted(f"messages.{kind}" for kind in named)
    assert [message["content"] for message in read.messages] == ["x", parts("a", "b"), "Before that, x."]
    of_user = [
        each for each in blocks if each["type"] not in ("image", "document", "search_result", "tool_result")
    ]
    body["messages"] = [{"role": "user", "content": [{"type": "text", "text": "a"}, *of_user]}]
    read = MessagesRequest.model_validate(body).conversation()
    assert [message["content"] for message in read.messages] == ["a"]
    assert {f"messages.{each['type']}" for each in of_user} == set(read.skipped)


ALLOWED = [{"type": "function", "name": "f"}, {"type": "custom", "name": "p"}]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_those_that_are_offered(mode: str) -> None:
    names = ("f", "g", "p")
    tools = [{"type": "custom" if name == "p" else "function", "name": name} for name in names]
    chat_tools = [{"type": "function", "function": {"name": name}} for name in names]
    allowed = [{"type": "function", "function": {"name": name}} for name in ("f", "p")]
    choice = {"type": "allowed_tools", "mode": mode, "tools": ALLOWED}
    one = responses(input="x", tools=tools, tool_choice=choice)
    other = ChatRequest.model_validate(
        {
            "messages": [USER],
            "tools": chat_tools,
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}},
        }
    )
    for chat in (one, other):
        assert chat.choice == mode and [tool.name for tool in chat.available_tools] == ["f", "p"]
        assert [tool["function"]["name"] for tool in conversation(chat, chat.messages, None).tools or ()] == [
            "f",
            "p",
        ]
    hosted = {"type": "web_search"}
    only_hosted = {"type": "allowed_tools", "mode": mode, "tools": [hosted]}
    if mode == "auto":
        assert responses(input="x", tools=[*tools, hosted], tool_choice=only_hosted).tool_choice == "none"
    else:
        with pytest.raises(RequestError, match=r"tool_choice\.allowed_tools\.tools|tool_choice"):
            responses(input="x", tools=[*tools, hosted], tool_choice=only_hosted)


def test_a_schema_is_honored_wherever_servers_take_it() -> None:
    def constraint(chat: ChatRequest) -> Any:
        return constraint_of(chat.response_format, chat.structured_outputs)

    for kind in ("json_object", "json_schema"):
        chat = ChatRequest.model_validate(
            {"messages": [USER], "response_format": {"type": kind, "schema": SCHEMA}}
        )
        assert constraint(chat).json == SCHEMA
    of_responses = responses(input="x", text={"format": {"type": "json_object", "schema": SCHEMA}})
    beta = messages(messages=[USER], output_format={"type": "json_schema", "schema": SCHEMA})
    assert constraint(of_responses).json == constraint(beta).json == SCHEMA


@pytest.mark.parametrize("kind", [None, "", "function"])
def test_a_call_of_the_history_needs_no_type(kind: str | None) -> None:
    called = {**CALL, "type": kind}
    chat = ChatRequest.model_validate({"messages": [USER, {"role": "assistant", "tool_calls": [called]}]})
    assert said(chat)[1]["tool_calls"] == [CALL]


def test_calls_of_every_kind_of_tool_are_part_of_the_conversation() -> None:
    """Answers of other servers, where a session may have begun."""
    chat = responses(
        input=[
            USER,
            {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "namespace": "n", "input": "+x"},
            {
                "type": "local_shell_call",
                "call_id": "c2",
                "action": {"type": "exec", "command": ["ls"], "env": {}},
            },
            {"type": "shell_call", "call_id": "c3", "action": {"commands": ["ls"], "timeout_ms": None}},
            {"type": "apply_patch_call", "call_id": "c4", "operation": {"type": "delete_file", "path": "a"}},
            {
                "type": "custom_tool_call_output",
                "call_id": "c1",
                "output": [{"type": "input_text", "text": "r"}],
            },
            {"type": "shell_call_output", "call_id": "c3", "output": [{"stdout": "é"}]},
            {"type": "image_generation_call", "id": "i1", "result": "x"},
            {"type": "tool_search_output", "call_id": "t1", "tools": []},
        ]
    )
    _, answer, patched, listed = said(chat)
    assert [
        (call["id"], call["function"]["name"], call["function"]["arguments"]) for call in answer["tool_calls"]
    ] == [
        ("c1", "n__patch", {"input": "+x"}),
        ("c2", "local_shell", {"command": ["ls"]}),
        ("c3", "shell", {"commands": ["ls"]}),
        ("c4", "apply_patch", {"type": "delete_file", "path": "a"}),
    ]
    assert (patched["content"], listed["content"]) == ("r", '[{"stdout": "é"}]')


def test_a_last_assistant_message_is_continued() -> None:
    said_so_far = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is"}]
    chat = messages(messages=said_so_far)
    assert chat.continue_final_message and not chat.add_generation_prompt
    assert not messages(messages=said_so_far[:1]).continue_final_message


def test_thinking_is_switched_if_the_template_has_a_switch() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "thinking": {"type": "disabled"}}
    assert messages(**body).chat_template_kwargs == {"enable_thinking": False}
    assert messages(supported=NONE, **body).chat_template_kwargs is None
    assert MessagesRequest.model_validate({"max_tokens": 1, **body}).ignored(NONE) == ["thinking"]
    switch = replace(NONE, switch=True)
    none = {"input": "x", "reasoning": {"effort": "none"}}
    assert responses(supported=switch, **none).chat_template_kwargs == {"enable_thinking": False}
    assert ResponsesRequest.model_validate(none).ignored(switch) == []
    assert ResponsesRequest.model_validate(none).ignored(NONE) == ["reasoning.effort"]


def test_an_error_names_a_field_consistently() -> None:
    reported = "max_completion_tokens=9 and a prompt: leave max_completion_tokens out."
    with (
        pytest.raises(RequestError) as raised,
        rename_error_fields({"max_completion_tokens": "max_output_tokens"}),
    ):
        raise RequestError(reported, param="max_completion_tokens")
    assert raised.value.message == reported.replace("completion", "output")
    with pytest.raises(RequestError) as raised, rename_error_fields({"prompt": "input"}):
        raise RequestError("prompt: the prompt is too long.", param="prompt")
    assert raised.value.message == "input: the prompt is too long."


@pytest.mark.parametrize("reference", [{"type": "item_reference", "id": "msg_1"}, {"id": "fc_1"}])
def test_references_to_items_are_skipped_and_named(reference: dict[str, str]) -> None:
    output = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
    given = [USER, reference, output, reference]
    request = ResponsesRequest.model_validate({"input": given})
    assert request.conversation().skipped == ["input.item_reference"]
    assert said(responses(input=given)) == said(responses(input=[USER, output]))


NAMESPACE = {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (responses, {"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    (responses, {"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input"),
    (responses, {"input": [{"role": "king", "content": "x"}]}, "input.0.role"),
    (responses, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
    (responses, {"input": [{"type": "function_call_output", "call_id": 1}]}, "input.0.call_id"),
    (
        responses,
        {"input": [{"type": "function_call_output", "call_id": "c", "output": {}}]},
        "input.0.output",
    ),
    (
        responses,
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [1]}]},
        "input.0.output.0",
    ),
    (responses, {"input": []}, "input"),
    (responses, {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    (responses, {"input": "x", "background": True}, "background"),
    (responses, {"input": "x", "truncation": "auto"}, "truncation"),
    (responses, {"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tools"),
    (responses, {"input": "x", "tools": [{"name": "f"}]}, "tools.0.type"),
    (responses, {"input": "x", "tools": [{"type": "namespace", "name": "n"}]}, "tools.0.tools"),
    (responses, {"input": "x", "tools": [{"type": "custom", "name": "a b"}]}, "tools.0.name"),
    (responses, {"input": "x", "tools": [NAMESPACE], "tool_choice": {"type": "mcp"}}, "tool_choice"),
    (responses, {"input": "x", "tools": [NAMESPACE, NAMESPACE]}, "tools.1.tools.0.name"),
    (responses, {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input.0.call_id"),
    (responses, {"input": "x", "tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
    (messages, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
    (messages, {"messages": [USER], "tools": [{"type": "web_search_1", "name": "w"}]}, "tools"),
    (messages, {"messages": [USER], "tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
    (messages, {"messages": [USER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    (messages, {"messages": [USER], "container": "c"}, "container"),
    (messages, {"messages": [USER], "thread": {"type": "continue", "previous_message_id": "x"}}, "thread"),
    (messages, {"messages": [USER], "tools": [{"type": "computer_20251124", "name": "computer"}]}, "tools"),
    (
        messages,
        {
            "messages": [USER],
            "output_format": {"type": "json_schema", "schema": SCHEMA},
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
        "output_format",
    ),
    (
        responses,
        {"input": "x", "tools": [NAMESPACE], "tool_choice": {"type": "allowed_tools", "mode": "auto"}},
        "tool_choice.tools",
    ),
    (
        responses,
        {
            "input": "x",
            "tools": [NAMESPACE],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": ALLOWED},
        },
        "tool_choice.tools.1",
    ),
    (messages, {"messages": [{"role": "user", "content": []}]}, "messages"),
    (messages, {"messages": [USER], "response_format": {"type": "json_object"}}, "response_format"),
    (messages, {"messages": [USER], "logprobs": True}, "logprobs"),
    (responses, {"input": "x", "reasoning_effort": "low"}, "reasoning_effort"),
    (responses, {"input": "x", "return_token_ids": True}, "return_token_ids"),
    (responses, {"input": [{"type": "reasoning", "summary": []}]}, "input"),
    (messages, {"messages": [USER], "stop_sequences": ["x"] * 65}, "stop_sequences"),
]


@pytest.mark.parametrize(("make", "body", "param"), WRONG)
def test_errors_name_the_fields_of_the_original_body(make: Any, body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        make(**body)
    assert refused.value.param == param and refused.value.message


def test_texts_of_a_message_stay_parts_on_every_api() -> None:
    texts = ("a", "b")
    chat = ChatRequest.model_validate(
        {"messages": [{"role": role, "content": parts(*texts)} for role in ("system", "user", "assistant")]}
    )
    of_responses = responses(
        input=[
            {"role": "system", "content": parts(*texts, kind="input_text")},
            {"role": "user", "content": parts(*texts, kind="input_text")},
            {"role": "assistant", "content": parts(*texts, kind="output_text")},
        ]
    )
    of_messages = messages(
        system=parts(*texts),
        messages=[{"role": role, "content": parts(*texts)} for role in ("user", "assistant")],
    )
    assert said(of_responses) == said(of_messages) == said(chat)
    assert [each["content"] for each in said(chat)] == [parts(*texts)] * 3


def test_texts_around_a_call_are_one() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    answers = [{"role": "assistant", "content": parts(*each, kind="output_text")} for each in ("ab", "cd")]
    chat = responses(input=[USER, answers[0], call, answers[1]])
    assert said(chat)[1]["content"] == parts("a", "bc", "d")
    use = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
    content = [*parts("a", "b"), use, *parts("c", "d")]
    anthropic = messages(messages=[USER, {"role": "assistant", "content": content}, USER])
    assert said(anthropic)[1]["content"] == parts("a", "bc", "d")


def test_an_output_without_a_call_id_is_that_of_the_only_call_without_one() -> None:
    calls = [
        {"type": "function_call", "call_id": f"c{i}", "name": name, "arguments": "{}"}
        for i, name in enumerate("fg")
    ]
    f, g = ({"type": "function_call_output", "output": "x", "name": name} for name in "fg")
    read = responses(input=[USER, *calls, g, {**f, "call_id": None, "name": None}])
    assert [each["tool_call_id"] for each in said(read) if each["role"] == "tool"] == ["c1", "c0"]
    for wrong in ([*calls, {**f, "name": None}], [f], [calls[0], f, f]):
        with pytest.raises(RequestError, match=r"call_id is needed") as refused:
            responses(input=[USER, *wrong])
        assert refused.value.param == f"input.{len(wrong)}.call_id"
