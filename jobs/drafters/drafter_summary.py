"""Summaries of drafters: one, two side by side, or all that are found, as a table or JSON."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from ...actors.checkpoints.published_drafters import drafters_for, speculation_advice
from ...cluster.errors import CheckpointError
from ...drafter.card import min_card_length
from ...drafter.compute.checkpoint.loading.quantized_tensors import QuantizedTensors
from ...drafter.compute.checkpoint.safetensors_reader import TensorHeaders
from ...drafter.dflash.config import DrafterConfig
from ...drafter.eagle3.config import DEFAULT_DRAFTS
from ..common.tables import NO_FIGURE, decimals, print_table
from .common.drafter_files import AnyConfig, DrafterFiles, licence_of, open_drafter, read_config

_SHARED_TENSORS = {"embedding": "embed_tokens.weight", "head": "lm_head.weight"}


def summarize_drafter(files: DrafterFiles[AnyConfig]) -> dict[str, Any]:  # Any: JSON values
    """Return properties of a drafter, in the order of the table's rows.

    `target_layer_ids` are empty for an EAGLE-3 drafter with the target's defaults, `kv_bytes_per_token` is
    for 16-bit elements, `mean_acceptance_length` the card's lowest value.
    """
    config, tensors = files.config, files.tensors
    stored = tensors.stored if isinstance(tensors, QuantizedTensors) else tensors
    blocks = config if isinstance(config, DrafterConfig) else None
    return {
        "name": files.name,
        "revision": files.revision,
        "format": format_of(config),
        "licence": licence_of(files.folder),
        "architecture": ", ".join(files.raw.get("architectures") or ()),
        "verifier": str(files.verifier.get("name_or_path") or ""),
        "layers": tuple(_layer(layer.causal, layer.window) for layer in config.layers),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": f"{config.num_heads} of {config.head_dim}, {config.num_kv_heads} of K/V",
        "dflash2": "" if blocks is None else _dflash2_parts(blocks),
        "dspark": "" if blocks is None else _dspark_parts(blocks),
        "target_layer_ids": config.target_layer_ids,
        "num_target_layers": None if blocks is None else blocks.num_target_layers,
        "target_hidden_size": config.target_hidden_size or config.hidden_size,
        "block_size": None if blocks is None else blocks.block_size,
        "mask_token_id": None if blocks is None else blocks.mask_token_id,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "borrowed": tuple(
            what
            for what, name in _SHARED_TENSORS.items()
            if tensors.shapes.keys().isdisjoint((name, f"model.{name}"))
        ),
        "rope": f"{config.rope.kind}, theta {config.rope.theta:g}",
        "dtypes": tuple(sorted({tensors.dtypes[name] for name in tensors.shapes})),
        "tensor_types": tensor_types(files),
        "num_parameters": sum(map(prod, tensors.shapes.values())),
        "weight_bytes": sum(_num_bytes(stored, name) for name in stored.shapes),
        "kv_bytes_per_token": 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim,
        "num_speculative_tokens": DEFAULT_DRAFTS if blocks is None else blocks.max_drafts,
        "mean_acceptance_length": min_card_length(files.folder),
    }


def format_of(config: AnyConfig) -> str:
    """Return the format of the files; "gguf" whatever the kind of drafter is."""
    is_gguf = config.quantization is not None and config.quantization.gguf_files
    return "gguf" if is_gguf else config.layout


def tensor_types(files: DrafterFiles[AnyConfig]) -> tuple[str, ...]:
    """Return the types of the tensors with their numbers, most frequent first."""
    tensors = files.tensors
    counts = Counter(tensors.dtypes[name] for name in tensors.shapes)
    return tuple(f"{count} {kind}" for kind, count in counts.most_common())


def describe_files(name: str) -> str:
    """Return a line about a drafter's files: format, types of the tensors, licence; "" if they are broken."""
    try:
        files = open_drafter(name)
    except CheckpointError:
        return ""
    licence = licence_of(files.folder) or "not named"
    types = ", ".join(tensor_types(files))
    return f"{name}: format {format_of(files.config)}; tensors {types}; licence {licence}."


