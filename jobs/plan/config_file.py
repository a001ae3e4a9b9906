"""Writes the `ray_config.yaml` of a layout for `serve deploy`, `manta serve` and `manta render`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ...actors.http.config.settings import split_settings
from ...actors.tokenization.checkpoint_paths import absolute_path
from ...cluster.config import Quantization
from ...cluster.hardware.memory_plan import MAX_ROWS, UTILISATION
from ...cluster.planner.estimates import LayoutEstimate
from .pair_reader import ReadPair

_HEAD = """\
# Written by `manta plan`: {why}
# Serve it with `manta serve --config FILE` or `serve deploy FILE`; `manta render` makes files for KubeRay,
# `ray up` and systemd from it. All settings: cluster/config.py, actors/http/config/settings.py.
"""
# Limit of waiting requests, as a multiple of max_num_seqs; further ones get 503 with Retry-After.
_QUEUED_PER_RUNNING = 4


@dataclass(frozen=True, slots=True)
class Quantized:
    """Quantization of the weights; None: as in the checkpoint."""

    target: Quantization | None = None
    drafter: Quantization | None = None


def serve_config(
    model: str,
    drafter: str | None,
    read: ReadPair,
    chosen: LayoutEstimate,
    max_num_seqs: int,
    quantized: Quantized,
) -> dict[str, Any]:  # Any: YAML
    """Return the config as plain data; its `args` are validated by `split_settings`."""
    layout = chosen.layout
    args: dict[str, Any] = {
        "model": absolute_path(model),
        "replicas": layout.replicas,
        "tensor_parallel_size": layout.tp,
        "device": "cuda",
        "dtype": read.dtype,
        **_given(quantization=quantized.target),
        "max_model_len": read.max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": MAX_ROWS,
        "gpu_memory_utilization": UTILISATION,
        "max_num_queued_reqs": _QUEUED_PER_RUNNING * max_num_seqs,
    }
    if drafter is not None and layout.placement is not None:
        spec = {"method": "dflash", "model": absolute_path(drafter), "placement": layout.placement}
        spec |= _given(quantization=quantized.drafter)
        args["speculative_config"] = spec
    split_settings(args)
    application = {
        "name": "manta",
        "route_prefix": "/",
        "import_path": "manta.actors.replica:build_app",
        "args": args,
    }
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "applications": [application],
    }


def write_config(path: Path, config: dict[str, Any], why: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = _HEAD.format(why=why) + yaml.safe_dump(config, sort_keys=False, width=100)
    path.write_text(text, encoding="utf-8")


def _given(**settings: str | None) -> dict[str, str]:
    return {name: value for name, value in settings.items() if value is not None}
