"""Templates make the text that transformers makes of them, with bounded work. The oracle is transformers."""

from __future__ import annotations

from typing import Any

import pytest
from manta.actors.tokenization import jinja_template
from manta.actors.tokenization.jinja_template import MAX_TEMPLATE_CHARS, JinjaTemplate
from manta.cluster.errors import RequestError
from transformers.utils.chat_template_utils import render_jinja_template

ARGUMENTS = {
    "whole": 1000.0,
    "tiny": 1e-7,
    "huge": 1e22,
    "long": 2**70,
    "signed": 2**63 - 1,
    "text": '<b>&"é\n',
    "none": None,
    "yes": True,
    "list": ["b", 1, None, {"z": 1, "a": 0.5}],
    "empty": {},
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": " U\n"},
    {"role": "assistant", "content": "", "arguments": ARGUMENTS},
]
LOOP = "{% for m in messages %}"
VALUES = "{% for k, v in messages[2].arguments.items() %}"

# One line of a published template each, or its kind.
KINDS = [
    "{% if tools is iterable and tools | length > 0 %}T{% else %}-{% endif %}",
    "{% if tools is not none and tools %}T{% elif tools is sequence %}s{% else %}-{% endif %}",
    VALUES + "{{ k }}={{ v }},{% endfor %}",
    VALUES + "{{ k }}={{ v | string }},{{ v ~ '' }},{{ v | tojson }};{% endfor %}",
    VALUES
    + "{{ v is mapping }}{{ v is sequence }}{{ v is string }}{{ v is number }}{{ v is none }}{% endfor %}",
    VALUES + "{{ v if v is string else v | tojson(ensure_ascii=true) }}{% endfor %}",
    "{{ messages[2].arguments | dictsort }}",
    "{{ messages[2].arguments | tojson(indent=2, sort_keys=true) }}",
    "{{ messages[2].arguments | tojson(separators=(',', ':')) }}",
    "{{ messages[2].arguments | items | list }}{{ messages[2].arguments.list | join('|') }}",
    "{{ messages[0].missing }}{{ messages[0].missing is defined }}{{ messages[0]['missing'] or 'x' }}",
    "{{ messages[::-1] | map(attribute='role') | join }}{{ messages[-1:][0].role }}{{ 'abc'[::-1] }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{{ messages | rejectattr('content', 'defined') | first | default('none') }}",
    "{% set ns = namespace(n=0, found=none) %}"
    + LOOP
    + "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ ns.found }}",
    LOOP + "{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
    LOOP + "{{ loop.length }}{{ loop.revindex0 }}{{ loop.last }}{{ loop.cycle('a', 'b') }}{% endfor %}",
    LOOP + "{{ loop.previtem is defined }}{{ loop.nextitem.role if not loop.last }}{% endfor %}",
    "{% for m in messages if m.role != 'system' %}{{ loop.index0 }}{% else %}none{% endfor %}",
    "{% for a in [1, [2, [3]]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}",
    "{% macro f(a, b='B') %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{{ caller() if caller }}{% endmacro %}"
    "{{ f(1, 2, 3, d=4) }}{% call f('x') %}y{% endcall %}",
    "{{ 'a\\x41\\u00e9\\\nb' }}{{ '%05.1f|%s' % (2.5, none) }}{{ '{:>4}'.format('a') }}",
    "{{ ' a b '.strip().split(' ', 1) }}{{ 'a</b>c'.rpartition('</b>') }}{{ 'x'.ljust(3) ~ 'y'.title() }}",
    "{{ 7 // 2 }}{{ -7 % 3 }}{{ 2 ** 70 }}{{ 1 / 3 }}{{ 3.0 }}{{ true + 1 }}{{ 1 == 1.0 }}",
    "{{ none }}{{ true }}{{ [none, 1.0, 'a'] }}{{ {'a': (1,)} }}",
    "{{ dict(a=1, **{'b': 2}) }}{{ dict.fromkeys('ab') }}{{ range(5, 0, -2) | list }}",
    "{{- 'a' }}   {{- 'b' -}}   \n  {% if true %}\n  c\n  {% endif %}\n{{ 'd' }}\n\n",
    "    {%- set x = 1 %}\n    {{ '{' }}\n        \"k\": {}\n    {{ '}' }}",
    "{# {% generation %} / {% endgeneration %} #}{% generation %}{{ 'said' }}{% endgeneration %}!",
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "{% set x = 'a' if tools else none %}{{ x }}{{ x is none }}{{ x == false }}{{ x | default('d', true) }}",
    "{% filter upper %}{{ messages[1].content | trim }}{% endfilter %}{{ '<' | e }}",
    "{{ messages[0].items() | list }}{{ messages[0].keys() | list }}",
    "{{ 'role' in messages[0] }}{{ messages[0].get('x', 0) }}",
    "{{ messages[0].content.startswith('S') }}{{ messages | length }}{{ messages | last | attr('role') }}",
    "{{ {'a': 1} | tojson | replace('\"', \"'\") }}{{ ['b', 'A', 'c'] | sort }}",
    "{{ [1, 2, 3] | batch(2) | list }}{{ [1, 2] | sum }}{{ [2, 1] | max }}{{ 2.567 | round(1) }}",
]


