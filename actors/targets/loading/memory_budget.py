"""Computes how many K/V pages and recurrent states a rank can have, and allocates the states."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence

import torch

from ....cluster.config import EngineConfig
from ....cluster.errors import ConfigError
from ....cluster.pages.kv_cache_groups import KVCacheSpec, LayerPlace, plane_width, share_pages
from ....drafter.compute.memory.kv_cache import PagedKVCache
from ....drafter.compute.memory.recurrent_state_cache import StateMemory
from ...checkpoints.gguf_files import weight_files
from ...system.host_resources import free_ram_bytes, ram_limit, resident_bytes
from ..model.assistant import AssistantConfig
from ..model.tensor_parallel import Sharding
from .draft_window import ChainConfig
from .resolved_config import ResolvedConfig

logger = logging.getLogger(__name__)

_CPU_SHARE = 0.25  # of free memory
_CPU_CAP_BYTES = 4 * 2**30
_STATES_PER_REQUEST = 2  # the one being computed, and a saved one
_STATES_SHARE = 0.5  # of the memory for pages and states


def page_bytes(resolved: ResolvedConfig, *, target: bool = True, drafter: bool = True) -> tuple[int, ...]:
    """Return the bytes of a page in each pool, on a rank that holds these models."""
    pages, sizes = resolved.pages, [0] * resolved.pages.num_pools
    models: list[tuple[Sequence[LayerPlace], Sequence[KVCacheSpec]]] = []
    if target:
        sharding = Sharding(resolved.target, 0, resolved.config.tensor_parallel_size)
        models.append((pages.target, sharding.kv_geometries()))
    if drafter and resolved.drafter is not None and not isinstance(resolved.drafter, AssistantConfig):
        models.append((pages.drafter, [resolved.drafter.kv_geometry] * resolved.drafter.num_layers))
    for places, geometries in models:
        width = plane_width(places, geometries)
        for pool in range(pages.num_pools):
            planes = pages.num_planes(places, pool)
            sizes[pool] += PagedKVCache.bytes_per_page(planes, resolved.page_size, width, resolved.kv_dtype)
    if drafter and isinstance(resolved.drafter, ChainConfig):  # it keeps a feature per page
        pool = pages.groups[pages.drafter[0].group].pool
        sizes[pool] += resolved.drafter.hidden_size * resolved.dtype.itemsize
    return tuple(sizes)


def state_bytes(resolved: ResolvedConfig) -> int:
    """Return the bytes of a state over all recurrent layers of a rank, with the records of its drafts."""
    if resolved.target.states is None:
        return 0
    count, geometry = resolved.target.states
    geometry_of_rank = geometry.rank(resolved.config.tensor_parallel_size)
    return StateMemory.bytes_per_slot(
        count, geometry_of_rank, resolved.num_speculative_tokens, resolved.dtype
    )


def make_state_memory(resolved: ResolvedConfig, num_states: int | None) -> StateMemory | None:
    if resolved.target.states is None or num_states is None:
        return None
    count, geometry = resolved.target.states
    geometry_of_rank = geometry.rank(resolved.config.tensor_parallel_size)
    return StateMemory(
        count, geometry_of_rank, num_states, resolved.num_speculative_tokens, resolved.dtype, resolved.device
    )


def affordable_states(resolved: ResolvedConfig, budget_bytes: int | None) -> int | None:
    """Return the number of states of a rank within `budget_bytes`; None without recurrent layers."""
    config, size = resolved.config, state_bytes(resolved)
    if not size or config.num_states is not None:
        return config.num_states if size else None
    if config.kv_cache_memory_bytes is not None:
        budget_bytes = config.kv_cache_memory_bytes
    elif budget_bytes is None:
        budget_bytes = _cpu_budget_bytes(size, config)
    maximum = int(budget_bytes * _STATES_SHARE) // size
    return max(1, min(maximum, _STATES_PER_REQUEST * config.max_num_seqs))


def affordable_pages(
    resolved: ResolvedConfig, sizes: tuple[int, ...], budget_bytes: int | None, taken_bytes: int = 0
) -> tuple[int, ...]:
    """Return the number of pages in each of a rank's pools. Raises ConfigError if no whole sequence fits.

    `sizes`: `page_bytes` of the rank's models. `budget_bytes`: measured free memory, of which recurrent
    states take `taken_bytes`; None where only settings and RAM decide (CPU).
    """
    config, pages, max_model_len = resolved.config, resolved.pages, resolved.max_model_len
    if config.num_pages is not None:
        return (config.num_pages,) * pages.num_pools
    rows = resolved.max_num_batched_tokens

    def bytes_of(num_tokens: int) -> int:
        pages_held = pages.pages_per_sequence(num_tokens, resolved.page_size, rows)
        return sum(count * size for count, size in zip(pages_held, sizes, strict=True))

    needed = bytes_of(max_model_len)
    if config.kv_cache_memory_bytes is not None:
        budget_bytes = config.kv_cache_memory_bytes - taken_bytes
    elif budget_bytes is None:
        free = _cpu_budget_bytes(needed + taken_bytes, config) - taken_bytes
        budget_bytes = min(needed * config.max_num_seqs, free)
    else:
        budget_bytes -= taken_bytes
    if budget_bytes < needed:
        fits = bisect_right(range(1, max_model_len + 1), budget_bytes, key=bytes_of)
        raise ConfigError(
            f"max_model_len={max_model_len} needs {needed} bytes of K/V pages, but memory holds "
            f"{max(budget_bytes, 0)}{_states_note(taken_bytes)}. Set max_model_len to at most {fits}, or "
            "raise kv_cache_memory_bytes (or, on a GPU, gpu_memory_utilization).",
            param="max_model_len",
        )
    shape = (resolved.page_size, rows, config.max_num_seqs, max_model_len)
    return share_pages(pages, *shape, sizes, budget_bytes)


def refuse_unaffordable(resolved: ResolvedConfig) -> None:
    """Raise ConfigError if one sequence of the longest context exceeds free memory.

    Called before weights and tables of positions are made, which a wrong length would let fill the memory.
    """
    is_gpu = resolved.device.type == "cuda"
    affordable_pages(
        resolved,
        page_bytes(resolved, drafter=not resolved.split),
        torch.cuda.mem_get_info(resolved.device)[0] if is_gpu else None,
    )


def warn_of_weights(resolved: ResolvedConfig) -> None:
    """Warn if the target's weights exceed free RAM as they are stored; for one rank, before they are read."""
    may_shrink = resolved.config.quantization is not None
    if resolved.device.type == "cuda" or may_shrink or not resolved.target_folder.is_dir():
        return  # of a lone config the weights are random
    size, free = sum(file.stat().st_size for file in weight_files(resolved.target_folder)), free_ram_bytes()
    if size > free:
        logger.warning(
            "memory: the target's weights are %s and %s are free. Give more memory, or a smaller checkpoint "
            "(--quantization int8 or int4).",
            *(_gib(size), _gib(free)),
        )


