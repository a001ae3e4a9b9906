"""The result of `manta drafter explain`, as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....cluster.errors import brief_name
from ....cluster.records.acceptance_slices import AcceptanceReport
from ....cluster.records.low_acceptance import LikelyCause, PairEvidence
from ...common.tables import NO_FIGURE

Json = Mapping[str, Any]  # Any: JSON
_WIDTH = 110
_MAX_POSITIONS = 8


@dataclass(frozen=True, slots=True)
class Explanation:
    """`note` says why the pair itself was not judged, "" if it was."""

    drafter: str
    target: str
    report: AcceptanceReport
    causes: list[LikelyCause]
    evidence: PairEvidence
    note: str

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        pair = {"texts": self.evidence.texts, "chats": self.evidence.chats}
        return {
            "drafter": self.drafter,
            "target": self.target,
            "causes": [each.as_json() for each in self.causes],
            "traffic": self.report.as_json(),
            "card_prompts": {
                name: None if ratio is None else ratio.as_json() for name, ratio in pair.items()
            },
            "note": self.note,
        }


def explanation_lines(explanation: Explanation) -> Iterator[str]:
    traffic, control = explanation.report.as_json(), explanation.evidence.control
    yield f"{explanation.drafter} for {explanation.target}"
    yield ""
    yield summary_line(traffic)
    if control is not None:
        yield f"The card's own prompts have {_share(control.as_json())} of the card's accepted drafts."
    if explanation.note:
        yield from textwrap.wrap(explanation.note, _WIDTH)
    yield ""
    if not explanation.causes:
        yield "No slice of this traffic loses, and no fault of the pair was found."
    yield from cause_lines([each.as_json() for each in explanation.causes])
    yield from table_lines(traffic)


def cause_lines(causes: Sequence[Json]) -> Iterator[str]:
    """Yield lines about causes of `LikelyCause.as_json`, in the given order."""
    for number, each in enumerate(causes, start=1):
        yield f"{number}. {each['cause']}: {each['lost_share']:.0%} of the lost tokens"
        evidence = each["evidence"]
        for text in (f"{evidence[0].upper()}{evidence[1:]}.", each["remedy"]):
            yield from textwrap.wrap(text, _WIDTH, initial_indent="   ", subsequent_indent="   ")


def summary_line(traffic: Json) -> str:
    """Return one line about a report of `AcceptanceReport.as_json`."""
    length, relative = traffic["tokens_per_block"], traffic["relative_acceptance"]
    return (
        f"{length['value']:.2f} tokens per block over {traffic['requests']} requests and {traffic['blocks']} "
        f"blocks: {_share(relative)} of the accepted drafts of the {traffic['reference']}."
    )


def table_lines(traffic: Json) -> Iterator[str]:
    """Yield the slices and the positions of a report; slices that lose come first, marked with "*"."""
    head = ("slice", "value", "requests", "blocks", "tokens", "relative", "95 %", "others", "lost")
    yield ""
    yield _row(head)
    for each in traffic["slices"]:
        relative, rest = each["relative_acceptance"], each["relative_acceptance_of_rest"]
        yield _row(
            (
                f"{'* ' if each['loses'] else '  '}{each['dimension'].replace('_', ' ')}",
                brief_name(each["value"]),
                str(each["requests"]),
                str(each["blocks"]),
                f"{each['tokens_per_block']:.2f}",
                f"{relative['value']:.0%}",
                _range(relative),
                NO_FIGURE if rest is None else f"{rest:.0%}",
                f"{each['lost_share']:.0%}" if each["loses"] else NO_FIGURE,
            )
        )
    yield ""
    yield "draft  reached  accepted  reference  lost"
    for each in traffic["positions"][:_MAX_POSITIONS]:
        yield (
            f"{each['position']:>5}{each['reached']:>9}{each['acceptance']:>10.0%}{each['reference']:>11.0%}"
            f"{each['lost_share']:>6.0%}"
        )


def _row(cells: Sequence[str]) -> str:
    left, value, *rest = cells
    widths = (9, 8, 8, 10, 12, 8, 6)
    return f"{left:<15} {value:<12}" + "".join(f"{cell:>{w}}" for cell, w in zip(rest, widths, strict=True))


def _range(estimate: Json) -> str:
    if estimate["low"] is None:
        return NO_FIGURE
    return f"{100 * estimate['low']:.0f} to {100 * estimate['high']:.0f}"


def _share(estimate: Json) -> str:
    interval = "" if estimate["low"] is None else f" ({_range(estimate)} %)"
    return f"{estimate['value']:.0%}{interval}"
