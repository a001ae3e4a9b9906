"""In which order an engine starts the rows it holds, where order is free: neighbours share what they can.

Rows whose prompts begin alike follow each other, so that the later ones find the first one's pages in the
prefix cache; those families, and rows without one, go from long to short, so that a lease ends with its
cheapest rows. Changes no answer. Pure; called by `engine.py` beside the event loop.
"""

from __future__ import annotations

import json
import os.path
from collections.abc import Mapping, Sequence
from typing import Any

from ...actors.batch.reading import Row
from ...actors.batch.rows import Layout, parse_line, prompt_column
from ...cluster.errors import RequestError

SHARED_CHARS = 64  # of a prefix that is worth a family: about a page of tokens


def by_shared_prefix(rows: Sequence[Row], layout: Layout) -> list[Row]:
    """The rows in the order in which to start them."""
    prompts = sorted(((_prompt(row, layout), row.number, row) for row in rows), key=lambda each: each[:2])
    families: list[list[tuple[str, int, Row]]] = []
    for each in prompts:
        if families and _alike(families[-1][-1][0], each[0]):
            families[-1].append(each)
        else:
            families.append([each])
    families.sort(key=lambda family: -max(len(prompt) for prompt, _, _ in family))
    return [row for family in families for _, _, row in family]


def _alike(one: str, other: str) -> bool:
    return len(os.path.commonprefix([one[:SHARED_CHARS], other[:SHARED_CHARS]])) == SHARED_CHARS


def _prompt(row: Row, layout: Layout) -> str:
    """What the model will read, about; rows that cannot be read fail later, where it can be said."""
    record: Mapping[str, Any] = row.record  # Any: whatever a row of the user's dataset holds
    if layout.lines:
        try:
            record = parse_line(record["text"])
        except RequestError:
            return ""
    if layout.kind == "openai":
        record = record["body"] if isinstance(record.get("body"), Mapping) else {}
    column = prompt_column([name for name, value in record.items() if value is not None], layout)
    value = record if column is None else record[column]
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
