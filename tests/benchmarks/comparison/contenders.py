"""Contenders in this process: Hugging Face `generate`, and an unbatched DFlash loop.

A contender lists its configurations for a concurrency; `compare.py` tries them, selects the fastest and
measures it. `contender_server.py` has contenders behind a URL.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import torch
from manta.actors.checkpoints.gguf_files import gguf_files
from manta.jobs.bench.common.engine_passes import Pass, SteppedPass
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from .dflash_loop import LoopDrafter, dflash_loop

Prompts = Sequence[list[int]]
Runner = Callable[[Prompts, int], Pass]  # arguments: prompts, tokens per answer


@dataclass(frozen=True, slots=True)
class ContenderSetup:
    """A configuration of a contender.

    Attributes:
        dtype: None for a server.
        at_once: concurrent requests.
        detail: further choices, as text.
    """

    dtype: str | None
    at_once: int
    detail: str = ""

    def __str__(self) -> str:
        together = "one by one" if self.at_once == 1 else f"{self.at_once} at once"
        return ", ".join(filter(None, (self.dtype, self.detail, together)))


class Contender(Protocol):
    """Continues prompts greedily by a fixed number of tokens."""

    @property
    def name(self) -> str: ...

    def setups(self, requests: int) -> Mapping[ContenderSetup, Runner]: ...


class TransformersTarget:
    """The target loaded by transformers, once per dtype, on one device."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder, self.device = folder, device
        self._models: dict[str, PreTrainedModel] = {}

    def load(self, dtype: str, attention: str = "sdpa") -> PreTrainedModel:
        if dtype not in self._models:
            given: dict[str, Any] = {"dtype": getattr(torch, dtype)}
            folder = self._folder
            for file in gguf_files(folder):  # transformers dequantizes it
                folder, given["gguf_file"] = file.parent, file.name
            model = AutoModelForCausalLM.from_pretrained(folder, **given)
            model.generation_config = GenerationConfig()  # the checkpoint's config would stop at EOS
            self._models[dtype] = model.to(self.device).eval()  # type: ignore[arg-type]  # its decorator hides self
        model = self._models[dtype]
        model.set_attn_implementation(attention)
        return model

    def drop(self, dtype: str) -> None:
        """Release the weights of a dtype."""
        self._models.pop(dtype, None)


class HuggingFaceGenerate:
    """Hugging Face `generate` with any attention and cache, in left-padded batches or one by one."""

    name = "Hugging Face generate"

    def __init__(self, target: TransformersTarget, dtypes: Sequence[str]) -> None:
        self._target, self._dtypes = target, dtypes

    def setups(self, requests: int) -> Mapping[ContenderSetup, Runner]:
        # A static cache is for compiled graphs; on a CPU every step would attend to its whole length.
        caches = ("dynamic",) if self._target.device.type == "cpu" else ("dynamic", "static")
        choices = product(sorted({requests, 1}), self._dtypes, ("sdpa", "eager"), caches)
        return {
            ContenderSetup(dtype, size, f"{attention}, {cache} cache"): partial(
                self._run, size, dtype, attention, cache
            )
            for size, dtype, attention, cache in choices
        }

    def reference(self, prompts: Prompts, max_tokens: int) -> list[list[int]]:
        """Return the reference outputs: fp32, one prompt at a time."""
        answer = self._run(1, "float32", "sdpa", "dynamic", prompts, max_tokens)
        if "float32" not in self._dtypes:
            self._target.drop("float32")
        assert answer.token_ids is not None
        return answer.token_ids

    def _run(
        self, size: int, dtype: str, attention: str, cache: str, prompts: Prompts, max_tokens: int
    ) -> Pass:
        model = self._target.load(dtype, attention)
        settings = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=0,
            cache_implementation=None if cache == "dynamic" else cache,
        )
        answers: list[list[int]] = []
        begin_s = time.perf_counter()
        with torch.inference_mode():
            for i in range(0, len(prompts), size):
                ids, mask = _padded(prompts[i : i + size], model.device)
                found = model.generate(ids, attention_mask=mask, generation_config=settings)  # type: ignore[operator]
                answers += found[:, ids.shape[1] :].tolist()
        return Pass(time.perf_counter() - begin_s, sum(map(len, answers)), answers)


class DFlashLoop:
    """`dflash_loop`, one request at a time."""

    name = "unbatched DFlash loop"

    def __init__(self, target: TransformersTarget, drafter: Path, dtypes: Sequence[str]) -> None:
        self._target, self._folder, self._dtypes = target, drafter, dtypes
        self._drafters: dict[str, LoopDrafter] = {}

    def setups(self, requests: int) -> Mapping[ContenderSetup, Runner]:
        return {ContenderSetup(dtype, 1): partial(self._run, dtype) for dtype in self._dtypes}

    def _run(self, dtype: str, prompts: Prompts, max_tokens: int) -> Pass:
        target = self._target.load(dtype)
        if dtype not in self._drafters:
            self._drafters[dtype] = LoopDrafter(self._folder, target)
        begin_s = time.perf_counter()
        answers = [dflash_loop(target, self._drafters[dtype], prompt, max_tokens) for prompt in prompts]
        return SteppedPass(
            seconds=time.perf_counter() - begin_s,
            tokens=sum(len(answer.token_ids) for answer in answers),
            token_ids=[answer.token_ids for answer in answers],
            num_steps=sum(answer.num_steps for answer in answers),
            num_accepted=sum(answer.num_accepted for answer in answers),
        )


def _padded(prompts: Prompts, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return token ids and attention mask, left-padded to equal length."""
    longest = max(map(len, prompts))
    ids = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
