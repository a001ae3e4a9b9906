"""Loads a target rank that can run steps.

EngineConfig ─▶ ResolvedConfig: all checked, nothing loaded ─▶ weights, drafter ─▶ pages that fit in memory
             ─▶ warm-up ─▶ Runner, ExecutorInfo
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ....cluster.config import EngineConfig
from ....cluster.pages.kv_cache_groups import KVCacheLayout, LayerPlace
from ....cluster.step.executor import ExecutorInfo
from ....drafter.compute.backend import Backend
from ....drafter.compute.memory.kv_cache import PagedKVCache
from ....drafter.compute.memory.recurrent_state_cache import StateMemory
from ....drafter.dflash.config import DrafterConfig
from ....drafter.dflash.proposer import DFlashProposer
from ....drafter.dflash.target_features import EmbeddingCopies
from ....drafter.eagle3.proposer import ChainProposer
from ....drafter.ngram.proposer import NgramProposer
from ....drafter.step.recurrent_states import RecurrentStates
from ....drafter.step.request_states import RequestStates
from ....drafter.step.sampling.step_ops import StepOperators
from ....drafter.suffix.mixing import SuffixMixer
from ....drafter.suffix.proposer import SuffixProposer
from ..model.assistant import AssistantConfig, AssistantDrafter
from ..model.decoder import Decoder
from ..model.model_spec import ModelSpec
from ..model.mtp import MtpConfig, MtpDrafter
from ..model.tensor_parallel import Communicator, Sharding, SingleRank, smallest
from ..runners.cpu_runner import CpuModelRunner
from ..runners.drafts.colocated_drafter import ColocatedDrafter
from ..runners.drafts.draft_source import (
    ChainedDrafter,
    DeviceDrafts,
    Drafter,
    DraftSource,
    NoDrafts,
    RemoteDrafter,
    StepMemory,
)
from ..runners.page_mover import nothing_is_deferred
from ..runners.runner_interface import Runner
from .checkpoint_models import Checkpoints, ModelSource
from .executor_info import device_limits, executor_info
from .kv_tier import describe_tier, make_page_mover, with_tier
from .memory_budget import (
    affordable_pages,
    affordable_states,
    gpu_budget_bytes,
    log_ram,
    make_state_memory,
    page_bytes,
    refuse_unaffordable,
    state_bytes,
    warn_of_weights,
)
from .operator_factory import (
    count_compilations,
    make_backend,
    make_drafter_backend,
    make_grammars,
    make_step_operators,
)
from .resolved_config import ResolvedConfig, resolve_config
from .warmup import check_invariance, measure_step_bytes, warm_up
from .weight_report import WeightCounts, describe_weights

_INT4_COST = (
    ". int4 at load sees the weights alone: perplexity may rise by a tenth and more. int8 costs next to "
    "nothing, a checkpoint that was quantized with data (AWQ, GPTQ, most GGUF files) little"
)

__all__ = [
    "Checkpoints",
    "ModelSource",
    "ResolvedConfig",
    "copy_embeddings",
    "load_runner",
    "resolve_config",
    "start_runner",
]

logger = logging.getLogger(__name__)

_CONTEXT_BYTES = 2**29  # of a CUDA context with PyTorch's kernels; an estimate


class RemoteSource(DraftSource, RemoteDrafter, Protocol):
    """Drafts from another process, for steps driven by the host or by the device."""


# Creates a rank's source of drafts where the drafter runs in a process of its own.
RemoteDrafts = Callable[[ResolvedConfig, Backend], RemoteSource]


@torch.inference_mode()
def load_runner(
    config: EngineConfig,
    communicator: Communicator | None = None,
    *,
    remote_drafts: RemoteDrafts | None = None,
) -> tuple[Runner, ExecutorInfo]:
    """Load one rank of the target, and the drafter if it is colocated, else `remote_drafts` makes its source.

    Uses CUDA's current device and the process's number of threads. Raises CheckpointError or ConfigError
    before weights are read, except for a lack of memory, and scales that are no finite numbers.
    """
    return start_runner(resolve_config(config), Checkpoints(), communicator, remote_drafts=remote_drafts)


@torch.inference_mode()
def start_runner(
    resolved: ResolvedConfig,
    models: ModelSource,
    communicator: Communicator | None = None,
    *,
    remote_drafts: RemoteDrafts | None = None,
) -> tuple[Runner, ExecutorInfo]:
    """Load one rank by resolved settings, as `load_runner` does; `models` provides the weights."""
    assert resolved.split == (remote_drafts is not None), "remote_drafts is given exactly for split drafters"
    communicator = communicator or SingleRank()
    resolved = with_tier(resolved, communicator)
    with count_compilations(resolved) as compiled:
        rank = _Rank(resolved, models, communicator, remote_drafts)
        check_invariance(resolved, rank.backend)
        num_pages, num_states = rank.affordable_cache()
        runner = rank.runner(num_pages, num_states)
        warm_up(runner, resolved, num_pages, num_states)
        runner.prepare()
    if compiled:
        logger.info("%s", compiled)
    info = executor_info(resolved, num_pages, num_states, has_grammars=rank.grammars is not None)
    if runner.mover is not None:
        runner.mover.start()
        info = replace(info, kv_tier=runner.mover.info)
        logger.info("%s", describe_tier(resolved))
    cache_bytes = sum(count * size for count, size in zip(num_pages, page_bytes(resolved), strict=True))
    logger.info("%s", _describe(info, resolved, cache_bytes))
    if resolved.device.type != "cuda":
        log_ram(cache_bytes + (num_states or 0) * state_bytes(resolved))
    for sentence in (*resolved.doubts, *resolved.without_effect):
        logger.warning("%s", sentence)
    for sentence in describe_weights(resolved, rank.weight_counts):
        logger.info("%s", sentence)
    if (quantization := resolved.config.quantization) is not None:
        logger.warning(
            "The target is quantized (%s): outputs differ from those of the unquantized model%s.",
            quantization,
            _INT4_COST if quantization == "int4" else "",
        )
    return runner, info


def _describe(info: ExecutorInfo, resolved: ResolvedConfig, cache_bytes: int) -> str:
    pages = " + ".join(f"{count:,}" for count in info.num_pages)
    drafts = (
        f"up to {info.num_speculative_tokens} drafts a step" if info.num_speculative_tokens else "no drafts"
    )
    stored = "" if resolved.kv_dtype is resolved.dtype else " in e4m3"
    return (
        f"loaded on {info.device} in {info.dtype} ({resolved.attention_backend} kernels): sequences of up to "
        f"{info.max_model_len:,} tokens, {pages} K/V pages of {info.page_size} tokens{stored} "
        f"({cache_bytes / 2**20:,.1f} MiB), {drafts}"
    )


def copy_embeddings(resolved: ResolvedConfig, backend: Backend) -> EmbeddingCopies:
    """Return the target's whole embedding and head, for a drafter in another process."""
    unsharded = Sharding(resolved.target, 0, 1)
    weights = Checkpoints().target(resolved, unsharded)
    embedding_VH = weights.embedding()
    head_VH = embedding_VH if resolved.target.tied_head else weights.head()
    return EmbeddingCopies(embedding_VH, backend.head(head_VH))


