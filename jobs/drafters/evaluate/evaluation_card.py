"""Writes the results of `manta drafter eval`: tables, card.json, card.md and card.svg.

card.md begins with the Hugging Face hub's model card metadata, with the results as its `model-index`. Its
table has the format of the shipped pair's cards, so `manta plan` and `manta drafter inspect` can read the
acceptance length from it. The figures come from `evaluate_drafter.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from ....actors.checkpoints.published_models import models_and_drafters
from ....actors.system.atomic_files import write_atomically, write_json
from ....cluster.errors import ConfigError
from ....cluster.records.repetition import REPEATED_TOKENS
from ....cluster.step.draft_shape import DraftShape
from ...bench.common.idle_check import idleness_warning, print_warning
from ...common.plots import Picture, can_plot, draw_shares, rows_size, write_svgs
from ...common.tables import NO_FIGURE, print_table
from ..common.drafter_files import CARD_FILE, public_name
from .evaluate_drafter import OVERALL

Figures = Mapping[str, Any]  # Any: JSON
_SHOWN = 8  # draft positions in a terminal table

_CARD = """\
---
{metadata}
---
# {drafter}, evaluated

Drafts for `{target}`.

## Acceptance

Suite `{suite}`, {prompts} prompts, at most {max_tokens} new tokens each; {machine}, {date}, by
`manta drafter eval`{settings}. Every step drafts and verifies whole {drafts}, and answers stop at an
end-of-sequence token. *Length* is the mean acceptance length: tokens of a step with drafts, including the
bonus token. *Fresh* is the same up to an answer's first repetition of {repeated_tokens} tokens, because
repetition is easy to draft; *fresh steps* is the share of the steps before it. Intervals are 95 % confidence
intervals with prompts as sampling units (steps of one answer are correlated): linearized ratio of sums,
Student's t.

{acceptance}

{by_draft}

{picture}{positions}
"""
_SPEED = """
## Speed

The engine as it serves, with adaptive draft lengths, against plain decoding on the same prompts, alternating
in one run; a turn of both is the sampling unit of the interval. *Tok/step* counts steps without drafts, too.

