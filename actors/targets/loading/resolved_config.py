"""Resolves settings against checkpoints and checks them, without reading a weight.

Reports every mistake that config files, tensor headers and settings can show.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ....cluster.config import AnyQuantization, EngineConfig, SpeculativeConfig, at_load
from ....cluster.errors import CheckpointError, ConfigError
from ....cluster.pages.kv_cache_groups import KVCacheLayout, plan_kv_cache
from ....cluster.speculation.draft_tree import TreeSizes
from ....cluster.step.draft_shape import UNBRANCHED, DraftShape
from ....cluster.step.scheduler_output import SchedulerOutput, TreeShape
from ....drafter.compute.backend import DeviceCapabilities, ModelStackSpec
from ....drafter.compute.checkpoint.loading.quantized_tensors import QuantizedFolder, open_folder
from ....drafter.dflash.checkpoint import check_drafter
from ....drafter.dflash.config import DrafterConfig
from ....drafter.dflash.target_features import TargetFacts
from ....drafter.drafter_weights import unused_drafter_scales
from ....drafter.eagle3.checkpoint import check_eagle3
from ....drafter.eagle3.config import Eagle3Config
from ...checkpoints.checkpoint_paths import drafter_folder, target_folder, tokenizer_folder
from ...tokenization.tokenizer_config import TokenIds
from ..families import end_tokens_file, read_assistant, read_model
from ..model.assistant import AssistantConfig
from ..model.model_spec import ModelSpec
from ..model.mtp import MtpConfig, count_mtp_layers
from ..model.tensor_parallel import Sharding
from ..model.weights import open_checkpoint, target_shapes, unused_scales
from .backend_selection import INTEGERS, BackendName, why_not
from .cpu_autotune import choose_cpu_config
from .draft_window import ChainConfig, DraftConfig, find_window, with_window
from .model_limits import find_max_model_len, find_num_drafts

logger = logging.getLogger(__name__)

_LARGE_GPU_MAJOR, _LARGE_GPU_BYTES = 9, 70 * 2**30  # an H100 or newer, and no part of one


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """The same on all ranks, but for the device's number.

    Attributes:
        target_folder, drafter_folder: checkpoints on this disk; a drafter's only if it has one of its own.
        facts: what the drafter must fit.
        num_speculative_tokens: most drafts per request and step.
        max_num_batched_tokens: most rows of a step.
        pages: which layers' K and V share pages, and where they lie.
        draft_window: most tokens of context that a layer of `drafter` sees; None: no limit.
        doubts: sentences about checkpoints that are odd, and no errors.
        recorded_layers: without a drafter, 0-based layers whose outputs steps return (`target_recorder.py`).
    """

    config: EngineConfig
    target_folder: Path
    target: ModelSpec
    drafter_folder: Path | None
    drafter: DraftConfig | None
    facts: TargetFacts
    device: torch.device
    dtype: torch.dtype
    num_speculative_tokens: int
    max_num_batched_tokens: int
    attention_backend: BackendName
    page_size: int
    pages: KVCacheLayout
    draft_window: int | None = None
    doubts: tuple[str, ...] = ()
    recorded_layers: tuple[int, ...] = ()

    @property
    def runs_on_device(self) -> bool:
        """Whether requests' state is on the device, which then drives the steps."""
        return self.attention_backend in ("triton", "flash_attn")

    @property
    def models(self) -> list[ModelStackSpec]:
        return _stack_specs(self.target, self.drafter, self.device)

    @property
    def machine(self) -> DeviceCapabilities:
        ranks = self.config.tensor_parallel_size
        return DeviceCapabilities(self.device, self.dtype, self.page_size, ranks, kv_dtype(self.config))

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype of stored K/V."""
        return kv_dtype(self.config) or self.dtype

    @property
    def max_model_len(self) -> int:
        return self.facts.max_model_len

    @property
    def tree(self) -> TreeSizes | None:
        """The largest draft trees; None if drafts form chains."""
        spec = self.config.speculative_config
        if spec is None or spec.tree_width == 1 or why_no_trees(self) is not None:
            return None
        depth = self.num_speculative_tokens
        return TreeSizes(depth, spec.tree_width, spec.tree_size or depth)

    @property
    def draft_shape(self) -> DraftShape:
        return UNBRANCHED if self.tree is None else DraftShape(self.tree.width, self.tree.nodes)

    @property
    def max_drafts(self) -> int:
        """Most drafts per request and step."""
        return self.draft_shape.most_drafts(self.num_speculative_tokens)

    @property
    def step_sizes(self) -> tuple[int, int, int, TreeSizes | None]:
        """The most requests, drafts on a path, and rows of a step, and its largest draft trees."""
        max_rows = self.max_num_batched_tokens
        max_requests = min(self.config.max_num_seqs, max_rows)
        return max_requests, self.num_speculative_tokens, max_rows, self.tree

    def with_branches(self, step: SchedulerOutput) -> SchedulerOutput:
        """Return the plan with trees of the engine's largest shape; the same plan if drafts form chains."""
        if self.tree is None:
            return step
        return replace(step, tree=TreeShape(self.tree.depth, self.tree.width, (1.0,) * self.tree.width))

    @property
    def without_effect(self) -> list[str]:
        """Warnings, one for each setting that has no effect with these models, with the reason."""
        spec = self.config.speculative_config
        if spec is None or spec.tree_width == 1 or (reason := why_no_trees(self)) is None:
            return []
        return [f"tree_width={spec.tree_width} has no effect, drafts form chains: {reason}"]

    @property
    def tap_ids(self) -> tuple[int, ...]:
        return self.drafter.target_layer_ids if self.drafter else self.recorded_layers

    @property
    def split(self) -> bool:
        spec = self.config.speculative_config
        return spec is not None and spec.placement != "colocated"


