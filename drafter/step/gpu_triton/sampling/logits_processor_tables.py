"""Tables of each request slot's logits rules on the device, written at admission.

`drafter/step/inputs/logits_processors.py` defines the rules; `logits_processors.py` in this folder reads the
tables. The tokens that a row has seen are read from the token table. Owned by
`drafter/step/gpu_triton/request_states.py`.

Legend: S slots, A allowed tokens at most, B biased ones, W bad words, L tokens of one; M tokens of a
reasoning mark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .....cluster.request.logits_processors import LogitsProcessorParams, RuleLimits
from ..inputs.row_layout import Ints
from ..inputs.upload import Arena

RULE_LIMITS = RuleLimits(
    allowed_tokens=1024, biased_tokens=512, bad_words=256, bad_word_tokens=8, reasoning_tokens=16
)
_NUMBERS = {  # a value per slot
    "is_ruled": torch.int32,
    "prompt_length": torch.int32,
    "num_allowed": torch.int32,
    "num_biased": torch.int32,
    "num_bad_words": torch.int32,
    "repetition": torch.float32,
    "frequency": torch.float32,
    "presence": torch.float32,
    "budget": torch.int32,
    "start_length": torch.int32,
    "end_length": torch.int32,
}


@dataclass(frozen=True, slots=True)
class RuleTables:
    """Views of the arena; for a slot without rules only `is_ruled` is meaningful.

    Attributes:
        is_ruled, prompt_length, num_allowed, num_biased, num_bad_words: int32 [S]; `num_allowed` 0
            allows all tokens.
        repetition, frequency, presence: fp32 [S].
        allowed_ids: int32 [S, A].
        biased_ids, biases: int32 and fp32 [S, B].
        bad_words: int32 [S, W, L], right-aligned, padded with -1.
        budget, start_length, end_length: int32 [S]; `end_length` 0: reasoning has no limit.
        marks: int32 [S, 2, M], the start and the end mark of reasoning.
    """

    is_ruled: Tensor
    prompt_length: Tensor
    num_allowed: Tensor
    num_biased: Tensor
    num_bad_words: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    budget: Tensor
    start_length: Tensor
    end_length: Tensor
    allowed_ids: Tensor
    biased_ids: Tensor
    biases: Tensor
    bad_words: Tensor
    marks: Tensor

    @staticmethod
    def shapes(num_slots: int) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of the arena's tables."""
        maximum = RULE_LIMITS
        return {
            **{name: ((num_slots,), dtype) for name, dtype in _NUMBERS.items()},
            "allowed_ids": ((num_slots, maximum.allowed_tokens), torch.int32),
            "biased_ids": ((num_slots, maximum.biased_tokens), torch.int32),
            "biases": ((num_slots, maximum.biased_tokens), torch.float32),
            "bad_words": ((num_slots, maximum.bad_words, maximum.bad_word_tokens), torch.int32),
            "marks": ((num_slots, 2, maximum.reasoning_tokens), torch.int32),
        }

    @classmethod
    def of(cls, arena: Arena) -> RuleTables:
        return cls(**{name: arena.tables[name] for name in cls.shapes(0)})


def rule_entries(arena: Arena, slot: int, rules: LogitsProcessorParams | None) -> list[tuple[Ints, Ints]]:
    """Return the arena entries that an admission writes; a request without rules writes one word."""
    if rules is None:
        return [arena.entries("is_ruled", (slot,), 0)]
    allowed, bad_words, thinking = rules.allowed_token_ids or (), rules.bad_words, rules.thinking
    start, end = ((), ()) if thinking is None else (thinking.start, thinking.end)
    numbers = {
        "is_ruled": 1,
        "prompt_length": rules.prompt_length,
        "num_allowed": len(allowed),
        "num_biased": len(rules.logit_bias),
        "num_bad_words": len(bad_words),
        "repetition": rules.repetition,
        "frequency": rules.frequency,
        "presence": rules.presence,
        "budget": 0 if thinking is None else thinking.budget,
        "start_length": len(start),
        "end_length": len(end),
    }
    found = [arena.entries(name, (slot,), value) for name, value in numbers.items()]
    biased_ids, biases = zip(*rules.logit_bias, strict=True) if rules.logit_bias else ((), ())
    lists = {"allowed_ids": allowed, "biased_ids": biased_ids, "biases": biases}
    found += [arena.entries(name, (slot, np.arange(len(x))), x) for name, x in lists.items() if x]
    for number, mark in enumerate((start, end)):
        if mark:
            found.append(arena.entries("marks", (slot, number, np.arange(len(mark))), mark))
    if bad_words:
        length = RULE_LIMITS.bad_word_tokens
        aligned = [(-1,) * (length - len(word)) + word for word in bad_words]
        places = (slot, np.arange(len(aligned))[:, None], np.arange(length))
        found.append(arena.entries("bad_words", places, aligned))
    return found
