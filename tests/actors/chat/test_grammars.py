"""Constrained answers: supported constraints hold, and speculation changes no token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from manta import LLM, SamplingParams, StructuredOutputsParams
from manta.actors.structured_outputs.grammar_frontend import (
    MAX_GRAMMAR_CHARS,
    GrammarFrontend,
    written_grammar,
)
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.cluster.config import EngineConfig
from manta.cluster.errors import RequestError
from manta.cluster.request.structured_outputs import Grammar, SlotGrammar
from manta.cluster.speculation.draft_tree import grow_tree
from manta.drafter.grammars import compiler as compiler_module
from manta.drafter.grammars.compiler import GrammarCompiler, lark_of
from manta.drafter.grammars.matchers import GrammarStates
from support.checkpoints.text_pair import VOCAB
from support.oracles.sampling_cases import WHOLE
from support.oracles.schemas import HELD, REFUSED, held_by

EOS = (0, 2)
PROMPT = "Hello, this is"
TAGS = {
    "structures": [{"begin": "<fn=a>", "schema": {"enum": [1, 22]}, "end": "</fn>"}],
    "triggers": ["<fn="],
}
FORMAT = {
    "type": "sequence",
    "elements": [
        {
            "type": "tag",
            "begin": "<t>",
            "content": {"type": "any_text", "excludes": ["a"]},
            "end": ["e", "o"],
        },
        {"type": "const_string", "value": " so: "},
        {"type": "regex", "pattern": "[0-9]{2,9}"},
    ],
}
KINDS = {
    "json": StructuredOutputsParams(json=HELD["three properties"], disable_any_whitespace=True),
    "json with spaces": StructuredOutputsParams(json=json.dumps(HELD["array of objects"])),
    "json_object": StructuredOutputsParams(json_object=True),
    "regex": StructuredOutputsParams(regex=r"[a-z]{3,9}@[a-z]{2,5}\.(com|org)"),
    "choice": StructuredOutputsParams(choice=("yes", "no", 'mäy "be" 😀', "yes, no")),
    "lark": StructuredOutputsParams(grammar='start: "a" b+ "end"\nb: "bb" | "c"'),
    "ebnf": StructuredOutputsParams(grammar='root ::= "x" [0-9]+ "y"'),
    "structural_tag": StructuredOutputsParams(structural_tag=TAGS),
    "formats of tags": StructuredOutputsParams(structural_tag={"format": FORMAT}),
    "regex behind a token": StructuredOutputsParams(regex="(yes|no){2}", after_token_ids=(ord("e") - 30,)),
}
KNOBS = {
    "alone": {},
    "penalties": {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "bias and filters": {"logit_bias": ((70, 3.0), (90, -3.0)), "top_k": 40, "top_p": 0.9},
    "ends": {"min_tokens": 12, "ignore_eos": True, "stop": ("org", "true"), "bad_words": ("c", "yes")},
}
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def frontend(tokenizer: Tokenizer) -> GrammarFrontend:
    return GrammarFrontend(tokenizer, VOCAB, EOS)


def config_of(pair: tuple[Path, Path], drafts: int | None, width: int = 1, **more: Any) -> EngineConfig:
    spec = {"model": str(pair[1]), "num_speculative_tokens": drafts, "adaptive": False}
    spec |= {"tree_width": width, "tree_size": 31} if width > 1 else {}
    small = {"dtype": "float32", "num_threads": 1, "max_model_len": 256, "max_num_seqs": 8, **more}
    return EngineConfig.from_dict(
        {"model": str(pair[0]), "speculative_config": None if drafts is None else spec, **small}
    )


def open_pair(pair: tuple[Path, Path], drafts: int | None, width: int = 1, **more: Any) -> LLM:
    return LLM(**asdict(config_of(pair, drafts, width, **more)))


@pytest.fixture(scope="module")
def llm(pair: tuple[Path, Path]) -> Iterator[LLM]:
    """The pair with seven drafts in every step."""
    with open_pair(pair, 7) as llm:
        yield llm


def grammar_of(requested: StructuredOutputsParams) -> Grammar:
    kind, text = written_grammar(requested)
    if kind == "grammar":
        kind, text = "lark", lark_of(text)
    return Grammar(kind, text, requested.after_token_ids, is_cheap=True)


# Which can be.


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_schema_is_refused_with_the_field_and_the_reason(
    frontend: GrammarFrontend, name: str
) -> None:
    schema, word = REFUSED[name]
    requested = StructuredOutputsParams(json=schema, sent_as="response_format.json_schema.schema")
    with pytest.raises(RequestError, match=re.escape(word)) as refused:
        frontend.compile(SamplingParams(structured_outputs=requested))
    assert (refused.value.param or "").startswith("response_format.json_schema.schema")


@pytest.mark.parametrize(
    ("requested", "field"),
    [
        ({"json": "{"}, "json"),
        ({"json": "3"}, "json"),
        ({"json": "[" * 100_000}, "json"),
        ({"json": {"enum": ["\ud800"]}}, "json"),
        ({"json": {"const": float("nan")}}, "json"),
        ({"json": {"description": "x" * MAX_GRAMMAR_CHARS}}, "json"),
        ({"regex": "(a"}, "regex"),
        ({"regex": ""}, "regex"),
        ({"choice": ()}, "choice"),
        ({"choice": ("a",) * 5000}, "choice"),
        ({"grammar": 'start: "a" unknown'}, "grammar"),
        ({"grammar": 'root ::= "a" | unknown'}, "grammar"),
        ({"structural_tag": "{"}, "structural_tag"),
        ({"structural_tag": {"triggers": ["<"]}}, "structural_tag.structures"),
        ({"structural_tag": {**TAGS, "triggers": ["["]}}, "structural_tag.structures.0.begin"),
        ({"structural_tag": {"format": {}}}, "structural_tag.format.type"),
    ],
)
def test_an_invalid_grammar_is_refused_by_its_field(
    frontend: GrammarFrontend, requested: dict[str, Any], field: str
) -> None:
    with pytest.raises(RequestError) as refused:
        frontend.compile(SamplingParams(structured_outputs=StructuredOutputsParams(**requested)))
    assert refused.value.param == f"structured_outputs.{field}"


def test_exactly_one_constraint_is_accepted_and_an_engine_without_a_tokenizer_refuses_all(
    pair: tuple[Path, Path],
) -> None:
    for fields in ({}, {"regex": "a", "choice": ("a",)}):
        with pytest.raises(RequestError, match="one of"):
            StructuredOutputsParams(**fields)
    requested = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    plain = open_pair(pair, None, skip_tokenizer_init=True)
    with plain as llm, pytest.raises(RequestError, match="tokenizer"):
        llm.generate([[5, 6]], requested)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SamplingParams(structured_outputs={"json": {}}), "structured_outputs="),
        (lambda: SamplingParams(structured_outputs="json"), "structured_outputs="),
        (lambda: SamplingParams(grammar={"kind": "regex"}), "grammar="),
        (lambda: StructuredOutputsParams(json=3), r"structured_outputs\.json=3 must be a JSON schema"),
        (lambda: StructuredOutputsParams(regex=5), r"structured_outputs\.regex=5 must be a string"),
        (lambda: StructuredOutputsParams(choice="abc"), r"choice=\"abc\" must be a list of strings"),
        (lambda: StructuredOutputsParams(choice=["a", 1]), "choice=.* must be a list of strings"),
        (lambda: StructuredOutputsParams(grammar={}), "grammar={} must be a string"),
        (lambda: StructuredOutputsParams(json_object="yes"), "json_object=.* must be true or false"),
        (lambda: StructuredOutputsParams(structural_tag=[1]), "structural_tag=.* must be an object"),
    ],
)
def test_constraints_of_a_wrong_type_are_refused_by_name(make: Callable[[], object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        make()


# That they are held.


def test_every_finished_answer_fits_its_schema(llm: LLM) -> None:
    assert len(HELD) >= 60
    schemas = [schema for schema in HELD.values() for _ in range(2)]
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=150, structured_outputs=held_by(schema))
        for seed, schema in enumerate(schemas)
    ]
    answers = llm.generate([PROMPT] * len(params), params)
    ended = 0
    for schema, answer in zip(schemas, answers, strict=True):
        (only,) = answer.outputs
        if only.finish_reason == "stop":
            ended += 1
            text = re.sub(
                r"(?<=:\d\d):60(?=[.Z+-])", ":59", only.text
            )  # a leap second is a time; not to Python
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.validate(json.loads(text), schema, format_checker=checker)
    assert ended >= 0.9 * len(params), "few of such small answers come to no end"


def test_other_constraints_hold_too_and_an_answer_without_allowed_tokens_ends(llm: LLM) -> None:
    dead = SamplingParams(
        temperature=1.0,
        seed=3,
        ignore_eos=True,
        min_tokens=9,
        allowed_token_ids=(68, 69, 70),
        structured_outputs=StructuredOutputsParams(regex="[a-z][0-9]{30}"),
    )
    params = [
        SamplingParams(temperature=1.0, seed=4, max_tokens=NUM_TOKENS, structured_outputs=KINDS[name])
        for name in ("regex", "choice", "lark", "ebnf")
    ]
    regex, choice, lark, ebnf, ended = (a.outputs[0] for a in llm.generate([PROMPT] * 5, [*params, dead]))
    assert llm.generate("x", replace(dead, structured_outputs=None, max_tokens=9))  # continues
    assert re.fullmatch(KINDS["regex"].regex or "", regex.text)
    assert choice.text in (KINDS["choice"].choice or ())
    assert re.fullmatch(r"a(bb|c)+end", lark.text) and re.fullmatch(r"x[0-9]+y", ebnf.text)
    assert ended.finish_reason == "stop" and re.fullmatch("[a-z]?", ended.text)


def test_a_grammar_that_runs_out_of_states_ends_only_its_own_answer(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "MAX_LEXER_STATES", 300)
    greedy = SamplingParams(temperature=1.0, seed=1, max_tokens=NUM_TOKENS)
    explodes = replace(greedy, structured_outputs=StructuredOutputsParams(regex="(a|b|c)*a(a|b|c){25}"))
    fine = replace(greedy, structured_outputs=KINDS["choice"])
    first, other = llm.generate([PROMPT] * 2, [explodes, fine])
    again, same = llm.generate([PROMPT] * 2, [explodes, fine])
    assert first.outputs[0].finish_reason in ("stop", "length") and set(first.outputs[0].text) <= set("abc")
    assert other.outputs[0].text == same.outputs[0].text and other.outputs[0].finish_reason == "stop"
    assert again.outputs[0].text == first.outputs[0].text


# That speculation changes nothing.


@pytest.fixture(scope="module")
def requested() -> list[SamplingParams]:
    """Yield every kind at every temperature, with the settings in turn."""
    knobs = list(KNOBS.values())
    return [
        SamplingParams(
            temperature=temperature,
            seed=10 * i + j,
            max_tokens=NUM_TOKENS,
            structured_outputs=kind,
            **knobs[(i + j) % len(knobs)],
        )
        for j, temperature in enumerate((0.0, 0.7, 1.0))
        for i, kind in enumerate(KINDS.values())
    ]


def answers_of(llm: LLM, requested: list[SamplingParams]) -> list[tuple[str, list[int], str | None]]:
    answers = llm.generate([PROMPT] * len(requested), requested)
    return [(a.outputs[0].text, a.outputs[0].token_ids, a.outputs[0].finish_reason) for a in answers]


@pytest.fixture(scope="module")
def reference(
    pair: tuple[Path, Path], requested: list[SamplingParams]
) -> list[tuple[str, list[int], str | None]]:
    """Decode plainly, one request at a time."""
    with open_pair(pair, None) as llm:
        return [answers_of(llm, [params])[0] for params in requested]


ENGINES = {
    "as shipped": {},
    "few pages": {"num_pages": 34, "page_size": 4, "max_num_batched_tokens": 40},
    "planned ahead": {"async_scheduling": True},
}


@pytest.mark.parametrize(
    ("drafts", "width", "engine"),
    [
        *[(drafts, 1, engine) for drafts, engine in product((1, 3, 15), ENGINES)],
        *[(15, width, engine) for width, engine in product((2, 4), ENGINES)],
    ]
    if WHOLE
    else [(1, 1, "planned ahead"), (3, 1, "as shipped"), (15, 1, "few pages"), (15, 4, "planned ahead")],
)
def test_speculation_changes_no_token_of_a_constrained_answer(
    pair: tuple[Path, Path],
    requested: list[SamplingParams],
    reference: list[tuple[str, list[int], str | None]],
    drafts: int,
    width: int,
    engine: str,
) -> None:
    with open_pair(pair, drafts, width, **ENGINES[engine]) as llm:
        assert answers_of(llm, requested) == reference
        stats = llm.stats()
    assert stats.num_accepted_tokens > 0
    assert (stats.preemptions > 0) == (engine == "few pages")


def test_each_of_n_completions_has_its_own_grammar_state(llm: LLM) -> None:
    params = SamplingParams(
        temperature=1.0, seed=1, n=4, max_tokens=NUM_TOKENS, structured_outputs=KINDS["regex"]
    )
    (answer,) = llm.generate(PROMPT, params)
    texts = [completion.text for completion in answer.outputs]
    assert len(set(texts)) == 4 and all(re.fullmatch(KINDS["regex"].regex or "", text) for text in texts)


def test_forced_tokens_are_drafted_at_no_cost(llm: LLM) -> None:
    known = held_by({"const": "all of it is known"})
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=64, structured_outputs=known)
    (answer,) = llm.generate(PROMPT, params)
    assert answer.outputs[0].text == '"all of it is known"'
    metrics = answer.metrics
    assert metrics.num_accepted_tokens >= len(answer.outputs[0].token_ids) - metrics.num_steps - 2


# The masks of a block.


def mask_of(compiler: GrammarCompiler, matcher: LLMatcher) -> np.ndarray:
    bits = np.zeros(compiler.mask_words, dtype=np.int32)
    matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    return bits


def allowed_by(bits: np.ndarray, number: int) -> int:
    """Return one of the tokens that a mask allows."""
    allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    return int(allowed[number % len(allowed)])


def states_with(compiler: GrammarCompiler, grammar: Grammar) -> GrammarStates:
    """Return the states of a request in slot 3, whose prompt is one token."""
    states = GrammarStates(compiler, 1)
    states.admit(3, SlotGrammar(grammar, prompt_length=1))
    return states


def masks_one_by_one(compiler: GrammarCompiler, grammar: Grammar, tokens: list[int]) -> Iterator[np.ndarray]:
    """Masks after each of the first tokens, as far as the grammar accepts them."""
    matcher = compiler.matcher(grammar)
    for token in [*tokens, None]:
        yield mask_of(compiler, matcher)
        if token is None or token in EOS or token < 0 or not matcher.try_consume_tokens([token]):
            return


def walk(compiler: GrammarCompiler, grammar: Grammar, choices: list[int], matcher: LLMatcher) -> list[int]:
    """Return tokens that a grammar accepts, chosen by these numbers."""
    tokens: list[int] = []
    for choice in choices:
        token = allowed_by(mask_of(compiler, matcher), choice)
        if token in EOS:
            break
        tokens.append(token)
        assert matcher.try_consume_tokens([token]) == 1
    return tokens


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from([name for name in KINDS if name != "regex behind a token"]),
    choices=st.lists(st.integers(0, 10**6), max_size=24),
    num_standing=st.integers(0, 12),
    spoiled=st.dictionaries(st.integers(0, 14), st.integers(-1, VOCAB + 5), max_size=2),
    kept=st.integers(0, 15),
)
def test_masks_of_a_block_are_those_made_one_token_at_a_time(
    compiler: GrammarCompiler,
    kind: str,
    choices: list[int],
    num_standing: int,
    spoiled: dict[int, int],
    kept: int,
) -> None:
    """Masks of all rows, or of the remaining ones."""
    grammar = grammar_of(KINDS[kind])
    tokens = walk(compiler, grammar, choices, compiler.matcher(grammar))
    standing, drafts = [5, *tokens[:num_standing]], [*tokens[num_standing:], 7][:15]
    for place, token in spoiled.items():
        drafts[place % len(drafts)] = token
    states = states_with(compiler, grammar)
    drafts_RK = np.array([[9] * len(drafts), drafts])
    margins_RK = np.ones(drafts_RK.shape, dtype=np.float32)
    slots, begins = np.array([1, 3]), np.array([4, len(standing)])
    counts = np.array([2, 1 + len(drafts)])
    walks = states.walk(
        slots, begins, counts, drafts_RK, lambda slot, begin, end: standing[begin:end], margins_RK
    )
    assert walks is not None
    cut = np.minimum(counts, [1, 1 + kept])
    few = states.masks(walks, cut)
    few_bits = few.bits_MW.copy()
    masks = states.masks(walks, counts)
    assert few.rows_M.tolist() == list(range(1, 1 + cut[1]))
    assert (few_bits == masks.bits_MW[: cut[1]]).all()
    assert masks.rows_M.tolist() == list(range(2, 3 + len(drafts)))
    seen = [*standing[1:], *drafts_RK[1].tolist()]
    expected = list(masks_one_by_one(compiler, grammar, seen))[len(standing) - 1 :]
    assert expected, "what stands can be read"
    for row, bits in enumerate(expected):
        assert (masks.bits_MW[row] == bits).all(), (row, drafts_RK)
    assert drafts_RK[0].tolist() == [9] * len(drafts), "others' drafts are theirs"
    assert (margins_RK[0] == 1).all(), "and so are their margins"
    num_walked = len(expected) - 1
    ends = num_walked < len(drafts) and drafts_RK[1, num_walked] in EOS
    assert np.isnan(margins_RK[1, num_walked + ends :]).all(), "behind what cannot be there is nothing"
    sure = np.isinf(margins_RK[1, :num_walked])
    assert (sure | (margins_RK[1, :num_walked] == 1)).all()
    assert sure[drafts_RK[1, :num_walked] != np.array(drafts)[:num_walked]].all(), "what is forced is sure"
    again = states.constrain_drafts(
        np.array([3]),
        np.array([len(standing)]),
        np.array([1]),
        np.empty((1, 0), dtype=np.int64),
        lambda slot, begin, end: standing[begin:end],
    )
    assert again is not None and (again.bits_MW[0] == expected[0]).all(), "the walk has left no trace"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(sorted(KINDS)),
    choices=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 10**6)), max_size=12),
    num_standing=st.integers(0, 12),
)
def test_masks_of_a_tree_are_those_made_one_token_at_a_time_on_each_path(
    compiler: GrammarCompiler, kind: str, choices: list[tuple[int, int]], num_standing: int
) -> None:
    """A node's token is allowed after its parent, or for some numbers any; rows after any other are free."""
    grammar = grammar_of(KINDS[kind])
    start = [*grammar.after_token_ids]
    standing = [5, *walk(compiler, grammar, [7] * num_standing, compiler.matcher(grammar))]
    standing = standing[:1] if start else standing  # the start marker is a draft
    paths, parents, expected = [standing[1:]], list[int](), list[np.ndarray | None]()

    def mask_after(path: list[int]) -> np.ndarray | None:
        if start and path[: len(start)] != start:
            return None
        masks = list(masks_one_by_one(compiler, grammar, path[len(start) :]))
        return masks[-1] if len(masks) == len(path) - len(start) + 1 else None

    expected.append(mask_after(paths[0]))
    for place, number in [(0, None)] * bool(start) + choices:
        parent = place % len(paths)
        bits, token = expected[parent], start[0] if number is None else number % VOCAB
        if bits is not None and number is not None and number % 4:
            token = allowed_by(bits, number)
        parents.append(parent)
        paths.append([*paths[parent], token])
        expected.append(mask_after(paths[-1]))
    states = states_with(compiler, grammar)
    drafts = np.array([[path[-1] for path in paths[1:]]], dtype=np.int64).reshape(1, -1)
    counts = np.array([len(paths)])
    for _ in range(2):  # a walk leaves no trace
        walks = states.walk(
            np.array([3]),
            np.array([len(standing)]),
            counts,
            drafts.copy(),
            lambda _, begin, end: standing[begin:end],
        )
        assert walks is not None
        masks = states.masks(replace(walks, trees=(drafts, np.array([parents]))), counts)
        for row, bits in enumerate(expected):
            assert (masks.bits_MW[row] == (-1 if bits is None else bits)).all(), (row, paths[row])


