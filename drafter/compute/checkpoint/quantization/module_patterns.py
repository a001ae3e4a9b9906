"""Patterns by which config.json names the modules that are quantized, or are not.

Names are compared with the prefix of a plain language model, as a checkpoint's may differ from the quantized
model's. Large models have 70,000 modules and hundreds of names: lists become sets, or one expression. An
expression is a stranger's, so the `regex` package matches it, which can be given a limit of time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Literal

import regex

from .....cluster.errors import CheckpointError, brief
from ..hf_config import wrong

_PREFIXES = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.": ""}
_REGEX = "re:"  # marks a regular expression in lists of names
_MAX_MATCH_S = 1.0  # of the process's CPU time; usual expressions take microseconds
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"  # the end of a component


@dataclass(frozen=True, slots=True)
class ModulePattern:
    """An expression that matches from the beginning of a name or anywhere, or a class ("Linear")."""

    kind: Literal["match", "search", "class"]
    text: str

    def matches(self, module: str) -> bool:
        if self.kind == "class":
            return self.text == _class_of(module)
        expression = regex.compile(self.text)
        matches = expression.match if self.kind == "match" else expression.search
        try:
            return any(matches(name, timeout=_MAX_MATCH_S) for name in {module, normalized(module)})
        except TimeoutError:
            raise CheckpointError(
                f"The expression {brief(self.text)}, by which the checkpoint's quantization names modules, "
                f"takes more than {_MAX_MATCH_S:g} s for {brief(module)}. "
                "Write it without nested repetitions.",
                param="quantization_config",
            ) from None


@dataclass(frozen=True, slots=True)
class ModulePatterns:
    """Modules by (normalized) names and patterns; `with_children`: a name includes all modules inside."""

    names: frozenset[str] = frozenset()
    patterns: tuple[ModulePattern, ...] = ()
    with_children: bool = False

    def has_name(self, module: str) -> bool:
        name = normalized(module)
        while name and self.with_children and name not in self.names:
            name = name.rpartition(".")[0]
        return name in self.names

    def matches(self, module: str) -> bool:
        return self.has_name(module) or any(pattern.matches(module) for pattern in self.patterns)


NO_MODULES = ModulePatterns()
LINEAR = ModulePatterns(patterns=(ModulePattern("class", "Linear"),))


def normalized(module: str) -> str:
    prefix = next((prefix for prefix in _PREFIXES if module.startswith(prefix)), None)
    return module if prefix is None else _PREFIXES[prefix] + module.removeprefix(prefix)


def names_and_classes(texts: Sequence[str], file: str, key: str) -> ModulePatterns:
    """Return compressed-tensors' targets: whole names, "re:" and an expression, or classes of layers."""
    expressions = [text.removeprefix(_REGEX) for text in texts if text.startswith(_REGEX)]
    names = [text for text in texts if not text.startswith(_REGEX)]
    classes = tuple(ModulePattern("class", name) for name in names if name[:1].isupper())
    found = (*expressions_of("match", expressions, file, key), *classes)
    return ModulePatterns(frozenset(map(normalized, names)), found)


def unconverted(texts: Sequence[str], file: str, key: str) -> ModulePatterns:
    """Return `modules_to_not_convert`: parts of names, or expressions that end where a component ends."""
    parts = [text for text in texts if re.fullmatch(r"[\w.-]+", text)]
    others = [f"(?:{text.removeprefix(_REGEX)}){_BOUNDARY}" for text in texts if text not in parts]
    alternatives = "|".join(re.escape(text) for text in _spellings(parts))
    whole_components = [rf"(?:^|\.)(?:{alternatives})(?:\.|$)"] if parts else []
    found = expressions_of("search", whole_components, file, key), expressions_of("match", others, file, key)
    return ModulePatterns(patterns=(*found[0], *found[1]))


def shell_patterns(texts: Sequence[str], file: str, key: str) -> ModulePatterns:
    """Return ModelOpt's excluded modules: shell patterns, or names of modules that may contain others."""
    globs = [text for text in texts if set(text) & set("*?[")]
    names = frozenset(normalized(text) for text in texts if text not in globs)
    expression = "|".join(translate(text) for text in _spellings(globs))
    patterns = expressions_of("match", [expression] if globs else [], file, key)
    return ModulePatterns(names, patterns, with_children=True)


def expressions_of(
    kind: Literal["match", "search"], texts: Sequence[str], file: str, key: str
) -> tuple[ModulePattern, ...]:
    """Return patterns of regular expressions. Raises CheckpointError if one is invalid."""
    for text in texts:
        try:
            regex.compile(text)
        except regex.error as error:
            raise wrong(file, key, text, f"a regular expression ({error})") from None
    return tuple(ModulePattern(kind, text) for text in texts)


def _spellings(texts: Iterable[str]) -> list[str]:
    return sorted({spelling for text in texts for spelling in (text, normalized(text))})


def _class_of(module: str) -> str:
    return "Embedding" if module.rpartition(".")[2] == "embed_tokens" else "Linear"
