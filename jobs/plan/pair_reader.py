"""Reads a plan's inputs: shapes, limits and acceptance of a target and a drafter, and a trace of arrivals.

No weights are read; from the hub only small files are downloaded (`SHAPE_FILES`). If a folder has weights,
their headers are checked. The shapes are also used by `jobs/bench/step_cost.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...actors.checkpoints.checkpoint_paths import SHAPE_FILES, drafter_folder, target_folder
from ...actors.checkpoints.gguf_files import weight_files
from ...actors.targets.families import read_assistant, read_model
from ...actors.targets.loading.model_limits import find_max_model_len
from ...actors.targets.loading.resolved_config import read_mtp, refuse_quantizing_twice
from ...actors.targets.model.assistant import AssistantConfig
from ...actors.targets.model.attention import TargetAttention
from ...actors.targets.model.mlp_spec import EXPERT_FORMS, PACKED_EXPERTS
from ...actors.targets.model.model_spec import DeltaNet, LayerSpec, ModelSpec
from ...actors.targets.model.mtp import MTP_DRAFTS, ChainLayersConfig, MtpConfig
from ...actors.targets.model.tensor_parallel import Sharding
from ...actors.targets.model.weights import open_checkpoint
from ...cluster.config import EngineConfig, Quantization, at_load
from ...cluster.errors import ConfigError, DatasetError
from ...cluster.hardware.kernel_loops import MXFP4_BYTES
from ...cluster.hardware.layer_shape import ExpertShape, LatentShape, LayerShape
from ...cluster.hardware.model_pair import ModelPair
from ...cluster.hardware.model_shape import ModelShape
from ...cluster.hardware.parallel_layouts import TP_SIZES
from ...cluster.simulation.simulated_engine import TraceArrival
from ...cluster.speculation.acceptance_length import check_survival, survival_of_length
from ...drafter.card import min_card_length
from ...drafter.compute.checkpoint.quantization.checkpoint_quantization import CheckpointQuantization
from ...drafter.dflash.checkpoint import check_drafter, drafter_shapes
from ...drafter.dflash.config import DrafterConfig
from ...drafter.dflash.target_features import TargetFacts
from ...drafter.drafter_weights import MULTIPLIED

HalfDType = Literal["bfloat16", "float16"]
# Mean acceptance length without a flag or a card: an estimate between chats at temperature 1 and code at 0.
# Measure yours with `manta bench`.
DEFAULT_LENGTH = 4.0
# Per weight that is quantized at load, with its share of a scale.
_BYTES: Mapping[Quantization | None, float] = {"fp8": 1, "int8": 33 / 32, "int4": 18 / 32}
_WEIGHT = ".weight"
# Parts of a layer that products take as codes, beside queries, keys and values.
_MLP_PARTS = ("gate", "up", "down")
_PACKED_PARTS = ("o", "delta_out", *_MLP_PARTS, *(f"shared_{part}" for part in _MLP_PARTS))


@dataclass(frozen=True, slots=True)
class ReadPair:
    """Two checkpoints as input of a plan.

    Attributes:
        acceptance: names the source of the curve.
        checkpoint_quantization: how the target's checkpoint is quantized, for messages; None if it is not.
    """

    pair: ModelPair
    dtype: HalfDType
    max_model_len: int
    acceptance: str
    checkpoint_quantization: str | None = None


def read_pair(config: EngineConfig, acceptance: str | None) -> ReadPair:
    """Read the models of `config`; `acceptance` is a mean length, one probability per draft, or None."""
    folder = target_folder(config, files=SHAPE_FILES)
    target = read_model(folder)
    if _has_weights(folder):
        open_checkpoint(folder, target)
    draft_folder, drafter = _read_drafter(config, target, folder)
    refuse_quantizing_twice(config, target, drafter)
    max_model_len = find_max_model_len(config, target, drafter)
    survival, source = (), "no drafter"
    if drafter is not None:
        num_drafts = _num_drafts(drafter)
        survival, source = _acceptance(acceptance, num_drafts, draft_folder)
    elif acceptance is not None:
        raise ConfigError("acceptance needs a drafter: give --drafter, too.", param="acceptance")
    sharded = [target, *([drafter.model] if isinstance(drafter, ChainLayersConfig) else [])]
    kv_itemsize = None if config.kv_cache_dtype == "auto" else 1
    of_drafter = None if drafter is None else _shape_of_drafter(drafter, config)
    pair = ModelPair(
        target=replace(
            target_shape(target, quantization=at_load(config.quantization)), kv_itemsize=kv_itemsize
        ),
        drafter=None if of_drafter is None else replace(of_drafter, kv_itemsize=kv_itemsize),
        tied=target.tied_head,
        tp_sizes=tuple(tp for tp in TP_SIZES if all(divides(spec, tp) for spec in sharded)),
        survival=survival,
        chain=_chain(drafter),
        read_layers=drafter.target_layers if isinstance(drafter, AssistantConfig) else (),
    )
    quantization = None if target.quantization is None else str(target.quantization)
    return ReadPair(pair, _dtype(config, target), max_model_len, source, quantization)


def _read_drafter(
    config: EngineConfig, target: ModelSpec, target_folder: Path
) -> tuple[Path | None, DrafterConfig | MtpConfig | AssistantConfig | None]:
    """Return a drafter and its folder; a target's own layers have none."""
    if (spec := config.speculative_config) is None:
        return None, None
    if spec.model is None:
        has_weights = _has_weights(target_folder)
        return None, read_mtp(config, target_folder, target) if has_weights else MtpConfig.of(target, 1)
    folder = drafter_folder(config, spec.model, files=SHAPE_FILES)
    if spec.method == "mtp":
        model = read_assistant(folder, spec.hf_overrides)
        if _has_weights(folder):
            open_checkpoint(folder, model)
        return folder, AssistantConfig.of(model, target, 1, str(folder / "config.json"))
    facts = TargetFacts(target.hidden_size, target.num_layers, target.vocab_size, 0)
    if _has_weights(folder):
        return folder, check_drafter(folder, facts)
    drafter = DrafterConfig.load(folder)
    drafter.check_fits(facts)
    return folder, drafter


