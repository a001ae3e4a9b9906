"""Flags made of dataclasses: names, types, defaults and descriptions come from the fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from manta.cluster.config import EngineConfig
from manta.cluster.flag import NO_FLAG, Flag, Size
from manta.jobs.common.engine_flags import Model, with_flags
from typer.testing import CliRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """Options of every job.

    Attributes:
        output: file for the result. It is replaced.
    """

    output: Annotated[Path, Flag("-o")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Base):
    """Further options of one job.

    Attributes:
        subject: what is measured, i.e. its name.
        num_rows: rows to read; the file's by default. The next sentence is the reference's.
        context: tokens, as 32k.
        sizes: numbers; may be repeated.
        overrides: values by name.
        mode: how it runs.
        resume: go on.
        force: go on anyway.
        inner: set by code alone.
    """

    subject: Annotated[str, Flag(positional=True)]
    num_rows: Annotated[int | None, Flag("--rows -r", least=1)] = None
    context: Size = 1024
    sizes: tuple[Size, ...] = (1, 8)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    mode: Literal["quick", "whole"] = "quick"
    resume: bool = True
    force: bool = False
    inner: Annotated[float, NO_FLAG] = 0.5


made: list[Any] = []
app = typer.Typer(rich_markup_mode=None)


@app.command()
@with_flags
def job(options: Options, tail: Annotated[str, typer.Option(help="The command's own.")] = "t") -> None:
    """Run a job."""
    made.append((options, tail))


@app.command()
@with_flags
def engine(config: EngineConfig, model_: Model = None) -> None:
    """Run an engine."""
    made.append(config)


def run(*arguments: str) -> Any:
    """Return the values that the command received, or the user's error message."""
    made.clear()
    found = CliRunner().invoke(app, arguments)
    return made[0] if made else " ".join(found.output.split())


def test_omitted_flags_keep_the_fields_defaults() -> None:
    wanted = Options(subject="s", output=Path("o"))
    assert run("job", "s", "-o", "o") == (wanted, "t")


def test_values_are_converted_to_the_fields_types() -> None:
    flags = ["--rows", "3", "--context", "32k", "--sizes", "4", "--sizes", "1K", "--overrides", '{"a": 1}']
    flags += ["--mode", "whole", "--no-resume", "--force", "--output", "o", "--tail", "x"]
    numbers: dict[str, Any] = {"num_rows": 3, "context": 32_000, "sizes": (4, 1024), "overrides": {"a": 1}}
    wanted = Options(subject="s", output=Path("o"), mode="whole", resume=False, force=True, **numbers)
    assert run("job", "s", *flags) == (wanted, "x")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rows", "0"], "Invalid value for '--rows' / '-r'"),
        (["--context", "long"], "not a whole number; write 4096, 32k or 1G"),
        (["--sizes", "long"], "not a whole number"),
        (["--overrides", "[1]"], "not a JSON object"),
        (["--mode", "slow"], "'quick'"),
        (["--inner", "1"], "No such option: --inner"),
        (["--no-force"], "No such option: --no-force"),
    ],
)
def test_a_wrong_value_is_a_usage_error_that_names_it(flags: list[str], said: str) -> None:
    assert said in run("job", "s", "-o", "o", *flags)


def test_help_shows_the_first_sentence_and_the_default_of_each_field() -> None:
    shown = run("job", "--help")
    for words in (
        "What is measured, i.e. its name. [required]",
        "File for the result. [required]",
        "Rows to read; the file's by default. [x>=1]",
        "--context SIZE Tokens, as 32k. [default: 1024]",
        "Numbers; may be repeated. [default: 1, 8]",
        "--resume / --no-resume Go on. [default: resume]",
    ):
        assert words in shown
    assert "reference's" not in shown and "Set by code" not in shown


def test_a_model_is_an_argument_or_a_flag_but_not_both() -> None:
    assert run("engine", "a").model == run("engine", "--model", "a").model == "a"
    assert "not both" in run("engine", "a", "-m", "b")
