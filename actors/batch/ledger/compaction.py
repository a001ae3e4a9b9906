"""Rewrites parts: so that at the end every row is in one part, or to renumber rows after the input changed.

A rewritten part gets a new name, and its record lists the parts it replaces. So each row counts in one part
at any moment, and running it again after a kill completes it. Called only while no writer may write.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from ....cluster.batch.row_ranges import RowRanges, contains, count, from_rows, iterate_rows
from ....cluster.errors import OutputError
from ..dataset.row_requests import id_hash
from ..dataset.storage import Storage
from ..row_stats import renumber_failures
from .output_index import OutputIndex, in_parallel, stats_of
from .output_parts import MANIFEST, Json, OutputForm, Record, ids_in, merge_rows, part_name, put

WRITER = "ledger"  # in records of parts written here
REMOVED = -1  # instead of a row's number


def compact(output: Storage, index: OutputIndex, form: OutputForm, run: int) -> None:
    """Remove parts that do not count; rewrite those that count partly or, if `ordered`, belong together."""
    for record in index.uncommitted:
        _remove(output, index, [record])
    owned = index.owned  # before rewriting, which moves rows
    for shard, group in _groups(index, form):
        complete = all(owned[record.part] == record.rows for record in group)
        if len(group) > 1 or group[0].shard != shard or not complete:
            numbers = [_row_mask(record.rows, owned[record.part]) for record in group]
            _rewrite(output, index, form, group, numbers, run=run, shard=shard)


def renumber(output: Storage, index: OutputIndex, form: OutputForm, id_hashes: np.ndarray, run: int) -> None:
    """Give rows of stale parts the numbers of their ids in the changed input; remove others. Repeatable."""
    order = np.argsort(id_hashes)  # order[i]: number of the row with the i-th smallest hash
    ordered = id_hashes[order]

    def numbers(record: Record) -> np.ndarray:
        wanted = np.array([id_hash(each) for each in ids_in(output.read(record.part), form)], dtype=np.uint64)
        if not len(ordered):
            return np.full(len(wanted), REMOVED)
        # Where a hash is, or would be; one beyond the last is compared with the last, and so not found.
        places = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
        return np.where(ordered[places] == wanted, order[places], REMOVED)

    stale = list(index.stale.values())
    for record, now in zip(stale, in_parallel(numbers, stale), strict=True):
        # The same rows in the same order: the file stays.
        if (now != REMOVED).all() and (np.diff(now) > 0).all():
            by_old = dict(zip(iterate_rows(record.rows), now.tolist(), strict=True))
            failures = renumber_failures([(record.failures, by_old)])
            same = replace(record, numbering=run, rows=from_rows(now.tolist()), failures=failures)
            output.write(same.name, same.encoded())
            index.add(same)
        else:
            _rewrite(output, index, form, [record], [now], run=run, shard=record.shard)


def manifest(index: OutputIndex) -> Json:
    failed = count(index.failed)
    parts = [
        {
            "file": each.part,
            "kind": "answered" if each.kind == "part" else "failed",
            "rows": count(each.rows),
            "bytes": each.num_bytes,
            "sha256": each.sha256,
        }
        for each in sorted(index.records.values(), key=lambda each: each.part)
    ]
    return {"rows": count(index.answered) + failed, "failed": failed, "parts": parts}


def manifest_parts(output: Storage) -> set[str]:
    """Return the parts in the output's manifest. An abandoned writer may have added others since."""
    try:
        return {part["file"] for part in json.loads(output.read(MANIFEST))["parts"]}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return set()


def _rewrite(
    output: Storage,
    index: OutputIndex,
    form: OutputForm,
    records: Sequence[Record],
    numbers: Sequence[np.ndarray],
    *,
    run: int,
    shard: int,
) -> None:
    """Write one part that replaces others, with their rows' new numbers or REMOVED; none without rows."""
    flat = np.concatenate(numbers)
    order = np.argsort(flat, kind="stable")[np.count_nonzero(flat == REMOVED) :]
    if len(order):
        by_old = {
            record.part: {
                old: new
                for old, new in zip(iterate_rows(record.rows), own.tolist(), strict=True)
                if new != REMOVED
            }
            for record, own in zip(records, numbers, strict=True)
        }
        content = merge_rows([_content(output, record) for record in records], order, form)
        record = Record(
            part=part_name(records[0].kind, shard, 0, form),
            run=max(record.run for record in records),
            writer=WRITER,
            numbering=run,
            rows=from_rows(flat[order].tolist()),
            num_bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            stats=stats_of(records, {part: from_rows(rows) for part, rows in by_old.items()}).to_json(),
            failures=renumber_failures([(record.failures, by_old[record.part]) for record in records]),
            replaces=tuple(record.part for record in records),
        )
        put(output, record, content)
        index.add(record)
    _remove(output, index, records)


def _remove(output: Storage, index: OutputIndex, records: Iterable[Record]) -> None:
    """Remove parts, then their records: a part without a record could not be attributed."""
    for record in records:
        output.remove(record.part, record.name)
        index.forget(record.part)


def _groups(index: OutputIndex, form: OutputForm) -> Iterator[tuple[int, list[Record]]]:
    """Yield groups of parts to become one (if `ordered`, those that overlap), with its shard."""
    records = sorted(index.records.values(), key=lambda each: (each.kind, each.rows[0]))
    if not form.ordered:
        yield from ((record.shard, [record]) for record in records)
        return
    for _, of_kind in groupby(records, key=lambda each: each.kind):
        groups: list[list[Record]] = []
        end, shard = 0, -1
        for record in of_kind:
            if groups and (record.rows[0][0] < end or record.shard == groups[-1][-1].shard):
                groups[-1].append(record)
            else:
                groups.append([record])
            end = max(end, record.rows[-1][1])
        for group in groups:
            shard = max(shard + 1, group[0].shard)
            yield shard, group


def _row_mask(rows: RowRanges, owned: RowRanges) -> np.ndarray:
    return np.array([row if contains(owned, row) else REMOVED for row in iterate_rows(rows)], dtype=np.int64)


def _content(output: Storage, record: Record) -> bytes:
    content = output.read(record.part)
    if hashlib.sha256(content).hexdigest() != record.sha256:
        raise OutputError(
            f"output: {record.part} in {output.where} was changed: its SHA-256 differs. "
            "Remove it, and run the same command again: its rows are answered again.",
            param="output",
        )
    return content
