"""From settings to a target rank that can run steps.

    EngineConfig ─▶ LoadPlan: all checked, nothing loaded ─▶ weights, drafter ─▶ pages that memory holds
                 ─▶ warm-up ─▶ Runner, ExecutorInfo

Called by `executor.InProcessExecutor` and `workers/target_worker.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from ....cluster.config import EngineConfig
from ....cluster.executor import ExecutorInfo
from ....cluster.page_groups import LayerPlace, PagePlan
from ....cluster.token_rules import RuleLimits
from ....drafter.compute.backend import Backend
from ....drafter.compute.kv_cache import PagedKVCache
from ....drafter.compute.random_tensors import RandomTensors
from ....drafter.dflash.checkpoint import drafter_shapes, load_drafter, make_drafter
from ....drafter.dflash.features import LentWeights, TargetLends
from ....drafter.dflash.model import DFlashDrafter
from ....drafter.dflash.propose import Proposer
from ....drafter.step.states import RequestStates
from ..model.decoder import Decoder
from ..model.parallel import Communicator, Sharding, SingleRank, smallest
from ..model.weights import TargetWeights, target_shapes
from ..runners.host import DraftSource, LocalDrafts, StepRunner
from ..runners.runner import RemoteDrafter, Runner
from .grammars import make_grammars
from .invariance import check_invariance
from .memory import affordable_pages, gpu_budget_bytes, page_bytes
from .operators import make_backend, make_drafter_backend, make_step_operators
from .plan import LoadPlan, plan_load
from .warm_up import measure_step_bytes, warm_up

__all__ = [
    "LoadPlan",
    "ModelSource",
    "device_room",
    "lent_weights",
    "load_runner",
    "plan_load",
    "runs_ahead",
    "runs_on_device",
    "start_runner",
]

logger = logging.getLogger(__name__)


class RemoteSource(DraftSource, RemoteDrafter, Protocol):
    """Drafts from another process, for steps driven by the host or by the device."""


# Makes a rank's source of drafts where the drafter has a process of its own.
RemoteDrafts = Callable[[LoadPlan, Backend], RemoteSource]


class ModelSource(Protocol):
    """Where a plan's models come from."""

    def target(self, plan: LoadPlan, sharding: Sharding) -> TargetWeights: ...

    def drafter(self, plan: LoadPlan, lends: TargetLends, backend: Backend) -> DFlashDrafter: ...


class Checkpoints:
    """The models in the plan's folders, or (`load_format`) random weights in their shapes."""

    def target(self, plan: LoadPlan, sharding: Sharding) -> TargetWeights:
        source = plan.target_folder if _reads(plan) else _random(plan, target_shapes(plan.target))
        return TargetWeights(source, plan.target, sharding, plan.dtype, plan.device)

    def drafter(self, plan: LoadPlan, lends: TargetLends, backend: Backend) -> DFlashDrafter:
        spec = plan.config.speculative_config
        assert plan.drafter is not None and plan.drafter_folder is not None and spec is not None, (
            "only a plan with a drafter asks for one"
        )
        place = (plan.facts, lends, plan.dtype, plan.device, backend, plan.pages.drafter)
        scale = spec.input_embedding_scale
        if not _reads(plan):
            tensors = _random(plan, drafter_shapes(plan.drafter, plan.facts))
            return make_drafter(plan.drafter, tensors, *place, input_embedding_scale=scale)
        folder, overrides = plan.drafter_folder, spec.hf_overrides
        return load_drafter(folder, *place, overrides=overrides, input_embedding_scale=scale)


def _reads(plan: LoadPlan) -> bool:
    return plan.config.load_format == "auto"


def _random(plan: LoadPlan, shapes: Mapping[str, tuple[int, ...]]) -> RandomTensors:
    return RandomTensors(shapes, plan.dtype, plan.device)


@torch.inference_mode()
def load_runner(
    config: EngineConfig,
    communicator: Communicator | None = None,
    *,
    remote_drafts: RemoteDrafts | None = None,
) -> tuple[Runner, ExecutorInfo]:
    """Load one rank of the target, and the drafter if it is colocated.

    The device is CUDA's current one; threads are the process's.

    Args:
        communicator: of the target's ranks; by default this one is alone.
        remote_drafts: where drafts come from when the drafter is split off.

    Raises:
        CheckpointError, ConfigError: before weights are read, but for a lack of memory.
    """
    return start_runner(plan_load(config), Checkpoints(), communicator, remote_drafts=remote_drafts)