def _num_drafts(drafter: DrafterConfig | MtpConfig | AssistantConfig) -> int:
    if isinstance(drafter, DrafterConfig):
        return drafter.max_drafts
    return drafter.num_layers if isinstance(drafter, MtpConfig) and drafter.num_layers > 1 else MTP_DRAFTS


def _chain(
    drafter: DrafterConfig | MtpConfig | AssistantConfig | None,
) -> Literal["mtp", "assistant"] | None:
    if isinstance(drafter, MtpConfig):
        return "mtp"
    return "assistant" if isinstance(drafter, AssistantConfig) else None


def _shape_of_drafter(
    drafter: DrafterConfig | MtpConfig | AssistantConfig, config: EngineConfig
) -> ModelShape:
    """Return a drafter's shape: a target's own layers and an assistant are read as targets are."""
    if isinstance(drafter, MtpConfig):
        shape = target_shape(drafter.model, quantization=at_load(config.quantization))
        # Each layer first combines two inputs, a token's embedding and a hidden state, by a plain matrix.
        return replace(shape, taps=2 * drafter.num_layers, packs_fc=False)
    spec = config.speculative_config
    quantization = None if spec is None else at_load(spec.quantization)
    if isinstance(drafter, AssistantConfig):
        shape = target_shape(drafter.model, quantization=quantization)
        return replace(shape, backbone=drafter.hidden_size, packs_fc=False)
    return drafter_shape(drafter, quantization=quantization)


def _has_weights(folder: Path) -> bool:
    return bool(weight_files(folder))


def divides(spec: ModelSpec, ranks: int) -> bool:
    try:
        Sharding(spec, 0, ranks)
    except ConfigError:
        return False
    return True


