"""How many K/V pages a rank can have, from settings and from the memory there is.

Not the pages themselves (`drafter/compute/kv_cache.py`) nor who gets them (`cluster/pages.py`). Called by
`rank.py`.
"""

from __future__ import annotations

import torch

from ....cluster.config import EngineConfig
from ....cluster.errors import ConfigError
from ...machine import free_ram_bytes

_CPU_SHARE = 0.25  # of the memory that is free
_CPU_CAP_BYTES = 4 * 2**30


def affordable_pages(
    config: EngineConfig, max_model_len: int, page_bytes: int, budget_bytes: int | None
) -> int:
    """Pages of a rank.

    Args:
        page_bytes: of one page in all pools of the rank.
        budget_bytes: memory that was measured to be left; None where only settings and RAM decide (CPU).

    Raises:
        ConfigError: what there is does not hold one sequence of `max_model_len`.
    """
    if config.num_pages is not None:
        return config.num_pages
    per_sequence = -(-max_model_len // config.page_size)
    wanted = per_sequence * config.max_num_seqs
    if config.kv_cache_memory_bytes is not None:
        pages = config.kv_cache_memory_bytes // page_bytes
    elif budget_bytes is not None:
        pages = budget_bytes // page_bytes
    else:
        pages = min(wanted, _cpu_budget_bytes(per_sequence * page_bytes, config) // page_bytes)
    if pages < per_sequence:
        raise ConfigError(
            f"max_model_len={max_model_len} needs {per_sequence} K/V pages of {page_bytes} bytes, but memory "
            f"holds {max(pages, 0)}. Set max_model_len to at most {max(pages, 0) * config.page_size}, or "
            "raise kv_cache_memory_bytes (or, on a GPU, gpu_memory_utilization).",
            param="max_model_len",
        )
    return pages


def _cpu_budget_bytes(sequence_bytes: int, config: EngineConfig) -> int:
    """A share of RAM; capped, but not below one whole sequence."""
    share = int(free_ram_bytes() * _CPU_SHARE) // config.tensor_parallel_size
    return min(share, max(_CPU_CAP_BYTES, sequence_bytes))


def gpu_budget_bytes(device: torch.device, utilization: float, step_bytes: int) -> int:
    """What `gpu_memory_utilization` leaves for pages, weights being loaded.

    Args:
        step_bytes: what steps will take beside the pages (`warm_up.measure_step_bytes`).
    """
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info(device)
    return int(total * utilization) - used_gpu_bytes(device) - step_bytes


def used_gpu_bytes(device: torch.device) -> int:
    """Memory of the device that somebody has, PyTorch's reserve included."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free
