"""The checks of `manta drafter validate` that run the pair, for pairs with matching files.

Level cpu decodes a few prompts in fp32, compares tokens and sees drafts accepted: this finds weights that do
not match the target. Level gpu decodes the prompts of the card again with whole blocks, and reports a figure
if its interval lies entirely below the card's: this finds kernels, dtypes and quantization that reduce
acceptance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ....actors.llm import LLM
from ....cluster.config import EngineConfig
from ....cluster.request.request import SamplingParams
from ....cluster.speculation.acceptance_length import mean_acceptance_length
from ..common.drafter_files import method_of
from ..evaluate.evaluate_drafter import OVERALL, engine_of, measure_suite, open_suite, suite_requests
from ..evaluate.evaluation_card import read_card
from .convention_checks import Incompatibility, fatal, warning

_AT_ONCE, _LENGTH = 8, "tokens_per_step"
Figures = Mapping[str, Any]  # Any: JSON
_PROMPTS = (
    'def read_lines(path, encoding=\'utf-8\'):\n    """Return the lines of a file',
    "The capital of France is Paris, and the capital of Italy is",
    "import json\nimport os\n\nclass Config:\n    def __init__(self, values):\n",
    "Question: what is the sum of 12 and 30?\nAnswer: the sum is",
)
_NUM_TOKENS = 48
_MAX_MODEL_LEN = 256
_MIN_LENGTH = 1.15  # mean acceptance length; without a drafter it is 1


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
    settings = figures["options"].get("speculative_config")
    config = replace(engine_of(drafter, target, settings), device=device)
    yield from compare_acceptance(figures["acceptance"], remeasure(config, figures))


def remeasure(config: EngineConfig, card: Figures) -> Sequence[Figures]:
    options = card["options"]
    suite = open_suite(options["prompts"], card["suite"]["prompts"])
    config = replace(config, enable_prefix_caching=False, max_num_seqs=_AT_ONCE)
    requests = suite_requests(
        config, suite, [at["temperature"] for at in card["acceptance"]], options["max_tokens"]
    )
    return measure_suite(config, requests, len(suite.rows))[1]


def compare_acceptance(card: Sequence[Figures], here: Sequence[Figures]) -> Iterator[Incompatibility]:
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
            f"{what} {_format_estimate(here)} here, {_format_estimate(card)} on the card. Compare dtype, "
            "quantization and revisions of both checkpoints with those of card.json.",
        )


def _format_estimate(estimate: Figures) -> str:
    return f"{estimate['value']:.2f} ({estimate['low']:.2f} to {estimate['high']:.2f})"


def check_drafts(drafter: str, target: str) -> Iterator[Incompatibility]:
    spec = {"model": drafter, "method": method_of(drafter), "adaptive": False}
    llm = LLM(target, speculative_config=spec, dtype="float32", device="cpu", max_model_len=_MAX_MODEL_LEN)
    try:
        drafted, plain = _tokens(llm, None), _tokens(llm, 0)
        stats = llm.stats()
    finally:
        llm.close()
    length = mean_acceptance_length(stats.num_drafts, stats.num_accepted_tokens)
    yield from compare_answers(drafted, plain, length or 1.0)


def compare_answers(
    drafted: list[list[int]], plain: list[list[int]], length: float
) -> Iterator[Incompatibility]:
    if drafted != plain:
        yield fatal(
            "tokens",
            "answers in fp32 differ with and without speculation. This is a bug in Manta, not in the "
            "drafter. Please report it with both names.",
        )
    if length < _MIN_LENGTH:
        yield warning(
            "acceptance",
            f"the mean acceptance length is {length:.2f} (1 without a drafter): it was trained for another "
            "revision of the target, with other taps, or on text unlike these prompts.",
        )


def _tokens(llm: LLM, max_draft_tokens: int | None) -> list[list[int]]:
    """Decode greedily: with shared sampling noise even a useless drafter has some drafts accepted."""
    params = SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS)
    outputs = llm.generate(list(_PROMPTS), params, use_tqdm=False, max_draft_tokens=max_draft_tokens)
    return [each.outputs[0].token_ids for each in outputs]
