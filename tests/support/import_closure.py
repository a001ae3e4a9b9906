"""Which test files a change reaches: those whose imports lead to a changed file. Used by `make check`.

    python tests/support/import_closure.py [BASE]     print the test files that changes since BASE reach

Imports are read from the sources, also those inside functions. Without circles between modules, the files
that a test file imports, directly or not, are exactly those that can change its result. Added to them are
modules that a string names ("manta.actors.replica:build_app", a script of a test), each conftest.py above a
test file with the imports of the fixtures that the file names, and files without imports (configs, templates,
data) wherever a module has their name in a string. What all tests share, as pyproject.toml, reaches all.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

if __name__ == "__main__":  # run as a script: `support` is a package of tests/
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.changes import changed_files
from support.paths import ROOT, TESTS

_OF_TESTS = ("support", "benchmarks", "trials", "compat")
_SHARED = {"pyproject.toml", "setup.py", "tests/conftest.py"}
_DOTTED = re.compile(r"\b(?:manta|support|benchmarks|trials|compat)(?:\.\w+)+")
_RELATIVE = re.compile(r"\.+\w+(?:\.\w+)*")
_FILE_NAME = re.compile(r"[\w.-]+\.\w{2,12}\b")


def reached_test_files(changed: Iterable[str]) -> list[str]:
    """Return the test files that a change of these files reaches; paths are relative to the repository."""
    changed = set(changed)
    tests = sorted(str(path.relative_to(ROOT)) for path in TESTS.rglob("test_*.py"))
    if changed & _SHARED:
        return tests
    names = {Path(path).name for path in changed if not path.endswith(".py")}
    return [
        test for test in tests if changed & (files := closure(test)) or any(names & named(f) for f in files)
    ]


def closure(test: str) -> set[str]:
    """Return the files that a test file imports, directly or not, itself included."""
    found: set[str] = set()
    pending = [test, *_imports_of_conftests(test)]
    while pending:
        if (path := pending.pop()) not in found:
            found.add(path)
            pending.extend(imports(path))
    return found


@cache
def imports(path: str) -> frozenset[str]:
    """Return the files that a file imports or names as modules."""
    return frozenset(_imported(_tree(path), path))


@cache
def named(path: str) -> frozenset[str]:
    """Return the names of files that a file's strings contain."""
    return frozenset(name for text in _strings(_tree(path)) for name in _FILE_NAME.findall(text))


@cache
def _tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_bytes())


def _strings(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


def _imported(node: ast.AST, path: str) -> Iterator[str]:
    for each in _executed(node, lazy=path != "__init__.py"):
        if isinstance(each, ast.Import):
            for alias in each.names:
                yield from _files_of(alias.name)
        elif isinstance(each, ast.ImportFrom):
            module = "." * each.level + (each.module or "")
            for alias in each.names:
                yield from _files_of(_absolute(module, path), alias.name)
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            for name in _DOTTED.findall(each.value):
                yield from _files_of(name)
            if _RELATIVE.fullmatch(each.value):
                yield from _files_of(_absolute(each.value, path))


def _executed(node: ast.AST, *, lazy: bool) -> Iterator[ast.AST]:
    """Walk a tree without docstrings and what only type checkers read. `lazy`: into functions."""
    pending: list[ast.AST] = [node]
    while pending:
        each = pending.pop()
        yield each
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
            continue  # a docstring
        if isinstance(each, ast.If) and "TYPE_CHECKING" in ast.dump(each.test):
            pending.extend(each.orelse)
        elif lazy or not isinstance(each, ast.FunctionDef):
            pending.extend(ast.iter_child_nodes(each))


def _absolute(module: str, path: str) -> str:
    """Return the name of a module that a file imports relatively."""
    level = len(module) - len(module.lstrip("."))
    if level == 0:
        return module
    package = ["manta", *Path(path).parent.parts]
    if path.startswith("tests/"):
        package = list(Path(path).parent.parts[1:])
    return ".".join([*package[: len(package) - level + 1], *filter(None, [module.lstrip(".")])])


def _files_of(module: str, name: str | None = None) -> Iterator[str]:
    """Yield the file of a module of the repository, of a name in it, and of the packages above it."""
    first, *rest = module.split(".")
    if first == "manta":
        folder = Path()
    elif first in _OF_TESTS:
        folder, rest = Path("tests", first), rest
    else:
        return
    yield from _existing(folder / "__init__.py")
    for part in filter(None, [*rest, name]):
        folder /= part
        if not (ROOT / folder).is_dir():
            yield from _existing(folder.with_name(f"{folder.name}.py"))
            break
        yield from _existing(folder / "__init__.py")
    if first == "manta" and not rest and name == "LLM":  # the package imports it when it is first used
        yield "actors/llm.py"


def _existing(path: Path) -> Iterator[str]:
    if (ROOT / path).is_file():
        yield str(path)


def _imports_of_conftests(test: str) -> Iterator[str]:
    """Yield each conftest.py above a test file, what it imports, and what its named fixtures import."""
    words = set(re.findall(r"\w+", (ROOT / test).read_text()))
    for folder in list(Path(test).parents)[:-1]:
        path = str(folder / "conftest.py")
        if not (ROOT / path).is_file():
            continue
        tree = _tree(path)
        functions = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
        shared = ast.Module([each for each in tree.body if each not in functions.values()], [])
        yield from _imported(shared, path)
        pending = [name for name in functions if name in words]
        used: set[str] = set()
        while pending:
            if (name := pending.pop()) not in used:
                used.add(name)
                yield from _imported(functions[name], path)
                inner = {each.id for each in ast.walk(functions[name]) if isinstance(each, ast.Name)}
                inner |= {argument.arg for argument in functions[name].args.args}
                pending.extend(inner & functions.keys())


if __name__ == "__main__":
    print("\n".join(reached_test_files(changed_files(*sys.argv[1:2]))))
