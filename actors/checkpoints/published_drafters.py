"""Published drafters by target, and what to do for speculation with a target that is served without one.

The ids are from the hub's pages, collections and model cards; docs/families.md lists the same ones. Read by
`manta drafter list --for`, `manta serve` and the live page. Asks no hub and imports neither torch nor Ray.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from ...cluster.errors import brief_name
from .published_models import PublishedModel, models_and_drafters

Kind = Literal["DFlash", "DFlash2", "DSpark", "JetSpec", "EAGLE-3", "assistant"]
_METHOD: dict[Kind, str] = {"EAGLE-3": "eagle3", "assistant": "mtp"}  # of the others dflash, the default
# Endings of names of quantized copies: their hidden states are the target's, so its drafters fit.
_COPY = re.compile(
    r"[-._](gguf|awq|gptq|fp8|nvfp4|mxfp4|int[48]|w4a16|w8a\w+|bf16|f16|(i?q\d)\w*|dynamic|ud)$",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class PublishedDrafter:
    """A drafter on the hub; `note` is a condition of its use."""

    target: str
    name: str
    kind: Kind
    note: str = ""

    @property
    def flags(self) -> str:
        method = _METHOD.get(self.kind)
        return f"{'' if method is None else f'--spec-method {method} '}--spec-model {self.name}"


def _pairs(kind: Kind, rows: str) -> Iterator[PublishedDrafter]:
    """Yield the pairs of rows `TARGET DRAFTER [NOTE]`."""
    for row in rows.strip().splitlines():
        target, name, *note = row.split(maxsplit=2)
        yield PublishedDrafter(target, name, kind, *note)


PUBLISHED_DRAFTERS = (
    PublishedDrafter("models/target", "models/drafter", "DFlash2", "shipped"),
    PublishedDrafter("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-drafter", "DFlash", "shipped"),
    *_pairs(
        "DFlash",
        """
        Qwen/Qwen3-4B z-lab/Qwen3-4B-DFlash-b16 without thinking
        Qwen/Qwen3-8B z-lab/Qwen3-8B-DFlash-b16 without thinking
        Qwen/Qwen3-30B-A3B-Instruct-2507 RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.dflash
        Qwen/Qwen3-Coder-30B-A3B-Instruct z-lab/Qwen3-Coder-30B-A3B-DFlash
        Qwen/Qwen3-Coder-Next z-lab/Qwen3-Coder-Next-DFlash
        Qwen/Qwen3.5-4B z-lab/Qwen3.5-4B-DFlash
        Qwen/Qwen3.5-9B z-lab/Qwen3.5-9B-DFlash
        Qwen/Qwen3.5-27B z-lab/Qwen3.5-27B-DFlash
        Qwen/Qwen3.5-35B-A3B z-lab/Qwen3.5-35B-A3B-DFlash
        Qwen/Qwen3.5-122B-A10B z-lab/Qwen3.5-122B-A10B-DFlash
        Qwen/Qwen3.6-27B z-lab/Qwen3.6-27B-DFlash
        Qwen/Qwen3.6-35B-A3B z-lab/Qwen3.6-35B-A3B-DFlash
        meta-llama/Llama-3.1-8B-Instruct z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat
        openai/gpt-oss-20b z-lab/gpt-oss-20b-DFlash
        openai/gpt-oss-120b z-lab/gpt-oss-120b-DFlash
        google/gemma-4-31B-it z-lab/gemma-4-31B-it-DFlash
        google/gemma-4-26B-A4B-it z-lab/gemma-4-26B-A4B-it-DFlash
        google/gemma-4-12B-it z-lab/gemma4-12B-it-DFlash
        MiniMaxAI/MiniMax-M2.5 z-lab/MiniMax-M2.5-DFlash on request
        MiniMaxAI/MiniMax-M2.7 z-lab/MiniMax-M2.7-DFlash on request
        moonshotai/Kimi-K2.5 z-lab/Kimi-K2.5-DFlash on request
        moonshotai/Kimi-K2.6 z-lab/Kimi-K2.6-DFlash on request
        """,
    ),
    *_pairs(
        "DFlash2",
        """
        Qwen/Qwen3-4B RedHatAI/Qwen3-4B-speculator.dflash2
        Qwen/Qwen3-8B RedHatAI/Qwen3-8B-speculator.dflash2 without thinking
        Qwen/Qwen3.8-27B z-lab/Qwen3.8-27B-DFlash2
        google/gemma-4-31B-it RedHatAI/gemma-4-31B-it-speculator.dflash2
        Muse-Glimmer-30B z-lab/Muse-Glimmer-30B-DFlash2
        """,
    ),
    *_pairs(
        "DSpark",
        """
        Qwen/Qwen3-4B deepseek-ai/dspark_qwen3_4b_block7
        Qwen/Qwen3-8B deepseek-ai/dspark_qwen3_8b_block7
        Qwen/Qwen3-14B deepseek-ai/dspark_qwen3_14b_block7
        google/gemma-4-12B-it deepseek-ai/dspark_gemma4_12b_block7
        Qwen/Qwen3.6-35B-A3B RedHatAI/Qwen3.6-35B-A3B-speculator.dspark
        Qwen/Qwen3.8-27B RedHatAI/Qwen3.8-27B-speculator.dspark
        google/gemma-4-31B-it RedHatAI/gemma-4-31B-it-speculator.dspark
        Qwen/Qwen3.8-27B RadixArk/Qwen3.8-27B-DSpark
        """,
    ),
    *_pairs(
        "JetSpec",
        """
        Qwen/Qwen3-8B JetSpec/jetspec-qwen3-8b
        Qwen/Qwen3-30B-A3B JetSpec/jetspec-qwen3-30b-a3b
        Qwen/Qwen3.6-35B-A3B JetSpec/jetspec-Qwen3.6-35B-A3B
        """,
    ),
    *_pairs(
        "EAGLE-3",
        """
        meta-llama/Llama-3.1-8B-Instruct RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3
        Qwen/Qwen3-8B RedHatAI/Qwen3-8B-speculator.eagle3
        Qwen/Qwen3-32B RedHatAI/Qwen3-32B-speculator.eagle3
        openai/gpt-oss-20b RedHatAI/gpt-oss-20b-speculator.eagle3
        Qwen/Qwen3-8B AngelSlim/Qwen3-8B_eagle3
        Qwen/Qwen3-Coder-30B-A3B-Instruct lmsys/SGLang-EAGLE3-Qwen3-Coder-30B-A3B-Instruct-SpecForge
        meta-llama/Llama-3.3-70B-Instruct lmsys/SGLang-EAGLE3-Llama-3.3-70B-Instruct-SpecForge
        meta-llama/Llama-3.1-8B-Instruct yuhuili/EAGLE3-LLaMA3.1-Instruct-8B convert to safetensors first
        """,
    ),
    *_pairs(
        "assistant",
        """
        google/gemma-4-31B-it google/gemma-4-31B-it-assistant
        google/gemma-4-26B-A4B-it google/gemma-4-26B-A4B-it-assistant
        google/gemma-4-12B-it google/gemma-4-12B-it-assistant
        """,
    ),
)


def drafters_for(model: str) -> list[PublishedDrafter]:
    """Return the published drafters of a target: a hub id, folder or GGUF file; quantized copies count."""
    key = target_key(model)
    return [each for each in PUBLISHED_DRAFTERS if target_key(each.target) == key]


def target_key(model: str) -> str:
    """Return what different copies of a target have in common: its name without owner and quantization."""
    if PurePosixPath(model).parts[-2:] == ("models", "target"):
        return "models/target"
    if isinstance(known := models_and_drafters().get(model), PublishedModel):
        model = known.file
    name = PurePosixPath(model.partition(":")[0]).name.removesuffix(".gguf")
    while (shorter := _COPY.sub("", name)) != name:
        name = shorter
    return name.lower().removeprefix("meta-")


def speculation_advice(model: str) -> str:
    """Return what to do for speculation with this target, in one line."""
    found = drafters_for(model)
    if found:
        more = f" (all: manta drafter list --for {brief_name(model)})" if len(found) > 1 else ""
        return f"for speculation add {found[0].flags}{more}"
    return "for speculation add --spec-method suffix, or train a drafter: manta drafter train --help"
