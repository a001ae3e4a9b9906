"""In which order an engine starts the rows it holds, where order is free: neighbours share what they can.

Rows whose prompts begin alike follow each other, so that the later ones find the first one's pages in the
prefix cache; those families, and rows without one, go from long to short, so that a lease ends with its
cheapest rows. Changes no answer. Pure; called by `engine.py` beside the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...actors.batch.reading import Row, record_of
from ...actors.batch.rows import Layout, prompt_column
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
    return len(one) >= SHARED_CHARS and one[:SHARED_CHARS] == other[:SHARED_CHARS]


def _prompt(row: Row, layout: Layout) -> str:
    """What the model will read, about; a row that cannot be read fails later, where it can be said."""
    try:
        record: Mapping[str, Any] = record_of(row, layout)  # Any: whatever a row of the dataset holds
    except RequestError:
        return ""
    if layout.kind == "openai":
        body = record.get("body")
        record = body if isinstance(body, Mapping) else {}
    present = [name for name, value in record.items() if value is not None]
    column = None if layout.template else prompt_column(present, layout)
    value = record if column is None else record[column]
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
