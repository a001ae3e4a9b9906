"""Writes the model card of a trained drafter: architecture, data, training and acceptance."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .heads.recipes import Head

# Title and description by kind of drafter.
_HEADS: Mapping[Head, tuple[str, str]] = {
    "dflash": ("DFlash drafter", "Drafts a block in one pass."),
    "selector": (
        "DFlash drafter with a selector",
        "Drafts a block in one pass; DFlash2's selector chooses each token given the one before it.",
    ),
    "dflash2": (
        "DFlash2 drafter",
        "Drafts a block in one pass with grouped dynamic convolutions; a selector chooses each token given\n"
        "the one before it.",
    ),
    "eagle3": ("EAGLE-3 head", "Drafts a chain of tokens, a pass of one layer for each; three taps."),
}

_CARD = """\
---
library_name: manta
tags: [{head}, speculative-decoding]
---
# {title} for {target}

{what}
Embedding and head are the target's.

* **Initialized from**: {initial}.
* **Data**: {data_tokens:.2f} M tokens of prompts and of the target's answers.
* **Training**: frozen target; {steps:,} steps, {tokens:.2f} M tokens, {minutes:.0f} minutes on {machine};
  cross-entropy and rejection probability at temperature 1, weighted by D-PACE; running average of the
  weights.

## Acceptance on held-out text

Mean acceptance length (including the bonus token) with whole blocks and greedy drafts, which are accepted
while they match the text; at 16 positions of each sequence, for at most 16 sequences.

| category | sequences | length | first draft accepted | before |
|---|---|---|---|---|
| overall | {num_held_out} | {after:.2f} | {accepted:.0%} | {before:.2f} |

Made by `manta drafter train`.
"""


@dataclass(frozen=True)
class DrafterCardFacts:
    head: Head
    target: str
    initial: str | None
    machine: str
    num_steps: int
    num_tokens: int
    used_s: float
    num_data_tokens: int
    num_held_out: int
    before: Mapping[str, float]
    after: Mapping[str, float]


def write_drafter_card(folder: Path, facts: DrafterCardFacts) -> None:
    title, what = _HEADS[facts.head]
    card = _CARD.format(
        head=facts.head,
        title=title,
        what=what,
        target=facts.target,
        initial=facts.initial or "layers of the target",
        data_tokens=facts.num_data_tokens / 1e6,
        steps=facts.num_steps,
        tokens=facts.num_tokens / 1e6,
        minutes=facts.used_s / 60,
        machine=facts.machine,
        num_held_out=facts.num_held_out,
        after=facts.after["tokens_per_step"],
        accepted=facts.after["accepted"],
        before=facts.before["tokens_per_step"],
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