def resolve_config(config: EngineConfig) -> ResolvedConfig:
    """Resolve and check settings. A CheckpointError or ConfigError names the field and the remedy."""
    folder, spec = target_folder(config), config.speculative_config
    target = read_model(folder, config.hf_overrides)
    Sharding(target, 0, config.tensor_parallel_size)
    tensors = open_checkpoint(folder, target) if config.load_format == "auto" else None
    target, doubts = _with_end_token(config, folder, target)
    draft_folder, drafter = _read_drafter_config(config, folder, target)
    config = without_stored_quantization(config, target, drafter)
    refuse_quantizing_twice(config, target, drafter)
    length, window = find_max_model_len(config, target, drafter), None
    if spec is not None and drafter is not None:
        passes = find_num_drafts(config, drafter) if isinstance(drafter, ChainConfig) else 1
        window = find_window(spec, target, drafter, length, passes)
        drafter = with_window(drafter, window)
    resolved = resolve_models(config, folder, target, draft_folder, drafter, length)
    with_kv = [target, *([drafter.model] if isinstance(drafter, MtpConfig) else [])]
    with_kv = [] if kv_dtype(config) is None else with_kv
    unused = () if tensors is None else unused_scales(tensors, with_kv)
    if draft_folder is not None and drafter is not None:
        if not isinstance(drafter, AssistantConfig):
            read_drafter(config, draft_folder, resolved.facts)
        if config.load_format == "auto" and drafter.quantization is not None:
            tensors = QuantizedFolder(draft_folder, drafter.quantization, torch.float32)
            unused += unused_drafter_scales(tensors, has_fp8_kv=kv_dtype(config) is not None)
    return replace(resolved, draft_window=window, doubts=(*doubts, *unused))


def _read_drafter_config(
    config: EngineConfig, folder: Path, target: ModelSpec
) -> tuple[Path | None, DraftConfig | None]:
    """Return what drafts, and its folder if it has one of its own.

    A checkpoint of DFlash or EAGLE-3, an assistant's (method mtp, with a model), or the target's own layers
    in `folder` (mtp without); nothing for methods that need no model.
    """
    spec = config.speculative_config
    if spec is None or (spec.model is None and spec.method != "mtp"):
        return None, None
    if spec.model is None:
        return None, read_mtp(config, folder, target)
    own = drafter_folder(config, spec.model)
    if spec.method == "mtp":
        return own, _read_assistant(config, own, target)
    return own, _read_config(spec, own, target.num_layers)


def read_mtp(config: EngineConfig, folder: Path, target: ModelSpec) -> MtpConfig:
    """Return the target's own layers. Raises CheckpointError if the folder lacks their tensors."""
    ranks = config.tensor_parallel_size
    drafter = MtpConfig.of(target, ranks)
    if config.load_format == "auto":
        count = count_mtp_layers(open_folder(folder, target.quantization), target, folder)
        drafter = MtpConfig.of(target, ranks, count)
        open_checkpoint(folder, drafter.model)
    return drafter


