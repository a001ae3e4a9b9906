"""The grammar of a whole answer: reasoning, then calls or constrained text, in each family's format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from manta.actors.chat.chat_model import ChatModel
from manta.actors.structured_outputs.grammar_frontend import written_grammar
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.cluster.request.structured_outputs import Grammar, StructuredOutputsParams
from manta.drafter.grammars.compiler import GrammarCompiler
from support.checkpoints.byte_tokenizer import byte_tokenizer
from support.checkpoints.chat_pairs import HARMONY, HERMES, NOW

QWEN = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # added tokens that are not special
SCHEMAS = {"now": NOW["function"]["parameters"]}
ANSWER = StructuredOutputsParams(
    json={"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    disable_any_whitespace=True,
)
JSON = '{"name":"Bo"}'
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
LLAMA = '{"name": .., "parameters": ..} ipython'

Takes = Callable[[str], bool]


def constrained(
    tokenizer: Tokenizer, constraint: StructuredOutputsParams | None, prompt: str = "", **more: Any
) -> Takes:
    """Return whether a text is an answer, after the tokens that the grammar waits for."""
    model = ChatModel.of(tokenizer)
    options = {"schemas": SCHEMAS, "required": False, **more}
    found = model.constraint(prompt, options.pop("schemas"), constraint, **options)
    assert found is not None
    kind, text = written_grammar(found)
    ends = (tokenizer.special_token_ids["<|im_end|>"],)
    compiler = GrammarCompiler(tokenizer.to_json(), tokenizer.vocab_size, ends)

    def takes(answer: str) -> bool:
        ids = tokenizer.encode(answer, add_special_tokens=False)
        if after := list(found.after_token_ids):
            ids = ids[next(i for i in range(len(ids)) if ids[i : i + len(after)] == after) + len(after) :]
        matcher = compiler.matcher(Grammar("lark" if kind == "grammar" else kind, text))
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return takes


@pytest.mark.parametrize("added", [QWEN, ()])
def test_an_answer_is_a_call_or_fits_the_constraint_with_or_without_reasoning(added: tuple[str, ...]) -> None:
    takes = constrained(byte_tokenizer(HERMES, added=added), ANSWER)
    for answer in (JSON, CALL, f"{CALL}\n{CALL}"):
        assert takes(answer), answer
        assert takes(f"<think>\nHm <b>.\n</think>\n\n{answer}"), answer
    for wrong in ("Bo", "<think>Hm</think>", f"Well. {JSON}", f"{JSON}{CALL}", CALL.replace("now", "f")):
        assert not takes(wrong), wrong


@pytest.mark.parametrize(
    "constraint", [{"regex": "[0-9]{2}"}, {"choice": ("42", "no")}, {"grammar": 'start: "42"'}]
)
def test_every_kind_of_constraint_stands_beside_calls(constraint: dict[str, Any]) -> None:
    takes = constrained(byte_tokenizer(HERMES, added=QWEN), StructuredOutputsParams(**constraint))
    assert takes("42") and takes(f"<think>a</think>\n{CALL}") and not takes("4")


def test_a_prompt_that_opens_or_closes_reasoning_is_continued() -> None:
    tokenizer = byte_tokenizer(HERMES, added=QWEN)
    opened = constrained(tokenizer, ANSWER, "<|im_start|>assistant\n<think>\n")
    assert opened(f"Hm.</think>\n\n{JSON}") and not opened("Hm.</think>\n\nBo")
    untokenized = constrained(byte_tokenizer(HERMES), ANSWER, "<|im_start|>assistant\n<think>\n")
    assert untokenized(f"Hm.</think>\n\n{JSON}") and not untokenized(JSON)
    closed = constrained(tokenizer, ANSWER, "<think>\n\n</think>\n\n")
    assert closed(JSON) and not closed(f"<think>a</think>{JSON}")


def test_required_calls_follow_optional_reasoning_and_replace_constrained_text() -> None:
    for added in (QWEN, ()):
        takes = constrained(byte_tokenizer(HERMES, added=added), ANSWER, required=True)
        assert takes(CALL) and takes(f"<think>a</think>\n{CALL}")
        assert not takes(JSON) and not takes("<think>a</think>")
        single = constrained(byte_tokenizer(HERMES, added=added), None, required=True, parallel=False)
        assert single(CALL) and not single(f"{CALL}\n{CALL}")


@pytest.mark.parametrize("added", [QWEN, ()])
def test_strict_calls_stand_anywhere_in_free_text(added: tuple[str, ...]) -> None:
    takes = constrained(byte_tokenizer(HERMES, added=added), None, strict={"now"})
    for answer in ("", "Hello.", CALL, f"I look.\n{CALL}\nand {CALL} <b>", f"<think>a</think>\nWell. {CALL}"):
        assert takes(answer), answer
    for wrong in (CALL.replace("now", "f"), CALL.replace("{}", '{"a": 1}'), f"{CALL} <tool_call>"):
        assert not takes(wrong), wrong


def test_an_answer_without_marks_before_calls_may_begin_as_a_call_does() -> None:
    takes = constrained(byte_tokenizer(LLAMA), ANSWER)
    assert takes(JSON) and takes('{"name": "now", "parameters": {}}')
    assert not takes('{"name": "f", "parameters": {}}') and not takes("Bo")
    strict = constrained(byte_tokenizer(LLAMA), None, strict={"now"})
    assert strict("Bo {") and strict('{"name": "now", "parameters": {}}') and not strict('{"name": "f"}')


def test_a_message_of_gpt_oss_is_constrained_with_and_without_analysis() -> None:
    tokenizer = byte_tokenizer(HARMONY + "<|message|>")
    takes = constrained(tokenizer, ANSWER)
    analysis = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    for answer in (final + JSON, f"<|channel|>final <|constrain|>json<|message|>{JSON}", call):
        assert takes(answer) and takes(analysis + answer), answer
    assert not takes(final + "Bo") and not takes(analysis) and not takes(JSON)
    required = constrained(tokenizer, None, required=True)
    assert required(analysis + call) and required(call) and not required(final + JSON)
    alone = constrained(tokenizer, ANSWER, schemas={})
    assert alone(analysis + final + JSON) and not alone(call)


def test_structural_tags_describe_the_whole_text() -> None:
    tags = {"format": {"type": "const_string", "value": f"Well. {CALL}"}}
    takes = constrained(byte_tokenizer(HERMES), StructuredOutputsParams(structural_tag=tags))
    assert takes(f"Well. {CALL}") and not takes(CALL)
