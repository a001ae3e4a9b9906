"""`load_format="dummy"` and `hf_overrides`: a model of any depth starts from config.json and tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from manta.actors.batch.ledger.job_spec import settings_identity
from manta.actors.targets.families import FAMILIES as READERS
from manta.actors.targets.families import read_model
from manta.actors.targets.loading.rank_loader import Checkpoints, load_runner
from manta.actors.targets.loading.resolved_config import resolve_config
from manta.actors.targets.model.mlp_weights import RoutedTensors
from manta.actors.targets.model.tensor_parallel import Sharding
from manta.cluster.config import EngineConfig
from manta.cluster.errors import CheckpointError, ConfigError
from manta.drafter.compute.checkpoint.dummy_weights import RandomTensors
from manta.drafter.compute.checkpoint.packed_codes import PackedCodes
from manta.drafter.compute.checkpoint.quantized_matrix import QuantizedMatrix
from manta.drafter.dflash.config import DrafterConfig
from manta.jobs.cli import main
from support.checkpoints.families import FAMILIES
from support.checkpoints.text_pair import make_text_pair
from support.checkpoints.tiny import make_tiny_target
from support.engines.steps import settings
from support.paths import DATA

PUBLISHED = json.loads((DATA / "published_configs.json").read_text())
SMALL = ("--dtype", "float32", "--num-threads", "1", "--max-model-len", "256", "--seed", "1")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folders = make_text_pair(tmp_path_factory.mktemp("shapes"))
    for folder in folders:
        (folder / "model.safetensors").unlink()
    return folders


def generated(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["generate", "def main(", "--max-tokens", "24", *arguments, *SMALL])
    captured = capsys.readouterr()
    assert not ended.value.code, captured.err
    return captured.out, captured.err


def test_a_pair_without_weights_generates_at_the_requested_depth(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    target, drafter = map(str, pair)
    flags = ("-m", target, "--load-format", "dummy", "--hf-overrides", '{"num_hidden_layers": 2}')
    plain, _ = generated(capsys, *flags)
    taps = {"num_target_layers": 2, "dflash_config": {"target_layer_ids": [0, 1]}}
    speculation = json.dumps({"model": drafter, "hf_overrides": taps})
    speculated, figures = generated(capsys, *flags, "--speculative-config", speculation)
    assert plain.strip() and speculated == plain
    assert "mean acceptance length" in figures
    deep, _ = generated(capsys, *flags[:4])
    assert deep != plain, "four layers are not two"


def test_weights_are_required_unless_they_are_dummies(pair: tuple[Path, Path]) -> None:
    config = EngineConfig(model=str(pair[0]), device="cpu")
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        resolve_config(config)


def test_ranks_hold_parts_of_the_same_dummy_weights(pair: tuple[Path, Path]) -> None:
    config = EngineConfig(model=str(pair[0]), device="cpu", dtype="float32", load_format="dummy")
    plan, source = resolve_config(config), Checkpoints()
    whole, *ranks = (
        source.target(plan, Sharding(plan.target, rank, of)) for rank, of in ((0, 1), (0, 2), (1, 2))
    )
    assert torch.equal(whole.layer(1).o_HO, torch.cat([rank.layer(1).o_HO for rank in ranks], 1))
    assert torch.equal(
        whole.layer(1).mlp.down_HI, torch.cat([rank.layer(1).mlp.down_HI for rank in ranks], 1)
    )
    assert torch.equal(whole.embedding(), torch.cat([rank.embedding() for rank in ranks]))
    assert not torch.equal(whole.layer(1).o_HO, whole.layer(2).o_HO)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_starts_at_reduced_depth(tmp_path: Path, family: str) -> None:
    """Loading ends with dummy steps; their logits are numbers and do not favor one token."""
    folder = make_tiny_target(tmp_path, family, seed=3)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    config = settings(folder, load_format="dummy", hf_overrides={"num_hidden_layers": 2}, num_pages=32)
    runner, _ = load_runner(config)
    assert len(runner.model.spec.layers) == 2
    hidden = torch.randn(3, runner.model.spec.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = runner.model.logits(hidden)
    assert logits.isfinite().all() and logits.std() > 0.1


def test_packed_dummy_experts_are_bytes(tmp_path: Path) -> None:
    folder = make_tiny_target(tmp_path, "gpt_oss", intermediate_size=64)
    packed = {"quantization_config": {"quant_method": "mxfp4"}}
    plan = resolve_config(settings(folder, load_format="dummy", hf_overrides=packed))
    mlp = Checkpoints().target(plan, Sharding(plan.target, 0, 1)).layer(0).mlp
    assert isinstance(mlp, RoutedTensors) and isinstance(mlp.experts.down, PackedCodes)
    assert mlp.experts.down.codes.dtype is torch.uint8
    values = mlp.experts.down.dequantized(torch.float32)
    assert values.shape == (8, 64, 64) and float(values.std()) == pytest.approx(64**-0.5, rel=0.4)


@pytest.mark.parametrize(
    ("stated", "code"),
    [
        ({"quant_method": "fp8", "weight_block_size": [32, 32]}, "e4m3"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, "int4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "e2m1"),
    ],
    ids=["FP8", "AWQ", "NVFP4"],
)
def test_dummy_matrices_are_codes_where_products_take_these(
    tmp_path: Path, stated: dict[str, object], code: str
) -> None:
    folder = make_tiny_target(tmp_path, "qwen3_moe", moe_intermediate_size=64)
    how = {"load_format": "dummy", "dtype": "bfloat16", "hf_overrides": {"quantization_config": stated}}
    plan = resolve_config(settings(folder, **how))

    def layer_of(rank: int, ranks: int) -> tuple[QuantizedMatrix, PackedCodes]:
        layer = Checkpoints().target(plan, Sharding(plan.target, rank, ranks)).layer(0)
        assert isinstance(layer.o_HO, QuantizedMatrix) and isinstance(layer.mlp, RoutedTensors)
        assert isinstance(layer.mlp.experts.down, PackedCodes)
        return layer.o_HO, layer.mlp.experts.down

    (o, down), (o_part, down_part) = layer_of(0, 1), layer_of(1, 2)
    assert o.code == down.code == code
    values = down.dequantized(torch.float32)
    assert float(values.std()) == pytest.approx(64**-0.5, rel=0.1) and values.isfinite().all()
    assert down_part.dequantized(torch.float32).equal(values[:, :, 32:])
    assert o_part.dequantized(torch.float32).equal(o.dequantized(torch.float32)[:, o_part.shape[1] :])


def test_dummy_tensors_keep_variance_and_map_tokens_to_themselves() -> None:
    shapes = {"a.weight": (64, 32, 400), "norm.weight": (400,), "q.bias": (8,), "d2t": (16,)}
    tensors = RandomTensors(shapes, torch.float32, torch.device("cpu"))
    assert float(tensors.get("a.weight").std()) == pytest.approx(400**-0.5, rel=0.02)
    assert torch.equal(tensors.slice("a.weight", slice(3, 9), 1), tensors.get("a.weight")[:, 3:9])
    assert tensors.get("norm.weight").eq(1).all() and tensors.get("q.bias").eq(0).all()
    assert tensors.get("d2t").dtype is torch.int64 and not tensors.get("d2t").any()


def written(folder: Path, config: dict) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_fewer_layers_keep_the_first_entries_of_lists_by_layer(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    raw = json.loads((pair[0] / "config.json").read_text())
    kinds = ["full_attention", "sliding_attention"] * 2
    raw |= {"layer_types": kinds, "use_sliding_window": True, "sliding_window": 9}
    alone, inside = written(tmp_path / "alone", raw), tmp_path / "inside"
    written(inside, {"architectures": raw["architectures"], "text_config": raw})
    for folder in (alone, inside):
        assert read_model(folder).windows == (None, 9, None, 9)
        assert read_model(folder, {"num_hidden_layers": 3}).windows == (None, 9, None)
        assert read_model(folder, {"text_config": {"sliding_window": 5}}).windows == (None, 5, None, 5)
        stated = {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2}
        assert read_model(folder, stated).windows == (9, 9)
        with pytest.raises(CheckpointError, match="layer_types"):
            read_model(folder, {"num_hidden_layers": 6})


def test_an_unread_override_is_refused_with_the_nearest_key(pair: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match=r"num_hiden_layers=2 changes nothing.*num_hidden_layers\?"):
        read_model(pair[0], {"num_hiden_layers": 2})
    with pytest.raises(CheckpointError, match=r"block_sise=4 must be absent"):
        DrafterConfig.load(pair[1], {"block_sise": 4})
    assert DrafterConfig.load(pair[1], {"block_size": 4}).block_size == 4


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
NEW_SPELLING = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": None}


SCALED = {**NEW_SPELLING, "rope_scaling": YARN}
NEW_YARN = {"rope_scaling": YARN, "rope_parameters": {"rope_theta": 2.0}}
# Keys of a config.json, overrides of it, and words.
IDLE: list[tuple[dict, dict, str]] = [
    (SCALED, {"rope_parameters": {"rope_theta": 2e6}}, "rope_scaling is also given"),
    (NEW_SPELLING, {"rope_theta": 5e5}, r"rope_parameters\.rope_theta is also given .* Override rope_par"),
    (NEW_SPELLING, NEW_YARN, "rope_scaling is also given"),
    (NEW_SPELLING, {"rope_parameters": {"factor": 4.0}}, "this model does not use it"),
    (NEW_SPELLING, {"rope_scaling": None}, "no such key. Known"),
    ({"dtype": "bfloat16"}, {"torch_dtype": "float16"}, "dtype is also given"),
    ({}, {"initializer_range": 0.5}, "this model does not use it"),
    ({"sliding_window": 9}, {"max_window_layers": 2}, "does not use it"),
]


@pytest.mark.parametrize(("keys", "overrides", "words"), IDLE)
def test_an_override_without_effect_is_refused_with_the_key_that_takes_precedence(
    pair: tuple[Path, Path], tmp_path: Path, keys: dict, overrides: dict, words: str
) -> None:
    raw = json.loads((pair[0] / "config.json").read_text())
    raw = {key: value for key, value in {**raw, "max_window_layers": 4, **keys}.items() if value is not None}
    with pytest.raises(ConfigError, match=rf"hf_overrides: \w+=.* changes nothing: .*{words}"):
        read_model(written(tmp_path / "raw", raw), overrides)


@pytest.mark.parametrize("keys", [{}, NEW_SPELLING])
def test_an_overridden_yarn_applies_in_every_spelling_and_lengthens_sequences(
    pair: tuple[Path, Path], tmp_path: Path, keys: dict
) -> None:
    raw = {**json.loads((pair[0] / "config.json").read_text()), **keys, "max_position_embeddings": 128}
    folder = written(tmp_path / "raw", {key: value for key, value in raw.items() if value is not None})
    for key in ("rope_scaling", "rope_parameters"):
        overrides = {key: YARN}
        assert {mixer.rope.kind for mixer in read_model(folder, overrides).attentions} == {"yarn"}
        config = settings(folder, load_format="dummy", hf_overrides=overrides, max_model_len=512)
        assert resolve_config(config).max_model_len == 512
        with pytest.raises(ConfigError, match=r"max_model_len=513 .*limit \(512"):
            resolve_config(replace(config, max_model_len=513))
    with pytest.raises(ConfigError, match=r"max_model_len=512 .*limit \(128"):
        resolve_config(settings(folder, load_format="dummy", max_model_len=512))


def test_an_override_that_repeats_a_value_is_accepted(pair: tuple[Path, Path]) -> None:
    raw = json.loads((pair[0] / "config.json").read_text())
    assert read_model(pair[0], raw) == read_model(pair[0])


@pytest.mark.parametrize(
    "name", [name for name, raw in PUBLISHED.items() if raw["architectures"][0] in READERS]
)
def test_no_family_accepts_an_override_that_it_does_not_read(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_hiden_layers=2 changes nothing"):
        read_model(written(tmp_path / "raw", PUBLISHED[name]), {"num_hiden_layers": 2})


def test_a_job_records_the_checkpoint_settings_of_its_answers() -> None:
    overrides = {"num_hidden_layers": 2}
    config = EngineConfig(model="m", load_format="dummy", hf_overrides=overrides)
    assert settings_identity(config) == {"load_format": "dummy", "hf_overrides": overrides}
    assert settings_identity(EngineConfig(model="m")) == {}