def _read_assistant(config: EngineConfig, folder: Path, target: ModelSpec) -> AssistantConfig:
    """Return an assistant. Raises CheckpointError if it is not the target's, or lacks tensors."""
    spec = config.speculative_config
    assert spec is not None, "only speculation has a drafter"
    model = read_assistant(folder, spec.hf_overrides)
    if config.load_format == "auto":
        open_checkpoint(folder, model)
    ranks, file = config.tensor_parallel_size, str(folder / "config.json")
    return AssistantConfig.of(model, target, ranks, file)


def without_stored_quantization(
    config: EngineConfig, target: ModelSpec, drafter: DraftConfig | None
) -> EngineConfig:
    """Return the config without settings that name the format in which a checkpoint is stored.

    Raises ConfigError if a checkpoint is not stored in the format that its setting names.
    """
    if _names_its_format("quantization", config.quantization, target):
        config = replace(config, quantization=None)
    spec = config.speculative_config
    if spec is not None and _names_its_format("speculative_config.quantization", spec.quantization, drafter):
        config = replace(config, speculative_config=replace(spec, quantization=None))
    return config


def _names_its_format(
    field: str, value: AnyQuantization | None, model: ModelSpec | DraftConfig | None
) -> bool:
    stored = None if model is None else model.quantization
    if value is not None and stored is not None and stored.method.removeprefix("fbgemm_") == value:
        return True
    if value is not None and at_load(value) is None:
        found = "not quantized" if stored is None else f"quantized as {stored}"
        raise ConfigError(
            f"{field}={value!r}: the checkpoint is {found}. Leave it out, since the format is read from the "
            "checkpoint, or name a checkpoint in that format; int8 and int4 quantize at load.",
            param=field,
        )
    return False


def refuse_quantizing_twice(config: EngineConfig, target: ModelSpec, drafter: DraftConfig | None) -> None:
    """Raise ConfigError if codes of a checkpoint would be quantized to integers again."""
    spec = config.speculative_config
    of_drafter = None if spec is None else spec.quantization
    settings = (
        ("quantization", config.quantization, target),
        ("speculative_config.quantization", of_drafter, drafter),
    )
    for field, value, model in settings:
        if value in INTEGERS and model is not None and model.quantization is not None:
            raise ConfigError(
                f"{field}={value!r}: the checkpoint is quantized already ({model.quantization}), and its "
                "codes are used as they are where there are products for them. Leave it out.",
                param=field,
            )


def read_drafter(config: EngineConfig, folder: Path, facts: TargetFacts) -> DrafterConfig | Eagle3Config:
    """Return a drafter's config. Raises CheckpointError if it does not fit, or lacks tensors to be read."""
    spec = config.speculative_config
    assert spec is not None, "only speculation has a drafter"
    if config.load_format == "auto":
        check = check_eagle3 if spec.method == "eagle3" else check_drafter
        return check(folder, facts, spec.hf_overrides)
    drafter = _read_config(spec, folder, facts.num_layers)
    drafter.check_fits(facts)
    return drafter


def _read_config(
    spec: SpeculativeConfig, folder: Path, num_target_layers: int
) -> DrafterConfig | Eagle3Config:
    if spec.method == "eagle3":
        return Eagle3Config.load(folder, num_target_layers, spec.hf_overrides)
    return DrafterConfig.load(folder, spec.hf_overrides)


