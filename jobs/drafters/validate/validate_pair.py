"""Checks whether a drafter fits a target, from configurations and headers of weights.

Findings are fatal (the engine refuses the pair) or warnings (the pair runs, but few drafts may be accepted; a
wrong draft never changes an answer). Called by `manta drafter validate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape

from ....actors.checkpoints.checkpoint_paths import resolve_checkpoint
from ....actors.targets.families import read_model
from ....actors.targets.model.model_spec import ModelSpec
from ....cluster.errors import CheckpointError
from ....drafter.dflash.checkpoint import stored_shapes
from ....drafter.dflash.config import DrafterConfig
from ....drafter.dflash.target_features import TargetFacts
from ....drafter.drafter_spec import stored_dtypes
from ....drafter.eagle3.checkpoint import check_eagle3_tensors
from ....drafter.eagle3.config import Eagle3Config
from ..common.drafter_files import CARD_FILE, SMALL_FILES, AnyConfig, DrafterFiles, is_dflash, open_drafter
from .convention_checks import Incompatibility, check_conventions, check_text, fatal

Level = Literal["static", "cpu", "gpu"]
# Tensors in Speculators' files that only trainers read.
_OF_TRAINING = ("t2d", "d2t", "verifier_norm.weight", "verifier_lm_head.weight")
_MAX_LISTED = 8  # tensors listed by name


def validate_pair(
    drafter: str, target: str, *, level: Level = "static", card: Path | None = None
) -> list[Incompatibility]:
    """Return all findings, fatal ones first; without those, levels "cpu" and "gpu" also run prompts."""
    try:
        target_folder = resolve_checkpoint(target, field="target", files=SMALL_FILES)
        spec = read_model(target_folder)
        files = open_drafter(drafter)
    except CheckpointError as error:
        return [fatal(error.param or "file", error.message)]
    found = list(_check_pair(files, spec, target_folder))
    fits = not any(finding.fatal for finding in found)
    if fits and level == "cpu":
        from .card_check import check_drafts

        found += check_drafts(drafter, target)
    if fits and level == "gpu":
        from .card_check import check_card

        found += check_card(drafter, target, card or files.folder / CARD_FILE)
    return sorted(found, key=lambda finding: not finding.fatal)


def print_findings(drafter: str, target: str, findings: list[Incompatibility]) -> None:
    console = Console(soft_wrap=True)
    for finding in findings:
        kind = "[bold red]error[/]" if finding.fatal else "[yellow]warning[/]"
        console.print(f"{kind} {escape(finding.what)}: {escape(finding.message)}")
    bad = sum(finding.fatal for finding in findings)
    verdict = "cannot draft for" if bad else "fits"
    console.print(escape(f"{drafter} {verdict} {target}: {bad} errors, {len(findings) - bad} warnings."))


def _check_pair(
    files: DrafterFiles[AnyConfig], spec: ModelSpec, target_folder: Path
) -> Iterator[Incompatibility]:
    facts = TargetFacts(spec.hidden_size, spec.num_layers, spec.vocab_size, 0, spec.embed_scale)
    if is_dflash(files):
        for error in files.config.incompatibilities(facts):
            yield fatal(error.param or "config.json", error.message)
        yield from _check_tensors(files, facts)
        yield from check_text(files, spec, target_folder)
        yield from check_conventions(files, spec)
    else:
        yield from _check_eagle3(files, facts)
        yield from check_text(files, spec, target_folder)


def _check_eagle3(files: DrafterFiles[AnyConfig], facts: TargetFacts) -> Iterator[Incompatibility]:
    try:
        config = Eagle3Config.load(files.folder, facts.num_layers)
        config.check_fits(facts)
        check_eagle3_tensors(config, files.tensors)
    except CheckpointError as error:
        yield fatal(error.param or "config.json", error.message)


def _check_tensors(files: DrafterFiles[DrafterConfig], facts: TargetFacts) -> Iterator[Incompatibility]:
    tensors = files.tensors
    wanted = stored_shapes(files.config, facts, tensors)
    wrong: list[Incompatibility] = []
    for name, shape in wanted.items():
        try:
            tensors.check(name, shape, stored_dtypes(name))
        except CheckpointError as error:
            wrong.append(fatal(name, error.message))
    yield from _limited(wrong)
    unused = sorted(tensors.shapes.keys() - wanted.keys() - set(_OF_TRAINING))
    if unused:
        named = ", ".join(unused[:_MAX_LISTED]) + (" ..." if len(unused) > _MAX_LISTED else "")
        yield fatal(
            "unused tensors",
            f"{tensors.where} has {len(unused)} unused tensors ({named}): config.json is from another "
            f"revision, or the names are in another format. {_remedy(unused, wanted)}",
        )


def _remedy(unused: list[str], wanted: dict[str, tuple[int, ...]]) -> str:
    for name in unused:
        prefix = next((name.removesuffix(known) for known in wanted if name.endswith("." + known)), "")
        if prefix:
            return f"Remove the prefix {prefix!r} from the names."
    return "Use config.json and weights of the same revision."


def _limited(findings: list[Incompatibility]) -> Iterator[Incompatibility]:
    yield from findings[:_MAX_LISTED]
    if (more := len(findings) - _MAX_LISTED) > 0:
        yield fatal("tensors", f"{more} more tensors are missing or have the wrong shape.")
