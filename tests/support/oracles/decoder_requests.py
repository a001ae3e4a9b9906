"""Requests fed to a target's decoder in chunks, and transformers' outputs for the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from manta.actors.targets.families import read_model
from manta.actors.targets.model.decoder import Decoder
from manta.actors.targets.model.model_spec import ModelSpec
from manta.actors.targets.model.tensor_parallel import Sharding, SingleRank
from manta.actors.targets.model.weights import TargetWeights
from manta.cluster.pages.kv_cache_groups import ONE_GROUP, KVCacheLayout
from manta.cluster.step.scheduler_output import SchedulerOutput
from manta.drafter.compute.eager.attention_metadata import AttentionBatch
from manta.drafter.compute.memory.recurrent_state_cache import StateMemory, StateRows
from manta.drafter.step.inputs.row_layout import StepRows
from manta.drafter.step.request_states import RequestStates
from transformers import PreTrainedModel

from support.checkpoints.tiny import TINY_VOCAB, transformers_model
from support.engines.steps import Steps

NUM_SLOTS, MAX_LEN = 4, 128
TAPS = (2, 0, 3)


def weights_of(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    *,
    rank: int = 0,
    ranks: int = 1,
    has_fp8_kv: bool = False,
) -> TargetWeights:
    """The weights of one rank, on the CPU."""
    spec = read_model(folder)
    sharding, device = Sharding(spec, rank, ranks), torch.device("cpu")
    return TargetWeights(folder, spec, sharding, dtype, device, has_fp8_kv=has_fp8_kv)


def load(folder: Path, dtype: torch.dtype = torch.float32, *, has_fp8_kv: bool = False) -> Decoder:
    return Decoder(weights_of(folder, dtype, has_fp8_kv=has_fp8_kv), TAPS, MAX_LEN, SingleRank())


def state_memory(spec: ModelSpec) -> StateMemory | None:
    """Build the decoder in fp32, for one rank."""
    if spec.states is None:
        return None
    return StateMemory(*spec.states, NUM_SLOTS, MAX_LEN, torch.float32, "cpu")


class Requests:
    """Prompts of several lengths, computed in chunks; every row's logits and taps are recorded.

    Args:
        pages: page groups of a model that was loaded with such a layout.
        batch: makes the backend's attention metadata, if not PyTorch's.
    """

    def __init__(
        self,
        model: Decoder,
        lengths: list[int],
        kv_dtype: torch.dtype | None = None,
        *,
        pages: KVCacheLayout = ONE_GROUP,
        batch: Callable[..., Any] = AttentionBatch.build,
        device: torch.device | str = "cpu",
    ) -> None:
        steps = Steps(NUM_SLOTS, MAX_LEN, num_groups=len(pages.groups))
        num_pages = len(pages.groups) * NUM_SLOTS * MAX_LEN // steps.page_size
        random = np.random.default_rng(2)
        self.tokens = [random.integers(0, TINY_VOCAB, n).tolist() for n in lengths]
        self.logits: list[list[torch.Tensor]] = [[] for _ in lengths]
        self.taps: list[list[torch.Tensor]] = [[] for _ in lengths]
        self._model, self._steps = model, steps
        size = (NUM_SLOTS, MAX_LEN, (num_pages,), steps.page_size, torch.device(device))
        self._states = RequestStates(*size, batch, pages=pages)
        self._pending = np.zeros(NUM_SLOTS, dtype=np.int64)
        self._cache = model.new_cache(num_pages, steps.page_size, state_memory(model.spec), kv_dtype)
        self._cache.kv.fill_(100.0)  # reading an unwritten value must show
        self._admitted = [steps.admit(slot, tokens) for slot, tokens in enumerate(self.tokens)]

    @torch.inference_mode()
    def compute(self, rows: dict[int, int], *, known: int = 1, wrong: int = 0) -> None:
        """One step with a number of further rows of each request, the first `known` of which are no drafts.

        The next tokens take the drafts' places; `wrong` more drafts, which are rejected, differ from them.
        """
        slots, counts = list(rows), [n + wrong for n in rows.values()]
        computed = [sum(map(len, self.logits[s])) for s in slots]
        drafts = [n - known for n in counts]
        plan = self._steps.plan(slots, computed, counts, drafts, admitted=self._admitted)
        self._admitted = []
        self._states.apply(plan)
        right = self._states.token_ids.clone()
        for slot, begin, count in zip(slots, computed, rows.values(), strict=True):
            guessed = slice(begin + count, begin + count + wrong)
            self._states.token_ids[slot, guessed] = (right[slot, guessed] + 1) % TINY_VOCAB
        step = self._laid_out(plan, wrong)
        self._states.token_ids.copy_(right)
        normed, taps = self._model.forward(step.token_ids_N, step, self._cache)
        assert taps is not None
        parts = zip(self._model.logits(normed).split(counts), taps.split(counts), strict=True)
        for slot, (logits, tapped) in zip(slots, parts, strict=True):
            self.logits[slot].append(logits[: rows[slot]])
            self.taps[slot].append(tapped[: rows[slot]])

    def _laid_out(self, plan: SchedulerOutput, wrong: int) -> StepRows:
        step = self._states.lay_out_rows(plan)
        slots, rows, drafts = (x.astype(np.int64) for x in (plan.slots, plan.num_rows, plan.num_drafts))
        states = StateRows(slots, rows, drafts, self._pending[slots])
        self._pending[slots] = drafts - wrong  # are accepted
        return replace(step, states=states)


@torch.no_grad()
def oracle(folder: Path, tokens: list[int]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return transformers' logits [N, V] and hidden states [N, H] of a sequence."""
    model = _model(folder, (folder / "model.safetensors").stat().st_mtime_ns)
    out = model(torch.tensor([tokens]), output_hidden_states=True)
    return out.logits[0], tuple(h[0] for h in out.hidden_states)


@lru_cache(maxsize=2)
def _model(folder: Path, written_ns: int) -> PreTrainedModel:
    return transformers_model(folder)


SCHEDULE = [{0: 17, 1: 5}, {0: 1, 1: 16, 2: 40}, {2: 1, 0: 16, 1: 1}, {0: 6, 3: 1}, {3: 1, 2: 1}, {3: 15}]


def computed(model: Decoder, **kind: Any) -> Requests:
    requests = Requests(model, [40, 22, 42, 17], **kind)
    for rows in SCHEDULE:
        requests.compute(rows)
    return requests