def print_summaries(summaries: Sequence[Mapping[str, Any]]) -> None:
    columns = [
        {key.replace("_", " "): _shown(key, value) for key, value in summary.items()} for summary in summaries
    ]
    rows: list[list[str]] = []
    for what in columns[0]:
        cells = [column[what] for column in columns]
        mark = "* " if len(set(cells)) > 1 else ""
        rows.append([mark + what, *cells])
    print_table("Drafter", ["", *[""] * len(summaries)], rows, num_left=1 + len(summaries))


def _shown(key: str, value: object) -> str:
    if value is None or value == "" or value == ():
        return NO_FIGURE
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if isinstance(value, int) and ("bytes" in key or key == "num_parameters"):
        return f"{value:,}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _layer(causal: bool, window: int | None) -> str:
    seen = "full" if window is None else f"sliding {window}"
    return f"{seen}{' causal' if causal else ''}"


def _dflash2_parts(config: DrafterConfig) -> str:
    parts: list[str] = []
    if (conv := config.convolutions) is not None:
        parts.append(f"convolutions of {conv.num_taps} over groups of {conv.group_size}")
    if (selector := config.selector) is not None:
        parts.append(f"selector of rank {selector.rank} among {selector.top_k}")
    return ", ".join(parts)


def _dspark_parts(config: DrafterConfig) -> str:
    parts: list[str] = []
    if config.samples_anchor:
        parts.append("anchor predicts")
    if (markov := config.markov) is not None:
        parts.append(f"Markov head of rank {markov.rank} among {markov.top_k}")
    if config.confidence_head is not None:
        parts.append(f"confidence head on {config.confidence_head}")
    return ", ".join(parts)


def _num_bytes(tensors: TensorHeaders, name: str) -> int:
    """Return the bytes of a tensor from the bits in its dtype's name; BOOL, without bits, has 8."""
    bits = re.search(r"\d+", tensors.dtypes[name])
    return prod(tensors.shapes[name]) * (8 if bits is None else int(bits[0])) // 8


def find_drafters(folders: Sequence[Path] | None) -> dict[str, AnyConfig]:
    """Return drafter configurations by folder or hub id; None searches models/ and the hub's cache."""
    here = [Path("models")] if folders is None else folders
    places = {
        str(each): each
        for folder in here
        for each in (folder, *sorted(filter(Path.is_dir, folder.glob("*"))))
    }
    if folders is None:
        places |= dict(_cached())
    found: dict[str, AnyConfig] = {}
    for name, folder in places.items():
        try:
            found[name] = read_config(folder)
        except CheckpointError:  # a target, or no checkpoint
            continue
    return found


def print_drafters(drafters: dict[str, AnyConfig]) -> None:
    rows = [
        [
            name,
            format_of(config),
            _kind(config),
            str(config.num_layers),
            str(config.block_size) if isinstance(config, DrafterConfig) else NO_FIGURE,
            ", ".join(map(str, config.target_layer_ids)) or NO_FIGURE,
            decimals(min_card_length(Path(config.file).parent)),
        ]
        for name, config in drafters.items()
    ]
    columns = ["drafter", "format", "kind", "layers", "block", "taps", "length"]
    print_table("Drafters", columns, rows, num_left=3)


def print_published(target: str) -> None:
    """Print the published drafters of a target, with the flags that serve them."""
    rows = [[each.name, each.kind, each.flags, each.note] for each in drafters_for(target)]
    if rows:
        print_table(f"Published drafters of {target}", ["drafter", "kind", "flags", "note"], rows, num_left=4)
    else:
        print(f"No drafter of {target} is known to be published; {speculation_advice(target)}")


def _kind(config: AnyConfig) -> str:
    if isinstance(config, DrafterConfig):
        if config.markov is not None:
            return "DSpark"
        return "DFlash2" if config.convolutions or config.selector else "DFlash"
    return "EAGLE-3"


def _cached() -> Iterator[tuple[str, Path]]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = sorted(scan_cache_dir().repos, key=lambda repo: repo.repo_id)
    except CacheNotFound:
        return
    for repo in repos:
        if repo.repo_type == "model" and repo.revisions:
            newest = max(repo.revisions, key=lambda revision: revision.last_modified)
            yield repo.repo_id, newest.snapshot_path
