"""`make check` runs each test whose result a change can alter, and few others."""

from __future__ import annotations

import json

import pytest
from support.import_closure import closure, reached_test_files
from support.jobs.package_copy import run_python

LOADED = """
import json, runpy, sys
from pathlib import Path
sys.path.insert(0, "tests")
import conftest
runpy.run_path(sys.argv[1])
files = {Path(getattr(module, "__file__", None) or "/") for module in sys.modules.values()}
print(json.dumps([str(path.relative_to(Path.cwd())) for path in files if Path.cwd() in path.parents]))
"""


def test_the_closure_contains_each_file_that_a_test_file_loads() -> None:
    test = "tests/actors/http/test_http_chat.py"
    loaded = {path for path in json.loads(run_python(LOADED, test)) if not path.startswith(".venv/")}
    assert loaded - {"tests/conftest.py"} <= closure(test)


@pytest.mark.parametrize(
    ("changed", "reached", "not_reached"),
    [
        (
            "cluster/kv_cache/prefix_cache.py",
            "cluster/kv_cache/test_cluster_pages.py",
            "cluster/speculation/test_draft_tree.py",
        ),
        (
            "actors/http/wire/sse.py",
            "actors/http/test_http_chat.py",
            "cluster/kv_cache/test_cluster_pages.py",
        ),
        ("actors/llm.py", "end_to_end/lossless/test_lossless.py", "drafter/compute/test_row_norm.py"),
        ("actors/http/ui/page.html", "actors/http/test_ui.py", "drafter/step/test_sampling.py"),
        ("ray_config.yaml", "jobs/test_config_file.py", "drafter/step/test_sampling.py"),
        ("tests/support/oracles/oracle_eagle3.py", "drafter/proposers/test_eagle3.py", "jobs/test_flags.py"),
    ],
)
def test_a_change_reaches_what_imports_or_names_it(changed: str, reached: str, not_reached: str) -> None:
    tests = reached_test_files([changed])
    assert f"tests/{reached}" in tests
    assert f"tests/{not_reached}" not in tests


def test_a_change_of_what_all_tests_share_reaches_all_of_them() -> None:
    assert reached_test_files(["pyproject.toml"]) == reached_test_files(["tests/conftest.py"])
    assert "tests/architecture/test_import_closure.py" in reached_test_files(["pyproject.toml"])
