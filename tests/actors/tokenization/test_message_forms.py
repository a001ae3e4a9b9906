"""Contents reach a template as text or parts, whichever it takes; transformers passes them as sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manta.actors.http.protocol.chat_completion import ChatMessage
from manta.actors.tokenization.chat_template import ChatTemplate
from manta.actors.tokenization.client_messages import parse_arguments
from manta.cluster.errors import RequestError
from transformers.utils.chat_template_utils import render_jinja_template

IF_TEXT = "{% if m.content is string %}{{ m.content }}"
# How published templates read a content: those of text models, of both kinds, and of models that see images.
CONTENTS = {
    "text": "{{ m.content }}",
    "stripped": "{{ m['content'].strip() }}",
    "added": "{{ '' + m['content'] + '' }}",
    "both": f"{IF_TEXT}{{% else %}}{{% for p in m.content %}}{{{{ p.text }}}}{{% endfor %}}{{% endif %}}",
    "spaced": f"{IF_TEXT}{{% else %}}{{% for p in m.content %}}{{{{ p.text }}}} {{% endfor %}}{{% endif %}}",
    "text only": f"{IF_TEXT}{{% endif %}}",
    "parts": "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}",
    "selected": "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p['text'] }}{% endfor %}",
    "first": "{{ m['content'][0]['text'] }}",
    "json": "{{ m.content if m.content is string else m.content | tojson }}",
}
EACH = "{%% for m in messages %%}[{{ m.role }}:%s]{%% endfor %%}"
OURS = {name: ChatTemplate(EACH % content, {}) for name, content in CONTENTS.items()}
TEXTS = st.text(st.sampled_from("aä😀. "), min_size=1, max_size=5).map(lambda text: f"<{text}>")
PARTS = st.lists(TEXTS, min_size=1, max_size=3).map(lambda texts: [parts(text)[0] for text in texts])


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def texts_of(content: str | list[dict[str, str]]) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content]


@pytest.mark.parametrize("name", CONTENTS)
@given(contents=st.lists(TEXTS | PARTS, min_size=1, max_size=6))
def test_no_text_is_lost_in_either_form(name: str, contents: list[Any]) -> None:
    roles = ["system", *["user", "assistant"] * len(contents)]
    messages = [{"role": role, "content": each} for role, each in zip(roles, contents, strict=False)]
    rendered = OURS[name].render([ChatMessage.model_validate(each).for_template("") for each in messages])
    at = 0
    for content in contents:
        for text in texts_of(content):
            at = rendered.index(text, at) + len(text)
    assert rendered.count("<") == sum(len(texts_of(content)) for content in contents)


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("content", ["A", parts("A"), parts("A", "B")], ids=["text", "part", "parts"])
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_a_form_that_a_template_takes_is_passed_as_transformers_passes_it(
    name: str, content: Any, role: str
) -> None:
    messages = [{"role": role, "content": content}]
    try:
        (theirs,), _ = render_jinja_template([messages], chat_template=EACH % CONTENTS[name])
    except Exception:
        theirs = ""
    ours = OURS[name].render(messages)
    keeps = (
        all(text in theirs for text in texts_of(content))
        and "'type'" not in theirs
        and '"type"' not in theirs
    )
    assert ours == (theirs if keeps else f"[{role}:{chr(10).join(texts_of(content))}]")


def call(arguments: Any, content: Any = "") -> list[Mapping[str, Any]]:
    called = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": content, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "R"},
    ]


@pytest.mark.parametrize(
    "written", ["{{ c.function.arguments | items | list }}", "{{ '=' + c.function.arguments }}"]
)
def test_results_of_tools_reach_a_template_of_parts_with_calls_of_either_form(written: str) -> None:
    calls = f"{{% for c in m.tool_calls or [] %}}{written}{{% endfor %}}"
    rendered = ChatTemplate(EACH % (CONTENTS["parts"] + calls), {}).render(call({"a": 1}, "said"))
    assert "[user:U][assistant:said" in rendered and rendered.endswith("[tool:R]")


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ('{"a": 1e3}', "1000.0"),
        ('{"a": 1180591620717411303424}', "1180591620717411303424"),
        ('{"a": 1180591620717411303424, "b": "\\ud83d"}', "1180591620717411303424"),
        ('{"a": -0.0}', "-0.0"),
        ('{"a": 1e-7}', "1e-07"),
        ('{"a": "1234567890123456789012"}', "1234567890123456789012"),
    ],
)
def test_numbers_of_calls_are_written_as_python_writes_them(arguments: str, written: str) -> None:
    template = ChatTemplate(
        EACH % "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments['a'] }}{% endfor %}",
        {},
    )
    assert f"[assistant:{written}]" in template.render(parse_arguments(call(arguments)))


@pytest.mark.parametrize(
    "source", ["{{ messages | length }}", "{% for m in messages %}{{ m.text }}{% endfor %}"]
)
def test_a_template_that_takes_text_in_no_form_is_refused(source: str) -> None:
    template = ChatTemplate(source, {})
    for content in ("said", parts("said")):
        with pytest.raises(RequestError, match="leaves out the text") as refused:
            template.render([{"role": "user", "content": content}])
        assert refused.value.param == "messages"


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


WRITES = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + EACH % "{{ m.content }}"
AFTER_SYSTEM = EACH % "{{ m.content }}{% if m.role == 'system' %}{{ tools }}{% endif %}"
BY_VARIABLE = "{{ xml_tools }}" + EACH % "{{ m.content }}"
IN_MESSAGE = EACH % "{{ m.content }}{{ m.tools }}"
USER: list[Mapping[str, Any]] = [{"role": "user", "content": "Use f."}]
SYSTEM: list[Mapping[str, Any]] = [{"role": "system", "content": "S"}, *USER]


@pytest.mark.parametrize(
    ("source", "messages", "variables", "seen"),
    [
        (WRITES, USER, {}, True),
        (EACH % "{{ m.content }}", USER, {}, False),  # though a message names it
        (AFTER_SYSTEM, SYSTEM, {}, True),
        (AFTER_SYSTEM, USER, {}, False),
        (BY_VARIABLE, USER, {"xml_tools": ["f(x)"]}, True),
        (BY_VARIABLE, USER, {"xml_tools": ["g(x)"]}, True),  # the user's message names it
        (BY_VARIABLE, [{"role": "user", "content": "x"}], {"xml_tools": ["g"]}, False),
        (IN_MESSAGE, [{**SYSTEM[0], "tools": "f"}, *USER], {}, True),
    ],
)
def test_tools_that_the_model_would_not_see_are_refused(
    source: str, messages: Sequence[Mapping[str, Any]], variables: dict[str, Any], seen: bool
) -> None:
    template = ChatTemplate(source, {})
    for _ in range(2):
        if seen:
            assert "f" in template.render(messages, tools=[tool("f")], variables=variables)
            continue
        with pytest.raises(RequestError, match="--chat-template") as refused:
            template.render(messages, tools=[tool("f")], variables=variables)
        assert refused.value.param == "tools"
    assert template.render(messages, tools=[], variables=variables)


@pytest.mark.parametrize("content", ["It is ", parts("It", "is "), "<end of the final message> x"])
@pytest.mark.parametrize("name", ["text", "stripped", "parts", "first"])
def test_a_continued_message_ends_where_its_text_ends(name: str, content: Any) -> None:
    """Spaces at its end are kept where the template keeps them."""
    messages = [{"role": "user", "content": "It is "}, {"role": "assistant", "content": content}]
    whole = OURS[name].render(messages).removesuffix("]")
    assert OURS[name].render(messages, continue_final_message=True) == whole


def test_templates_by_name_are_compiled_once() -> None:
    template = ChatTemplate({"default": WRITES, "rag": AFTER_SYSTEM}, {})
    assert template.another("rag") is template.another("rag") is not template.another("default")