class _Rank:
    """Loads a rank's models and builds runners for them with any number of pages and states."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        models: ModelSource,
        communicator: Communicator,
        remote_drafts: RemoteDrafts | None,
    ) -> None:
        self._resolved, self._communicator, self._remote_drafts = resolved, communicator, remote_drafts
        refuse_unaffordable(resolved)
        if communicator.rank == 0:
            warn_of_weights(resolved)
        sharding = Sharding(resolved.target, communicator.rank, communicator.world_size)
        weights = models.target(resolved, sharding)
        self.backend = backend = make_backend(resolved, communicator)
        places = resolved.pages.target
        self._model = Decoder(
            weights, resolved.tap_ids, resolved.max_model_len, communicator, backend, places
        )
        self.grammars = make_grammars(resolved)
        self.weight_counts = {"target": WeightCounts.of(backend)}
        self._drafter: Drafter | None = None
        if resolved.drafter is not None and not resolved.split:
            final_norm_H = weights.final_norm()
            self._drafter, draft_backend = load_drafter(
                resolved, models, self._model, final_norm_H, communicator
            )
            before = self.weight_counts["target"] if draft_backend is backend else None
            self.weight_counts["drafter"] = WeightCounts.of(draft_backend, before)

    def affordable_cache(self) -> tuple[tuple[int, ...], int | None]:
        """Return the pages of each pool and the states that every rank can afford."""
        resolved, config, budget = self._resolved, self._resolved.config, None
        is_set = config.num_pages is not None or config.kv_cache_memory_bytes is not None
        if resolved.device.type == "cuda" and not is_set:
            budget = gpu_budget_bytes(resolved.device, config.gpu_memory_utilization, self._step_bytes())
        own_states = num_states = affordable_states(resolved, budget)
        if own_states is not None:
            (num_states,) = smallest(lambda: [own_states], 1, self._communicator, resolved.device)
        sizes, state_bytes_taken = (
            page_bytes(resolved, drafter=not resolved.split),
            (num_states or 0) * state_bytes(resolved),
        )
        pages = smallest(
            lambda: affordable_pages(resolved, sizes, budget, state_bytes_taken),
            resolved.pages.num_pools,
            self._communicator,
            resolved.device,
        )
        return pages, num_states

    def runner(self, num_pages: tuple[int, ...], num_states: int | None) -> Runner:
        if self._resolved.runs_on_device:
            return self._device_runner(num_pages, num_states)
        return self._step_runner(num_pages, num_states)

    def _remote(self) -> RemoteSource | None:
        return self._remote_drafts(self._resolved, self.backend) if self._remote_drafts is not None else None

    def _device_runner(self, num_pages: tuple[int, ...], num_states: int | None) -> Runner:
        """Create the runner of steps that the device drives, with the memory that steps and graphs share."""
        from ....drafter.step.gpu_triton.recurrent_states import NO_RECURRENT, DeviceRecurrent
        from ....drafter.step.gpu_triton.request_states import DeviceStates
        from ....drafter.step.gpu_triton.sampling.grammar_masks import DeviceMasks
        from ....drafter.step.gpu_triton.sampling.sampler import SamplingWorkspace
        from ..runners.drafts.device_suffixes import NO_SUFFIXES, DeviceSuffixes
        from ..runners.gpu_runner import GpuModelRunner
        from ..runners.grammar_masks import NO_GRAMMARS, DeviceGrammars
        from ..runners.step_passes import DeviceModels

        resolved, config = self._resolved, self._resolved.config
        _, num_rows = device_limits(resolved)
        state_memory = make_state_memory(resolved, num_states)
        cache, draft_cache = self._caches(num_pages, state_memory)
        state_args = (config.max_num_seqs, resolved.max_model_len, num_pages, resolved.page_size)
        states = DeviceStates(*state_args, resolved.device, resolved.pages)
        workspace = SamplingWorkspace.build(num_rows, resolved.target.vocab_size, resolved.device)
        memory = StepMemory(states, workspace, self._communicator)
        drafts = self._device_drafts(memory, draft_cache)
        masks, grammars, recurrent, suffixes = None, NO_GRAMMARS, NO_RECURRENT, NO_SUFFIXES
        if state_memory is not None:
            recurrent = DeviceRecurrent(state_memory, states.states_S, states.tables)
        if self.grammars is not None:
            compiler = self.grammars.compiler
            end_id = compiler.eos_token_ids[0]
            masks = DeviceMasks.build(num_rows, compiler.mask_words, end_id, resolved.device)
            grammars = DeviceGrammars(self.grammars, memory, masks, forces=drafts.can_be_forced)
        if (proposer := _suffix_proposer(config)) is not None:
            mixer = None if self._drafter is None else self._mixer(proposer)
            suffixes = DeviceSuffixes(proposer, mixer, num_rows, self._communicator, resolved.device)
        # what a page of the K/V tier holds, by page group: K/V, and what the drafter keeps by page
        kept = [(cache.group(0), cache.kv)]
        if draft_cache is not None:
            kept += [(draft_cache.group(0), tensor) for tensor in drafts.kept_by_page]
        hidden_shape = num_rows, resolved.target.hidden_size
        models = DeviceModels(
            target=self._model,
            cache=cache,
            memory=memory,
            drafts=drafts,
            hidden=torch.empty(hidden_shape, dtype=self._model.dtype, device=resolved.device),
            recurrent=recurrent,
            masks=masks,
        )
        return GpuModelRunner(
            models,
            *resolved.step_sizes,
            grammars,
            suffixes,
            make_page_mover(resolved, self._communicator, kept),
            captures=resolved.device.type == "cuda",
        )

    def _device_drafts(self, memory: StepMemory, draft_cache: PagedKVCache | None) -> DeviceDrafts:
        from ..runners.drafts.device_blocks import DeviceBlocks
        from ..runners.drafts.device_chains import DeviceChains
        from ..runners.drafts.device_lookup import DeviceLookup
        from ..runners.drafts.remote_exchange import RemoteExchange

        resolved, drafter = self._resolved, self._drafter
        if drafter is not None and draft_cache is not None:
            if isinstance(drafter, ChainedDrafter):
                return DeviceChains(drafter, draft_cache, memory)
            return DeviceBlocks(drafter, draft_cache, memory)
        if (remote := self._remote()) is not None:
            assert isinstance(resolved.drafter, DrafterConfig), "other drafters are colocated"
            max_requests, _ = device_limits(resolved)
            sizes = max_requests, resolved.max_num_batched_tokens
            return RemoteExchange(remote, memory, *sizes, resolved.drafter, resolved.dtype)
        lengths = _lookup_lengths(resolved.config)
        return DeviceDrafts() if lengths is None else DeviceLookup(lengths, memory)

    def _step_runner(self, num_pages: tuple[int, ...], num_states: int | None) -> CpuModelRunner:
        """Create the runner of steps that the host drives, with the source of drafts of the config."""
        resolved, page_size = self._resolved, self._resolved.page_size
        operators = make_step_operators(resolved)
        drafts: DraftSource
        memory = make_state_memory(resolved, num_states)
        cache, draft_cache = self._caches(num_pages, memory)
        kept, settle = [(cache.group(0), cache.kv)], nothing_is_deferred
        if self._drafter is not None:
            assert draft_cache is not None, "a drafter has pages"
            proposer, mixer = _make_proposer(self._drafter, draft_cache, operators), None
            kept += [(draft_cache.group(0), tensor) for tensor in proposer.kept_by_page]
            settle = proposer.settle
            if (suffix := _suffix_proposer(resolved.config)) is not None:
                mixer = self._mixer(suffix)
            drafts = ColocatedDrafter(proposer, self._communicator, mixer)
        elif (lengths := _lookup_lengths(resolved.config)) is not None:
            drafts = NgramProposer(*lengths)
        else:
            drafts = self._remote() or _suffix_proposer(resolved.config) or NoDrafts()
        state_args = (resolved.config.max_num_seqs, resolved.max_model_len, num_pages, page_size)
        batch = self.backend.attention_batch
        recurrent = None if memory is None else RecurrentStates(memory, resolved.config.max_num_seqs)
        states = RequestStates(
            *state_args, resolved.device, batch, operators, resolved.pages, self.grammars, recurrent
        )
        mover = make_page_mover(resolved, self._communicator, kept, recurrent, settle)
        return CpuModelRunner(self._model, cache, states, drafts, self._communicator, operators, mover)

    def _mixer(self, proposer: SuffixProposer) -> SuffixMixer:
        return SuffixMixer(
            proposer, self._resolved.num_speculative_tokens, self._resolved.config.max_num_seqs
        )

    def _caches(
        self, num_pages: tuple[int, ...], memory: StateMemory | None
    ) -> tuple[PagedKVCache, PagedKVCache | None]:
        """Return the target's pages, and those of a drafter in this process."""
        resolved, drafter = self._resolved, self._drafter
        count = pages_of(resolved.pages, resolved.pages.target, num_pages)
        cache = self._model.new_cache(count, resolved.page_size, memory, resolved.kv_dtype)
        if drafter is None:
            return cache, None
        if isinstance(drafter, AssistantDrafter):
            return cache, cache.of_layers(drafter.config.target_layers)
        count = pages_of(resolved.pages, resolved.pages.drafter, num_pages)
        return cache, drafter.new_cache(count, resolved.page_size, resolved.kv_dtype)

    def _step_bytes(self) -> int:
        """Return the peak bytes of steps beyond weights, pages and states, by running the largest ones."""
        resolved, pages = self._resolved, (1,) * self._resolved.pages.num_pools
        states = resolved.config.max_num_seqs if resolved.target.states is not None else None
        measured = measure_step_bytes(lambda: self.runner(pages, states), resolved)
        minimal_cache = sum(page_bytes(resolved, drafter=not resolved.split)) + (states or 0) * state_bytes(
            resolved
        )
        # The process of a split drafter opens a CUDA context on the GPUs whose memory it reads.
        of_peer = _CONTEXT_BYTES if resolved.split and resolved.device.type == "cuda" else 0
        return max(measured - minimal_cache, 0) + of_peer