@torch.inference_mode()
def start_runner(
    plan: LoadPlan,
    models: ModelSource,
    communicator: Communicator | None = None,
    *,
    remote_drafts: RemoteDrafts | None = None,
) -> tuple[Runner, ExecutorInfo]:
    """The same from a plan; `models` says where weights come from."""
    assert plan.split == (remote_drafts is not None), "a split drafter, and only that, needs a way to it"
    rank = _Rank(plan, models, communicator or SingleRank(), remote_drafts)
    num_pages = rank.affordable_pages()
    runner = rank.runner(num_pages)
    warm_up(runner, plan, num_pages)
    runner.prepare()
    info = _info(plan, num_pages, has_grammars=rank.grammars is not None)
    logger.info("%s; backend %s", info, plan.attention_backend)
    if plan.config.quantization is not None:
        logger.warning("The target is quantised (%s): outputs are its own.", plan.config.quantization)
    check_invariance(plan, rank.backend)
    return runner, info


def lent_weights(plan: LoadPlan, backend: Backend) -> LentWeights:
    """The target's whole embedding and head, for a drafter that lives apart."""
    whole = Sharding(plan.target, 0, 1)
    weights = Checkpoints().target(plan, whole)
    embedding_VH = weights.embedding()
    head_VH = embedding_VH if plan.target.tied_head else weights.head()
    return LentWeights(embedding_VH, backend.head(head_VH))


def _info(plan: LoadPlan, num_pages: tuple[int, ...], *, has_grammars: bool) -> ExecutorInfo:
    return ExecutorInfo(
        num_pages=num_pages,
        page_groups=plan.pages.groups,
        page_size=plan.page_size,
        max_model_len=plan.max_model_len,
        vocab_size=plan.target.vocab_size,
        eos_token_ids=plan.target.eos_token_ids,
        num_speculative_tokens=plan.num_speculative_tokens,
        dtype=str(plan.dtype).removeprefix("torch."),
        device=plan.device.type,
        max_in_flight=2 if runs_ahead(plan) or plan.split else 1,
        halves=plan.split,
        max_stop_token_ids=_max_stop_token_ids(plan),
        has_grammars=has_grammars,
        rule_limits=_rule_limits(plan),
    )


def runs_on_device(plan: LoadPlan) -> bool:
    """Whether requests' state lives on the device, which then drives the steps."""
    return plan.attention_backend in ("triton", "flash_attn")


def device_room(plan: LoadPlan) -> tuple[int, int]:
    """Most requests of a step, and most rows of which tokens are chosen."""
    config = plan.config
    rows = config.max_num_seqs * (1 + plan.num_speculative_tokens)
    budget = config.max_num_batched_tokens
    return min(config.max_num_seqs, budget), min(rows, budget)


def _max_stop_token_ids(plan: LoadPlan) -> int | None:
    if not runs_on_device(plan):
        return None
    from ....drafter.step.device.states import MAX_STOP_TOKEN_IDS

    return MAX_STOP_TOKEN_IDS


def _rule_limits(plan: LoadPlan) -> RuleLimits | None:
    if not runs_on_device(plan):
        return None
    from ....drafter.step.device.rule_tables import RULE_LIMITS

    return RULE_LIMITS


def runs_ahead(plan: LoadPlan) -> bool:
    """Whether steps start before the last one ends: as asked; by itself where a device would wait."""
    if plan.config.async_scheduling is not None:
        return plan.config.async_scheduling
    return plan.device.type == "cuda" and runs_on_device(plan)


