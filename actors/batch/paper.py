"""The paper of a job: what its answers are made from, so that a later run knows whether it may go on with it.

The fingerprint is a hash of what answers depend on. The drafter is not in it: it changes no answer, and may
be another in the next run. Pure; kept by `runs.py`.
"""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ...cluster.row_ranges import RowRanges
from .parts import Json, OutputForm

SHOWN = 80  # characters of a setting
NAMED_FILES = 3  # of changed input; the others are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPaper:
    """What a job is. JSON through and through, but for the form.

    Attributes:
        made_from: what answers depend on, by name: model and revision, tokenizer, sampling, template, seed.
        input: of every file: name, size, modified, and a hash of its content (`Source.identity`).
        input_format: of these files.
        form: of the output.
        num_rows: of the input.
        sample: the rows of it that are to be answered; all of them if absent.
        rows_per_shard: where order is preserved; another in a later run is set right at the end.
        about: told in the manifest, and free to differ between runs: the drafter, how many engines.
    """

    made_from: Mapping[str, Any]
    input: Sequence[Mapping[str, Any]]
    input_format: str
    form: OutputForm
    num_rows: int
    sample: RowRanges | None = None
    rows_per_shard: int | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        text = json.dumps(_plain(self.made_from), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def rows(self) -> RowRanges:
        """What is to be answered."""
        return ((0, self.num_rows),) if self.sample is None else self.sample

    def as_json(self) -> Json:
        return _plain(
            {
                "fingerprint": self.fingerprint,
                "made_from": self.made_from,
                "input_format": self.input_format,
                "output": self.form.as_json(),
                "num_rows": self.num_rows,
                "sample": self.sample,
                "rows_per_shard": self.rows_per_shard,
                "about": self.about,
                "input": list(self.input),
            }
        )

    def differences(self, before: Mapping[str, Any]) -> list[str]:
        """What is not as it was, in words, over the fingerprint and the input.

        Args:
            before: `as_json` of the earlier paper.
        """
        return self.other_settings(before) + self.other_input(before)

    def other_settings(self, before: Mapping[str, Any]) -> list[str]:
        """Differences that give other answers."""
        return _changes(before["made_from"], _plain(self.made_from))

    def other_form(self, before: Mapping[str, Any]) -> list[str]:
        """Differences that one output cannot hold."""
        return _changes(before["output"], self.as_json()["output"], "output ")

    def other_input(self, before: Mapping[str, Any]) -> list[str]:
        """Files that are not what they were."""
        old = {file["name"]: file for file in before["input"]}
        new = {file["name"]: file for file in _plain(list(self.input))}
        words = [_file_change(name, old.get(name), new.get(name)) for name in sorted({*old, *new})]
        changes = [word for word in words if word]
        if not changes and before["num_rows"] != self.num_rows:
            changes = [f"input: {before['num_rows']:,} rows before, {self.num_rows:,} now"]
        if len(changes) > NAMED_FILES:
            return [*changes[:NAMED_FILES], f"{len(changes) - NAMED_FILES} other files"]
        return changes


def _plain(value: Any) -> Any:
    """As it comes back from JSON."""
    return json.loads(json.dumps(value, default=str))


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    changes: list[str] = []
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            changes += _changes(old, new, f"{prefix}{name}.")
        elif old != new:
            changes.append(f"{prefix}{name}: {_shown(old)} before, {_shown(new)} now")
    return changes


def _shown(value: Any) -> str:
    return "none" if value is None else textwrap.shorten(str(value), SHOWN, placeholder=" ...")


def _file_change(name: str, before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> str | None:
    if before == now:
        return None
    if before is None:
        return f"{name}: new"
    if now is None:
        return f"{name}: gone"
    if before["size"] != now["size"]:
        return f"{name}: {before['size']:,} bytes before, {now['size']:,} now"
    for kind in {"sha256", "sampled"} & before.keys() & now.keys():
        old, new = before[kind], now[kind]
        if old != new:
            return f"{name}: other content of the same size (SHA-256 {old[:12]}... before, {new[:12]}... now)"
        if kind == "sha256":
            return None  # whenever it was written
    if before.get("modified") != now.get("modified"):
        return f"{name}: modified {_time(before.get('modified'))} before, {_time(now.get('modified'))} now"
    return None  # an earlier version noted no hash


def _time(modified: Any) -> str:
    if isinstance(modified, int | float):
        return f"{datetime.fromtimestamp(modified, UTC):%Y-%m-%d %H:%M:%S} UTC"
    return str(modified)
