"""Target and drafter of any shape with random weights, created on the device.

They measure the cost of a step without a checkpoint: no weights are read from disk or pass through host
memory. The output of such a pair is noise; `tests/benchmarks/engine/widen.py` makes wide pairs that produce
text and accepted drafts. Called by `jobs/bench/step_cost.py`; the doctor takes shapes from here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch

from ....actors.checkpoints.checkpoint_paths import resolve_checkpoint
from ....actors.targets.families import read_model
from ....actors.targets.loading.checkpoint_models import random_target
from ....actors.targets.loading.operator_factory import kept_codes
from ....actors.targets.loading.resolved_config import ResolvedConfig
from ....actors.targets.model.model_spec import ModelSpec
from ....actors.targets.model.tensor_parallel import Sharding
from ....actors.targets.model.weights import TargetWeights, target_shapes
from ....cluster.errors import CheckpointError
from ....drafter.compute.backend import Backend
from ....drafter.compute.checkpoint.dummy_weights import RandomTensors
from ....drafter.compute.checkpoint.hf_config import Json, read_json
from ....drafter.compute.memory.kv_cache import PagedKVCache
from ....drafter.dflash.checkpoint import drafter_shapes
from ....drafter.dflash.config import DrafterConfig
from ....drafter.dflash.model import DFlashDrafter
from ....drafter.dflash.target_features import TargetEmbeddings, TargetFacts, usual_layer_ids
from ....drafter.drafter_weights import DrafterWeights

T = TypeVar("T")

QWEN3_8B: Json = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
DRAFT_LAYERS, DRAFT_TAPS, BLOCK_SIZE = 5, 5, 16  # z-lab's b16 drafters


@dataclass(frozen=True, slots=True)
class PairShape:
    name: str
    target_json: Json
    drafter_json: Json
    target: ModelSpec
    drafter: DrafterConfig

    @classmethod
    def read(cls, model: str | None, spec_model: str | None) -> PairShape:
        """Read folders or config.json files without weights; by default Qwen3-8B and z-lab's b16 drafter."""
        target_json = QWEN3_8B if model is None else _read(model, "model")
        target = _parse(target_json, model, read_model)
        drafter_json = (
            z_lab_drafter(target_json)
            if spec_model is None
            else _read(spec_model, "speculative_config.model")
        )
        drafter = _parse(drafter_json, spec_model, DrafterConfig.load)
        if drafter.layout != "z-lab":
            raise CheckpointError(
                f"speculative_config.model={spec_model!r} must be a drafter in z-lab's format here.",
                param="speculative_config.model",
            )
        drafter.check_fits(TargetFacts(target.hidden_size, target.num_layers, target.vocab_size, 0))
        return cls("Qwen3-8B" if model is None else model, target_json, drafter_json, target, drafter)

    @classmethod
    def of(cls, name: str, target_json: Json) -> PairShape:
        drafter_json = z_lab_drafter(target_json)
        target = _parse(target_json, None, read_model)
        return cls(name, target_json, drafter_json, target, _parse(drafter_json, None, DrafterConfig.load))

    def num_params(self) -> int:
        facts = TargetFacts(self.target.hidden_size, self.target.num_layers, self.target.vocab_size, 0)
        shapes = [*target_shapes(self.target).values(), *drafter_shapes(self.drafter, facts).values()]
        return sum(math.prod(shape) for shape in shapes)


def z_lab_drafter(target: Json) -> Json:
    num_layers: int = target["num_hidden_layers"]
    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    same = {key: target[key] for key in (*kept, "vocab_size", "rms_norm_eps", "rope_theta") if key in target}
    return {
        **same,
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": DRAFT_LAYERS,
        "num_target_layers": num_layers,
        "block_size": BLOCK_SIZE,
        "dflash_config": {
            "mask_token_id": target["vocab_size"] - 1,
            "target_layer_ids": list(usual_layer_ids(num_layers, DRAFT_TAPS)),
        },
    }


class RandomModels:
    """Models with random weights (a `rank.ModelSource`); the drafter's KV pages are random, too."""

    def target(self, resolved: ResolvedConfig, sharding: Sharding) -> TargetWeights:
        sizes, kept = (resolved.target, sharding, resolved.dtype, resolved.device), kept_codes(resolved)
        return TargetWeights(random_target(resolved), *sizes, kept_codes=kept)

    def drafter(
        self, resolved: ResolvedConfig, shared_embeddings: TargetEmbeddings, backend: Backend
    ) -> DFlashDrafter:
        assert isinstance(resolved.drafter, DrafterConfig), "only a plan with a block drafter asks for one"
        tensors = RandomTensors(
            drafter_shapes(resolved.drafter, resolved.facts), resolved.dtype, resolved.device
        )
        weights = DrafterWeights({name: tensors.get(name) for name in tensors.shapes})
        positions = resolved.max_model_len + resolved.drafter.block_size
        return _FilledDrafter(
            resolved.drafter, weights, shared_embeddings, positions, backend, resolved.pages.drafter
        )


class _FilledDrafter(DFlashDrafter):
    def new_cache(self, num_pages: int, page_size: int, dtype: torch.dtype | None = None) -> PagedKVCache:
        cache = super().new_cache(num_pages, page_size, dtype)
        cache.kv.normal_()
        return cache


def _read(path: str, field: str) -> Json:
    file = _config_file(path)
    if not file.is_file():
        raise CheckpointError(
            f"{field}={path!r} must be a config.json or a folder with one; {file} does not exist.",
            param=field,
        )
    return read_json(file.parent, file.name, param=field)


def _config_file(path: str) -> Path:
    given = Path(path).expanduser()
    if given.suffix == ".gguf":
        given = resolve_checkpoint(path, field="model")
    return given / "config.json" if given.is_dir() else given


def _parse(raw: Json, path: str | None, load: Callable[[Path], T]) -> T:
    """Parse with a checkpoint reader. It takes a folder, so that errors name the user's file."""
    if path is not None and (file := _config_file(path)).name == "config.json":
        return load(file.parent)
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw), encoding="utf-8")
        return load(Path(folder))
