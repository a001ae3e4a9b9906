"""Likely causes of low acceptance, from slices of the traffic and from tests of the pair.

Two kinds of causes:

* *The traffic* is unlike the drafter's training data: slices that lose (`acceptance_slices.py`).
* *The pair* is not the one of the card: the card's own prompts are accepted less than the card says. If other
  taps bring the acceptance back, the taps are wrong. Else the target is quantized, or it is another one.

Causes are ranked by the accepted drafts that they cost this traffic. A slice that another one explains is no
cause. A cause is likely, not proven: slices that occur together (all German requests are sampled at
temperature 1) cannot be separated, and are reported both.

Called for `/explain` and by `jobs/drafters/explain/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from .acceptance_slices import MIN_CONTEXT, MIN_LOSS, AcceptanceReport, Dimension, SliceReport, differs
from .confidence_intervals import RatioEstimate

Cause = Literal[
    "wrong taps",
    "other fine-tune",
    "quantized target",
    "chat template",
    "thinking",
    "long context",
    "temperature",
    "language",
    "content",
    "grammar",
    "prefix cache",
    "tenant",
]

_OF_SLICE: dict[Dimension, tuple[Cause, str]] = {
    "temperature": (
        "temperature",
        "Samples at a higher temperature are harder to guess; no drafter avoids this. Train it on answers at "
        "this temperature, or lower the temperature where the use allows it.",
    ),
    "thinking": (
        "thinking",
        "The drafter was probably trained without thinking (or with thinking alone). Adapt it to answers of "
        "this mode, or set enable_thinking to the mode of its card.",
    ),
    "language": (
        "language",
        "The drafter has probably seen little text in this language. Adapt it to such traffic.",
    ),
    "content": (
        "content",
        "The drafter has probably seen little text of this kind. Adapt it to such traffic.",
    ),
    "context": (
        "long context",
        "The context is probably longer than the drafter's training sequences. Train it with longer ones.",
    ),
    "prompt": (
        "chat template",
        "Chats are probably rendered by another template than in the drafter's training. Serve the template "
        "that it was trained with (--chat-template), or adapt it to this one.",
    ),
    "grammar": (
        "grammar",
        "Structured outputs are probably unlike the training data. Adapt the drafter to such traffic.",
    ),
    "prefix_cache": (
        "prefix cache",
        "Drafts after a hit should be as good as without one: the drafter's context of cached pages may be "
        "incomplete. Please report it.",
    ),
    "tenant": ("tenant", "This tenant's text is probably unlike the training data. Adapt the drafter to it."),
}
_TAPS = "Set target_layer_ids of the drafter's config.json to these layers."
_QUANTIZED = (
    "The drafter reads hidden states that quantization changes. Adapt it to this target, or compare with the "
    "target in 16 bits."
)
_FINE_TUNE = (
    "The drafter was made for another fine-tune or revision of the target. Use the target of its card, or "
    "adapt the drafter to this one."
)


@dataclass(frozen=True, slots=True)
class TapTrial:
    """The control prompts again, with other taps.

    `relative` is their relative acceptance, and `blocks` the number of blocks divided by that with the given
    taps, prompt by prompt: both runs give the same answers, so far fewer prompts show a difference.
    """

    layer_ids: tuple[int, ...]
    relative: RatioEstimate
    blocks: RatioEstimate

    def is_better(self, control: RatioEstimate) -> bool:
        """Return whether acceptance is higher by MIN_LOSS at least, and the answers need fewer blocks."""
        return control.value < (1.0 - MIN_LOSS) * self.relative.value and is_below(self.blocks, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairEvidence:
    """Findings about the pair itself.

    Attributes:
        texts, chats: acceptance of the card's prompts on this pair, relative to the card's own figures; None
            if the card has none, or there is no card.
        taps: the best trial of other taps, if any was made.
        quantization: the target's quantization, "" without one.
        max_trained_context: longest context that config.json of the drafter names; None if unknown.
        other_template: the drafter's files have another chat template than the target's.
    """

    texts: RatioEstimate | None = None
    chats: RatioEstimate | None = None
    taps: TapTrial | None = None
    quantization: str = ""
    max_trained_context: int | None = None
    other_template: bool = False

    @property
    def control(self) -> RatioEstimate | None:
        return self.chats if self.texts is None else self.texts

    @property
    def pair_is_low(self) -> bool:
        """Whether the card's prompts are accepted less than on the card."""
        return self.control is not None and is_below(self.control, 1.0)


