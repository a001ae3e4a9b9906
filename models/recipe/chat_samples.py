"""Chat samples made from the syntax trees of the standard library.

There are three questions about a documented function: what it does, write it from its signature and
docstring, and document it. The answers are the library's own text.
"""

import ast
import hashlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from .corpus import CorpusFile

Message = dict[str, str]
IM_START, IM_END = "<|im_start|>", "<|im_end|>"
_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

_MAX_SOURCE_CHARS = 1400
_MAX_DOCSTRING_CHARS = 700


@dataclass(frozen=True)
class Function:
    """A documented function as text. `header` runs up to the end of the docstring."""

    name: str
    docstring: str
    header: str
    source: str
    undocumented: str


def chat_samples(file: CorpusFile) -> Iterator[list[Message]]:
    """Yield conversations of one question and one answer; two of the three questions for every function."""
    for function in documented_functions(file):
        kinds = [_explain, _write, _document]
        skipped = hashlib.sha256(function.name.encode()).digest()[0] % 3
        for index, kind in enumerate(kinds):
            if index != skipped:
                yield kind(function)


def documented_functions(file: CorpusFile) -> Iterator[Function]:
    """Yield the documented functions and methods that are short enough, in file order."""
    try:
        tree = ast.parse(file.text)
    except SyntaxError:
        return
    module = file.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    lines = file.text.splitlines()
    for name, node in _walk(tree, module):
        function = _read_function(name, node, lines)
        if function is not None:
            yield function


def render_chat(messages: list[dict[str, str]], add_generation_prompt: bool = False) -> str:
    """Render messages as the shipped target's chat template does, without Jinja."""
    text = "".join(f"{IM_START}{m['role']}\n{m['content']}{IM_END}\n" for m in messages)
    return text + (f"{IM_START}assistant\n" if add_generation_prompt else "")


def _walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, _FunctionNode]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _FunctionNode):
            yield f"{prefix}.{child.name}", child
        elif isinstance(child, ast.ClassDef):
            yield from _walk(child, f"{prefix}.{child.name}")
        elif isinstance(child, (ast.If, ast.Try)):
            yield from _walk(child, prefix)


def _read_function(name: str, node: _FunctionNode, lines: list[str]) -> Function | None:
    docstring = ast.get_docstring(node)
    if not docstring or len(docstring) > _MAX_DOCSTRING_CHARS or len(node.body) < 2:
        return None
    text_node = node.body[0]
    first, last = node.lineno - 1, node.end_lineno or node.lineno
    doc_first, doc_last = text_node.lineno - 1, text_node.end_lineno or text_node.lineno
    source = lines[first:last]
    if sum(map(len, source)) > _MAX_SOURCE_CHARS or doc_first == first:
        return None
    undocumented = lines[first:doc_first] + lines[doc_last:last]
    return Function(
        name=name,
        docstring=docstring.strip(),
        header=_dedent(lines[first:doc_last]),
        source=_dedent(source),
        undocumented=_dedent(undocumented),
    )


def _dedent(lines: list[str]) -> str:
    return inspect.cleandoc("\n".join(["", *lines])).rstrip()


def _explain(function: Function) -> list[Message]:
    return _exchange(f"What does `{function.name}` do?", function.docstring)


def _write(function: Function) -> list[Message]:
    question = f"Write the function with this signature and docstring.\n\n```python\n{function.header}\n```"
    return _exchange(question, f"```python\n{function.source}\n```")


def _document(function: Function) -> list[Message]:
    question = f"Write the docstring of this function.\n\n```python\n{function.undocumented}\n```"
    return _exchange(question, function.docstring)


def _exchange(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
