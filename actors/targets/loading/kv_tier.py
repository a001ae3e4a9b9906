"""Opens the tier below a rank's K/V pages: host memory, and files that hold what this rank would compute."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from ....cluster.config import EngineConfig
from ....cluster.errors import ConfigError
from ....cluster.pages.page_files import PageFiles, PageFolder, default_tier, open_tier
from ....cluster.step.page_transfer import KVTierInfo
from ....drafter.step.recurrent_states import RecurrentStates
from ....version import __version__
from ...system.host_resources import cpu_name, free_ram_bytes
from ..model.tensor_parallel import Communicator, smallest
from ..runners.page_mover import PageMemory, PageMover, nothing_is_deferred
from .resolved_config import ResolvedConfig

_DISK_SHARE = 0.05  # of the disk's free space, that the default folder may take
_LEAST_BYTES = 64 * 2**20  # of the default folder: less is a few prompts


def with_tier(resolved: ResolvedConfig, communicator: Communicator) -> ResolvedConfig:
    """Open the tier's folder; return the settings with "auto" replaced by a folder and its size, or by None.

    Raises ConfigError if a folder that was given cannot be used with these settings. If the default folder
    cannot be used, a doubt says so.
    """
    config, doubts, size = resolved.config, resolved.doubts, 0
    reason = why_no_tier(resolved)
    if config.kv_tier_host_bytes is not None:
        _check_host_bytes(config, config.kv_tier_host_bytes, reason)
    if config.kv_tier_path is None:
        return resolved
    if config.kv_tier_path != "auto":
        if reason is not None:
            raise ConfigError(f"kv_tier_path is not supported {reason}. Remove it.", param="kv_tier_path")
        open_tier(Path(config.kv_tier_path))
        return resolved
    if reason is not None or resolved.device.type != "cpu":  # a GPU computes a prompt in little time
        return replace(resolved, config=replace(config, kv_tier_path=None))
    path = default_tier()
    try:
        size = _open_default(path, config.kv_tier_bytes)
    except ConfigError as error:
        doubts = (*doubts, f"K/V pages that leave memory are lost: {error.message}")
    (size,) = smallest(lambda: [size], 1, communicator, resolved.device)
    if size:
        config = replace(config, kv_tier_path=str(path), kv_tier_bytes=size)
    else:
        config = replace(config, kv_tier_path=None)
    return replace(resolved, config=config, doubts=doubts)


def _open_default(path: Path, most_bytes: int) -> int:
    """Return the bytes that the default folder may take. Raises ConfigError if it cannot be used."""
    open_tier(path)
    free = shutil.disk_usage(path).free
    if (size := min(most_bytes, int(_DISK_SHARE * free))) >= min(most_bytes, _LEAST_BYTES):
        return size
    raise ConfigError(
        f"{path} is on a disk with {free / 2**20:,.0f} MiB of free space. Name a folder with kv_tier_path.",
        param="kv_tier_path",
    )


def _check_host_bytes(config: EngineConfig, host_bytes: int, reason: str | None) -> None:
    if reason is not None:
        raise ConfigError(
            f"kv_tier_host_bytes is not supported {reason}. Remove it.", param="kv_tier_host_bytes"
        )
    free = free_ram_bytes()
    if host_bytes * config.tensor_parallel_size > free:
        raise ConfigError(
            f"kv_tier_host_bytes={host_bytes} for each of {config.tensor_parallel_size} ranks exceeds the "
            f"{free} free bytes of memory. Lower it.",
            param="kv_tier_host_bytes",
        )


def why_no_tier(resolved: ResolvedConfig) -> str | None:
    """Return why pages of these models cannot be kept in a tier; None if they can."""
    if resolved.target.states is not None and resolved.runs_on_device:
        return "where a device drives the steps of a target with recurrent layers, whose states are not moved"
    if resolved.split:
        return "with a drafter in another process, whose context would be missing"
    if not resolved.config.enable_prefix_caching:
        return "without enable_prefix_caching, through which its pages are found"
    return None


def make_page_mover(
    resolved: ResolvedConfig,
    communicator: Communicator,
    kept: Iterable[tuple[int, Tensor]],
    states: RecurrentStates | None = None,
    settle: Callable[[], None] = nothing_is_deferred,
) -> PageMover | None:
    """Return what moves a rank's pages and states; None without a tier.

    Args:
        kept: what target and drafter keep by page, [A, P + 1, ...] each, with a group whose pages these are.
        states: those of recurrent layers, on a host.
        settle: see `PageMover`.
    """
    config, groups = resolved.config, resolved.pages.groups
    if config.kv_tier_path is None and config.kv_tier_host_bytes is None:
        return None
    by_pool = [list[Tensor]() for _ in range(resolved.pages.num_pools)]
    for group, tensor in kept:
        by_pool[groups[group].pool].append(tensor)
    pools = tuple(map(PageMemory.of, by_pool))
    memory = [pools[group.pool] for group in groups]
    if states is not None:
        memory.append(PageMemory.of(states.tensors))
    page_bytes, files = tuple(part.page_bytes for part in memory), None
    if config.kv_tier_path is not None:
        tier = Path(config.kv_tier_path)
        path = tier / _subject(resolved, communicator.world_size) / str(communicator.rank)
        files = PageFiles(tier, PageFolder(path), config.kv_tier_bytes)
    # Each group has the share of the memory that its pages have on the device.
    share = (config.kv_tier_host_bytes or 0) / sum(part.num_pages * part.page_bytes for part in set(memory))
    num_host_pages = tuple(int(share * part.num_pages / memory.count(part)) for part in memory)
    if config.kv_tier_host_bytes is not None and not all(num_host_pages):
        raise ConfigError(
            f"kv_tier_host_bytes={config.kv_tier_host_bytes} holds no page of each group of layers "
            f"({', '.join(map(str, page_bytes))} bytes). Raise it.",
            param="kv_tier_host_bytes",
        )
    info = KVTierInfo(page_bytes, num_host_pages, None if files is None else files.folder)
    return PageMover(info, files, memory, settle)


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
        "drafts": resolved.num_speculative_tokens,  # a recurrent state has records of them
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
