"""Classes in `architectures` of a drafter's config.json: those that are read, and what the others are.

Files of other classes may look like a DFlash drafter's, and would run and lose acceptance silently. Does not
import PyTorch. Used by `config_formats.py` here and in `../eagle3`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import ClassVar

from pydantic import field_validator

from ..compute.checkpoint.hf_config import HfConfig
from .config_parts import UNSERVED_PROJECTORS

ASSISTANT = "MuseGlimmerAssistantModel"
DEEPSPEC = "Qwen3DSparkModel"  # DeepSpec's DFlash drafters are of this class, too: with markov_rank 0
DEEPSPEC_GEMMA4 = "Gemma4DSparkModel"
SPECFORGE = "DSparkDraftModel"
DFLASH = frozenset({"DFlashDraftModel", "DFlash2DraftModel", ASSISTANT, DEEPSPEC, DEEPSPEC_GEMMA4, SPECFORGE})
EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
ASSISTANTS_OF_TARGETS = frozenset({"Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"})
_RUN_WITH: tuple[tuple[Collection[str], str], ...] = (
    (DFLASH, 'DFlash drafters are run with method="dflash"'),
    (EAGLE3[:2], 'EAGLE-3 drafters are run with method="eagle3"'),
    (ASSISTANTS_OF_TARGETS, 'Gemma 4\'s assistants are run with method="mtp"'),
)
# Found anywhere in a class; the first one counts.
_OTHERS = tuple(
    (re.compile(pattern), reason)
    for pattern, reason in (
        ("Domino", UNSERVED_PROJECTORS["domino"]),
        ("LiLiCorr", UNSERVED_PROJECTORS["lilicorr"]),
        ("XPress", "XPress's refiner, which scores a block in several passes, is not supported"),
        ("DFlash2Beam", "beams over DFlash2's candidates are not supported"),
        ("Medusa", "Medusa's heads are not supported"),
        ("MLPSpeculator", "MLP speculators are not supported"),
        ("(?i)p_?eagle", "P-EAGLE, which drafts in parallel, is not supported"),
        ("(?i)eagle_?3", "EAGLE-3 drafters of this class are not supported"),
        ("(?i)eagle", "EAGLE-1 and EAGLE-2 are not supported; EAGLE-3 is"),
        ("DSpark", "DSpark drafters of this class are not supported"),
        ("DFlash", "DFlash drafters of this class are not supported"),
        ("(?i)mtp|NextN", 'a target\'s own layers for multi-token prediction need no model: method="mtp"'),
        (
            "(ForCausalLM|ForConditionalGeneration|LMHeadModel)$",
            "this is a whole language model, a target. Set `speculative_config.model` to a drafter that was "
            'trained for the target, or draft without one: method="suffix"',
        ),
    )
)


class DrafterKind(HfConfig):
    """The key that says of which of a method's CLASSES a drafter is; refuses others with what they are."""

    CLASSES: ClassVar[Collection[str]]

    architectures: tuple[str, ...] = ()

    @field_validator("architectures")
    @classmethod
    def _is_known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not set(names) - set(cls.CLASSES) and len(names) < 2:
            return names
        reasons = (what_it_is(name) for name in names if name not in cls.CLASSES)
        wanted = f"one of {', '.join(sorted(cls.CLASSES))}"
        raise ValueError(f"must be {wanted}; {next(reasons, 'a drafter has one class')}")


def what_it_is(name: str) -> str:
    for names, reason in _RUN_WITH:
        if name in names:
            return reason
    found = (reason for pattern, reason in _OTHERS if pattern.search(name))
    return next(found, "drafters of this class are not known")