def test_a_tree_grows_along_a_grammar_and_takes_forced_tokens(compiler: GrammarCompiler) -> None:
    grammar = grammar_of(StructuredOutputsParams(regex="[ab]xyz[0-9]"))
    states = states_with(compiler, grammar)
    walks = states.walk(
        np.array([3]), np.array([1]), np.array([9]), np.full((1, 8), -1), lambda _, begin, end: []
    )
    assert walks is not None
    chances = np.tile(np.array([0.5, 0.3, 0.1], np.float32), (5, 1, 1))
    ids = np.tile(np.array([ord(letter) - 30 for letter in "qba"]), (5, 1))
    ids[4] = [ord(letter) - 30 for letter in "1q2"]
    nodes = grow_tree(chances, ids, 12, 2, restrict=states.tree_restriction(walks.walks[0].slot))
    paths = [""]
    for parent, token in zip(nodes.parents, nodes.tokens, strict=True):
        paths.append(paths[parent] + chr(token + 30))
    assert set(paths[1:]) == {
        *("a", "b", "ax", "bx", "axy", "bxy", "axyz", "bxyz"),
        *(f"{path}xyz{digit}" for path in "ab" for digit in "12"),
    }
    assert (
        nodes.survivals[0] == pytest.approx(0.6) and paths[1] == "b"
    )  # half of the chances were not allowed
