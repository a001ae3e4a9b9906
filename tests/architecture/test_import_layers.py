"""What import-linter does not check: circles of modules and folders, and what importing and running load.

The contracts of pyproject.toml (`make floors`) include late imports and imports for types.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from manta import LLM, SamplingParams
from support.jobs.package_copy import imported, module_name, run_python, sources
from support.paths import ROOT, TESTS


def test_only_workers_import_torch_distributed() -> None:
    naming = {path for path in sources() if any(n.startswith("torch.distributed") for n in imported(path))}
    assert {path.relative_to(ROOT).parent.as_posix() for path in naming} == {"actors/workers/comm"}


def import_graph(root: Path) -> dict[str, set[str]]:
    """The package's modules, and which of them each imports."""
    paths = {module_name(path, root): path for path in [root / "__init__.py", *sources(root)]}
    graph = {}
    for module, path in paths.items():
        named = (name if name in paths else name.rpartition(".")[0] for name in imported(path, root))
        graph[module] = {name for name in named if name in paths} - {module}
    return graph


def folders(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the graph of folders. `__init__.py` does not count, and a parent is a folder of its own."""
    found: dict[str, set[str]] = {}
    packages = {module_name(path.parent / "__init__.py") for path in sources()}
    for module, imported_modules in graph.items():
        if module in packages:
            continue
        folder = module.rpartition(".")[0]
        others = {each.rpartition(".")[0] for each in imported_modules if each not in packages}
        found.setdefault(folder, set()).update(others - {folder, "manta"})  # the version, which all may name
        found |= {other: set() for other in others if other not in found}
    return found


def test_neither_modules_nor_folders_import_each_other_in_circles() -> None:
    graph = import_graph(ROOT)
    assert "manta.actors.llm" in graph["manta"], "imports for types count"
    for each in (graph, folders(graph)):
        TopologicalSorter(each).prepare()  # raises for a circle


@pytest.mark.parametrize(
    "late",
    ["def late():\n    {}", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {}"],
    ids=["late", "for types"],
)
def test_an_import_circle_is_found_and_named(tmp_path: Path, late: str) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "__init__.py").touch()
    for file, line in (
        ("first", "from . import second"),
        ("second", late.format("from .third import x")),
        ("third", late.format("from .first import y")),
    ):
        (tmp_path / "cluster" / f"{file}.py").write_text(f"{line}\n", encoding="utf-8")
    with pytest.raises(CycleError, match=r"manta\.cluster\.(first|second|third)"):
        TopologicalSorter(import_graph(tmp_path)).prepare()


def test_a_folder_holds_at_most_sixteen_modules_and_one_docstring() -> None:
    for folder in {path.parent for path in sources()}:
        modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(modules) <= 16, folder
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))), folder


def test_a_folder_of_tests_holds_at_most_sixteen_files_each_with_a_name_of_its_own() -> None:
    """Documents and `tests/trials/mutations.py` name a test file without its folder."""
    files = sorted(TESTS.rglob("[!_]*.py"))
    assert max(Counter(path.parent for path in files if path.name != "conftest.py").values()) <= 16
    names = Counter(path.name for path in files if path.name.startswith("test_"))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_two_public_classes_have_the_same_name() -> None:
    names = [
        node.name
        for path in sources()
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert sorted(names) == sorted(set(names))


# Folders that name Numba or Triton, and what steps on a GPU: imported only where they are chosen.
CHOSEN_LATE = (
    "drafter/compute/cpu_numba",
    "drafter/compute/cpu_fused",
    "drafter/compute/gpu_triton",
    "drafter/step/cpu_numba",
    "drafter/step/gpu_triton",
    "jobs/compile/kernel_compiler.py",
    "jobs/compile/pretended_gpu.py",
    "jobs/compile/pretended_start.py",
    "actors/targets/runners/drafts/device_chains.py",
    "actors/targets/runners/drafts/device_lookup.py",
    "actors/targets/runners/drafts/device_suffixes.py",
    "actors/targets/runners/drafts/remote_exchange.py",
    "actors/targets/runners/drafts/tp_sampling.py",
    "actors/targets/runners/drafts/device_trees.py",
    "actors/targets/runners/drafts/device_blocks.py",
    "actors/targets/runners/gpu_runner.py",
    "actors/targets/runners/cuda_graphs.py",
    "actors/targets/runners/grammar_masks.py",
    "actors/targets/runners/plan_layout.py",
    "actors/targets/runners/step_passes.py",
    "actors/targets/runners/logprobs.py",
    "jobs/doctor/cases/products.py",
    "jobs/doctor/cases/steps.py",
    "jobs/doctor/cases/drafts.py",
    "jobs/doctor/cuda_graph_check.py",
    "actors/workers/drafter/gpu_drafter_session.py",
)


def test_modules_import_neither_numba_nor_triton_before_a_backend_is_chosen() -> None:
    names = [
        module_name(path)
        for path in sources()
        if not path.relative_to(ROOT).as_posix().startswith(CHOSEN_LATE)
    ]
    script = """
import importlib, sys

class Absent:  # PyTorch copes with it, where its compiler looks for Triton
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("numba", "llvmlite", "triton"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""
    run_python(script, *names)


IMPORTS = """
import importlib, sys
from manta.drafter.compute.cpu_numba import cpu_features

def asked():
    raise AssertionError("an import asks which instructions there are")

cpu_features.bf16_instructions = asked
before, compiled = sys.argv[1].split(), sys.argv[2].split()
for name in before:  # what the others import, and what that opens
    importlib.import_module(name)
sys.addaudithook(lambda event, args: event == "open" and print(args[0]))
assert not any(name in sys.modules for name in compiled)
for name in compiled:
    importlib.import_module(name)
"""


def test_importing_the_fused_pass_inspects_and_opens_nothing() -> None:
    """Not even the permission to use AMX is requested, since an importing process may never compile."""
    compute, compiled = ROOT / "drafter" / "compute", ROOT / "drafter" / "compute" / "cpu_fused"
    before = [*compute.glob("*.py"), *(compute / "cpu_numba").glob("*.py")]
    modules = sorted(compiled.rglob("*.py"))
    names = (" ".join(map(module_name, paths)) for paths in (before, modules))
    opened = {
        Path(line).resolve() for line in run_python(IMPORTS, *names, PYTHONPYCACHEPREFIX="").splitlines()
    }
    assert {path.name.split(".")[0] for path in opened} == {path.stem for path in modules}
    assert {path.parent for path in opened} <= {
        parent for path in modules for parent in (path.parent, path.parent / "__pycache__")
    }


DECODE = """
import json, os, sys
from dataclasses import replace
from manta import LLM, SamplingParams

if os.environ.get("TRITON_INTERPRET"):
    sys.path.append("tests")
    from support.kernels import interpreter

    interpreter.prepare()
    from manta.actors.targets.loading import warmup

    warmup._sampling_variants = lambda *_: []  # it takes longer than the requests, which sample in every way
settings, unwanted = json.loads(sys.argv[1]), sys.argv[2:]
with LLM(**settings) as llm:
    params = SamplingParams(max_tokens=3, seed=1, ignore_eos=True)
    warm = replace(params, temperature=0.8, top_p=0.9, presence_penalty=0.5)
    for output in llm.generate(["def f("] * 2, [replace(params, temperature=0.0), warm]):
        assert len(output.outputs[0].token_ids) == 3
found = [name for name in sys.modules if name.split(".")[0] in unwanted]
assert not found, found
"""


def test_a_gpu_process_imports_neither_numba_nor_llvm(pair: tuple[Path, Path]) -> None:
    """As far as a CPU can run it: in the interpreter, on a single thread, with a tiny pair."""
    pytest.importorskip("triton")
    drafter = {"model": str(pair[1]), "num_speculative_tokens": 3}
    settings = {"model": str(pair[0]), "speculative_config": drafter, "max_model_len": 32, "page_size": 16}
    settings |= {"device": "cpu", "dtype": "float32", "attention_backend": "triton", "num_threads": 1}
    run_python(DECODE, json.dumps(settings), "numba", "llvmlite", TRITON_INTERPRET="1")


def test_a_cpu_process_does_not_import_triton() -> None:
    pair = {"model": "models/target", "speculative_config": {"model": "models/drafter"}}
    settings = {**pair, "device": "cpu", "max_model_len": 64}
    run_python(DECODE, json.dumps(settings), "triton", TRITON_INTERPRET="")


SCRIPT = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("manta.drafter.compute.cpu_fused"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hidden())
from manta import LLM, SamplingParams
from manta.cluster.errors import ConfigError

pair = {"speculative_config": {"model": "models/drafter"}, "num_threads": 1}
with LLM("models/target", dtype="float32", **pair) as llm:
    (output,) = llm.generate("def read_lines(path):", SamplingParams(temperature=0, max_tokens=8))
print(output.outputs[0].token_ids)
with LLM("models/target", dtype="bfloat16", **pair) as llm:
    assert llm.generate("def read_lines(path):", SamplingParams(temperature=0, max_tokens=4))
try:
    LLM("models/target", dtype="bfloat16", attention_backend="compiled", **pair)
except ConfigError as error:
    assert "is not part of this installation" in error.message, error.message
else:
    raise SystemExit("it was not refused")
assert not any(name.startswith("manta.drafter.compute.cpu_fused") for name in sys.modules)
"""


@pytest.mark.slow
def test_the_fused_pass_can_be_removed(shipped_pair: tuple[Path, Path]) -> None:
    target, drafter = map(str, shipped_pair)
    spec = {"speculative_config": {"model": drafter}, "num_threads": 1}
    with LLM(target, dtype="float32", **spec) as llm:
        (output,) = llm.generate("def read_lines(path):", SamplingParams(temperature=0, max_tokens=8))
    assert json.loads(run_python(SCRIPT)) == output.outputs[0].token_ids


def test_kernel_tests_import_without_a_web_framework() -> None:
    """A bare machine with a GPU has PyTorch, Triton and few packages besides."""
    program = "import sys; sys.modules['fastapi'] = None; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    files = sorted((TESTS / "drafter" / "gpu_triton").glob("test_*.py"))
    done = subprocess.run(
        [sys.executable, "-c", program, "-q", "--collect-only", *map(str, files)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-1000:]
