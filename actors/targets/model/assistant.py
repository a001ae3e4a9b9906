"""An assistant of Gemma 4: a small decoder that drafts from the target's own K and V.

It has a checkpoint of its own (`Gemma4AssistantForCausalLM`). Its layers project queries only, and each reads
K and V of the target's last layer of its kind, sliding or full. It writes none, so it needs no pages and no
pass over a prompt.

    from the last known token n (the anchor), or a draft, and y of the position before
    pre [E[token] ; y] [N, 2B] --> x [N, H] --layers, norm--> h [N, H] --post--> y [N, B] of the next draft
    h --its own head--> logits

With ordered embeddings (E2B, E4B) only tokens of some clusters of the vocabulary are possible: those whose
centroids have the largest products with h.

All drafts of a step are made at position n, and their queries see the target's K and V of positions before n.
E is the target's embedding, scaled; y the target's normed hidden state, and the assistant's past it. Sharded
over ranks as the target is: each rank has the K and V of its heads.

Sources: transformers' modeling_gemma4_assistant.py and SinglePositionMultiTokenCandidateGenerator.

Legend: N rows, X rows of the head, H hidden, B hidden size of the target, m taps (one), Q query heads, D head
dim, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....cluster.errors import CheckpointError
from ....drafter.compute.backend import Backend, ModelStackSpec, PlacedRows
from ....drafter.compute.block_weights import AttentionShape, BlockWeights, MixerShape, Projection
from ....drafter.compute.blocks import BlockStack
from ....drafter.compute.checkpoint.quantization.checkpoint_quantization import CheckpointQuantization
from ....drafter.compute.layers.linear import RMSNorm
from ....drafter.compute.layers.rope import RopeConfig
from ....drafter.compute.memory.kv_cache import PagedKVCache
from ....drafter.dflash.target_features import TargetEmbeddings
from .attention import TargetAttention
from .decoder import RopeOf, make_block
from .model_spec import ModelSpec
from .mtp import ChainLayersConfig
from .tensor_parallel import Communicator, Sharding, VocabHead
from .weights import TargetWeights


@dataclass(frozen=True, slots=True)
class AssistantConfig(ChainLayersConfig):
    """Describes an assistant. `kv_geometry` is that of its last layer.

    Windows of `model` are one less than the target's: an anchor's row sees as many keys of the target before
    itself.

    Attributes:
        target_layers: the target's layer, among those with K/V, that each layer reads.
        hidden_size: the target's.
        embed_scale: factor of the target's embedding.
    """

    target_layers: tuple[int, ...]
    hidden_size: int
    embed_scale: float

    @classmethod
    def of(cls, model: ModelSpec, target: ModelSpec, num_ranks: int, file: str) -> AssistantConfig:
        """Return the assistant of a target. Raises CheckpointError, naming `file`, if it is not for it."""
        sizes = {
            "backbone_hidden_size": (model.backbone_size, "hidden_size", target.hidden_size),
            "text_config.vocab_size": (model.vocab_size, "vocab_size", target.vocab_size),
        }
        for key, (own, name, theirs) in sizes.items():
            if own != theirs:
                raise _misfit(file, f"{key}={own} is not the target's {name} ({theirs})")
        chosen = tuple(_target_layer(model.attention(i), target, i, file) for i in range(model.num_layers))
        layers = [
            replace(layer, mixer=_seeing_before(model.attention(i), target.attentions[chosen[i]]))
            for i, layer in enumerate(model.layers)
        ]
        return cls(
            model=replace(model, layers=tuple(layers)),
            target_layers=chosen,
            target_layer_ids=(target.num_layers - 1,),
            kv_geometry=Sharding(model, 0, num_ranks).kv_geometries()[-1],
            hidden_size=target.hidden_size,
            embed_scale=target.embed_scale,
        )

    @property
    def quantization(self) -> CheckpointQuantization | None:
        return self.model.quantization

    def stack_spec(self) -> ModelStackSpec:
        return replace(self.model.stack_spec(), name="drafter")


def _target_layer(own: TargetAttention, target: ModelSpec, layer: int, file: str) -> int:
    """Return the target's last layer with or without a window, like this one."""
    kind = "full" if own.window is None else "sliding"
    alike = [i for i, window in enumerate(target.windows) if (window is None) == (own.window is None)]
    if not alike:
        raise _misfit(file, f"layer {layer} reads K and V of a {kind} layer, and the target has none")
    theirs = target.attentions[alike[-1]]
    for name in ("num_kv_heads", "head_dim", "value_dim"):
        if getattr(own, name) != getattr(theirs, name):
            wanted = f"{name}={getattr(own, name)}, and the target's {kind} layers {getattr(theirs, name)}"
            raise _misfit(file, f"layer {layer} reads K and V of {wanted}")
    if not _rotate_alike(own.rope, theirs.rope):
        raise _misfit(file, f"layer {layer} rotates otherwise than the target's {kind} layers")
    return alike[-1]


def _rotate_alike(own: RopeConfig | None, theirs: RopeConfig | None) -> bool:
    assert own is not None, "the family rotates all layers"
    return theirs is not None and torch.equal(own.frequencies(), theirs.frequencies())


def _misfit(file: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{file}: {why}. Take the assistant that was published for this target.",
        param="speculative_config.model",
    )


def _seeing_before(own: TargetAttention, theirs: TargetAttention) -> TargetAttention:
    if own.window is None or theirs.window is None:
        return own
    return replace(own, window=max(min(own.window, theirs.window) - 1, 1))