def _dtype(config: EngineConfig, target: ModelSpec) -> HalfDType:
    """Return the configured dtype or the checkpoint's; fp32 is planned as bf16."""
    wanted = target.dtype if config.dtype == "auto" else config.dtype
    return "float16" if wanted == "float16" else "bfloat16"


def _acceptance(text: str | None, num_drafts: int, folder: Path | None) -> tuple[tuple[float, ...], str]:
    """Return survival probabilities and their source; `folder` may hold a drafter's card."""
    if text is not None:
        return _stated(text, num_drafts), "as given"
    if folder is not None and (length := min_card_length(folder)) is not None:
        return survival_of_length(min(length, num_drafts + 1), num_drafts), "lowest in the drafter's card"
    length = min(DEFAULT_LENGTH, 1 + num_drafts / 2)
    return survival_of_length(length, num_drafts), "an assumption; give --acceptance"


def _stated(text: str, num_drafts: int) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"acceptance={text!r} must be a mean acceptance length, such as 4.2, or one probability per "
            "draft, such as 0.8,0.7,...",
            param="acceptance",
        ) from None
    if len(numbers) == 1 and numbers[0] >= 1.0:
        return survival_of_length(numbers[0], num_drafts)
    check_survival(numbers, num_drafts, param="acceptance")
    return numbers


def target_shape(spec: ModelSpec, itemsize: int = 2, quantization: Quantization | None = None) -> ModelShape:
    """Return a target's shape. Packed weights stay packed; `quantization` is that of dense products."""
    loaded = itemsize if quantization == "fp8" else _BYTES.get(quantization, itemsize)
    layers = tuple(_layer(layer, _expert_bytes(spec, i, loaded)) for i, layer in enumerate(spec.layers))
    return ModelShape(
        layers=layers,
        hidden=spec.hidden_size,
        vocab=spec.vocab_size,
        itemsize=itemsize,
        product_itemsize=_packed_target_bytes(spec, itemsize) or _BYTES.get(quantization),
    )


def _expert_bytes(spec: ModelSpec, layer: int, loaded: float) -> float:
    """Return the mean bytes of a weight of experts; `loaded` are those of one that the files have plain."""
    if PACKED_EXPERTS in spec.expert_forms:
        return MXFP4_BYTES
    rules = [spec.tensors[part] for part in EXPERT_FORMS[0] if part in spec.tensors]
    if spec.quantization is None or not rules:
        return loaded
    modules = (f"model.{rule.name.format(layer=layer, expert=0)}".removesuffix(_WEIGHT) for rule in rules)
    forms = [spec.quantization.packed_form(module) for module in modules]
    return sum(loaded if each is None else each.bytes for each in forms) / len(forms)


def _packed_target_bytes(spec: ModelSpec, itemsize: int) -> float | None:
    """Return the mean bytes of a weight of dense products; None if the checkpoint has no packed ones."""
    if (quantization := spec.quantization) is None:
        return None
    sizes: list[tuple[int, float]] = []
    for layer in range(spec.num_layers):
        packed = {*spec.qkv_parts(layer), *_PACKED_PARTS}
        for part in spec.layer_parts(layer):
            rule = spec.tensors[part]
            if len(rule.axes) != 2 or not rule.name.endswith(_WEIGHT) or "{expert}" in rule.name:
                continue
            module, each = f"model.{rule.name.format(layer=layer)}".removesuffix(_WEIGHT), None
            if part in packed and rule.transform is None:
                each = _bytes(quantization, module)
            count = math.prod(spec.axis_size(axis, layer) for axis in rule.axes)
            sizes.append((count, itemsize if each is None else each))
    return _mean_bytes(sizes, itemsize)


def _packed_drafter_bytes(config: DrafterConfig, itemsize: int) -> float | None:
    if (quantization := config.quantization) is None:
        return None
    facts = TargetFacts(config.hidden_size, 0, config.vocab_size, 0)
    sizes: list[tuple[int, float]] = []
    for name, shape in drafter_shapes(config, facts).items():
        if name.endswith(MULTIPLIED):
            each = _bytes(quantization, name.removesuffix(_WEIGHT))
            sizes.append((math.prod(shape), itemsize if each is None else each))
    return _mean_bytes(sizes, itemsize)


