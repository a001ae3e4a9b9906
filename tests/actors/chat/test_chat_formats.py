"""Detection of a model's chat formats, forced calls, marks in texts, and templates."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from manta.actors.batch.ledger.job_spec import settings_identity
from manta.actors.chat.answer_grammar import AnswerGrammar, Reasoning
from manta.actors.chat.call_syntax import CallSyntax
from manta.actors.chat.chat_formats import CALLS, mark_ids
from manta.actors.chat.chat_model import ChatModel, ReasoningCounter
from manta.actors.chat.stream_parser import Splitter
from manta.actors.chat.text_stream import concatenate
from manta.actors.structured_outputs.grammar_frontend import written_grammar
from manta.actors.tokenization.chat_template import ChatTemplate
from manta.actors.tokenization.jinja_template import JinjaTemplate
from manta.actors.tokenization.prompts import load_tokenizer
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.cluster.errors import ConfigError, RequestError
from manta.cluster.request.structured_outputs import Grammar
from manta.drafter.grammars.compiler import GrammarCompiler
from support.checkpoints.byte_tokenizer import byte_tokenizer
from support.checkpoints.chat_pairs import HARMONY, HARMONY_TOKENS, HERMES, NOW, TOOLS, chat_config

THINK = ("<think>", "</think>")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def takes(tokenizer: Tokenizer) -> Callable[[str, str], bool]:
    """Returns whether a text is an answer under a Lark grammar."""
    ends = (tokenizer.special_token_ids["<|im_end|>"],)
    compiler = GrammarCompiler(tokenizer.to_json(), tokenizer.vocab_size, ends)

    def takes(lark: str, text: str) -> bool:
        matcher = compiler.matcher(Grammar("lark", lark))
        ids = tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return takes


def forced_calls(
    syntax: CallSyntax, schemas: Mapping[str, Any], tokenizer: Tokenizer, *, several: bool
) -> str:
    marks = mark_ids([syntax], tokenizer.added_token_ids)
    return AnswerGrammar(syntax, schemas, marks, Reasoning()).forced(several=several)


W = json.dumps({"city": "Paris", "days": 3})
# By each format: the calls of both tools, as the model was trained to write them.
CALLED = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {W}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": f'{{"name": "get_weather", "parameters": {W}}}; {{"name": "now", "parameters": {{}}}}',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "mimo": "<tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n<parameter=days>3"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris'
    '</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n'
    '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    f"<|tool_call_argument_begin|>{W}<|tool_call_end|><|tool_call_begin|>functions.now:1"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'
    "<|tool_call>call:now{}<tool_call|>",
    "openai": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + W,
    "muse_glimmer": " to=get_weather<|message|><atem:function_calls>\n"
    '<atem:invoke name="get_weather">\n<atem:parameter name="city">Paris</atem:parameter>\n'
    '<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|>'
    '<|start|>assistant to=now<|message|><atem:function_calls>\n<atem:invoke name="now">\n</atem:invoke>\n'
    "</atem:function_calls>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    f"{W}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
    f"get_weather<｜tool▁sep｜>{W}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    "mistral": f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {W}}}, '
    '{"name": "now", "arguments": {}}]',
    "seed_oss": "<seed:tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n"
    "<function=now>\n</function>\n</seed:tool_call>",
}
# In these a schema of text would let anything through, so its words are not enumerated.
PLAIN_WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": PLAIN_WEATHER, "now": NOW["function"]["parameters"]}


@pytest.mark.parametrize("name", sorted(CALLED))
def test_forced_calls_are_parsed_by_the_splitter(
    tokenizer: Tokenizer, takes: Callable[[str, str], bool], name: str
) -> None:
    syntax, text = CALLS[name], CALLED[name]
    alone = name == "openai"  # a message is one call, and ends the answer
    lark = forced_calls(syntax, SCHEMAS, tokenizer, several=True)
    assert takes(lark, text)
    reader = Splitter(None, syntax, schemas=SCHEMAS)
    found = concatenate([reader.feed(text), reader.finish()])
    called = [(call.name, json.loads(call.arguments)) for call in found.calls]
    assert called == [("get_weather", json.loads(W)), ("now", {})][: 1 if alone else 2] and not found.content
    single = forced_calls(syntax, SCHEMAS, tokenizer, several=False)
    assert takes(single, text) == alone
    named = forced_calls(syntax, {"now": SCHEMAS["now"]}, tokenizer, several=True)
    for wrong in (text, "Hello.", "", text.replace("days", "hours"), text.replace("3", '"three"')):
        assert not takes(named if wrong == text else lark, wrong), wrong


def test_calls_of_strict_tools_fit_their_schemas_with_auto(takes: Callable[[str, str], bool]) -> None:
    model = ChatModel.of(byte_tokenizer(HERMES))
    strict = model.constraint("", SCHEMAS, None, required=False, strict={"get_weather"})
    assert strict is not None and strict.field == "tools"
    _, lark = written_grammar(strict)
    call = CALLED["hermes"]
    for text, allowed in (
        ("Hello.", True),
        (f"I look.\n{call}\nDone.", True),
        (call.replace("{}", '{"any": 1}'), True),
        (call.replace("days", "hours"), False),
        (call.replace("get_weather", "unknown"), False),
    ):
        assert takes(lark, text) == allowed, text


def test_only_allowed_tools_are_called_with_auto(takes: Callable[[str, str], bool]) -> None:
    model = ChatModel.of(byte_tokenizer(HERMES))
    allowed = {"now": {**SCHEMAS["now"], "uniqueItems": True}}
    found = model.constraint("", allowed, None, required=False, are_some=True)
    assert found is not None and not found.left_out
    _, lark = written_grammar(found)
    now = '<tool_call>\n{"name": "now", "arguments": {"any": 1}}\n</tool_call>'
    assert takes(lark, "Hello.") and takes(lark, f"I look.\n{now}") and not takes(lark, CALLED["hermes"])
    assert model.constraint("", {}, None, required=False, are_some=True) is None  # tool_choice is none


@pytest.mark.parametrize("required", [[], ["a"], ["b"], ["a", "b"]])
def test_optional_arguments_may_be_omitted(
    tokenizer: Tokenizer, takes: Callable[[str, str], bool], required: list[str]
) -> None:
    kinds = {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": "string"}}
    schemas = {"f": {"type": "object", "properties": kinds, "required": required}}
    written = {"a": 'a:<|"|>x<|"|>', "b": "b:1", "c": 'c:<|"|>y<|"|>'}
    quoted = forced_calls(CALLS["gemma4"], schemas, tokenizer, several=False)
    tagged = forced_calls(CALLS["mimo"], schemas, tokenizer, several=False)
    for present in ([], ["a"], ["b"], ["a", "b"], ["a", "b", "c"], ["b", "c"], ["c"]):
        complete = set(required) <= set(present)
        ordered = sorted(present, key=lambda key: (key not in required, key))
        text = "<|tool_call>call:f{" + ",".join(written[key] for key in ordered) + "}<tool_call|>"
        assert takes(quoted, text) == complete, text
        values = {"a": "x", "b": "1", "c": "y"}
        text = "<tool_call>\n<function=f>\n"
        text += "".join(f"<parameter={key}>{values[key]}</parameter>\n" for key in present)
        assert takes(tagged, text + "</function>\n</tool_call>") == complete, text


@pytest.mark.parametrize("bounds", [{}, {"minItems": 1}, {"minItems": 2, "maxItems": 3}, {"maxItems": 2}])
def test_items_have_the_schemas_of_their_places_and_the_last_ones_may_be_omitted(
    tokenizer: Tokenizer, takes: Callable[[str, str], bool], bounds: dict[str, int]
) -> None:
    kinds = [{"type": "integer"}, {"type": "string"}, {"type": "boolean"}]
    array = {"type": "array", "prefixItems": kinds, "items": {"type": "null"}, **bounds}
    schemas = {"f": {"type": "object", "properties": {"a": array}, "required": ["a"]}}
    lark = forced_calls(CALLS["gemma4"], schemas, tokenizer, several=False)
    for items in itertools.chain.from_iterable(
        itertools.permutations((1, "x", True, None, None), n) for n in range(6)
    ):
        written = ",".join(f'<|"|>{each}<|"|>' if each == "x" else json.dumps(each) for each in items)
        is_valid = jsonschema.Draft202012Validator(array).is_valid(list(items))
        assert takes(lark, f"<|tool_call>call:f{{a:[{written}]}}<tool_call|>") == is_valid, written


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        (HERMES, "hermes", "qwen3"),
        (HARMONY + "<|message|>", "openai", "openai_gptoss"),
        ("{{ '<tool_call>\\n<function=' }}<parameter=", "qwen3_coder", None),
        ("{{ '<tool_call>\\n<function=' }}<parameter=<think>", "qwen3_coder", "qwen3"),  # Qwen3.5
        ("<seed:tool_call><function=<parameter=<seed:think>", "seed_oss", "seed_oss"),
        ("[TOOL_CALLS]", "mistral", None),
        ("[TOOL_CALLS][THINK]", "mistral", "mistral"),
        ("<｜tool▁calls▁begin｜>```json", "deepseek_v3", None),
        ("<｜tool▁calls▁begin｜><think>", "deepseek_v31", "deepseek_v3"),
        ("{{ '<' + '｜DSML｜' + 'function_calls>' }}", "deepseek_v32", "deepseek_v3"),
        ("{{ '<' + '｜DSML｜' + 'tool_calls>' }}", "deepseek_v4", "deepseek_v3"),
        # Formats that look like others, and have no parser.
        ("<function={{ name }}>{{ json }}</function>", None, None),  # functionary
        ("]<]minimax[>[<tool_call>", None, None),  # MiniMax-M3
        ("<tool_calls>[{{ json }}]</tool_calls> not <tool_call>", None, None),  # Apriel
        ("<|tool_call>", "gemma4", "gemma4"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2", "kimi_k2"),
        ("<minimax:tool_call><think>", "minimax_m2", "minimax_m2"),
        ("<tool_call><arg_key>", "glm45", "glm45"),
        ('{"name": .., "parameters": ..} ipython', "llama3_json", None),
        ("{{ messages }}", None, None),
    ],
)
def test_a_models_formats_are_detected_from_its_template(
    template: str, calls: str | None, reasoning: str | None
) -> None:
    model = ChatModel.of(byte_tokenizer(template))
    assert (model.call_parser, model.reasoning_parser) == (calls, reasoning)
    chosen = ChatModel.of(byte_tokenizer(template), tool_call_parser="glm45", reasoning_parser="none")
    assert str(chosen) == "tool_call_parser=glm45, reasoning_parser=none"
    with pytest.raises(ConfigError, match="hermes"):
        ChatModel.of(byte_tokenizer(template), tool_call_parser="hermess")


def test_reasoning_starts_open_if_the_prompt_opens_it(tokenizer: Tokenizer) -> None:
    model = ChatModel.of(byte_tokenizer(HERMES))
    assert model.reading("a<|im_start|>assistant\n<think>\n").opened
    assert not model.reading("<think> is a mark<|im_start|>assistant\n").opened
    assert not model.reading("assistant\n<think>\n\n</think>\n\n").opened
    always = ChatModel.of(byte_tokenizer(), reasoning_parser="minimax_m2")
    assert always.reading("assistant\n").opened and not always.reading("<think>\n\n</think>\n").opened


def test_marks_stay_in_a_text_without_its_other_special_tokens(tokenizer: Tokenizer) -> None:
    model = ChatModel.of(byte_tokenizer(HARMONY + "<|message|>"))
    assert {tokenizer.special_token_ids[mark] for mark in HARMONY_TOKENS} <= set(model.kept_token_ids)
    ids = tokenizer.encode("<|channel|>analysis<|message|>é<|im_end|><|end|>", add_special_tokens=False)
    for kept, text in ((model.kept_token_ids, "<|channel|>analysis<|message|>é<|end|>"), ((), "analysisé")):
        reader = tokenizer.detokenizer([5, 6], skip_special_tokens=True, kept_token_ids=kept)
        assert reader.step(ids) + reader.flush() == text
    assert ChatModel.of(byte_tokenizer("{{ messages }}")).kept_token_ids == ()


def test_reasoning_tokens_are_counted_if_the_marks_are_tokens() -> None:
    def count(model: ChatModel, text: str, *, opened: bool = False) -> int | None:
        assert model.thinking is not None and model.tokenizer is not None
        counter = ReasoningCounter.of(model.thinking, model.tokenizer, opened=opened)
        if counter is None:
            return None
        for token_id in model.tokenizer.encode(text, add_special_tokens=False):
            counter.feed([token_id])
        return counter.count

    model = ChatModel.of(byte_tokenizer(HERMES, added=THINK))
    assert count(model, "<think>abc</think>defg<think>h</think>") == 4
    assert count(model, "abc</think>defg", opened=True) == 3
    assert count(model, "abcdefg") == 0
    assert count(ChatModel.of(byte_tokenizer(HERMES)), "<think>abc</think>") is None
    gpt = ChatModel.of(byte_tokenizer(HARMONY + "<|message|>"))
    said = "<|channel|>analysis<|message|>abc<|end|><|start|>assistant<|channel|>final<|message|>defg"
    assert count(gpt, said) == 3


TEMPLATES = {
    "hermes": HERMES,
    "harmony": HARMONY,
    "json": "{{ tools | tojson }}|{{ tools[0] | tojson(indent=2) }}|"
    "{{ messages | tojson(separators=(',', ':')) }}",
    "generation": "{% for m in messages %}"
    "{%- generation %} {{ m.content }} {% endgeneration -%} {% endfor %}",
    "loops": "{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
    "{% set ns.n = ns.n + loop.index0 %}{{ m['role'] | upper }}"
    "{{ '\\n' if not loop.last }}{% endfor %}{{ ns.n }}"
    "{% for m in messages[::-1] %}{{ m.content | trim }}{% break %}{% endfor %}",
    "macros": "{% macro f(t) -%}"
    "{%- for k, v in t.function.parameters.properties | items %}{{ k }}={{ v.type }};"
    "{% endfor %}{%- endmacro %}{% for t in tools %}{{ f(t) }}{% endfor %}{{ 'a,b'.split(',')[-1].strip() }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    calls = [{"function": {"name": "now", "arguments": {"a": "<"}}}]
    messages = [
        {"role": "user", "content": "Is 1 < 2 & 'é'?"},
        {"role": "assistant", "content": " yes ", "tool_calls": calls},
    ]
    given: dict[str, Any] = {"tools": [*TOOLS], "documents": [{"text": "d"}]}
    options = {"chat_template": TEMPLATES[name], "add_generation_prompt": True, "whole_tools": True}
    rendered, _ = render_jinja_template([messages], **given, **options)
    variables = {"messages": messages, "add_generation_prompt": True, "whole_tools": True}
    assert JinjaTemplate(TEMPLATES[name]).render({**variables, **given}) == rendered[0]


def test_templates_are_bounded_and_their_settings_are_checked() -> None:
    endless = "{% for i in range(100000) %}{% for j in range(100000) %}{{ j }}{% endfor %}{% endfor %}"
    for source in (endless, "{{ messages[0].content.nothing.at_all }}", "{{ raise_exception('no') }}"):
        with pytest.raises(RequestError) as caught:
            ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])
        assert caught.value.param == "messages"
    for source in ("{% if %}", "x" * 300_000):
        with pytest.raises(RequestError) as caught:
            ChatTemplate(source, {})
        assert caught.value.param == "chat_template"
    with pytest.raises(RequestError, match=r"default_chat_template_kwargs\.messages"):
        ChatTemplate("", {}, {"messages": []})


def test_a_template_setting_replaces_the_checkpoints_template(tmp_path: Path) -> None:
    config = chat_config(tmp_path, HERMES)
    assert settings_identity(config) == {}
    file = tmp_path / "own.jinja"
    identities: list[object] = []
    for source, text in (("{{ a }}{{ messages[0].content }}", "1x"), ("{{ a }}.", "1.")):
        file.write_text(source)
        own = replace(config, chat_template=str(file), default_chat_template_kwargs={"a": 1})
        tokenizer = load_tokenizer(own)
        assert tokenizer is not None
        assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == text
        identities.append(settings_identity(own))
    assert identities[0] != identities[1]
    with pytest.raises(ConfigError, match="nowhere"):
        load_tokenizer(replace(config, chat_template=str(tmp_path / "nowhere")))
    file.write_text("{% if %}")
    with pytest.raises(ConfigError, match="no Jinja template"):
        load_tokenizer(replace(config, chat_template=str(file)))