def by_transformers(source: str, **variables: Any) -> str:
    (text,), _ = render_jinja_template([MESSAGES], chat_template=source, **variables)
    return text


@pytest.mark.parametrize("source", KINDS)
def test_a_template_makes_the_text_that_transformers_makes(source: str) -> None:
    given = {"messages": MESSAGES, "tools": None, "documents": None, "add_generation_prompt": False}
    assert JinjaTemplate(source).render(given) == by_transformers(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages + 1 }}",
        "{{ missing.key }}",
        "{{ messages[0].content.nothing() }}",
        "{{ 1 / 0 }}",
        "{{ messages | tojson(indent=messages) }}",
        "{{ missing | tojson }}",
        "{{ strftime_now(1) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ namespace(__init__=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ messages.append(1) }}",
        "{% include 'other' %}",
    ],
)
def test_whatever_a_template_raises_is_a_refusal(source: str) -> None:
    with pytest.raises(RequestError, match="the chat template refused them") as refused:
        JinjaTemplate(source).render({"messages": MESSAGES})
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99) %}{% for b in range(99) %}{{ a * b }}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(20) }}",
        "{% for a in [1] * 20 recursive %}{{ loop([1] * 20) if loop.depth < 4 }}{% endfor %}",
    ],
)
def test_steps_of_a_template_are_limited(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja_template, "MAX_TEMPLATE_STEPS", 5000)
    template = JinjaTemplate(source)
    for _ in range(2):
        with pytest.raises(RequestError, match="more than 5000 steps"):
            template.render({})


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**11 }}",
        "{{ 10**11 * [1] }}",
        "{{ 10**(10**10) }}",
        "{{ 7**(7**(7**7)) }}",
        "{% set ns = namespace(n=3) %}{% for _ in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for _ in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for _ in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for _ in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set x = 'a' * 10**6 %}{% for _ in range(10**5) %}{{ x }}{% endfor %}",
        "{% set x = 'a' * 10**6 %}{% set y %}{% for _ in range(10**5) %}{{ x }}{% endfor %}{% endset %}",
        "{% set x = 'a' * 10**6 %}{{ ([x] * 10**6) | join }}",
        "{% set x = 'a' * 10**6 %}{{ x.join([x] * 10**6) }}",
        "{% set x = 'a' * 10**6 %}{{ x | replace('a', x) }}",
        "{% set x = 'a' * 10**6 %}{{ x.replace('', x) }}",
        "{% set x = '\n' * 10**6 %}{{ x | indent(9999, true, true) }}",
        "{{ 'a'.ljust(10**11) }}{{ 'a'.center(10**11) }}",
        "{{ 'a' | center(10**11) }}",
        "{{ '%100000000000d' % 1 }}",
        "{{ '%*d' % (10**11, 1) }}",
        "{{ '%100000000000d' | format(1) }}",
        "{{ '{:>100000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**11) }}",
        "{{ [[1]] | tojson(indent=10**9) }}",
        "{{ range(10**9) | list }}",
    ],
)
def test_one_operation_of_a_template_cannot_take_the_memory_or_the_process(source: str) -> None:
    template = JinjaTemplate(source)  # Jinja computes constants when it compiles
    with pytest.raises(RequestError, match=r"an operation asks|a width|Range too big"):
        template.render({})


def test_usual_operations_are_within_the_limits() -> None:
    source = (
        "{{ 'ab' * 3 }}{{ 2**10 * 3 + 1 }}{{ '%s %d%%' % ('x', 123456) }}{{ '{:,}'.format(1234567) }}"
        "{{ 'a-b'.replace('-', '+') }}{{ ['a', 1] | join('-') }}{{ '-'.join(['c', 'd']) }}{{ 'x' ~ 123456 }}"
        "{{ 'a\nb' | indent(4) }}{{ 1234567 | tojson(indent=2) }}{{ '%05d' | format(123456) }}{{ 7 % 4 }}"
    )
    expected = "ababab3073x 123456%1,234,567a+ba-1c-dx123456a\n    b12345671234563"
    assert JinjaTemplate(source).render({}) == expected


def test_each_rendering_may_take_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja_template, "MAX_TEMPLATE_STEPS", 50)
    template = JinjaTemplate("{% for a in range(40) %}{{ a % 2 }}{% endfor %}")
    assert {template.render({}) for _ in range(5)} == {"01" * 20}


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ a",
        "{% unknown %}",
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
        "x" * MAX_TEMPLATE_CHARS + "x",
    ],
)
def test_what_is_no_template_is_refused_by_its_field(source: str) -> None:
    with pytest.raises(RequestError) as refused:
        JinjaTemplate(source)
    assert refused.value.param == "chat_template"