class AssistantDrafter:
    """A loaded assistant. Stateless: it reads the target's pages, and what requests need is in them.

    Args:
        weights: of `AssistantConfig.model`, this rank's slices.
        target_norm_H: the target's final norm.
        rope_of: returns the tables of a rotation; the target's has them already.
    """

    reads_target_kv, has_layer_per_draft = True, False

    def __init__(
        self,
        config: AssistantConfig,
        weights: TargetWeights,
        target_norm_H: Tensor,
        shared_embeddings: TargetEmbeddings,
        rope_of: RopeOf,
        communicator: Communicator,
        backend: Backend,
    ) -> None:
        self.config = config
        self._operators, self._shared_embeddings = backend, shared_embeddings
        spec = config.model
        self._target_norm = RMSNorm(target_norm_H, spec.rms_norm_eps)
        self._pre, self._post = (
            backend.linear_of_either(weights.part(f"{which}_projection")) for which in ("pre", "post")
        )
        head_UH = weights.head()
        self.dtype, self.device = head_UH.dtype, head_UH.device
        self._head = VocabHead(backend.head(head_UH), spec.vocab_size, weights.sharding, communicator)
        self._clusters: _Clusters | None = None
        if spec.clusters is not None:
            centroids = backend.linear_of_either(weights.part("centroids"))
            self._clusters = _Clusters(centroids, *spec.clusters, weights.part("token_ordering"))
        self._embed_scale = float(torch.tensor(config.embed_scale, dtype=self.dtype))
        made = [make_block(weights, i, rope_of, communicator, backend) for i in range(spec.num_layers)]
        final_norm = RMSNorm(weights.final_norm(), spec.rms_norm_eps)
        self._stack = BlockStack(backend, [_with_unused_kv(*block) for block in made], final_norm, ())

    def new_cache(self, num_pages: int, page_size: int, dtype: torch.dtype | None = None) -> PagedKVCache:
        raise AssertionError("an assistant reads the target's pages")

    def features(self, taps_NmH: Tensor) -> Tensor:
        """Return the target's normed hidden states y [N, B] of its rows."""
        return self._operators.norm(self._target_norm, taps_NmH[:, 0].to(self.dtype).contiguous())

    def write_entries(self, token_ids_N: Tensor, y_NB: Tensor, rows: PlacedRows, cache: PagedKVCache) -> None:
        """Do nothing: the target has written its K and V."""

    def forward(
        self, token_ids_N: Tensor, y_NB: Tensor, rows: PlacedRows, cache: PagedKVCache, depth: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return y [N, B] for the next draft, and hidden states [N, H] for the head.

        Args:
            y_NB: of the position before each token.
            rows: one for each token, at the position before its request's anchor.
            cache: the target's, with the layers that the assistant's read.
        """
        token_NB = self._shared_embeddings.embed(token_ids_N).to(self.dtype) * self._embed_scale
        skipped = tuple(torch.full_like(slots_N, cache.skip_slot) for slots_N in rows.kv_slots)
        rows = replace(rows, positions_N=rows.positions_N + 1, kv_slots=skipped)
        hidden_NH, _ = self._stack(self._pre(torch.cat((token_NB, y_NB), dim=-1)), rows, cache)
        return self._post(hidden_NH), hidden_NH

    def logits(self, hidden_XH: Tensor) -> Tensor:
        """Return the logits [X, V] of all ranks' tokens; -inf for tokens of clusters that are not chosen."""
        logits_XV = self._head(hidden_XH)
        if self._clusters is None:
            return logits_XV
        return logits_XV.masked_fill_(~self._clusters.chosen(hidden_XH), -torch.inf)


class _Clusters:
    """Clusters of the vocabulary, of which `num_chosen` are possible in a row.

    Args:
        token_ordering_V: token ids, cluster after cluster, all of one size.
    """

    def __init__(
        self, centroids: Projection, num_clusters: int, num_chosen: int, token_ordering_V: Tensor
    ) -> None:
        self._centroids, self._num_chosen = centroids, num_chosen
        self._cluster_V = token_ordering_V.argsort() // (len(token_ordering_V) // num_clusters)

    def chosen(self, hidden_XH: Tensor) -> Tensor:
        """Return which tokens are possible, bool [X, V]."""
        scores_XC = self._centroids(hidden_XH)
        is_chosen_XC = torch.zeros_like(scores_XC, dtype=torch.bool)
        is_chosen_XC.scatter_(1, scores_XC.topk(self._num_chosen, dim=1).indices, True)
        return is_chosen_XC.index_select(1, self._cluster_V)


def _with_unused_kv(shape: MixerShape, block: BlockWeights) -> tuple[MixerShape, BlockWeights]:
    """Return the block with zeros for K and V beside its queries, which backends write to the skip slot."""
    assert isinstance(shape, AttentionShape) and shape.q_norm_D is not None, "its queries are normed"
    width = shape.num_kv_heads * (shape.head_dim + shape.v_head_dim)
    shape = replace(shape, k_norm_D=torch.ones_like(shape.q_norm_D))
    return shape, replace(block, qkv=_WithZeros(block.qkv, width))


class _WithZeros:
    """A projection with `width` zeros after its result."""

    def __init__(self, project: Projection, width: int) -> None:
        self._project, self._width = project, width

    def __call__(self, x_NK: Tensor, residual_NO: Tensor | None = None) -> Tensor:
        return torch.nn.functional.pad(self._project(x_NK, residual_NO), (0, self._width))