class _Rank:
    """A rank's models, on the way to a runner: what is missing are pages."""

    def __init__(
        self,
        plan: LoadPlan,
        models: ModelSource,
        communicator: Communicator,
        remote_drafts: RemoteDrafts | None,
    ) -> None:
        self._plan, self._communicator, self._remote_drafts = plan, communicator, remote_drafts
        sharding = Sharding(plan.target, communicator.rank, communicator.world_size)
        weights = models.target(plan, sharding)
        self.backend = backend = make_backend(plan)
        places = plan.pages.target
        self._model = Decoder(weights, plan.tap_ids, plan.max_model_len, communicator, backend, places)
        self.grammars = make_grammars(plan)
        self._drafter: DFlashDrafter | None = None
        if plan.drafter is not None and not plan.split:
            drafts_with = make_drafter_backend(plan, backend)
            self._drafter = models.drafter(plan, self._model.lends, drafts_with)

    def affordable_pages(self) -> tuple[int, ...]:
        """Pages of each pool that every rank can afford: page ids are the same everywhere."""
        plan, config, budget = self._plan, self._plan.config, None
        stated = config.num_pages is not None or config.kv_cache_memory_bytes is not None
        if plan.device.type == "cuda" and not stated:
            budget = gpu_budget_bytes(plan.device, config.gpu_memory_utilization, self._step_bytes())
        sizes = page_bytes(plan, drafter=not plan.split)
        mine = affordable_pages(plan, sizes, budget)
        return tuple(smallest(pages, self._communicator, plan.device) for pages in mine)

    def runner(self, num_pages: tuple[int, ...]) -> Runner:
        if runs_on_device(self._plan):
            return self._device_runner(num_pages)
        return self._step_runner(num_pages)

    def _remote(self) -> RemoteSource | None:
        """The way to a drafter in a process of its own."""
        return self._remote_drafts(self._plan, self.backend) if self._remote_drafts is not None else None

    def _device_runner(self, num_pages: tuple[int, ...]) -> Runner:
        from ....drafter.step.device.sampling import SamplingWorkspace
        from ....drafter.step.device.states import DeviceStates
        from ..runners.device import DeviceRunner
        from ..runners.guide import DeviceGuide
        from ..runners.iteration import DeviceModels

        plan, config = self._plan, self._plan.config
        max_requests, num_rows = device_room(plan)
        size = (config.max_num_seqs, plan.max_model_len, num_pages, plan.page_size)
        models = DeviceModels(
            target=self._model,
            cache=self._model.new_cache(pages_of(plan.pages, plan.pages.target, num_pages), plan.page_size),
            drafter=self._drafter,
            draft_cache=self._draft_cache(num_pages),
            states=DeviceStates(*size, plan.device, plan.pages),
            workspace=SamplingWorkspace.build(num_rows, plan.target.vocab_size, plan.device),
            communicator=self._communicator,
            hidden=torch.empty(
                num_rows, plan.target.hidden_size, dtype=self._model.dtype, device=plan.device
            ),
            remote=self._remote(),
        )
        guide = None
        if self.grammars is not None:
            guide = DeviceGuide(self.grammars, models.states, forces=models.remote is None)
        return DeviceRunner(
            models,
            max_requests,
            plan.num_speculative_tokens,
            config.max_num_batched_tokens,
            guide,
            captures=plan.device.type == "cuda" and not plan.split,  # the drafter's part would be in them
        )

    def _step_runner(self, num_pages: tuple[int, ...]) -> StepRunner:
        plan, page_size = self._plan, self._plan.page_size
        operators = make_step_operators(plan)
        drafts: DraftSource | None = self._remote()
        if self._drafter is not None:
            cache = self._draft_cache(num_pages)
            assert cache is not None, "a drafter has pages"
            proposer = Proposer(self._drafter, cache, operators)
            drafts = LocalDrafts(proposer, self._communicator)
        size = (plan.config.max_num_seqs, plan.max_model_len, num_pages, page_size)
        batch = self.backend.attention_batch
        states = RequestStates(*size, plan.device, batch, operators, plan.pages, self.grammars)
        cache = self._model.new_cache(pages_of(plan.pages, plan.pages.target, num_pages), page_size)
        return StepRunner(self._model, cache, states, drafts, self._communicator, operators)

    def _draft_cache(self, num_pages: tuple[int, ...]) -> PagedKVCache | None:
        pages, page_size = self._plan.pages, self._plan.page_size
        if self._drafter is None:
            return None
        return self._drafter.new_cache(pages_of(pages, pages.drafter, num_pages), page_size)

    def _step_bytes(self) -> int:
        """What steps take beside weights and pages, by running the largest with a page that is given back."""
        plan, pages = self._plan, (1,) * self._plan.pages.num_pools
        taken = measure_step_bytes(lambda: self.runner(pages), plan)
        return max(taken - sum(page_bytes(plan, drafter=not plan.split)), 0)


def pages_of(plan: PagePlan, places: Sequence[LayerPlace], num_pages: tuple[int, ...]) -> int:
    """Pages of the pool that a model's layers use."""
    return num_pages[plan.groups[places[0].group].pool]
