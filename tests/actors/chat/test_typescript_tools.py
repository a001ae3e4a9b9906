"""Tools in TypeScript for Kimi K2.5, against the output of its publisher's encoder.

`data/typescript_tools.json` was written by tool_declaration_ts.py as published with Kimi-K2.5, from tools
with keys sorted by tokenization_kimi.py; null if it raised.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from manta.actors.tokenization.chat_template import ChatTemplate
from manta.actors.tokenization.tiktoken_tokenizer import sorts_tools
from manta.actors.tokenization.typescript_tools import declare, sort_keys
from manta.cluster.errors import RequestError
from support.paths import DATA

RECORDED: dict[str, dict[str, Any]] = json.loads((DATA / "typescript_tools.json").read_text(encoding="utf-8"))
# As in Kimi-K2.5's chat_template.jinja.
TEMPLATE = (
    "{%- if tools -%}<|im_system|>tool_declare<|im_middle|>"
    "{%- if tools_ts_str -%}{{ tools_ts_str }}"
    "{%- else -%}{{ tools | tojson(separators=(',', ':')) }}{%- endif -%}"
    "<|im_end|>{%- endif -%}{{ messages[0].content }}"
)
MESSAGES = [{"role": "user", "content": "Hi"}]
UNSORTED = [{"type": "function", "function": {"parameters": {"type": "object"}, "name": "f"}}]


@pytest.mark.parametrize("name", RECORDED)
def test_declarations_equal_the_published_encoders(name: str) -> None:
    recorded = RECORDED[name]
    assert declare(sort_keys(recorded["tools"])) == recorded["typescript"]


def test_the_recorded_cases_contain_both_kinds() -> None:
    texts = [recorded["typescript"] for recorded in RECORDED.values()]
    assert None in texts and "" in texts and sum(bool(text) for text in texts) > 10


def test_a_template_that_names_declarations_gets_them() -> None:
    recorded = RECORDED["a function"]
    text = ChatTemplate(TEMPLATE, {}).render(MESSAGES, tools=recorded["tools"])
    assert text == f"<|im_system|>tool_declare<|im_middle|>{recorded['typescript']}<|im_end|>Hi"


def test_undeclarable_tools_are_json_with_sorted_keys() -> None:
    tools = RECORDED["refused: allOf"]["tools"]
    compact = json.dumps(tools, separators=(",", ":"), sort_keys=True)
    text = ChatTemplate(TEMPLATE, {}).render(MESSAGES, tools=tools)
    assert text == f"<|im_system|>tool_declare<|im_middle|>{compact}<|im_end|>Hi"


def test_without_tools_nothing_is_declared() -> None:
    assert ChatTemplate(TEMPLATE, {}).render(MESSAGES) == "Hi"


def test_a_recursive_schema_is_not_declared() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}]
    assert declare(tools) is None
    with pytest.raises(RequestError, match="too deep"):
        ChatTemplate(TEMPLATE, {}).render(MESSAGES, tools=tools)


@pytest.mark.parametrize("sorts", [False, True])
def test_keys_are_sorted_if_the_model_was_trained_so(sorts: bool) -> None:
    template = ChatTemplate("{{ tools | tojson }}", {}, sorts_tools=sorts)
    assert template.render(MESSAGES, tools=UNSORTED) == json.dumps(UNSORTED, sort_keys=sorts)
    assert template.another("-{{ tools | tojson }}").render(MESSAGES, tools=UNSORTED) == "-" + json.dumps(
        UNSORTED, sort_keys=sorts
    )


@pytest.mark.parametrize(
    ("code", "expected"), [(None, False), ("x = 1", False), ("tools = deep_sort_dict(tools)", True)]
)
def test_sorting_is_read_from_the_publishers_code(tmp_path: Path, code: str | None, expected: bool) -> None:
    assert not sorts_tools(tmp_path)
    settings = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if code is not None:
        (tmp_path / "tokenization_kimi.py").write_text(code)
    assert sorts_tools(tmp_path) == expected
