"""Conversations in the form that a template accepts: no role is refused and no message omitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manta.actors.tokenization.chat_template import ChatTemplate
from manta.cluster.errors import RequestError
from support.checkpoints.role_templates import NO_TOOLS, ROLE_TEMPLATES
from transformers.utils.chat_template_utils import render_jinja_template

SYSTEM = st.sampled_from(("system", "developer"))
TALK = st.sampled_from(("system", "developer", "user", "assistant", "call"))
OURS = {name: ChatTemplate(source, {}) for name, source in ROLE_TEMPLATES.items()}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {}}}


def conversation(leading: Sequence[str], behind: Sequence[str]) -> list[dict[str, Any]]:
    """Messages with distinct texts; a call is answered by a tool."""
    found: list[dict[str, Any]] = []
    for role in (*leading, "user", *behind):
        text = f"<{len(found)}:{role}>"
        if role == "call":
            found.append({"role": "assistant", "content": text, "tool_calls": [CALL]})
            found.append({"role": "tool", "content": f"<{len(found)}:tool>", "tool_call_id": CALL["id"]})
        else:
            found.append({"role": role, "content": text})
    return found


@pytest.mark.parametrize("name", ROLE_TEMPLATES)
@given(leading=st.lists(SYSTEM, max_size=3), behind=st.lists(TALK, max_size=6))
def test_every_message_is_rendered_once_and_in_order(
    name: str, leading: list[str], behind: list[str]
) -> None:
    messages = conversation(leading, ["assistant" if r == "call" and name in NO_TOOLS else r for r in behind])
    shown = OURS[name].render(messages)
    places = [shown.index(message["content"]) for message in messages]
    assert places == sorted(places)
    assert all(shown.count(message["content"]) == 1 for message in messages)


@pytest.mark.parametrize("name", ROLE_TEMPLATES)
@given(data=st.data())
def test_messages_that_a_template_accepts_are_unchanged(name: str, data: st.DataObject) -> None:
    if name in ("qwen3", "llama3"):  # these take any role anywhere
        leading = data.draw(st.lists(st.just("system"), max_size=2))
        behind = data.draw(st.lists(TALK.filter(lambda role: role != "developer"), max_size=4))
    else:
        leading = [] if name == "gemma2" else data.draw(st.lists(st.just("system"), max_size=1))
        behind = ["assistant", "user"] * data.draw(st.integers(0, 2))
        behind += [] if name in NO_TOOLS else data.draw(st.lists(st.just("call"), max_size=2))
    messages = conversation(leading, behind)
    (alone,), _ = render_jinja_template(
        [messages], chat_template=ROLE_TEMPLATES[name], add_generation_prompt=True
    )
    assert OURS[name].render(messages) == alone


S, D, U, A = ({"role": r, "content": r[0].upper()} for r in ("system", "developer", "user", "assistant"))
FOLDED: list[tuple[str, list[dict[str, Any]], list[tuple[str, str]]]] = [
    ("qwen3", [D, U], [("system", "D"), ("user", "U")]),
    (
        "qwen3",
        [S, D, U, S, U],
        [(r["role"].replace("developer", "system"), r["content"]) for r in (S, D, U, S, U)],
    ),
    ("qwen35", [S, D, U], [("system", "S\n\nD"), ("user", "U")]),
    ("qwen35", [U, S], [("user", "U\n\nS")]),
    ("qwen35", [U, S, U], [("user", "U\n\nS"), ("user", "U")]),
    ("qwen35", [U, A, S, U], [("user", "U"), ("assistant", "A"), ("user", "S\n\nU")]),
    ("qwen35", [U, A, S], [("user", "U"), ("assistant", "A"), ("user", "S")]),
    ("gemma2", [S, U], [("user", "S\n\nU")]),
    ("gemma2", [S], [("user", "S")]),
    ("gemma3", [S, S], [("user", "S\n\nS")]),
    ("qwen35", [S], [("user", "S")]),
    ("gemma2", [U, S, U], [("user", "U\n\nS\n\nU")]),
    ("gemma3", [S, S, U], [("system", "S\n\nS"), ("user", "U")]),
    ("mistral", [U, A, A, U], [("user", "U"), ("assistant", "A\n\nA"), ("user", "U")]),
    ("llama3", [D, U, D], [("system", "D"), ("user", "U"), ("system", "D")]),
    ("gpt_oss", [D, U], [("developer", "D"), ("user", "U")]),
    ("gpt_oss", [S, D, U, S], [("system", "S\n\nD"), ("user", "U\n\nS")]),
]


@pytest.mark.parametrize(("name", "messages", "wanted"), FOLDED)
def test_messages_that_a_template_refuses_are_merged_into_a_neighbor(
    name: str, messages: list[dict[str, Any]], wanted: list[tuple[str, str]]
) -> None:
    assert [(m["role"], m["content"]) for m in OURS[name]._jinja.fit(messages)] == wanted


def test_messages_after_a_tools_output_are_merged_into_it_if_no_user_message_may_follow() -> None:
    messages = conversation([], ["call", "user", "assistant"])
    wanted = ["<0:user>", "<1:call>", "<2:tool>\n\n<3:user>", "<4:assistant>"]
    assert [m["content"] for m in OURS["mistral"]._jinja.fit(messages)] == wanted
    assert OURS["qwen35"]._jinja.fit(messages) == messages


def test_joined_messages_keep_reasoning_calls_and_the_text_of_parts() -> None:
    one = {**A, "reasoning_content": "R", "tool_calls": [CALL]}
    _, answer = OURS["mistral"]._jinja.fit([U, A, one])
    assert answer == {**one, "content": "A\n\nA"}
    parts = [{"type": "text", "text": "P"}]
    (user,) = OURS["mistral"]._jinja.fit([U, {"role": "user", "content": parts}])
    assert user["content"] == "U\n\nP"


def test_calls_are_passed_in_the_form_that_a_template_accepts() -> None:
    """DeepSeek-R1 adds arguments to a text; gpt-oss refuses text together with reasoning and calls."""
    adds = ChatTemplate(
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ '[' + c.function.arguments + ']' }}{% endfor %}{% endfor %}",
        {},
    )
    refuses = ChatTemplate(
        "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}"
        "{{ raise_exception('both') }}{% endif %}{{ m.thinking or m.content }}{% endfor %}",
        {},
    )
    call = {**CALL, "function": {"name": "f", "arguments": {"a": "é"}}}
    said = {**A, "thinking": "T", "reasoning_content": "T", "tool_calls": [call]}
    reported = {"role": "tool", "content": "R", "tool_call_id": CALL["id"]}
    assert adds.render([U, said, reported]) == 'UA[{"a": "é"}]R'
    assert (
        adds.render([U, {**said, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]}])
        == "UA[{]"
    )
    assert refuses.render([U, said, reported]) == "UT\n\nAR"
    assert refuses.render([U, {**A, "thinking": "T"}]) == "UT"


def test_an_unsupported_system_message_is_prepended_to_the_users() -> None:
    template = ChatTemplate("{% for m in messages if m.role != 'system' %}[{{ m.content }}]{% endfor %}", {})
    assert template.render([S, S, U, U]) == "[S\n\nS\n\nU][U]"


def test_the_error_of_a_template_that_accepts_nothing_is_shown() -> None:
    template = ChatTemplate("{{ raise_exception('not today') }}", {})
    with pytest.raises(RequestError, match="not today"):
        template.render([S, U, S])
    with pytest.raises(RequestError, match="No user query"):
        OURS["qwen35"].render([S, A])
