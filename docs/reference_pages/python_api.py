"""Reference page of the Python API, from signatures and docstrings in the sources, which are not imported."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from textwrap import dedent

from manta.actors.http.protocol.protocol import GenerationRequest
from manta.jobs.common.engine_flags import described

from .markdown import cell, code, summary, table

ROOT = Path(__file__).resolve().parents[2]
# Public name -> source file.
PUBLIC = {
    "manta.LLM": "actors/llm.py",
    "manta.SamplingParams": "cluster/request/request.py",
    "manta.StructuredOutputsParams": "cluster/request/structured_outputs.py",
    "RequestOutput": "actors/engine/outputs.py",
    "CompletionOutput": "actors/engine/outputs.py",
    "RequestMetrics": "actors/engine/outputs.py",
    "manta.data.MantaEngineProcessorConfig": "jobs/batch/processor.py",
    "manta.data.build_processor": "jobs/batch/processor.py",
}
_OF_HTTP = """These have the meanings of [HTTP's fields](routes.md#fields-of-bodies): """
_INTRODUCTION = """# Python API

`manta.LLM` decodes in this process, without Ray or HTTP; `manta.data` is a stage of a
[Ray Data](../batch.md#mantadatabuild_processor) pipeline. Everything else is internal.

```python
from manta import LLM, SamplingParams

with LLM("models/target", speculative_config={"model": "models/drafter"}) as llm:
    (output,) = llm.generate("def median(values):", SamplingParams(temperature=0, max_tokens=64))
print(output.outputs[0].text, output.metrics.mean_acceptance_length)
```
"""


def python_page() -> str:
    return "\n".join([_INTRODUCTION, *(_entry(name, ROOT / path) for name, path in PUBLIC.items())])


def _entry(name: str, path: Path) -> str:
    own = name.rpartition(".")[2]
    source = path.read_text(encoding="utf-8")
    found = next(node for node in ast.parse(source).body if getattr(node, "name", None) == own)
    if isinstance(found, ast.FunctionDef):
        return _function(f"## `{name}`", name, found, source)
    assert isinstance(found, ast.ClassDef), f"{name} is neither a class nor a function"
    methods = {each.name: each for each in found.body if isinstance(each, ast.FunctionDef)}
    text = ast.get_docstring(found)
    parts = [f"## `{name}`", summary(text)]
    if "__init__" in methods:
        parts += [_signature(own, methods["__init__"], source), _said(described(text, "Args:"))]
    shared = set(GenerationRequest.model_fields) if own == "SamplingParams" else set[str]()
    parts += [_fields(found, described(text, "Attributes:"), shared)]
    public = (each for each in methods.values() if not each.name.startswith("_"))
    parts += [
        _function(f"### `{own}.{each.name}`", each.name, each, source)
        for each in public
        if not _is_property(each)
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _function(head: str, name: str, node: ast.FunctionDef, source: str) -> str:
    text = ast.get_docstring(node)
    parts = [head, _signature(name, node, source), summary(text), _said(described(text, "Args:"))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _signature(name: str, node: ast.FunctionDef, source: str) -> str:
    """Return a function's signature from its source, without `self` and `-> None`."""
    head = dedent("\n".join(source.splitlines()[node.lineno - 1 : node.body[0].lineno - 1]))
    shown = re.sub(r"^def \w+", name, head).replace(" -> None:", "").rstrip(":")
    shown = re.sub(r"\n {4}self,(?=\n)|(?<=\()self(, )?", "", shown)
    return f"```python\n{shown}\n```"


def _fields(node: ast.ClassDef, said: dict[str, str], shared: set[str]) -> str:
    """Return a dataclass's public fields: the `shared` ones as a list, the others as a table."""
    rows: list[tuple[str, str, str, str]] = []
    names: list[str] = []
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.target.id[0] != "_":
            name, kind = each.target.id, ast.unparse(each.annotation)
            default = ast.unparse(each.value) if each.value else ""
            if name in shared:
                names.append(code(f"{name} = {default}"))
            else:
                rows.append((code(name), code(kind), code(default), cell(said.get(name, ""))))
    listed = f"{_OF_HTTP}{', '.join(names)}.\n\n" if names else ""
    return listed + (table(("field", "type", "default", "meaning"), rows) if rows else "")


def _said(arguments: dict[str, str]) -> str:
    return (
        table(("argument", "meaning"), [(code(name), cell(text)) for name, text in arguments.items()])
        if arguments
        else ""
    )


def _is_property(node: ast.FunctionDef) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list)
