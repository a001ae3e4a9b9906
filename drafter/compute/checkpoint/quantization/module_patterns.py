"""Patterns by which config.json names the modules that are quantized, or are not.

Formats write them differently. A checkpoint's tensors may have another prefix than the model that was
quantized had, so names are compared with the prefix of a plain language model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from ..hf_config import wrong

# How a text names modules: by an expression that matches from the beginning or anywhere, by a shell pattern,
# by whole components in a row ("mlp.gate"), or by the class of the layer ("Linear").
Kind = Literal["match", "search", "glob", "components", "class"]

_BODIES = ("model.language_model.", "language_model.model.", "language_model.")
_BODY = "model."
_REGEX = "re:"  # marks a regular expression in lists of names
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"  # the end of a component


@dataclass(frozen=True, slots=True)
class ModulePattern:
    kind: Kind
    text: str

    def matches(self, module: str) -> bool:
        names = {module, normalized(module)}
        match self.kind:
            case "match":
                return any(re.match(self.text, name) for name in names)
            case "search":
                return any(re.search(self.text, name) for name in names)
            case "glob":
                return any(fnmatchcase(name, text) for name in names for text in self._spellings())
            case "components":
                return any(f".{text}." in f".{name}." for name in names for text in self._spellings())
            case "class":
                return self.text == _class_of(module)

    def _spellings(self) -> set[str]:
        return {self.text, normalized(self.text)}


@dataclass(frozen=True, slots=True)
class ModulePatterns:
    """A set of modules: some by their whole (normalized) names, others by patterns."""

    names: frozenset[str] = frozenset()
    patterns: tuple[ModulePattern, ...] = ()

    def has_name(self, module: str) -> bool:
        return normalized(module) in self.names

    def matches(self, module: str) -> bool:
        return self.has_name(module) or any(pattern.matches(module) for pattern in self.patterns)


NO_MODULES = ModulePatterns()
LINEAR = ModulePatterns(patterns=(ModulePattern("class", "Linear"),))


def normalized(module: str) -> str:
    """Return a module's name with the prefix of a plain language model."""
    body = next((body for body in _BODIES if module.startswith(body)), None)
    return module if body is None else _BODY + module.removeprefix(body)


def names_and_classes(texts: Sequence[str], file: str, key: str) -> ModulePatterns:
    """Return compressed-tensors' targets: whole names, "re:" and an expression, or classes of layers."""
    expressions = [text.removeprefix(_REGEX) for text in texts if text.startswith(_REGEX)]
    names = [text for text in texts if not text.startswith(_REGEX)]
    classes = tuple(ModulePattern("class", name) for name in names)
    found = (*expressions_of("match", expressions, file, key), *classes)
    return ModulePatterns(frozenset(map(normalized, names)), found)


def unconverted(texts: Sequence[str], file: str, key: str) -> ModulePatterns:
    """Return `modules_to_not_convert`: parts of names, or expressions that end where a component ends."""
    found: list[ModulePattern] = []
    for text in texts:
        if re.fullmatch(r"[\w.-]+", text):
            found.append(ModulePattern("components", text))
        else:
            expression = f"(?:{text.removeprefix(_REGEX)}){_BOUNDARY}"
            found += expressions_of("match", [expression], file, key)
    return ModulePatterns(patterns=tuple(found))


def shell_patterns(texts: Sequence[str]) -> ModulePatterns:
    """Return ModelOpt's excluded modules: shell patterns, or names of modules that contain others."""
    patterns = [ModulePattern("glob" if set(text) & set("*?[") else "components", text) for text in texts]
    return ModulePatterns(patterns=tuple(patterns))


def expressions_of(
    kind: Literal["match", "search"], texts: Sequence[str], file: str, key: str
) -> tuple[ModulePattern, ...]:
    """Return patterns of regular expressions.

    Raises:
        CheckpointError: one is no regular expression.
    """
    for text in texts:
        try:
            re.compile(text)
        except re.error as error:
            raise wrong(file, key, text, f"a regular expression ({error})") from None
    return tuple(ModulePattern(kind, text) for text in texts)


def _class_of(module: str) -> str:
    return "Embedding" if module.rpartition(".")[2] == "embed_tokens" else "Linear"