def log_ram(cache_bytes: int) -> None:
    """Say what a rank in RAM takes and what is free. `cache_bytes`: its pages and states, once written."""
    free = free_ram_bytes()
    limit, owner = ram_limit()
    said = (
        f"memory: this worker has {_gib(resident_bytes())}, its K/V pages and states take up to "
        f"{_gib(cache_bytes)} as they are written; {_gib(free)} are free of {owner} {_gib(limit)}"
    )
    if cache_bytes <= free:
        logger.info("%s", said)
    else:
        logger.warning("%s, which is too little. Lower max_model_len or kv_cache_memory_bytes.", said)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"


def _states_note(taken_bytes: int) -> str:
    return f" next to {taken_bytes} bytes of recurrent states" if taken_bytes else ""


def _cpu_budget_bytes(sequence_bytes: int, config: EngineConfig) -> int:
    """Return a share of free RAM, capped, but never less than one whole sequence."""
    share = int(free_ram_bytes() * _CPU_SHARE) // config.tensor_parallel_size
    return min(share, max(_CPU_CAP_BYTES, sequence_bytes))


def gpu_budget_bytes(device: torch.device, utilization: float, step_bytes: int) -> int:
    """Return the bytes for pages once weights are loaded; `step_bytes` is the peak that steps add."""
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info(device)
    return int(total * utilization) - used_gpu_bytes(device) - step_bytes


def used_gpu_bytes(device: torch.device) -> int:
    """Return the bytes of the device in use by any process, including PyTorch's reserve."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free
