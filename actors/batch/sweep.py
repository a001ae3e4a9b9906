"""The end of a job in its output: every row once, in as many parts as count and no other.

Also what a part is when its rows are others: written anew under a new name, with a record that says which
parts it replaces. So at any moment each row counts in one part, wherever this is killed; what was left is
done when it runs again. Called by `ledger.py` alone, when no writer may write.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import numpy as np

from ...cluster.errors import OutputError
from ...cluster.row_ranges import RowRanges, contains, count, of_rows, rows_of
from .contents import Contents, figures_of
from .failures import renumbered
from .parts import MANIFEST, Json, OutputForm, Record, part_name, present_name, put, taken_from
from .storage import Storage

SWEEPER = "ledger"  # the writer in records of what is written here
GONE = -1  # in place of a row's number


def settle(output: Storage, contents: Contents, form: OutputForm, run: int) -> None:
    """Remove what does not count, write anew what counts in part, and, in order, what belongs together.

    Raises OSError; may be called again.
    """
    for record in contents.uncommitted:
        remove(output, contents, [record])
    owned = contents.owned  # as it was: what is written anew holds the rows that its parts owned
    for shard, group in _groups(contents, form):
        whole = all(owned[record.part] == record.rows for record in group)
        if len(group) > 1 or group[0].shard != shard or not whole:
            numbers = [_kept(record.rows, owned[record.part]) for record in group]
            rewrite(output, contents, form, group, numbers, run=run, shard=shard)


def rewrite(
    output: Storage,
    contents: Contents,
    form: OutputForm,
    records: Sequence[Record],
    numbers: Sequence[np.ndarray],
    *,
    run: int,
    shard: int,
) -> None:
    """One part in place of others; none where no row is left.

    Args:
        records: of parts of one kind.
        numbers: for each of their rows its number from now on, or GONE.
    """
    flat = np.concatenate(numbers)
    order = np.argsort(flat, kind="stable")[np.count_nonzero(flat == GONE) :]
    if len(order):
        left = {each.part: _left(each, own) for each, own in zip(records, numbers, strict=True)}
        owned = {part: of_rows(rows) for part, rows in left.items()}
        content = taken_from([_content(output, record) for record in records], order, form)
        record = Record(
            part=part_name(records[0].kind, shard, 0, form),
            run=max(record.run for record in records),
            writer=SWEEPER,
            numbering=run,
            rows=of_rows(flat[order].tolist()),
            num_bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            figures=figures_of(records, owned).counts(),
            failures=renumbered([(record.failures, left[record.part]) for record in records]),
            replaces=tuple(record.part for record in records),
        )
        put(output, record, content)
        contents.learn(record)
    remove(output, contents, records)


def remove(output: Storage, contents: Contents, records: Iterable[Record]) -> None:
    """Parts, then their records: a part without a record would be nobody's."""
    for record in records:
        output.remove(record.part, record.name)
        contents.forget(record.part)


def listed(contents: Contents) -> Json:
    """The parts for the manifest."""
    records = sorted(contents.records.values(), key=lambda each: each.part)
    failed = count(contents.failed)
    parts = [
        {
            "file": each.part,
            "kind": "answered" if each.kind == "part" else "failed",
            "rows": count(each.rows),
            "bytes": each.num_bytes,
            "sha256": each.sha256,
        }
        for each in records
    ]
    return {"rows": count(contents.answered) + failed, "failed": failed, "parts": parts}


def manifest_parts(output: Storage) -> set[str]:
    """The parts of the manifest that is there. A writer that was given up may have added others since."""
    try:
        return {present_name(part["file"]) for part in json.loads(output.read(MANIFEST))["parts"]}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return set()


def _groups(contents: Contents, form: OutputForm) -> Iterator[tuple[int, list[Record]]]:
    """Parts that are to be one, and the shard in its name.

    Where order is preserved those are one whose rows lie between each other's, and names follow the rows:
    they do not by themselves where rows were answered in several runs, or have other numbers than before.
    """
    records = sorted(contents.records.values(), key=lambda each: (each.kind, each.rows[0]))
    if not form.ordered:
        yield from ((record.shard, [record]) for record in records)
        return
    for _, of_kind in groupby(records, key=lambda each: each.kind):
        shard = -1
        for group in _neighbours(of_kind):
            shard = max(shard + 1, group[0].shard)
            yield shard, group


def _neighbours(records: Iterable[Record]) -> list[list[Record]]:
    """Records by their first row, in groups that share rows' places or a shard."""
    groups: list[list[Record]] = []
    end = 0
    for record in records:
        if groups and (record.rows[0][0] < end or record.shard == groups[-1][-1].shard):
            groups[-1].append(record)
        else:
            groups.append([record])
        end = max(end, record.rows[-1][1])
    return groups


def _kept(rows: RowRanges, owned: RowRanges) -> np.ndarray:
    return np.array([row if contains(owned, row) else GONE for row in rows_of(rows)], dtype=np.int64)


def _content(output: Storage, record: Record) -> bytes:
    content = output.read(record.part)
    if hashlib.sha256(content).hexdigest() != record.sha256:
        raise OutputError(
            f"output: {record.part} in {output.where} is not what was written: its SHA-256 is another. "
            "Remove it, and run the same command again: its rows are answered again.",
            param="output",
        )
    return content


def _left(record: Record, numbers: np.ndarray) -> dict[int, int]:
    """New numbers of a part's rows by their old ones, without those that are gone."""
    pairs = zip(rows_of(record.rows), numbers.tolist(), strict=True)
    return {old: new for old, new in pairs if new != GONE}
