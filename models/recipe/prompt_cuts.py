"""Positions in a source file at which a prompt may end, by category.

Character offsets, from the syntax tree and the comment lines.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from .corpus import CorpusFile

Category = Literal["function_body", "docstring", "prose_comment", "data_literal", "chat"]
CATEGORIES: tuple[Category, ...] = ("function_body", "docstring", "prose_comment", "data_literal", "chat")

_MIN_LITERAL_ELEMENTS = 5
_MIN_COMMENT_LINES = 3
_MIN_DOCSTRING_CHARS = 40

OffsetOf = Callable[[int, int], int]  # (line from 1, byte column from 0) -> character offset


@dataclass(frozen=True)
class Cut:
    """End of a prompt of `category`, before character `offset` of the file."""

    category: Category
    offset: int


def cuts(file: CorpusFile) -> Iterator[Cut]:
    """Yield all cuts of a file, in no particular order."""
    try:
        tree = ast.parse(file.text)
    except SyntaxError:
        return
    line_starts = _line_starts(file.text)

    def offset(line: int, byte_column: int) -> int:
        start = line_starts[line - 1]
        prefix = file.text[start : start + byte_column].encode()[:byte_column]
        return start + len(prefix.decode(errors="ignore"))

    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            if len(node.body) > 1 and _is_docstring(first):
                yield Cut("docstring", offset(first.lineno, first.col_offset) + len('"""'))
                yield Cut(
                    "function_body", offset(first.end_lineno or first.lineno, first.end_col_offset or 0)
                )
            elif len(node.body) > 2:
                yield Cut("function_body", line_starts[first.lineno - 1] - 1)
        elif isinstance(node, (ast.List, ast.Tuple, ast.Set)) and _is_literal(node):
            yield _inside_literal(node.elts, offset)
        elif isinstance(node, ast.Dict) and len(node.values) >= _MIN_LITERAL_ELEMENTS:
            yield _inside_literal(node.values, offset)
    for line in _comment_cut_lines(file.text):
        yield Cut("prose_comment", line_starts[line] - 1)


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and len(node.value.value) >= _MIN_DOCSTRING_CHARS
    )


def _is_literal(node: ast.List | ast.Tuple | ast.Set) -> bool:
    """Return whether the node is a value with enough elements, not the target of an assignment."""
    is_value = isinstance(node, ast.Set) or isinstance(node.ctx, ast.Load)
    return is_value and len(node.elts) >= _MIN_LITERAL_ELEMENTS


def _inside_literal(elements: list[ast.expr], offset: OffsetOf) -> Cut:
    element = elements[len(elements) // 3]
    return Cut("data_literal", offset(element.end_lineno or element.lineno, element.end_col_offset or 0))


def _comment_cut_lines(text: str) -> Iterator[int]:
    """Yield the 0-based number of the second line of each comment of at least three lines."""
    run = 0
    for number, line in enumerate(text.split("\n")):
        stripped = line.strip()
        run = run + 1 if stripped.startswith("#") and any(map(str.isalpha, stripped)) else 0
        if run == _MIN_COMMENT_LINES:
            yield number - 1


def _line_starts(text: str) -> list[int]:
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    return starts