@dataclass(frozen=True, slots=True)
class LikelyCause:
    """One cause: the accepted drafts that it costs, its share of all lost ones, and why it is named."""

    cause: Cause
    num_lost_tokens: float
    lost_share: float
    evidence: str
    remedy: str

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        return {
            "cause": self.cause,
            "lost_tokens": round(self.num_lost_tokens, 1),
            "lost_share": round(self.lost_share, 4),
            "evidence": self.evidence,
            "remedy": self.remedy,
        }


def likely_causes(report: AcceptanceReport, pair: PairEvidence) -> list[LikelyCause]:
    """Return the causes, the most expensive first."""
    found = [*_of_pair(report, pair), *_of_template(report, pair)]
    named = {each.cause for each in found}
    found += [each for each in _of_slices(report, pair) if each.cause not in named]
    return sorted(found, key=lambda each: -each.num_lost_tokens)


def is_below(ratio: RatioEstimate, value: float) -> bool:
    """Return whether the 95 % interval is below a value."""
    return ratio.high is not None and ratio.high < value


def _of_pair(report: AcceptanceReport, pair: PairEvidence) -> Iterator[LikelyCause]:
    control, trial = pair.control, pair.taps
    if control is None or not pair.pair_is_low:
        return
    lost = (1.0 - control.value) * report.num_expected
    said = f"the card's own prompts have {control.value:.0%} of the card's accepted drafts"
    tried = "" if trial is None else ", and other taps are no better"
    if trial is not None and trial.is_better(control):
        evidence = f"{said}; with the taps {list(trial.layer_ids)} they have {trial.relative.value:.0%}"
        yield _cause("wrong taps", lost, report, evidence, _TAPS)
    elif pair.quantization:
        evidence = f"{said}; the target is quantized ({pair.quantization}){tried}"
        yield _cause("quantized target", lost, report, evidence, _QUANTIZED)
    else:
        yield _cause("other fine-tune", lost, report, said + tried, _FINE_TUNE)


def _of_template(report: AcceptanceReport, pair: PairEvidence) -> Iterator[LikelyCause]:
    """Name the template if the card's chats are accepted less than on the card, and its texts are not."""
    if pair.texts is None or pair.chats is None or not differs(pair.chats, pair.texts):
        return
    chats = next((each for each in report.slices if (each.dimension, each.value) == ("prompt", "chat")), None)
    if chats is None:
        return
    share = chats.num_blocks / report.num_blocks
    lost = (1.0 - pair.chats.value / pair.texts.value) * share * report.num_expected
    files = "; the drafter's files have another chat template than the target's" * pair.other_template
    evidence = (
        f"the card's chats have {pair.chats.value:.0%} of the card's accepted drafts, its texts "
        f"{pair.texts.value:.0%}{files}"
    )
    yield _cause("chat template", lost, report, evidence, _OF_SLICE["prompt"][1])


def _of_slices(report: AcceptanceReport, pair: PairEvidence) -> Iterator[LikelyCause]:
    best: dict[Dimension, SliceReport] = {}
    for each in report.losing:
        if not each.explained_by and not _is_plain(each, report):
            best.setdefault(each.dimension, each)
    for dimension, each in best.items():
        assert each.rest is not None, "a slice that loses was compared"
        cause, remedy = _OF_SLICE[dimension]
        name = dimension.replace("_", " ")
        evidence = (
            f"{name} {each.value}: {each.relative.value:.0%} of the expected drafts are accepted, "
            f"{each.rest:.0%} elsewhere ({each.num_requests} requests, {each.num_blocks} blocks)"
        )
        if dimension == "context" and pair.max_trained_context is not None:
            evidence += f"; the drafter's config.json names {pair.max_trained_context} positions"
        yield LikelyCause(cause, each.num_lost_tokens, each.lost_share, evidence, remedy)


def _is_plain(slice_report: SliceReport, report: AcceptanceReport) -> bool:
    """Return whether it is the plain value of its dimension, such as the lowest temperature of several.

    That such a slice loses names no cause.
    """
    dimension, value = slice_report.dimension, slice_report.value
    if dimension == "context" and int(value) <= MIN_CONTEXT:
        return True
    if dimension in ("temperature", "context"):
        values = [float(each.value) for each in report.slices if each.dimension == dimension]
        return len(values) > 1 and float(value) == min(values)
    return {"prompt": "text", "grammar": "no", "prefix_cache": "no"}.get(dimension) == value


def _cause(cause: Cause, lost: float, report: AcceptanceReport, evidence: str, remedy: str) -> LikelyCause:
    return LikelyCause(cause, lost, lost / max(report.num_lost_tokens, lost, 1e-9), evidence, remedy)
