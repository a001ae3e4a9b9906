"""Why an output cannot be taken for a job: it is somebody else's, or what is in it was made otherwise.

Each refusal names what is in the way, from what to what it has changed, and what helps; nothing is touched.
Called by `ledger.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...cluster.errors import ConfigError
from .contents import Contents
from .paper import JobPaper

NAMED_FILES = 3


def check_same(where: str, paper: JobPaper, before: Mapping[str, Any], *, force: bool) -> None:
    """Raise ConfigError where a job cannot go on with the results of an earlier run.

    Args:
        before: the earlier run's paper, as JSON.
        force: other settings and another input are meant.
    """
    if other := paper.other_form(before):
        raise ConfigError(
            f"output: {where} holds results of another form: {'; '.join(other)}. Choose another output, or "
            "replace it with --overwrite.",
            param="output",
        )
    differences = paper.differences(before)
    if differences and not force:
        raise ConfigError(
            f"output: {where} holds a job that was begun otherwise: {'; '.join(differences)}. Run it as it "
            "was, choose another output, go on nevertheless with --force-resume, or replace it with "
            "--overwrite.",
            param="output",
        )


def check_parts(where: str, contents: Contents, replaced: Collection[str]) -> None:
    """Raise ConfigError where a part is not this job's, or not as long as it was written.

    Args:
        replaced: results of an earlier job, which are to go.
    """
    if foreign := [name for name in contents.unrecorded if name not in replaced]:
        raise ConfigError(
            f"output: {_named(foreign)} in {where} was not written by this job. Move it away, choose another "
            "output, or replace all results with --overwrite.",
            param="output",
        )
    for record in (*contents.records.values(), *contents.stale.values()):
        if (size := contents.files[record.part]) != record.num_bytes:
            raise ConfigError(
                f"output: {record.part} in {where} has {size:,} bytes where {record.num_bytes:,} were "
                "written. Remove it: its rows are answered again.",
                param="output",
            )


def not_empty(where: str, files: Sequence[str]) -> ConfigError:
    """A new job wants an empty output."""
    return ConfigError(
        f"output: {where} is not empty ({_named(files) or 'a job was begun there'}). Choose another output, "
        "or replace its results with --overwrite.",
        param="output",
    )


def _named(files: Sequence[str]) -> str:
    more = len(files) - NAMED_FILES
    return ", ".join([*sorted(files)[:NAMED_FILES], *([f"{more} more"] if more > 0 else [])])
