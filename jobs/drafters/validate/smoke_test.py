"""Runs a pair on a few prompts on the CPU in fp32, to compare tokens and to see drafts accepted.

This finds weights that do not match the target, which files cannot show. It is a smoke test; `manta bench`
measures. Called by `validate_pair.py` for pairs that fit.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....actors.llm import LLM
from ....cluster.request.request import SamplingParams
from ....cluster.speculation.acceptance_length import mean_acceptance_length
from ..common.drafter_files import method_of
from .incompatibility import Incompatibility, fatal, warning

_PROMPTS = (
    'def read_lines(path, encoding=\'utf-8\'):\n    """Return the lines of a file',
    "The capital of France is Paris, and the capital of Italy is",
    "import json\nimport os\n\nclass Config:\n    def __init__(self, values):\n",
    "Question: what is the sum of 12 and 30?\nAnswer: the sum is",
)
_NUM_TOKENS = 48
_MAX_MODEL_LEN = 256
_LEAST_LENGTH = 1.15  # mean acceptance length; without a drafter it is 1


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
    if length < _LEAST_LENGTH:
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
