"""The commands in the guides exist."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer.main
from manta.jobs.cli import app
from support.paths import ROOT

DOCS = ROOT / "docs"


def parsed(command: list[str]) -> dict[str, Any]:
    """Parse the parameters of a `manta` command without running it; click raises for wrong ones."""
    name, *subcommand = command
    assert name == "manta"
    group: Any = typer.main.get_command(app)
    return group.commands[subcommand[0]].make_context(subcommand[0], subcommand[1:]).params


def test_an_unknown_flag_would_be_detected() -> None:
    with pytest.raises(Exception, match=r"--prompt-columm"):
        parsed(["manta", "batch", "-m", "x", "-i", "a", "-o", "b", "--prompt-columm", "c"])


@pytest.mark.parametrize(
    ("guide", "minimum"), [("batch.md", 6), ("production.md", 8), ("how-to/structured-output.md", 1)]
)
def test_the_commands_of_a_guide_exist(guide: str, minimum: int) -> None:
    text = (DOCS / guide).read_text()
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)).replace("\\\n", " ")
    found = [match[1] for line in blocks.splitlines() if (match := re.search(r"(?:^|-- )(manta .*)", line))]
    assert len(found) >= minimum
    for command in found:
        parsed(shlex.split(command, comments=True))
