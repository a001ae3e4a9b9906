"""Opens the tier below a rank's K/V pages: host memory, and files that hold what this rank would compute."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from ....cluster.errors import ConfigError
from ....cluster.pages.page_files import PageFiles, PageFolder, open_tier
from ....cluster.step.page_transfer import KVTierInfo
from ....version import __version__
from ...system.host_resources import cpu_name, free_ram_bytes
from ..model.tensor_parallel import Communicator
from ..runners.page_mover import PageMemory, PageMover
from .resolved_config import ResolvedConfig


def check_tier(resolved: ResolvedConfig) -> None:
    """Open the tier's folder. Raises ConfigError if a tier cannot be used with these settings."""
    config = resolved.config
    for name in ("kv_tier_path", "kv_tier_host_bytes"):
        if getattr(config, name) is not None and (reason := why_no_tier(resolved)) is not None:
            raise ConfigError(f"{name} is not supported {reason}. Remove it.", param=name)
    if config.kv_tier_path is not None:
        open_tier(Path(config.kv_tier_path))
    needed, free = (config.kv_tier_host_bytes or 0) * config.tensor_parallel_size, free_ram_bytes()
    if needed > free:
        raise ConfigError(
            f"kv_tier_host_bytes={config.kv_tier_host_bytes} for each of {config.tensor_parallel_size} ranks "
            f"exceeds the {free} free bytes of memory. Lower it.",
            param="kv_tier_host_bytes",
        )


def why_no_tier(resolved: ResolvedConfig) -> str | None:
    """Return why pages of these models cannot be kept in a tier; None if they can."""
    if resolved.split:
        return "with a drafter in another process, whose context would be missing"
    if resolved.target.states is not None:
        return "for targets with recurrent layers, whose states are not kept"
    if not resolved.config.enable_prefix_caching:
        return "without enable_prefix_caching, through which its pages are found"
    return None


def make_page_mover(
    resolved: ResolvedConfig, communicator: Communicator, kept: Iterable[tuple[int, Tensor]]
) -> PageMover | None:
    """Return what moves a rank's pages; None without a tier.

    Args:
        kept: what target and drafter keep by page, [A, P + 1, ...] each, with a group whose pages these are.
    """
    config, groups = resolved.config, resolved.pages.groups
    if config.kv_tier_path is None and config.kv_tier_host_bytes is None:
        return None
    by_pool = [list[Tensor]() for _ in range(resolved.pages.num_pools)]
    for group, tensor in kept:
        by_pool[groups[group].pool].append(tensor)
    pools = tuple(map(PageMemory.of, by_pool))
    memory = [pools[group.pool] for group in groups]
    page_bytes, files = tuple(part.page_bytes for part in memory), None
    if config.kv_tier_path is not None:
        tier = Path(config.kv_tier_path)
        path = tier / _subject(resolved, communicator.world_size) / str(communicator.rank)
        files = PageFiles(tier, PageFolder(path), config.kv_tier_bytes)
    # Each group has the share of the memory that its pages have on the device.
    share = (config.kv_tier_host_bytes or 0) / sum(pool.num_pages * pool.page_bytes for pool in pools)
    num_host_pages = tuple(int(share * part.num_pages / memory.count(part)) for part in memory)
    if config.kv_tier_host_bytes is not None and not all(num_host_pages):
        raise ConfigError(
            f"kv_tier_host_bytes={config.kv_tier_host_bytes} holds no page of each group of layers "
            f"({', '.join(map(str, page_bytes))} bytes). Raise it.",
            param="kv_tier_host_bytes",
        )
    info = KVTierInfo(page_bytes, num_host_pages, None if files is None else files.folder)
    return PageMover(info, files, memory)


def describe_tier(resolved: ResolvedConfig) -> str:
    config, places = resolved.config, list[str]()
    if config.kv_tier_host_bytes is not None:
        places.append(f"{config.kv_tier_host_bytes / 2**30:.3g} GiB of host memory for each rank")
    if config.kv_tier_path is not None:
        size = config.kv_tier_bytes / 2**30
        places.append(
            f"{config.kv_tier_path} (up to {size:.3g} GiB; they are users' text in another form; manta "
            "kv-tier clear deletes them)"
        )
    return f"K/V pages that leave memory are kept in {' and '.join(places)}"


def _subject(resolved: ResolvedConfig, num_ranks: int) -> str:
    """Return a hash of everything that the bytes of a page depend on, besides its tokens and those before."""
    config, spec = resolved.config, resolved.config.speculative_config
    facts = {
        "manta": __version__,
        "checkpoints": [_files(resolved.target_folder), _files(resolved.drafter_folder)],
        "load_format": config.load_format,
        "hf_overrides": [config.hf_overrides, None if spec is None else spec.hf_overrides],
        "quantization": [config.quantization, None if spec is None else spec.quantization],
        "embedding_scale": None if spec is None else spec.input_embedding_scale,
        "dtypes": [str(resolved.dtype), str(resolved.kv_dtype)],
        "kernels": [resolved.attention_backend, os.environ.get("MANTA_CPU_INSTRUCTIONS")],
        "processor": _processor(resolved),
        "batch_invariant": config.batch_invariant,
        "ranks": num_ranks,
        "page_size": resolved.page_size,
        "pages": asdict(resolved.pages),
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=12).hexdigest()


def _processor(resolved: ResolvedConfig) -> list[str]:
    """Return the processor and, for a GPU, where its kernels come from."""
    if resolved.device.type == "cpu":
        return [cpu_name()]
    return [torch.cuda.get_device_name(resolved.device), torch.__version__]


def _files(checkpoint: Path | None) -> list[tuple[str, int, int]] | None:
    """Return names, sizes and times of a checkpoint's files, which change when it does."""
    if checkpoint is None:
        return None
    files = sorted(checkpoint.iterdir()) if checkpoint.is_dir() else [checkpoint]  # a lone config
    found = [(str(file), file.stat()) for file in files if file.is_file()]
    return [(name, facts.st_size, facts.st_mtime_ns) for name, facts in found]