def _lookup_lengths(config: EngineConfig) -> tuple[int, int] | None:
    spec = config.speculative_config
    return spec.lookup_lengths if spec is not None and spec.method == "ngram" else None


def _suffix_proposer(config: EngineConfig) -> SuffixProposer | None:
    spec = config.speculative_config
    if spec is None or not spec.copies_suffixes:
        return None
    return SuffixProposer(spec.suffix_decoding_max_cached_requests)


def _make_proposer(
    drafter: Drafter, cache: PagedKVCache, operators: StepOperators
) -> DFlashProposer | ChainProposer:
    if isinstance(drafter, ChainedDrafter):
        return ChainProposer(drafter, cache, operators)
    return DFlashProposer(drafter, cache, operators)


def pages_of(resolved: KVCacheLayout, places: Sequence[LayerPlace], num_pages: tuple[int, ...]) -> int:
    return num_pages[resolved.groups[places[0].group].pool]


def load_drafter(
    resolved: ResolvedConfig, models: ModelSource, target: Decoder, target_norm_H: Tensor, ranks: Communicator
) -> tuple[Drafter, Backend]:
    """Return the drafter and its backend, which may be the target's."""
    config, shared = resolved.drafter, target.shared_embeddings
    if isinstance(config, MtpConfig):  # the target's own layer, sharded like its blocks
        weights = models.target(replace(resolved, target=config.model), _sharding(config.model, ranks))
        args = (shared, target.rope_of, ranks, target.backend, resolved.pages.drafter)
        return MtpDrafter(config, weights, target_norm_H, *args), target.backend
    backend = make_drafter_backend(resolved, target.backend, ranks)
    if isinstance(config, AssistantConfig):  # sharded like the target, of which it reads K and V
        assert resolved.drafter_folder is not None, "an assistant has a checkpoint"
        of_assistant = replace(resolved, target=config.model, target_folder=resolved.drafter_folder)
        weights = models.target(of_assistant, _sharding(config.model, ranks))
        args = (shared, target.rope_of, ranks, backend)
        return AssistantDrafter(config, weights, target_norm_H, *args), backend
    return models.drafter(resolved, shared, backend), backend


def _sharding(model: ModelSpec, ranks: Communicator) -> Sharding:
    return Sharding(model, ranks.rank, ranks.world_size)