def _bytes(quantization: CheckpointQuantization, module: str) -> float | None:
    form = quantization.packed_form(module)
    return None if form is None else form.bytes


def _mean_bytes(sizes: Sequence[tuple[int, float]], itemsize: int) -> float | None:
    mean = sum(count * each for count, each in sizes) / sum(count for count, _ in sizes)
    return None if mean == itemsize else mean


def drafter_shape(
    config: DrafterConfig, itemsize: int = 2, quantization: Quantization | None = None
) -> ModelShape:
    return ModelShape.dense(
        layers=config.num_layers,
        hidden=config.hidden_size,
        inter=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab=config.draft_vocab_size,
        taps=config.num_taps,
        itemsize=itemsize,
        product_itemsize=_packed_drafter_bytes(config, itemsize) or _BYTES.get(quantization),
        windows=tuple(layer.window for layer in config.layers),
    )


def _layer(layer: LayerSpec, weight_bytes: float) -> LayerShape:
    mixer, dense = layer.mixer, layer.dense
    if isinstance(mixer, DeltaNet):
        inter = 0 if dense is None else dense.inner_size
        return LayerShape(state=mixer.geometry, inter=inter, experts=_experts(layer, weight_bytes))
    return LayerShape(
        heads=mixer.num_heads,
        kv_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        v_head_dim=mixer.value_dim,
        window=mixer.window,
        inter=0 if dense is None else dense.inner_size,
        experts=_experts(layer, weight_bytes),
        gated=mixer.gate,
        queries_only=mixer.queries_only,
        latent=_latent(mixer),
    )


def _latent(mixer: TargetAttention) -> LatentShape | None:
    if (latent := mixer.latent) is None:
        return None
    return LatentShape(
        q_rank=latent.q_rank,
        nope_dim=latent.nope_dim,
        rope_dim=mixer.head_dim - mixer.value_dim,
        v_dim=latent.v_dim,
        rank=mixer.value_dim,
    )


def _experts(layer: LayerSpec, weight_bytes: float) -> ExpertShape | None:
    if (routed := layer.routed) is None:
        return None
    return ExpertShape(
        count=routed.router.num_experts,
        chosen=routed.router.top_k,
        inter=routed.inner_size,
        num_held=routed.router.num_experts,
        shared_inter=0 if routed.shared is None else routed.shared.inner_size,
        weight_bytes=weight_bytes,
        inner_multiple=routed.inner_multiple,
    )


class _Line(BaseModel):
    """A line of a trace. Other keys are ignored, so that logs can be used as traces."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    arrival_s: float = Field(ge=0)
    prompt_tokens: int = Field(ge=1)
    output_tokens: int = Field(ge=1)


def read_trace(path: Path, max_model_len: int) -> list[TraceArrival]:
    """Read all arrivals; DatasetError names a line that is invalid or longer than `max_model_len`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"trace: {path} cannot be read: {error}.", param="trace") from None
    trace = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not trace:
        raise DatasetError(f"trace: {path} has no arrivals. Give at least one line.", param="trace")
    for number, arrival in enumerate(trace, 1):
        length = arrival.prompt_tokens + arrival.output_tokens
        if length > max_model_len:
            raise DatasetError(
                f"trace: arrival {number} of {path} is {length} tokens long, and max_model_len "
                f"is {max_model_len}. Raise --max-model-len, or remove such lines.",
                param="trace",
            )
    return trace


def _parse(line: str, where: str) -> TraceArrival:
    try:
        return TraceArrival(**_Line.model_validate_json(line).model_dump())
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        key = ".".join(map(str, found["loc"])) or "the line"
        raise DatasetError(
            f"trace: {where}: {key}: {found['msg']}. Write lines like "
            '{"arrival_s": 0.4, "prompt_tokens": 812, "output_tokens": 240}.',
            param="trace",
        ) from None
