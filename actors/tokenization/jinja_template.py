"""A compiled Jinja template: the text that transformers would render, with bounded work.

The same library, sandbox, tags, filters and globals as in transformers, which is not imported. Differences:
the sandbox's rules for dictionaries and namespaces are looked up faster (a third of the time for long
chats), loop iterations and calls are counted and limited, and so is what one operation creates
(`template_limits.py`). Many large values together are not, so only trusted sources may be rendered.
Thread-safe.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.utils
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from ...cluster.errors import RequestError, brief
from .template_limits import GROWING_FILTERS, check_call, check_operation, joined

MAX_SHOWN = 300  # characters of a template's error message
# Loop iterations and calls. Gemma 4's template makes 500,000 for 1,000 messages, in about a second.
MAX_TEMPLATE_STEPS = 2_000_000
MAX_TEMPLATE_CHARS = 256 * 1024
_DICT_METHODS = frozenset(dir(dict))


class JinjaTemplate:
    """Raises RequestError if the source is too long or no Jinja template."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise RequestError(
                f"chat_template: it has {len(source)} characters; at most {MAX_TEMPLATE_CHARS}.",
                param="chat_template",
            )
        self._environment = _Environment()
        try:
            self._template = self._environment.from_string(source)
        except Exception as error:  # of Jinja's parser, or of Python's compiler for code nested too deep
            raise RequestError(
                f"chat_template: it is no Jinja template: {brief(str(error), MAX_SHOWN)}.",
                param="chat_template",
            ) from None

    # Any: JSON.
    def render(self, variables: Mapping[str, Any]) -> str:
        """Raises RequestError if the template rejects the variables or takes too many steps."""
        try:
            self._environment.count_from(MAX_TEMPLATE_STEPS)
            return self._template.render(variables)
        except Exception as error:  # a template can raise any: it computes
            raise RequestError(
                f"messages: the chat template refused them: {brief(str(error), MAX_SHOWN)}.",
                param="messages",
            ) from error


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(joined)  # of outputs, macros and blocks

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        self._remaining = threading.local()
        self.filters["tojson"] = _tojson
        self.filters |= {name: _bounded(name, self.filters[name]) for name in GROWING_FILTERS}
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def count_from(self, max_steps: int) -> None:
        """Allow this thread so many steps from now on."""
        self._remaining.steps = max_steps

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Limits().visit(super()._parse(source, name, filename))

    # Any: values of templates, in the following methods.
    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._count()
            yield value

    def joined(self, *parts: Any) -> str:
        return joined(parts)

    def call(self, /, context: Context, obj: Any, *arguments: Any, **named: Any) -> Any:
        self._count()
        text = getattr(obj, "__self__", None)
        if isinstance(text, str):
            if obj.__name__ == "join":
                return joined(*arguments, separator=text)
            check_call(obj.__name__, [text, *arguments, *named.values()])
        return super().call(context, obj, *arguments, **named)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if (bounded := super().wrap_str_format(value)) is None:
            return None

        def run(*arguments: Any, **named: Any) -> str:
            check_call("format", [value.__self__])
            return bounded(*arguments, **named)

        return run

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str and len(left) + len(right) < 10**6:
            return left + right  # most operations
        check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        try:
            if type(obj) is dict and attribute not in _DICT_METHODS:
                return obj[attribute]
            if type(obj) is _Namespace and not attribute.startswith("_"):
                return getattr(obj, attribute)
        except (KeyError, AttributeError):
            return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def _count(self) -> None:
        self._remaining.steps -= 1
        if self._remaining.steps < 0:
            raise jinja2.TemplateError(f"it takes more than {MAX_TEMPLATE_STEPS} steps")


class _Limits(NodeTransformer):
    """Counts the iterations of loops, and bounds the texts that `~` joins."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802  # Jinja's interface
        self.generic_visit(node)
        node.iter = nodes.Call(nodes.EnvironmentAttribute("counted"), [node.iter], [], None, None)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("joined"), node.nodes, [], None, None)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that checks its arguments; Jinja's marks on it are kept."""

    @functools.wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        check_call(name, [*arguments, *named.values()])
        if name == "join":
            arguments = tuple(list(each) if isinstance(each, Iterator) else each for each in arguments)
            joined(next(each for each in arguments if isinstance(each, Iterable)))
        return function(*arguments, **named)

    return run


class _Generation(jinja2.ext.Extension):
    """Reads the tag that marks a model's output for training; it has no effect on the text."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("written"), [], [], body).set_lineno(line)

    @staticmethod
    def written(caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """Rejects names of Python's internals, through which templates have left the sandbox."""

    def __init__(*arguments: Any, **named: Any) -> None:  # "self" may be a name in it
        self, *given = arguments
        named = dict(*given, **named)
        for name in named:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, named)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.TemplateError(f"names in a namespace may not begin with _, as does {name}")


class _Dict:
    """`dict` in templates: the class itself would give access to Python's other classes."""

    def __call__(self, *values: Any, **named: Any) -> dict[Any, Any]:
        return dict(*values, **named)

    def fromkeys(self, *values: Any) -> dict[Any, Any]:
        return dict.fromkeys(*values)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as in transformers; Jinja's own filter escapes HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
