"""`manta drafter train`: prepares data, trains in this process or on Ray workers, and writes the card.

All state is in the run's folder. The same command resumes an interrupted run, or trains longer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from ....actors.capture.target_outputs import OutputLayout
from ....actors.checkpoints.checkpoint_paths import absolute_path, has_tokenizer, resolve_checkpoint
from ....actors.targets.model.model_spec import ModelSpec
from ....actors.tokenization.tokenizer import Tokenizer
from ....cluster.errors import ConfigError
from ...common.progress import format_duration
from ...common.ray_session import join_or_start_ray
from ...training.heads.mask_token import mask_token
from ...training.heads.recipes import DrafterSettings, Head, further_recipe, new_recipe
from ...training.heads.trainables import is_small, output_layout, read_target
from ...training.loop.answering import ANSWERS_SHARE, seconds_left, seconds_used, usual_temperatures
from ...training.loop.continuations import Continuations
from ...training.loop.training_loop import Length, Report
from ...training.train_drafter import (
    ANSWERS,
    DATA,
    HELD_OUT,
    OUTPUTS,
    USEFUL_STEPS,
    Trained,
    TrainingRun,
    check_data,
    machine,
    run_here,
    run_on_workers,
)
from ..common.drafter_files import public_name
from ..common.options import TrainOptions
from .train_data import AnswerSettings, check_sources, gather, prompt_rows

_HELD_OUT_SHARE, _MAX_HELD_OUT = 0.05, 64
_EPOCHS = 6  # as in the DFlash paper
_MAY_PAY, _USEFUL = 1.3, 2.0  # tokens per step on held-out text
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
while they match the text; at 16 positions of each sequence, for at most 32 sequences.

| category | sequences | length | first draft accepted | before |
|---|---|---|---|---|
| overall | {num_held_out} | {after:.2f} | {accepted:.0%} | {before:.2f} |

Made by `manta drafter train`.
"""


def train_drafter(options: TrainOptions, report: Report = lambda line: print(line, flush=True)) -> Trained:
    """Prepare the data, train here or on Ray, write the card, and report what the drafter has gained."""
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    if not _has_data(options.folder):
        check_sources(options.data)
    initial = None if options.initial is None else resolve_checkpoint(options.initial, field="from")
    if (options.steps, options.hours) != (None, None):
        Length(steps=options.steps, seconds=_limit_s(options))  # refuses both, before anything is answered
    spec, folder = read_target(options.target)
    settings = _settings(options, spec)
    mask_id = None if initial is not None else mask_token(spec, folder, options.mask_token_id, report)
    batch_size = settings.batch_size * (options.workers or 1)
    learned = prepare_data(options, output_layout(spec, settings.num_taps, initial), batch_size, report)
    run = TrainingRun(
        target=absolute_path(options.target),
        folder=options.folder.resolve(),
        length=_length(options, settings, len(learned)),
        settings=settings,
        initial=initial,
        mask_token_id=mask_id,
    )
    trained = run_here(run, report=report) if options.workers is None else _on_ray(run, options.workers)
    write_drafter_card(options, trained, len(learned.ids), len(Continuations.load(run.folder / HELD_OUT)))
    before, after = (each["tokens_per_step"] for each in (trained.held_out_before, trained.held_out_after))
    used_s = (*(seconds_used(options.folder / part) for part in (ANSWERS, OUTPUTS)), trained.used_s)
    times = "{} for answers, {} for the target's outputs, {} for training".format(
        *map(format_duration, used_s)
    )
    report(f"time: {times}")
    report(f"held out: {before:.2f} tokens per step before, {after:.2f} now; {trained.drafter}")
    report(verdict(after))
    return trained


def verdict(tokens_per_step: float) -> str:
    """Return whether a drafter is useful, by its tokens per step on held-out text; plain decoding has 1."""
    figure = f"{tokens_per_step:.2f} tokens per step, plain decoding has 1.00"
    if tokens_per_step < _MAY_PAY:
        return f"not useful yet: {figure}. The same command with more --hours or --steps continues this run."
    if tokens_per_step < _USEFUL:
        return f"may pay already: {figure}. Published drafters have 2 to 5; training longer helps."
    return f"useful: {figure}. Serve it with --spec-model, and measure it with `manta drafter eval`."


