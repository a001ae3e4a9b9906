"""Targets whose layers differ in K/V heads, sizes and windows, against full attention by hand.

Specs and weights are synthetic, to test a layer's geometry alone. Pages are planned as by the loader (narrow
layers share planes); prompts come in chunks and batches.

Legend: N rows, Q query heads, K kv heads, D head dim, F head dim of values.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from manta.actors.targets.families.shared.llama_like import TENSORS
from manta.actors.targets.loading.memory_budget import affordable_pages, page_bytes
from manta.actors.targets.loading.resolved_config import resolve_models
from manta.actors.targets.model.attention import TargetAttention
from manta.actors.targets.model.decoder import Decoder
from manta.actors.targets.model.mlp_spec import GatedMLP
from manta.actors.targets.model.model_spec import LayerSpec, ModelSpec
from manta.actors.targets.model.tensor_parallel import Communicator, Sharding, SingleRank
from manta.actors.targets.model.weights import TargetWeights, target_shapes
from manta.cluster.pages.kv_cache_groups import plan_kv_cache
from manta.drafter.compute.backend import Backend
from manta.drafter.compute.cpu_numba.backend import NumbaBackend
from manta.drafter.compute.eager.backend import EagerBackend
from manta.drafter.compute.gpu_triton.backend import TritonBackend
from manta.drafter.compute.layers.rope import RopeConfig
from support.checkpoints.tiny import TINY_VOCAB
from support.engines.devices import DEVICE
from support.engines.steps import settings
from support.engines.thread_ranks import ThreadRanks
from support.oracles.decoder_requests import MAX_LEN, computed
from torch import Tensor

HIDDEN, EPS = 64, 1e-5
WINDOW = 9


def _layer(heads: int, kv_heads: int, dim: int, window: int | None, v_dim: int | None = None) -> LayerSpec:
    mixer = TargetAttention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        v_head_dim=v_dim,
        rope=RopeConfig(dim, 1e4 if window else 1e6, "default", {}),
        scale=0.3,
        window=window,
        qk_norm=v_dim is None,
        bias=v_dim is not None,
    )
    return LayerSpec(mixer=mixer, mlp=GatedMLP(inner_size=96))


def _spec(*layers: LayerSpec) -> ModelSpec:
    return ModelSpec(
        architecture="RandomSpecTensors",
        hidden_size=HIDDEN,
        vocab_size=TINY_VOCAB,
        layers=layers,
        rms_norm_eps=EPS,
        tied_head=False,
        tensors=TENSORS,
        max_position_embeddings=MAX_LEN,
        dtype="float32",
        eos_token_ids=(0,),
    )


SPECS = {
    # As Gemma 4's: full layers have fewer, wider heads, and half a sliding layer's width: two in a plane.
    "heads by layer": _spec(*[_layer(4, 4, 16, WINDOW), _layer(4, 1, 32, None)] * 2),
    # Like MiMo: values shorter than keys, whose size is no power of two; full layers have half the heads.
    "shorter values": _spec(*[_layer(4, 1, 24, None, 16), _layer(4, 2, 24, WINDOW, 16)] * 2),
    # All see everything, and the widths do not divide each other: two groups for one window.
    "query heads by layer": _spec(_layer(4, 2, 16, None), _layer(2, 1, 24, None), _layer(4, 1, 16, None)),
}
BACKENDS: dict[str, Callable[[], Backend]] = {
    "eager": EagerBackend,
    "loops": NumbaBackend,
    "triton": lambda: TritonBackend(DEVICE),
}


SLOW = ("triton", "query heads by layer")  # in Triton's interpreter; the other two have all of it


class RandomSpecTensors:
    """Random weights of a spec; a `TensorSource`."""

    def __init__(self, spec: ModelSpec) -> None:
        self.shapes = target_shapes(spec)
        generator = torch.Generator().manual_seed(3)
        self._tensors = {
            name: torch.randn(shape, generator=generator) * (0.1 if len(shape) > 1 else 0.3)
            + (len(shape) == 1)
            for name, shape in self.shapes.items()
        }

    def get(self, name: str) -> Tensor:
        return self._tensors[name]

    def slice(self, name: str, rows: slice, dim: int = 0) -> Tensor:
        return self._tensors[name].narrow(dim, rows.start, rows.stop - rows.start)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


def _rotate(x_NJD: Tensor, theta: float) -> Tensor:
    dim = x_NJD.shape[-1]
    angle_NC = torch.arange(len(x_NJD))[:, None] * theta ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = angle_NC.cos()[:, None], angle_NC.sin()[:, None]
    low, high = x_NJD.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def full_attention(spec: ModelSpec, tokens: list[int]) -> Tensor:
    """Return the logits of a whole sequence, from the definition."""
    made = RandomSpecTensors(spec)
    x = made.get("model.embed_tokens.weight")[tokens]
    for i, layer in enumerate(spec.layers):
        at, mixer = f"model.layers.{i}.", layer.mixer

        def heads(kind: str, dim: int, u: Tensor, at: str = at, mixer: TargetAttention = mixer) -> Tensor:
            y = u @ made.get(f"{at}self_attn.{kind}_proj.weight").T
            if mixer.bias:
                y = y + made.get(f"{at}self_attn.{kind}_proj.bias")
            y_NJD = y.unflatten(1, (-1, dim))
            if kind != "v" and mixer.qk_norm:
                y_NJD = _norm(y_NJD, made.get(f"{at}self_attn.{kind}_norm.weight"))
            return y_NJD if kind == "v" else _rotate(y_NJD, mixer.rope.theta)

        u = _norm(x, made.get(at + "input_layernorm.weight"))
        q_NQD = heads("q", mixer.head_dim, u)
        k_NQD, v_NQF = (
            heads(kind, dim, u).repeat_interleave(mixer.num_heads // mixer.num_kv_heads, dim=1)
            for kind, dim in (("k", mixer.head_dim), ("v", mixer.value_dim))
        )
        back = torch.arange(len(tokens))[:, None] - torch.arange(len(tokens))
        hidden = (back < 0) | (back >= (mixer.window or MAX_LEN))
        scores = torch.einsum("nqd,tqd->qnt", q_NQD, k_NQD) * mixer.scale
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        attended = torch.einsum("qnt,tqf->nqf", weights, v_NQF).flatten(1)
        x = x + attended @ made.get(at + "self_attn.o_proj.weight").T
        u = _norm(x, made.get(at + "post_attention_layernorm.weight"))
        gate, up = (u @ made.get(f"{at}mlp.{kind}_proj.weight").T for kind in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ made.get(at + "mlp.down_proj.weight").T
    return _norm(x, made.get("model.norm.weight")) @ made.get("lm_head.weight").T


def check_full_attention(name: str, communicator: Communicator, backend: Backend) -> None:
    """Assert the logits of all requests, computed in chunks over the pages that the loader would plan."""
    spec = SPECS[name]
    sharding = Sharding(spec, communicator.rank, communicator.world_size)
    pages = plan_kv_cache(spec.windows, [], MAX_LEN, sharding.kv_geometries())
    device = torch.device(DEVICE) if isinstance(backend, TritonBackend) else torch.device("cpu")
    weights = TargetWeights(RandomSpecTensors(spec), spec, sharding, torch.float32, device)
    model = Decoder(weights, (0,), MAX_LEN, communicator, backend, pages.target)
    requests = computed(model, pages=pages, batch=backend.attention_batch, device=device)
    for tokens, logits in zip(requests.tokens, requests.logits, strict=True):
        found = torch.cat(logits).cpu()
        torch.testing.assert_close(found, full_attention(spec, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("backend", "name"),
    [(backend, name) for backend in BACKENDS for name in SPECS if (backend, name) != SLOW],
)
def test_layers_of_several_geometries_attend_like_full_attention(backend: str, name: str) -> None:
    check_full_attention(name, SingleRank(), BACKENDS[backend]())


@pytest.mark.parametrize("name", SPECS)
def test_page_bytes_count_all_of_a_page(name: str) -> None:
    spec = SPECS[name]
    plan = resolve_models(settings(Path("none")), Path("none"), spec, None, None, MAX_LEN)
    weights = TargetWeights(
        RandomSpecTensors(spec), spec, Sharding(spec, 0, 1), torch.float32, torch.device("cpu")
    )
    cache = Decoder(weights, (), MAX_LEN, SingleRank(), places=plan.pages.target).new_cache(6, plan.page_size)
    assert page_bytes(plan) == (cache.kv.nbytes // 7,)
    tokens = affordable_pages(plan, page_bytes(plan), None)[0] * plan.page_size
    assert tokens == plan.config.max_num_seqs * MAX_LEN * len(plan.pages.groups), "room for every sequence"


@pytest.mark.parametrize("name", ["heads by layer", "shorter values"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_share_kv_heads_of_some_layers_and_repeat_others(name: str, world_size: int) -> None:
    """Each of four ranks has its own head in sliding layers and the one head of full ones: other widths."""
    ThreadRanks(world_size).run(lambda rank: check_full_attention(name, rank, EagerBackend()))
