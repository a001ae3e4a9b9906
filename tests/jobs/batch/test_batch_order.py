"""The order in which an engine starts its rows: common prefixes together, long rows first."""

from __future__ import annotations

from manta.actors.batch.dataset.row_reader import Row
from manta.actors.batch.dataset.row_requests import RowSchema
from manta.jobs.batch.engine_actor import SHARED_CHARS, by_shared_prefix

SHARED = "You are a helpful assistant. " * 4


def numbers(rows: list[Row], row_schema: RowSchema) -> list[int]:
    return [row.number for row in by_shared_prefix(rows, row_schema)]


def test_rows_with_a_common_prefix_are_adjacent_and_groups_are_sorted_from_long_to_short() -> None:
    prompts = [SHARED + "b", "short", SHARED + "a" * 40, "x" * 500, "short"]
    rows = [Row(number, {"prompt": prompt}) for number, prompt in enumerate(prompts)]
    assert len(SHARED) > SHARED_CHARS
    assert numbers(rows, RowSchema()) == [3, 2, 0, 1, 4]


def test_every_kind_of_row_is_sorted_including_broken_ones() -> None:
    lines = ['{"prompt": "abc"}', "{broken", '{"messages": [{"role": "user", "content": "hi"}]}', '{"id": 1}']
    rows = [Row(number, {"text": line}) for number, line in enumerate(lines)]
    assert sorted(numbers(rows, RowSchema(lines=True))) == [0, 1, 2, 3]
    openai = [
        Row(0, {"text": '{"custom_id": "a", "body": {"prompt": "p"}}'}),
        Row(1, {"text": '{"body": 3}'}),
    ]
    assert sorted(numbers(openai, RowSchema(kind="openai", lines=True))) == [0, 1]
    templated = [Row(0, {"a": "x"}), Row(1, {"a": None})]
    assert sorted(numbers(templated, RowSchema(template="{a}"))) == [0, 1]