def resolve_models(
    config: EngineConfig,
    target_folder: Path,
    target: ModelSpec,
    drafter_folder: Path | None,
    drafter: DraftConfig | None,
    max_model_len: int,
) -> ResolvedConfig:
    """Return the settings for models with known shapes. Does not read the folders."""
    device = _device(config)
    models = _stack_specs(target, drafter, device)
    page_size = config.page_size or _page_size(config, device)
    ranks = config.tensor_parallel_size
    preferred = DeviceCapabilities(device, torch.bfloat16, page_size, ranks, kv_dtype(config))
    num_values = sum(math.prod(shape) for shape in target_shapes(target).values())
    is_quantized = target.quantization is not None
    cpu_config = choose_cpu_config(config, models, target.dtype, preferred, num_values, is_quantized)
    if device.type == "cpu" and cpu_config.dtype is torch.float16:
        logger.warning("dtype=float16: CPUs compute it many times slower than bfloat16 or float32. Use auto.")
    if config.dtype == "auto" and cpu_config.dtype.itemsize > getattr(torch, target.dtype).itemsize:
        reason = why_not("compiled", models, preferred) or "takes longer, as measured on this machine"
        logger.info(
            "dtype=auto: the checkpoint's %s is computed in float32, because attention_backend=compiled %s.",
            target.dtype,
            reason,
        )
    geometries = Sharding(target, 0, config.tensor_parallel_size).kv_geometries()
    draft_windows = [layer.window for layer in drafter.layers] if drafter else []
    if isinstance(drafter, AssistantConfig):
        pages = plan_kv_cache(target.windows, [], max_model_len, geometries)
        pages = replace(pages, drafter=tuple(pages.target[layer] for layer in drafter.target_layers))
    else:
        pages = plan_kv_cache(target.windows, draft_windows, max_model_len, geometries)
    return ResolvedConfig(
        config=config,
        target_folder=target_folder,
        target=target,
        drafter_folder=drafter_folder,
        drafter=drafter,
        facts=TargetFacts(
            target.hidden_size, target.num_layers, target.vocab_size, max_model_len, target.embed_scale
        ),
        device=device,
        dtype=cpu_config.dtype,
        num_speculative_tokens=find_num_drafts(config, drafter),
        max_num_batched_tokens=config.max_num_batched_tokens or _max_rows(device),
        attention_backend=cpu_config.backend,
        page_size=page_size,
        pages=pages,
    )


def _stack_specs(
    target: ModelSpec, drafter: DraftConfig | None, device: torch.device
) -> list[ModelStackSpec]:
    """Return what the models require of a backend, but for chains on a CPU, which all backends run."""
    if drafter is None or (isinstance(drafter, ChainConfig) and device.type == "cpu"):
        return [target.stack_spec()]
    return [target.stack_spec(), drafter.stack_spec()]


def _with_end_token(
    config: EngineConfig, folder: Path, target: ModelSpec
) -> tuple[ModelSpec, tuple[str, ...]]:
    """Return the target with the tokenizer's end token added, as in vLLM and SGLang, and warnings.

    Raises CheckpointError if the tokenizer has ids without an embedding in the target.
    """
    if config.skip_tokenizer_init:
        return target, ()
    source = tokenizer_folder(config)
    tokens = TokenIds.read(source)
    if tokens is None:  # loading the tokenizer reports why
        return target, ()
    if (largest := max(tokens.known, default=-1)) >= target.vocab_size:
        raise CheckpointError(
            f"tokenizer: {source} makes token ids up to {largest}, but the target's vocab_size is "
            f"{target.vocab_size}. Set `tokenizer` to the one that the target was trained with.",
            param="tokenizer",
        )
    named_in = end_tokens_file(folder, config.hf_overrides)
    doubts = tuple(
        f"{named_in}: eos_token_id names {token_id}, which is no token of the tokenizer in {source}: it "
        "ends an answer, but no grammar can wait for it."
        for token_id in target.eos_token_ids
        if token_id not in tokens.known
    )
    ends = (*target.eos_token_ids, *([] if tokens.end is None else [tokens.end]))
    return replace(target, eos_token_ids=tuple(dict.fromkeys(ends))), doubts


def why_no_trees(resolved: ResolvedConfig) -> str | None:
    """Return why drafts form chains, although trees are wanted; None if they form trees."""
    if resolved.target.states is not None:
        return "recurrent states follow one path of tokens"
    spec = resolved.config.speculative_config
    if resolved.runs_on_device and spec is not None and spec.suffix_drafts:
        return "copies beside a drafter are chosen on the host, and a GPU grows trees without it"
    return None


def _page_size(config: EngineConfig, device: torch.device) -> int:
    """Return the default: a GPU kernel's tile of keys; smaller on a CPU, to waste less and share more."""
    if config.attention_backend == "flash_attn":
        return 256  # the only size that FlashAttention 2 supports
    return 64 if device.type == "cuda" else 16


def _max_rows(device: torch.device) -> int:
    """Return the default: more rows read the weights less often, and delay the other requests of a step."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        if properties.major >= _LARGE_GPU_MAJOR and properties.total_memory >= _LARGE_GPU_BYTES:
            return 8192
    return 2048


def kv_dtype(config: EngineConfig) -> torch.dtype | None:
    """Return the dtype of stored K/V; None for the models'."""
    return None if config.kv_cache_dtype == "auto" else torch.float8_e4m3fn


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            'device="cuda": PyTorch sees no CUDA device. Set device="cpu", or install a CUDA build of '
            "PyTorch and check the driver.",
            param="device",
        )
    return torch.device("cuda", torch.cuda.current_device())