{speed}
"""

_BY_DRAFT = "By draft: share of the steps with a draft at this position in which it is accepted."
_BY_DEPTH = "By draft: share of the steps in which a path of at least this many drafts is accepted."


def write_card(figures: Figures, folder: Path) -> None:
    """Write the three files; without matplotlib there is no card.svg."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / CARD_FILE, figures)
        if has_picture := can_plot():
            write_svgs([_picture(figures)], folder)
        card = _card(figures, has_picture=has_picture)
        write_atomically(folder / "card.md", lambda path: path.write_text(card, encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"output={str(folder)!r} cannot be written: {error.strerror}.", param="output"
        ) from None


def read_card(path: Path) -> Figures:
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
        for at in figures["acceptance"]:
            assert at["temperature"] >= 0 and at["categories"][OVERALL]["by_position"]
    except OSError as error:
        raise ConfigError(
            f"card={str(path)!r} cannot be read ({error.strerror}). Make one with `manta drafter eval -o` "
            "and give it with --card.",
            param="card",
        ) from None
    except (ValueError, TypeError, KeyError, AssertionError):
        raise ConfigError(
            f"card={str(path)!r} is not a card of `manta drafter eval`; give its card.json.", param="card"
        ) from None
    return figures


def print_evaluation(figures: Figures) -> None:
    for at in figures["acceptance"]:
        found, temperature = at["categories"], f"temperature {at['temperature']:g}"
        lengths = [[name, str(each["prompts"]), *_length_cells(each)] for name, each in found.items()]
        columns = ["category", "prompts", "tok/step", *_LENGTH_COLUMNS]
        print_table(f"Tokens per step with {_drafts(figures)}, {temperature}", columns, lengths)
        shares = {
            name: [f"{share['value']:.2f}" for share in each["by_position"][:_SHOWN]]
            for name, each in found.items()
        }
        print_table(f"Acceptance by draft, {temperature}", *_by_draft("category", shares))
    if figures["points"]:
        print_table("Speed", _SPEED_COLUMNS, _speed_rows(figures))
        print_warning(_idleness(figures))


_LENGTH_COLUMNS = ["95 %", "fresh", "95 %", "fresh steps"]  # after the length itself
_SPEED_COLUMNS = [
    *("temperature", "requests at once", "plain tok/s", "tok/s", "speed-up", "95 %", "tok/step"),
    "identical output",
]


def _speed_rows(figures: Figures) -> list[list[str]]:
    return [
        [
            f"{point['temperature']:g}",
            str(point["requests"]),
            f"{point['plain_tokens_per_s']:.1f}",
            f"{point['tokens_per_s']:.1f}",
            f"{point['speedup']['value']:.2f}x",
            _range(point["speedup"], 2),
            f"{point['tokens_per_step']:.2f}",
            "yes" if point["identical"] else "no",
        ]
        for point in figures["points"]
    ]


def _length_cells(found: Figures) -> list[str]:
    """Return the lengths of whole answers and of fresh text with their intervals, and the fresh share."""
    lengths = found["tokens_per_step"], found["fresh_tokens_per_step"]
    cells = (
        [NO_FIGURE] * 2 if each is None else [f"{each['value']:.2f}", _range(each, 2)] for each in lengths
    )
    return [*chain.from_iterable(cells), f"{found['fresh_blocks'] / found['blocks']:.0%}"]


def _range(estimate: Figures, digits: int) -> str:
    if estimate["low"] is None:
        return NO_FIGURE
    return f"{estimate['low']:.{digits}f} to {estimate['high']:.{digits}f}"


def _card(figures: Figures, *, has_picture: bool) -> str:
    provenance, engine = figures["provenance"], figures["engine"]
    speed = _SPEED.format(speed=_markdown(_SPEED_COLUMNS, _speed_rows(figures)))
    if warning := idleness_warning(_idleness(figures)):
        speed += f"\n{warning}\n"
    machine = provenance["gpu"] or f"{provenance['cpu']}, {provenance['cores']} cores"
    card = _CARD.format(
        metadata=_metadata(figures).to_yaml().strip(),
        drafter=public_name(_drafter(figures)),
        target=public_name(engine["model"]),
        suite=figures["suite"]["name"],
        prompts=figures["suite"]["prompts"],
        drafts=_drafts(figures),
        settings=_settings(figures),
        by_draft=_BY_DEPTH if _shape(figures).branches else _BY_DRAFT,
        max_tokens=figures["options"]["max_tokens"],
        repeated_tokens=REPEATED_TOKENS,
        machine=machine,
        date=provenance["date"][:10],
        acceptance=_acceptance_table(figures),
        picture="![Acceptance by category and draft](card.svg)\n\n" if has_picture else "",
        positions=_position_table(figures),
    )
    return card + speed if figures["points"] else card


def _idleness(figures: Figures) -> list[Figures]:
    return [point["idleness"] for point in figures["points"]]


def _metadata(figures: Figures) -> ModelCardData:
    """Return the hub's metadata; `base_model` is left out for a target that the hub cannot link."""
    target, suite = figures["engine"]["model"], figures["suite"]["name"]
    what = "tokens per step of trees" if _shape(figures).branches else "tokens per step"

    def result(kind: str, name: str, value: float) -> EvalResult:
        return EvalResult("text-generation", suite, suite, kind, round(value, 4), metric_name=name)

    results = [
        result(
            "mean_acceptance_length",
            f"{what}, {name}, temperature {at['temperature']:g}",
            found["tokens_per_step"]["value"],
        )
        for at in figures["acceptance"]
        for name, found in at["categories"].items()
    ]
    results += [
        result(
            "mean_acceptance_length",
            f"{what} before repetitions, {OVERALL}, temperature {at['temperature']:g}",
            fresh["value"],
        )
        for at in figures["acceptance"]
        if (fresh := at["categories"][OVERALL]["fresh_tokens_per_step"]) is not None
    ]
    results += [
        result(
            "speedup",
            f"speed-up, {point['requests']} at once, temperature {point['temperature']:g}",
            point["speedup"]["value"],
        )
        for point in figures["points"]
    ]
    return ModelCardData(
        base_model=None if Path(target).exists() or target in models_and_drafters() else target,
        library_name="manta",
        tags=[figures["engine"]["speculative_config"]["method"], "speculative-decoding"],
        model_name=public_name(_drafter(figures)),
        eval_results=results,
    )


def _shape(figures: Figures) -> DraftShape:
    return DraftShape.read(figures["suite"])


def _drafts(figures: Figures) -> str:
    return _shape(figures).describe(figures["suite"]["num_speculative_tokens"])


def _settings(figures: Figures) -> str:
    given = figures["options"]["speculative_config"]
    return f" with `--speculative-config '{json.dumps(given)}'`" if given else ""


def _acceptance_table(figures: Figures) -> str:
    """Return the table that `card_lengths` of drafter/card.py reads."""
    columns = ["category", "prompts"]
    rows: dict[str, list[str]] = {}
    for at in figures["acceptance"]:
        columns += [f"length, T={at['temperature']:g}", *_LENGTH_COLUMNS]
        for name in _categories(figures):
            found = at["categories"].get(name)
            row = rows.setdefault(name, [name, NO_FIGURE if found is None else str(found["prompts"])])
            row += [NO_FIGURE] * 5 if found is None else _length_cells(found)
    return _markdown(columns, [*rows.values()])


def _position_table(figures: Figures) -> str:
    """Return shares in per cent, each with half the width of its interval."""
    shares = _shares(figures, lambda share: _with_reach(share))
    return _markdown(*_by_draft("%, by draft", shares))


def _by_draft(title: str, cells: Mapping[str, list[str]]) -> tuple[list[str], list[list[str]]]:
    """Return columns by draft and the rows of a table, filled up."""
    maximum = max(map(len, cells.values()))
    rows = [[name, *row, *[NO_FIGURE] * (maximum - len(row))] for name, row in cells.items()]
    return [title, *map(str, range(1, maximum + 1))], rows


def _with_reach(share: Figures) -> str:
    value = f"{100 * share['value']:.0f}"
    return value if share["low"] is None else f"{value} ± {50 * (share['high'] - share['low']):.0f}"


def _picture(figures: Figures) -> Picture:
    shares = _shares(figures, lambda share: share["value"])
    draw = partial(draw_shares, rows=shares, x_title="draft")
    return Picture("card", draw, rows_size(len(shares)))


def _shares(figures: Figures, cell: Any) -> dict[str, list[Any]]:  # Any: a cell, text or number
    several = len(figures["acceptance"]) > 1
    return {
        f"{name}, T={at['temperature']:g}" if several else name: [
            cell(share) for share in found["by_position"]
        ]
        for name in _categories(figures)
        for at in figures["acceptance"]
        if (found := at["categories"].get(name)) is not None
    }


def _categories(figures: Figures) -> list[str]:
    return list(dict.fromkeys(name for at in figures["acceptance"] for name in at["categories"]))


def _markdown(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _drafter(figures: Figures) -> str:
    return figures["engine"]["speculative_config"]["model"]
