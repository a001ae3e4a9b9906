"""Compares the acceptance of a pair on this machine with its card: `manta drafter validate --level gpu`.

The prompts of the card are decoded again at its temperatures with whole blocks. A figure is reported if its
interval lies entirely below the card's. This finds kernels, dtypes and quantization that reduce acceptance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ....cluster.config import EngineConfig
from ..evaluate.eval_suites import open_suite
from ..evaluate.evaluate_drafter import OVERALL, engine_of, measure_suite, suite_asks
from ..evaluate.evaluation_card import read_card
from .incompatibility import Incompatibility, warning

_AT_ONCE, _LENGTH = 8, "tokens_per_step"
Figures = Mapping[str, Any]  # Any: JSON


def needs_gpu() -> str:
    import torch

    if torch.cuda.is_available():
        return ""
    return (
        "--level gpu measures acceptance on a GPU, and PyTorch finds none here. Run it on a machine with a "
        "GPU, or use --level cpu, which runs a few prompts."
    )


def check_card(
    drafter: str, target: str, card: Path, device: Literal["cuda", "cpu"] = "cuda"
) -> Iterator[Incompatibility]:
    """Yield the figures in which acceptance is below the card's."""
    figures = read_card(card)
    config = replace(engine_of(drafter, target), device=device)
    yield from compare_acceptance(figures["acceptance"], measure_again(config, figures))


def measure_again(config: EngineConfig, card: Figures) -> Sequence[Figures]:
    options = card["options"]
    suite = open_suite(options["prompts"], card["suite"]["prompts"])
    config = replace(config, enable_prefix_caching=False, max_num_seqs=_AT_ONCE)
    asks = suite_asks(config, suite, [at["temperature"] for at in card["acceptance"]], options["max_tokens"])
    return measure_suite(config, asks, len(suite.rows))[1]


def compare_acceptance(card: Sequence[Figures], here: Sequence[Figures]) -> Iterator[Incompatibility]:
    """Compare tokens per step of each category, and the overall acceptance of each draft, by temperature."""
    for said, found in zip(card, here, strict=True):
        where = f"at temperature {said['temperature']:g}"
        for name, of_card in said["categories"].items():
            if (of_here := found["categories"].get(name)) is not None:
                yield from _compared(
                    f"{name} {where}: tokens per step", *(of[_LENGTH] for of in (of_here, of_card))
                )
        drafts = zip(*(each["categories"][OVERALL]["by_position"] for each in (said, found)), strict=False)
        for place, (of_card, of_here) in enumerate(drafts, start=1):
            yield from _compared(f"draft {place} {where}: share of blocks that accept it", of_here, of_card)


def _compared(what: str, here: Figures, card: Figures) -> Iterator[Incompatibility]:
    if here["high"] is not None and card["low"] is not None and here["high"] < card["low"]:
        yield warning(
            "acceptance",
            f"{what} {_spelled(here)} here, {_spelled(card)} on the card. Compare dtype, quantization and "
            "revisions of both checkpoints with those of card.json.",
        )


def _spelled(estimate: Figures) -> str:
    return f"{estimate['value']:.2f} ({estimate['low']:.2f} to {estimate['high']:.2f})"
