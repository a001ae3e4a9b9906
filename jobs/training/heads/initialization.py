"""Shape and initial weights of a drafter in training.

A new drafter starts from another drafter's weights or from layers of the target. These already attend to the
context and write what the head reads, which saves many steps. Parts with another shape or kind than the
target's (latent attention, experts) start at random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ....actors.targets.model.mlp_weights import DenseTensors
from ....actors.targets.model.model_spec import GatedMLP, ModelSpec, TargetAttention
from ....actors.targets.model.weights import TargetWeights
from ....cluster.errors import ConfigError
from ....drafter.compute.checkpoint.loading.quantized_tensors import open_folder
from ....drafter.compute.checkpoint.quantized_matrix import plain
from ....drafter.compute.layers.rope import RopeConfig
from ....drafter.dflash.checkpoint import drafter_shapes, named_as_ours
from ....drafter.dflash.config import ConvolutionSize, DrafterConfig, DraftLayer
from ....drafter.dflash.target_features import TargetFacts, usual_layer_ids
from .dflash_module import TAPS, TrainableDrafter
from .recipes import DrafterSettings

_USUAL_HEAD_DIM, _ROWS_OF_A_KV_HEAD, _INNER_SHARE = 128, 4, 3
SEED = 1
_NEW_LAYERS = 3
_OUTPUTS = (
    "self_attn.o_proj.weight",
    "mlp.down_proj.weight",
)  # outputs of the sublayers


def facts_of(spec: ModelSpec) -> TargetFacts:
    return TargetFacts(spec.hidden_size, spec.num_layers, spec.vocab_size, 0, spec.embed_scale)


def drafter_config(spec: ModelSpec, settings: DrafterSettings, mask_token_id: int) -> DrafterConfig:
    """Return the configuration of a new drafter: layers shaped like the target's, with full attention."""
    size = settings.conv_group_size
    return DrafterConfig(
        file="a new drafter",
        layout="z-lab",
        **layer_sizes(spec),
        layers=(DraftLayer(causal=False, window=None),) * (settings.num_layers or _NEW_LAYERS),
        target_layer_ids=usual_layer_ids(spec.num_layers, settings.num_taps),
        block_size=settings.block_size,
        mask_token_id=mask_token_id,
        draft_vocab_size=spec.vocab_size,
        target_hidden_size=None,
        num_target_layers=spec.num_layers,
        mask_embedding=False,
        input_embedding_scale=spec.embed_scale,
        convolutions=None if size is None else ConvolutionSize(TAPS, size),
        selector=settings.selector,
    )


def continued(initial: DrafterConfig, settings: DrafterSettings, embed_scale: float) -> DrafterConfig:
    """Return the configuration of an existing drafter with the parts that the recipe adds."""
    size, scale = settings.conv_group_size, initial.input_embedding_scale
    num_more = (settings.num_layers or initial.num_layers) - initial.num_layers
    if num_more < 0:
        raise ConfigError(
            f"layers={settings.num_layers}: the initial drafter has {initial.num_layers} layers, and none "
            "can be removed. Leave it out, or give more.",
            param="layers",
        )
    return replace(
        initial,
        layers=initial.layers + initial.layers[-1:] * num_more,
        input_embedding_scale=embed_scale if scale is None else scale,
        convolutions=initial.convolutions or (None if size is None else ConvolutionSize(TAPS, size)),
        selector=initial.selector or settings.selector,
    )