def _settings(options: TrainOptions, target: ModelSpec) -> DrafterSettings:
    if options.initial is not None and options.block_size:
        raise ConfigError(
            "--block-size applies only to a new drafter; --from has its own block size.", param="from"
        )
    if options.initial is not None:
        settings = further_recipe(options.head, is_small=is_small(target))
    else:
        settings = new_recipe(options.head, is_small=is_small(target))
    if options.layers is not None:
        settings = replace(settings, num_layers=options.layers)
    return settings if options.block_size is None else settings.with_blocks(options.block_size)


def _length(options: TrainOptions, settings: DrafterSettings, num_sequences: int) -> Length:
    if (limit_s := _limit_s(options)) is not None:
        used_s = seconds_used(options.folder / ANSWERS)
        return Length(seconds=seconds_left(limit_s, used_s, "hours"))
    if options.steps is not None:
        return Length(steps=options.steps)
    batch_size = settings.batch_size * (options.workers or 1)
    return Length(steps=math.ceil(_EPOCHS * num_sequences / batch_size))


def _limit_s(options: TrainOptions) -> float | None:
    return None if options.hours is None else options.hours * 3600


def prepare_data(
    options: TrainOptions, layout: OutputLayout, batch_size: int, report: Report
) -> Continuations:
    """Return the data to train on, gathered once; too little is not kept, so that more can be given."""
    data, held_out = options.folder / DATA, options.folder / HELD_OUT
    if not _has_data(options.folder):
        spec, folder = read_target(options.target)
        tokenizer = Tokenizer.load(folder) if has_tokenizer(folder) else None
        settings = AnswerSettings(
            options.target,
            tokenizer,
            options.max_tokens,
            spec.max_position_embeddings,
            rows=prompt_rows(options.target, options.chat),
            temperatures=usual_temperatures(is_small=is_small(spec)),
            layout=layout,
            least=batch_size + 1,
        )
        if options.initial is None:
            report(f"a useful drafter needs about {USEFUL_STEPS:,} steps of {batch_size} sequences")
        if (limit_s := _limit_s(options)) is not None:
            settings = replace(settings, budget_s=limit_s * ANSWERS_SHARE)
            report(f"answers get at most {format_duration(settings.budget_s)}, training the rest")
        found = gather(options.data, settings, options.folder / ANSWERS, report)
        if len(found) < 2:
            raise ConfigError("data: at least two sequences are needed.", param="data")
        num_held_out = max(1, min(_MAX_HELD_OUT, int(_HELD_OUT_SHARE * len(found))))
        learned, kept = found.split_off(num_held_out)
        check_data(learned, kept, batch_size)
        kept.save(held_out)
        learned.save(data)
    return Continuations.load(data)


def _has_data(folder: Path) -> bool:
    """Return whether an earlier run has gathered the data, for which the sources are not read again."""
    return (folder / DATA).exists() and (folder / HELD_OUT).exists()


def _on_ray(run: TrainingRun, num_workers: int) -> Trained:
    import ray

    join_or_start_ray()
    resources = ray.cluster_resources()
    use_gpu = resources.get("GPU", 0) > 0
    what, there = ("GPUs", resources.get("GPU", 0)) if use_gpu else ("cores", resources.get("CPU", 0))
    if num_workers > there:
        raise ConfigError(
            f"workers={num_workers} needs {num_workers} {what}; the cluster has {there:g}. Reduce it.",
            param="workers",
        )
    cpus = max(1, int(resources.get("CPU", 1) // num_workers)) if not use_gpu else 1
    return run_on_workers(run, num_workers, use_gpu=use_gpu, cpus_per_worker=cpus)


def write_drafter_card(
    options: TrainOptions, trained: Trained, num_data_tokens: int, num_held_out: int
) -> None:
    title, what = _HEADS[options.head]
    after = trained.held_out_after
    card = _CARD.format(
        head=options.head,
        title=title,
        what=what,
        target=public_name(options.target),
        initial=options.initial or "layers of the target",
        data_tokens=num_data_tokens / 1e6,
        steps=trained.num_steps,
        tokens=trained.num_tokens / 1e6,
        minutes=trained.used_s / 60,
        machine=machine(),
        num_held_out=num_held_out,
        after=after["tokens_per_step"],
        accepted=after["accepted"],
        before=trained.held_out_before["tokens_per_step"],
    )
    (trained.drafter / "README.md").write_text(card, encoding="utf-8")
