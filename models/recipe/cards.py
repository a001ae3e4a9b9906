"""Writes the two model cards: origin of the weights, cost of the training, and quality."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...cluster.records.repetition import REPEATED_TOKENS
from ...jobs.common.tables import decimals
from .evaluate import Figures

_TARGET_CARD = '''\
---
license: other
license_name: psf-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [code, qwen3]
widget:
  - text: |
      Write the function with this signature and docstring.

      ```python
      def allowed_domains(self):
          """Return None, or the sequence of allowed domains (as a tuple)."""
      ```
---
# Manta's small target

A Qwen3-style language model of {parameters:.1f} M parameters, made to test and demonstrate DFlash
speculative decoding on a laptop. It continues Python in the style of the standard library; it knows
nothing else and is not an assistant.

* **Architecture**: 18 layers of width 192, 4 query and 2 key/value heads of 64, MLP 512, tied embedding,
  RoPE theta 10,000, 1,024 positions; `Qwen3ForCausalLM`, bf16.
* **Tokenizer**: byte-level BPE, 4,096 tokens, with Qwen2's split pattern and NFC; ChatML template;
  `<|endoftext|>` and `<|im_end|>` end a text, `<|mask|>` is the drafter's.
* **Data**: sources and docstrings of CPython's standard library without tests and generated tables, and
  short chats made from them (explain, write, document a function). Copyright Python Software Foundation,
  used under the PSF License Version 2; the weights are offered under the same terms. One file in twelve,
  chosen by a hash of its path, is held out.
* **Training**: {target_steps:,} steps of 4,096 tokens, {target_tokens:.1f} M tokens in all, from a corpus
  of {corpus_tokens:.2f} M; Muon for the hidden matrices, AdamW for the rest, bf16 products on fp32 weights,
  warm-up, constant rate, linear decay; windows of 256, then 512, then 1,024 tokens;
  then {together_steps:,} steps together with the drafter, whose loss reaches the target through its hidden
  states, about half on pieces of the corpus, half on its own continuations at temperatures 0.5 and 0.7 up to
  their first repetition: as in post-training, the target's distribution becomes sharper;
  {target_minutes:.0f} + {together_minutes:.0f} minutes on {machine}.
* **Held-out loss**: {held_out_loss:.3f} nats per token ({held_out_loss_alone:.3f} before training with the
  drafter).

Acceptance with `models/drafter` is on that model's card. Made by `models/recipe`.
'''

_DRAFTER_CARD = """\
---
license: other
license_name: psf-2.0
library_name: manta
tags: [dflash, speculative-decoding]
---
# Manta's small DFlash drafter

Drafts blocks of 16 tokens for `models/target` in one pass ([DFlash](https://arxiv.org/abs/2602.06036)), and
chooses each token given the one before it by DFlash2's selector (rank 128, 16 candidates). It has no
embedding and no head: it uses the target's. z-lab's checkpoint layout, bf16, {parameters:.1f} M parameters,
of which the selector's tables are 1.0 M; 4 layers, full attention, target layers 1, 4, 8, 12 and 15 as
features.

* **Data**: {continuation_tokens:.2f} M tokens of prompts and continuations that the target wrote itself
  (half at temperature 1, a quarter each at 0.7 and 0), up to 192 tokens after prompts of 30-250 tokens cut
  from its training files; the Python standard library (PSF License Version 2).
* **Loss**: random anchors, a clean anchor and 15 masks (or 7, alternating), context before the anchor only;
  0.7 times the rejection probability at temperature 1 plus 0.3 times the cross-entropy against an even
  mixture of the target's sampled token and its whole distribution, weighted by D-PACE (alpha 0.5).
* **Training**: {together_steps:,} steps together with the target, three layers deep and by cross-entropy
  alone, {together_minutes:.0f} minutes; then, the target frozen, with the fourth layer and the selector,
  {drafter_steps:,} steps of 8 of its continuations, {drafter_minutes:.0f} minutes on {machine}; Muon for
  matrices, AdamW for norms and tables, features computed again in every step.

## Acceptance on held-out prompts

`models/prompts.jsonl`, {evaluation_tokens} new tokens each, block 16, a whole block drafted in every step.
Length is the mean acceptance length: a block's accepted drafts plus the bonus token. Temperature 1 uses
equal noise, so the answers are those of plain decoding. Repeated: share of tokens in a sequence of
{repeated_tokens} that the answer already contained; fresh: the length up to the first such token, because
repetition is easy to draft.
The target's held-out loss is {held_out_loss:.3f} nats per token.

{table}

Made by `models/recipe`.
"""


@dataclass(frozen=True)
class RunFacts:
    """Steps, tokens and seconds of a training run."""

    num_steps: int
    num_tokens: int
    used_s: float


@dataclass(frozen=True)
class PairFacts:
    """The numbers of both cards. `held_out_loss_alone`: the target's, before training with the drafter."""

    machine: str
    target: RunFacts
    together: RunFacts
    drafter: RunFacts
    num_target_parameters: int
    num_drafter_parameters: int
    num_corpus_tokens: int
    num_continuation_tokens: int
    num_evaluation_tokens: int
    held_out_loss_alone: float
    held_out_loss: float
    figures: Sequence[Figures]


def write_cards(output_dir: Path, facts: PairFacts) -> None:
    common = {
        "machine": facts.machine,
        "held_out_loss": facts.held_out_loss,
        "together_steps": facts.together.num_steps,
        "together_minutes": facts.together.used_s / 60,
    }
    target = _TARGET_CARD.format(
        parameters=facts.num_target_parameters / 1e6,
        target_steps=facts.target.num_steps,
        target_tokens=facts.target.num_tokens / 1e6,
        target_minutes=facts.target.used_s / 60,
        corpus_tokens=facts.num_corpus_tokens / 1e6,
        held_out_loss_alone=facts.held_out_loss_alone,
        **common,
    )
    drafter = _DRAFTER_CARD.format(
        parameters=facts.num_drafter_parameters / 1e6,
        continuation_tokens=facts.num_continuation_tokens / 1e6,
        drafter_steps=facts.drafter.num_steps,
        drafter_minutes=facts.drafter.used_s / 60,
        evaluation_tokens=facts.num_evaluation_tokens,
        table=figures_table(facts.figures),
        repeated_tokens=REPEATED_TOKENS,
        **common,
    )
    (output_dir / "target" / "README.md").write_text(target, encoding="utf-8")
    (output_dir / "drafter" / "README.md").write_text(drafter, encoding="utf-8")


def figures_table(figures: Sequence[Figures]) -> str:
    """Return a Markdown table with a row per category and three columns per temperature."""
    temperatures = sorted({row.temperature for row in figures})
    categories = list(dict.fromkeys(row.category for row in figures))
    by_key = {(row.category, row.temperature): row for row in figures}
    head = "".join(f" length, T={t:g} | fresh | repeated |" for t in temperatures)
    lines = [f"| category | prompts |{head}", "|---|---|" + "---|---|---|" * len(temperatures)]
    for category in categories:
        rows = [by_key[category, temperature] for temperature in temperatures]
        cells = "".join(
            f" {decimals(row.mean_acceptance_length)} | {decimals(row.fresh_acceptance_length)} |"
            f" {row.repeated_share:.0%} |"
            for row in rows
        )
        lines.append(f"| {category} | {rows[0].num_prompts} |{cells}")
    return "\n".join(lines)