@torch.no_grad()
def new_drafter(
    config: DrafterConfig, target: TargetWeights, initial: Path | None = None
) -> TrainableDrafter:
    """Make a drafter with the weights of `initial` or of target layers.

    Layers beyond those of `initial` start as identity. Without `initial`, layers are copied from evenly
    spaced target layers up to the last, and read the deepest tap.
    """
    torch.manual_seed(SEED)
    drafter = TrainableDrafter(config)
    if initial is not None:
        source, facts = open_folder(initial, DrafterConfig.load(initial).quantization), facts_of(target.spec)
        names = [name for name in source.shapes if named_as_ours(name) in drafter_shapes(config, facts)]
        drafter.load_state_dict({named_as_ours(n): source.get(n) for n in names}, strict=False)
        _add_identity_layers(drafter, names)
        return drafter
    for index, layer in enumerate(drafter.layers):
        parts = layer_parts(target, target.spec.num_layers * (index + 1) // config.num_layers - 1)
        load_matching(layer, _without_input_norm(parts))  # a target has no convolutions
    width = config.hidden_size
    drafter.fc.weight[:, -width:].copy_(torch.eye(width))
    drafter.norm.weight.copy_(_soft_norm(target.final_norm().float(), target.head()))
    return drafter


def _without_input_norm(parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fold the input norm's weight into q, k and v, which in a drafter also read the context, without it."""
    norm = parts["input_layernorm.weight"]
    folded = {f"self_attn.{kind}_proj.weight": norm for kind in "qkv"}
    folded = {name: parts[name] * weight for name, weight in folded.items() if name in parts}
    return {**parts, **folded, "input_layernorm.weight": torch.ones_like(norm)}


def _soft_norm(norm_D: torch.Tensor, head_VD: torch.Tensor) -> torch.Tensor:
    """Scale the final norm's weight down where logits of unrelated states would have a variance above 1.

    A new drafter knows nothing: with the target's weight, its confident logits would lose more than a uniform
    guess.
    """
    variance = norm_D.square().mean() * head_VD.float().square().sum(dim=-1).mean()
    return norm_D * variance.clamp(min=1.0).rsqrt()


def _add_identity_layers(drafter: TrainableDrafter, known: Sequence[str]) -> None:
    """Initialize the layers after the known ones as the last known one, with zero output projections."""
    count = len({name.split(".")[1] for name in map(named_as_ours, known) if name.startswith("layers.")})
    last = drafter.layers[count - 1].state_dict()
    identity = {name: torch.zeros_like(part) if name in _OUTPUTS else part for name, part in last.items()}
    for layer in drafter.layers[count:]:
        layer.load_state_dict(identity)


def load_matching(module: torch.nn.Module, parts: Mapping[str, torch.Tensor]) -> None:
    own = module.state_dict()
    fitting = {n: part for n, part in parts.items() if n in own and own[n].shape == part.shape}
    module.load_state_dict(fitting, strict=False)


def layer_sizes(spec: ModelSpec) -> dict:
    """Return layer sizes like those of the target's plain layers, or usual ones if it has none."""
    hidden = spec.hidden_size
    mixer = next((each for each in spec.attentions if _is_plain(each)), None)
    inner = next((layer.mlp.inner_size for layer in spec.layers if isinstance(layer.mlp, GatedMLP)), None)
    if mixer is not None:
        head_dim, heads, kv_heads = mixer.head_dim, mixer.num_heads, mixer.num_kv_heads
    else:
        head_dim = min(_USUAL_HEAD_DIM, hidden)
        kv_heads = max(1, hidden // head_dim // _ROWS_OF_A_KV_HEAD)
        heads = kv_heads * max(1, hidden // head_dim // kv_heads)
    theta = mixer.rope.theta if mixer is not None and mixer.rope is not None else 10000.0
    return {
        "hidden_size": hidden,
        "intermediate_size": inner or _INNER_SHARE * hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope": RopeConfig(head_dim, theta, "default", {}),
        "vocab_size": spec.vocab_size,
    }


def _is_plain(mixer: TargetAttention) -> bool:
    return mixer.latent is None and mixer.value_dim == mixer.head_dim and not mixer.k_is_v


def layer_parts(target: TargetWeights, index: int) -> dict[str, torch.Tensor]:
    """Return a target layer's tensors by the drafter's names, if they have the same meaning."""
    weights, mixer = target.layer(index), target.spec.layers[index].mixer
    parts = {
        "input_layernorm.weight": weights.attention_norm_H,
        "post_attention_layernorm.weight": weights.mlp_norm_H,
    }
    if isinstance(mixer, TargetAttention) and _is_plain(mixer) and not mixer.gate:
        rows = [mixer.num_heads, mixer.num_kv_heads, mixer.num_kv_heads]
        projections = plain(weights.qkv_OH, target.dtype).split([count * mixer.head_dim for count in rows])
        parts |= {
            f"self_attn.{kind}_proj.weight": part for kind, part in zip("qkv", projections, strict=True)
        }
        parts["self_attn.o_proj.weight"] = plain(weights.o_HO, target.dtype)
        if mixer.qk_norm and weights.q_norm is not None and weights.k_norm is not None:
            parts |= {"self_attn.q_norm.weight": weights.q_norm, "self_attn.k_norm.weight": weights.k_norm}
    if isinstance(weights.mlp, DenseTensors):
        gate, up = plain(weights.mlp.gate_up_IH, target.dtype).chunk(2)
        parts |= {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}
        parts["mlp.down_proj.weight"] = plain(weights.mlp.down_HI, target.dtype)
    return parts
