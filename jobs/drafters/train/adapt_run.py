"""`manta drafter adapt`: trains a drafter on new traffic and writes it only if a gate passes.

    traffic, general text ─▶ split by hash ─▶ answers of the target ─▶ train() ─▶ gate ─▶ output, or exit 1
                                  └─ held out: tokens per step of the old and of the new drafter, greedy ─┘

Intermediate files are in a folder beside the output, so the same command continues an interrupted run. The
text comes from `adapt_data.py`; tokens per step are measured by
`jobs/drafters/evaluate/evaluate_drafter.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ....actors.checkpoints.checkpoint_paths import resolve_checkpoint, shipped
from ....actors.system.atomic_files import write_json
from ....actors.tokenization.tokenizer import Tokenizer
from ...bench.common.engine_passes import PromptRow, say
from ...bench.common.request_source import RequestSource
from ...common.tables import decimals, print_table
from ...training.heads.recipes import DrafterSettings, Teaching
from ...training.heads.trainables import output_layout, read_target
from ...training.loop.training_loop import Length, Schedule
from ...training.train_drafter import train
from ..common.options import AdaptOptions
from ..evaluate.evaluate_drafter import OVERALL, engine_of, measure_acceptance, open_full_length
from .adapt_data import AdaptRunKey, Example, check_place, prepare_text

# Lower learning rates than for a new drafter, to limit forgetting; chosen on the shipped pair.
RECIPE = DrafterSettings(
    num_anchors=32,
    matrix_lr=1e-3,
    other_lr=1e-3,
    teaching=Teaching(distance_share=0.3, distance_from=0.0),
    schedule=Schedule(warmup_steps=20, decay_from=0.3),
)
MEASURED_TOKENS = 128
_AT_ONCE = 16
MAX_LOSS = 0.03  # accepted loss of tokens per step in a category of old text


def run_adapt(options: AdaptOptions, report: Callable[[str], None] = say) -> dict[str, Any]:
    """Train and measure, write `output` if the gate passes, and return the figures with `passed`."""
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    target = resolve_checkpoint(options.target, field="target")
    initial = resolve_checkpoint(options.drafter, field="drafter")
    key = AdaptRunKey(
        str(initial), str(target), str(options.data), str(options.replay), options.minutes, options.chat
    )
    for field, path in (("data", options.data), ("replay", shipped(options.replay))):
        check_place(path, field)
    options.work.mkdir(mode=0o700, parents=True, exist_ok=True)
    spec, _ = read_target(target)
    layout = output_layout(spec, RECIPE.num_taps, initial)
    text = prepare_text(key, options.work, Tokenizer.load(target), report, layout)
    report(
        f"{len(text.new)} new and {len(text.old)} old completions for training; {len(text.held_out_new)} and "
        f"{len(text.held_out_old)} prompts are held out"
    )
    before = measure(initial, target, text.held_out_new, text.held_out_old)
    trained = train(
        target,
        text.mixture(),
        text.new_to_watch,
        options.work / "training",
        Length(seconds=text.training_s),
        initial=initial,
        settings=RECIPE,
        report=report,
        recorded=[options.work / name for name in ("new", "old", "watched")],
    )
    after = measure(trained.drafter, target, text.held_out_new, text.held_out_old)
    verdict = judge(before, after, options.min_gain)
    figures = {
        **verdict.as_json(),
        **key.as_json(),
        "learnt": {"new": len(text.new), "old": len(text.old)},
        "held_out": {"new": len(text.held_out_new), "old": len(text.held_out_old)},
        "steps": trained.num_steps,
        "tokens": trained.num_tokens,
        "training_s": round(trained.used_s, 1),
    }
    write_json(trained.drafter / "adapt.json", figures)
    if verdict.passed:
        shutil.copytree(trained.drafter, options.output)
    return figures


def measure(drafter: Path, target: Path, new: Sequence[Example], old: Sequence[Example]) -> GateLengths:
    config = replace(engine_of(str(drafter), str(target)), enable_prefix_caching=False, max_num_seqs=_AT_ONCE)
    with open_full_length(config) as driver:

        def of(examples: Sequence[Example]) -> dict[str, float]:
            rows = [PromptRow(str(i), each.category, each.prompt) for i, each in enumerate(examples)]
            source = RequestSource(rows, MEASURED_TOKENS, 0.0, natural=True)
            found = measure_acceptance(driver, source, len(rows), min(_AT_ONCE, len(rows)))
            return {category: each.tokens_per_step.value for category, each in found.items()}

        of_new, of_old = of(new), of(old)
    return GateLengths(of_new[OVERALL], {name: value for name, value in of_old.items() if name != OVERALL})


def print_figures(figures: dict[str, Any], options: AdaptOptions) -> None:
    rows = [
        [name, decimals(found["before"]), decimals(found["after"]), f"{found['gain']:+.1%}"]
        for name, found in figures["tokens_per_step"].items()
    ]
    print_table("tokens per step on held-out text", ["text", "before", "after", "gain"], rows)
    if figures["passed"]:
        print(f"adapted: {options.output}")
    else:
        print(f"rejected, the old drafter stays: {'; '.join(figures['complaints'])}")
        print(f"the trained drafter and its curves are in {options.work / 'training'}")


@dataclass(frozen=True, slots=True)
class GateLengths:
    new: float
    old: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of the comparison; `complaints` are reasons to reject the new drafter."""

    before: GateLengths
    after: GateLengths
    complaints: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.complaints

    def rows(self) -> list[tuple[str, float, float]]:
        old = [(name, self.before.old[name], self.after.old[name]) for name in self.before.old]
        return [("new", self.before.new, self.after.new), *old]

    def as_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "complaints": list(self.complaints),
            "tokens_per_step": {
                name: {
                    "before": round(before, 4),
                    "after": round(after, 4),
                    "gain": round(gain(before, after), 4),
                }
                for name, before, after in self.rows()
            },
        }


def judge(before: GateLengths, after: GateLengths, min_gain: float) -> Verdict:
    complaints: list[str] = []
    gained = gain(before.new, after.new)
    if gained < min_gain:
        complaints.append(f"new text gains {gained:+.1%}, less than {min_gain:.1%}")
    for name, length in before.old.items():
        if (lost := -gain(length, after.old[name])) > MAX_LOSS:
            complaints.append(f"{name} loses {lost:.1%}, more than {MAX_LOSS:.0%}")
    return Verdict(before, after, tuple(complaints))


def gain(before: float, after: float) -> float:
    return after / before - 1.0
