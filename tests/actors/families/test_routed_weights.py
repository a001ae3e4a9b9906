"""Weights of routed MLPs: forms in checkpoints, sharding, what is read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from manta.actors.targets.families import read_model
from manta.actors.targets.model.mlp_spec import GatedMLP, RoutedMLP
from manta.actors.targets.model.mlp_weights import DenseTensors, RoutedTensors
from manta.actors.targets.model.model_spec import TensorRule
from manta.actors.targets.model.tensor_parallel import Sharding
from manta.actors.targets.model.weights import TargetWeights, target_shapes
from manta.cluster.errors import CheckpointError, ConfigError
from manta.drafter.compute.layers.moe import ExpertWeights
from safetensors.torch import load_file, save_file
from support.checkpoints.tiny import changed, make_tiny_target
from support.oracles.decoder_requests import weights_of

CPU = torch.device("cpu")
LAYER, NUM_EXPERTS, HIDDEN = 2, 8, 64


@pytest.fixture(scope="module")
def one_by_one(tiny_target: Callable[[str], Path]) -> Path:
    return tiny_target("qwen3_moe")


def fused(folder: Path, copy: Path) -> Path:
    tensors = load_file(folder / "model.safetensors")
    at = "model.layers.{}.mlp.experts."
    for layer in (0, 2, 3):
        each = {
            name: torch.stack(
                [tensors.pop(f"{at.format(layer)}{e}.{name}_proj.weight") for e in range(NUM_EXPERTS)]
            )
            for name in ("gate", "up", "down")
        }
        tensors[at.format(layer) + "gate_up_proj"] = torch.cat((each["gate"], each["up"]), dim=1)
        tensors[at.format(layer) + "down_proj"] = each["down"]
    copy.mkdir()
    (copy / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, copy / "model.safetensors")
    return copy


def experts_of(folder: Path, rank: int = 0, world_size: int = 1) -> ExpertWeights:
    weights = weights_of(folder, rank=rank, ranks=world_size)
    mlp = weights.layer(LAYER).mlp
    assert isinstance(mlp, RoutedTensors) and isinstance(weights.layer(1).mlp, DenseTensors)
    return mlp.experts


def assert_same(got: ExpertWeights, expected: ExpertWeights) -> None:
    assert torch.equal(got.gate_up, expected.gate_up) and torch.equal(got.down, expected.down)
    assert got.first_expert == expected.first_expert


def test_experts_in_one_tensor_equal_separate_ones(one_by_one: Path, tmp_path: Path) -> None:
    in_one = fused(one_by_one, tmp_path / "fused")
    whole = experts_of(one_by_one)
    stored = load_file(one_by_one / "model.safetensors")
    at = f"model.layers.{LAYER}.mlp.experts.5"
    gate, up, down = (stored[f"{at}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    assert torch.equal(whole.gate_up[5], torch.cat((gate, up))) and torch.equal(whole.down[5], down)
    for world_size in (1, 2, 4):
        for rank in range(world_size):
            assert_same(experts_of(in_one, rank, world_size), experts_of(one_by_one, rank, world_size))


@pytest.mark.parametrize("form", ["one by one", "fused"])
def test_ranks_have_whole_experts_if_the_inner_size_does_not_divide(tmp_path: Path, form: str) -> None:
    folder = make_tiny_target(tmp_path / "split", "qwen3_moe", moe_intermediate_size=30)
    folder = fused(folder, tmp_path / "fused") if form == "fused" else folder
    whole, parts = experts_of(folder), [experts_of(folder, rank, 4) for rank in range(4)]
    assert [part.first_expert for part in parts] == [0, 2, 4, 6]
    assert torch.equal(torch.cat([part.gate_up for part in parts]), whole.gate_up)
    assert torch.equal(torch.cat([part.down for part in parts]), whole.down)


class Watched:
    """Tensors of a checkpoint; counts the values of experts that were read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors, self.num_read = tensors, 0
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def get(self, name: str) -> torch.Tensor:
        return self._seen(name, self.tensors[name])

    def slice(self, name: str, rows: slice, dim: int = 0) -> torch.Tensor:
        return self._seen(name, self.tensors[name][(*[slice(None)] * dim, rows)])

    def _seen(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.num_read += tensor.numel() * (".experts." in name)
        return tensor


@pytest.mark.parametrize("form", ["one by one", "fused"])
def test_a_rank_reads_its_own_part_and_nothing_else(tmp_path: Path, form: str) -> None:
    for inner in (32, 30):  # by inner states, by experts
        folder = make_tiny_target(tmp_path / f"{inner}", "qwen3_moe", moe_intermediate_size=inner)
        folder = fused(folder, tmp_path / f"{inner} fused") if form == "fused" else folder
        spec = read_model(folder)
        watched = Watched(load_file(folder / "model.safetensors"))
        TargetWeights(watched, spec, Sharding(spec, 1, 4), torch.float32, CPU).layer(LAYER)
        assert watched.num_read == NUM_EXPERTS * 3 * inner * HIDDEN // 4


def test_routing_is_in_fp32_and_one_rank_adds_the_bias(tmp_path: Path) -> None:
    at = "layers.{layer}.mlp."
    rules = {
        "router_correction": TensorRule(name=at + "gate.correction", axes=("experts",), is_fp32=True),
        "expert_scale": TensorRule(name=at + "gate.scale", axes=("experts",), is_fp32=True),
        "experts_gate_up_bias": TensorRule(name=at + "gate_up.bias", axes=("expert", "expert_gate_up")),
        "experts_down_bias": TensorRule(name=at + "down.bias", axes=("expert", "hidden")),
    }
    for inner in (32, 30):  # by inner states, by experts
        down_biases: list[torch.Tensor] = []
        folder = make_tiny_target(tmp_path / f"{inner}", "qwen3_moe", moe_intermediate_size=inner)
        plain = read_model(folder)
        routed = plain.layers[LAYER].routed
        assert routed is not None
        router = replace(routed.router, correction=True, expert_scale=True)
        layer = replace(plain.layers[LAYER], mlp=replace(routed, router=router, bias=True))
        layers = (*plain.layers[:LAYER], layer, *plain.layers[LAYER + 1 :])
        spec = replace(plain, layers=layers, tensors={**plain.tensors, **rules})
        shapes = [
            (f"model.{rule.name.format(layer=LAYER)}", [spec.axis_size(axis, LAYER) for axis in rule.axes])
            for rule in rules.values()
        ]
        made = {name: torch.randn(shape) for name, shape in shapes}
        tensors = Watched(load_file(folder / "model.safetensors") | made)
        for rank in range(4):
            weights = TargetWeights(tensors, spec, Sharding(spec, rank, 4), torch.bfloat16, CPU)
            mlp = weights.layer(LAYER).mlp
            assert isinstance(mlp, RoutedTensors)
            correction_E, scale_E, gate_up_EI, down_EH = made.values()
            assert mlp.router.correction_E is not None and mlp.router.expert_scale_E is not None
            assert torch.equal(mlp.router.correction_E, correction_E)
            assert torch.equal(mlp.router.expert_scale_E, scale_E)
            gate_up, down = mlp.experts.gate_up_bias_EI, mlp.experts.down_bias_EH
            assert gate_up is not None and down is not None
            down_biases.append(down)
            if inner == 30:
                mine = slice(2 * rank, 2 * rank + 2)
                assert torch.equal(down, down_EH[mine].bfloat16())
                assert torch.equal(gate_up, gate_up_EI[mine].bfloat16())
            else:
                mine = gate_up_EI.unflatten(1, (2, -1))[..., 8 * rank : 8 * rank + 8].flatten(1)
                assert torch.equal(gate_up, mine.bfloat16())
                assert down.count_nonzero() == 0 or rank == 0, "the others add zeros, by the same kernels"
        added = torch.cat(down_biases) if inner == 30 else torch.stack(down_biases).sum(0)
        assert torch.equal(added, down_EH.bfloat16()), "over all ranks each bias is added once"


def test_a_missing_expert_is_named_before_anything_is_read(one_by_one: Path, tmp_path: Path) -> None:
    tensors = load_file(one_by_one / "model.safetensors")
    name = "model.layers.3.mlp.experts.7.up_proj.weight"
    del tensors[name]
    (tmp_path / "config.json").write_text((one_by_one / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(f"{name} is missing")):
        experts_of(tmp_path)


def test_a_models_shapes_equal_its_checkpoints(one_by_one: Path) -> None:
    spec = read_model(one_by_one)
    stored = {name: tuple(t.shape) for name, t in load_file(one_by_one / "model.safetensors").items()}
    assert target_shapes(spec) == stored


def test_ranks_that_divide_neither_size_are_refused(tmp_path: Path) -> None:
    changes = {"moe_intermediate_size": 30, "num_experts": 6, "mlp_only_layers": []}
    folder = make_tiny_target(tmp_path, "qwen3_moe", **changes)
    with pytest.raises(ConfigError, match="its number of experts is 6"):
        Sharding(read_model(folder), 0, 4)


def test_configs_say_which_layers_have_experts(tmp_path: Path) -> None:
    changes = {"decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False}
    spec = read_model(make_tiny_target(tmp_path, "qwen3_moe", **changes))
    kinds = [type(layer.mlp) for layer in spec.layers]
    assert kinds == [GatedMLP, RoutedMLP, GatedMLP, GatedMLP]
    routed = spec.layers[1].routed
    assert routed is not None and not routed.router.renormalize


def test_experts_are_counted_by_the_keys_of_published_and_saved_files(
    one_by_one: Path, tmp_path: Path
) -> None:
    assert json.loads((one_by_one / "config.json").read_text())["num_local_experts"] == NUM_EXPERTS
    published = changed(one_by_one, tmp_path / "hub", num_local_experts=None, num_experts=NUM_EXPERTS)
    assert read_model(published) == read_model(one_by_one)
