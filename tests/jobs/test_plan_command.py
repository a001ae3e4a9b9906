"""`manta plan` from flags to a ray_config.yaml that Serve and Manta's commands accept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from manta.actors.http.config.settings_mapping import split_settings
from manta.actors.targets.families import read_model
from manta.cluster.errors import CheckpointError, ConfigError, DatasetError, PlacementError
from manta.cluster.hardware.model_pair import ModelPair
from manta.drafter.dflash.config import DrafterConfig
from manta.jobs.cli import app
from manta.jobs.common.config_loading import engine_config, read_settings
from manta.jobs.plan.make_plan import PlanOptions, make_plan
from manta.jobs.plan.pair_reader import drafter_shape, target_shape
from support.paths import DATA
from typer.testing import CliRunner

PUBLISHED = json.loads((DATA / "published_configs.json").read_text())


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for name in ("Qwen3-8B", "Qwen3-8B-DFlash-b16", "Llama-3.1-70B-Instruct"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(PUBLISHED[name]))
    return tmp_path


def options(folders: Path, **changes: Any) -> PlanOptions:
    pair = {"model": str(folders / "Qwen3-8B"), "drafter": str(folders / "Qwen3-8B-DFlash-b16")}
    return PlanOptions(**{"num_gpus": 8, "gpu": "h200", "as_json": True, **pair, **changes})


def test_the_command_prints_tables_and_writes_a_valid_serve_config(folders: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    file = folders / "out" / "ray_config.yaml"
    flags = ["--gpus", "8", "--gpu", "h200", "-m", folders / "Qwen3-8B", "--max-model-len", "32K"]
    flags += ["--drafter", folders / "Qwen3-8B-DFlash-b16", "--slo-tpot-ms", "5", "-o", file]
    done = CliRunner().invoke(app, ["plan", *map(str, flags)])
    assert done.exit_code == 0, done.output
    assert (
        "8 x TP1 colocated" in done.output
        and "1 x TP8 plain" in done.output
        and f"written: {file}" in done.output
    )
    schema = ServeDeploySchema.model_validate(yaml.safe_load(file.read_text()))
    assert schema.applications[0].import_path == "manta.actors.replica:build_app"
    config = engine_config(read_settings(file))
    assert (config.max_model_len, config.tensor_parallel_size, config.dtype) == (32768, 1, "bfloat16")
    assert config.speculative_config is not None and config.speculative_config.placement == "colocated"


def test_one_byte_weights_are_planned_and_configured(folders: Path) -> None:
    """The blocks' products read half the bytes: a single user is faster, but not twice as fast."""
    file, seldom = folders / "ray_config.yaml", {"batch": 1, "num_gpus": 1}
    plain = make_plan(options(folders, **seldom))
    report = make_plan(
        options(folders, **seldom, quantization="fp8", drafter_quantization="fp8", output=file)
    )
    config = engine_config(read_settings(file))
    assert config.speculative_config is not None
    assert (config.quantization, config.speculative_config.quantization) == ("fp8", "fp8")
    speeds = [found["candidates"][0]["alone"]["user_tokens_per_s"] for found in (plain, report)]
    assert 1.2 < speeds[1] / speeds[0] < 2.0
    target = target_shape(read_model(folders / "Qwen3-8B"), quantization="fp8")
    whole = ModelPair(target=target, drafter=None, tied=False, tp_sizes=(1,))
    assert whole.target_bytes(1) == pytest.approx(6.95e9 + 2 * 2 * 0.622e9, rel=0.01)
    with pytest.raises(CheckpointError, match=r"architectures=.* must be"):  # no assistant
        make_plan(options(folders, spec_method="mtp"))
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM has no layer for multi-token prediction"):
        make_plan(options(folders, drafter=None, spec_method="mtp"))
    with pytest.raises(ConfigError, match="drafter_quantization needs a drafter"):
        options(folders, drafter=None, drafter_quantization="fp8")


def test_a_targets_own_layer_is_planned_without_a_drafter(folders: Path) -> None:
    (folders / "glm").mkdir()
    (folders / "glm" / "config.json").write_text(json.dumps(PUBLISHED["GLM-4.5-Air"]))
    report = make_plan(options(folders, model=str(folders / "glm"), drafter=None, spec_method="mtp"))
    assert {each["layout"]["placement"] for each in report["candidates"]} == {"colocated", None}
    assert report["spec_method"] == "mtp" and report["acceptance"]["source"].startswith("an assumption")
    engine, _ = split_settings(report["ray_config"]["applications"][0]["args"])
    assert engine.speculative_config is not None and engine.speculative_config.method == "mtp"


@pytest.mark.parametrize("gpus", [1, 2, 3, 8])
def test_every_candidate_is_a_valid_layout_of_settings(folders: Path, gpus: int, capsys: Any) -> None:
    report = make_plan(options(folders, num_gpus=gpus))
    assert json.loads(capsys.readouterr().out)["chosen"] == report["chosen"]
    engine, server = split_settings(report["ray_config"]["applications"][0]["args"])
    chosen = next(c for c in report["candidates"] if _name(c["layout"]) == report["chosen"])
    assert engine.tensor_parallel_size == chosen["layout"]["tp"]
    assert server.replicas == chosen["layout"]["replicas"]
    assert engine.max_num_seqs == min(chosen["room"]["largest_batch"], 256)


def _name(layout: dict[str, Any]) -> str:
    return f"{layout['replicas']} x TP{layout['tp']} {layout['placement'] or 'plain'}"


def test_a_trace_decides_by_goodput(folders: Path, capsys: Any) -> None:
    trace = folders / "arrivals.jsonl"
    lines = [
        {"arrival_s": n * 0.02, "prompt_tokens": 500, "output_tokens": 60, "user": "x"} for n in range(16)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    report = make_plan(options(folders, num_gpus=2, trace=trace, slo_tpot_ms=50.0, slo_ttft_ms=500.0))
    played = {_name(c["layout"]): c["trace"] for c in report["candidates"]}
    best = max(outcome["goodput"] for outcome in played.values())
    assert played[report["chosen"]]["goodput"] >= 0.98 * best and played[report["chosen"]]["kept"] == 1.0
    assert "goodput" in report["why"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no arrivals"),
        ('{"arrival_s": 1, "prompt_tokens": 3, "output_tokens": 4}\n{"arrival_s": 1}', ":2: prompt_tokens"),
        ("hello", ":1: the line"),
        ('{"arrival_s": 1, "prompt_tokens": 40000, "output_tokens": 4000}', "max_model_len is 40960"),
    ],
)
def test_an_invalid_trace_is_refused_with_its_line(folders: Path, text: str, said: str) -> None:
    trace = folders / "arrivals.jsonl"
    trace.write_text(text)
    with pytest.raises(DatasetError) as refused:
        make_plan(options(folders, trace=trace))
    assert said in refused.value.message and refused.value.param == "trace"


def test_layouts_that_cannot_fit_are_refused_and_nothing_is_written(folders: Path) -> None:
    file = folders / "ray_config.yaml"
    large = {"model": str(folders / "Llama-3.1-70B-Instruct"), "drafter": None}
    with pytest.raises(PlacementError, match="GiB are missing"):
        make_plan(options(folders, num_gpus=1, gpu="h100", output=file, **large))
    assert not file.exists()


def test_checkpoints_with_weights_have_their_headers_checked(
    shipped_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    target, drafter = shipped_pair
    report = make_plan(options(tmp_path, model=str(target), drafter=str(drafter)))
    assert (report["max_model_len"], report["dtype"]) == (1024, "bfloat16")
    assert report["acceptance"]["source"] == "lowest in the drafter's card"
    broken = tmp_path / "broken"
    broken.mkdir()
    raw = json.loads((target / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(raw | {"intermediate_size": 112}))
    (broken / "model.safetensors").symlink_to(target / "model.safetensors")
    with pytest.raises(CheckpointError, match="112"):
        make_plan(options(tmp_path, model=str(broken), drafter=None))


def test_a_hub_ids_small_files_are_enough(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has a snapshot without weights, and there is no connection."""
    revision = "f" * 40
    repository = tmp_path / "hub" / "models--Qwen--Qwen3-8B"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    (repository / "snapshots").mkdir()
    (folders / "Qwen3-8B").rename(repository / "snapshots" / revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    report = make_plan(options(folders, model="Qwen/Qwen3-8B", drafter=None, num_gpus=1))
    assert report["ray_config"]["applications"][0]["args"]["model"] == "Qwen/Qwen3-8B"
    with pytest.raises(CheckpointError, match="Qwen/Qwen3-9B"):
        make_plan(options(folders, model="Qwen/Qwen3-9B", drafter=None))


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def write_quantized(folder: Path, name: str, stated: dict[str, Any]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name] | {"quantization_config": stated}))
    return str(folder)


@pytest.mark.parametrize(
    ("stated", "bits", "says"),
    [
        (FP8, 8.25, "fp8: FP8 in blocks of 128 x 128"),
        (GPTQ, 4.125, "gptq: GPTQ INT4 in groups of 128"),
        ({**GPTQ, "desc_act": True}, 16, "gptq: GPTQ INT4 in groups of 128, act-order"),
    ],
    ids=["FP8", "GPTQ", "act-order"],
)
def test_a_quantized_checkpoint_is_planned_as_it_is_kept(
    folders: Path, stated: dict[str, Any], bits: float, says: str
) -> None:
    """Packed, or dequantized with the bytes of the plain one."""
    target = write_quantized(folders / "quantized", "Qwen3-8B", stated)
    drafter = write_quantized(folders / "drafter", "Qwen3-8B-DFlash-b16", stated)
    plain = make_plan(options(folders, num_gpus=1))
    report = make_plan(options(folders, model=target, drafter=drafter, num_gpus=1))
    assert plain["checkpoint_quantization"] is None and report["checkpoint_quantization"] == says
    shape = target_shape(read_model(Path(target)))
    assert shape.weight_bytes == bits / 8
    saved = [each["candidates"][0]["room"]["weights_bytes"] for each in (plain, report)]
    of_both = shape.linear_params + drafter_shape(DrafterConfig.load(drafter)).linear_params
    taps = drafter_shape(DrafterConfig.load(drafter)).fc_params
    assert saved[0] - saved[1] == pytest.approx((of_both + taps) * (16 - bits) / 8, rel=1e-6)
    speeds = [each["candidates"][0]["alone"]["user_tokens_per_s"] for each in (plain, report)]
    assert speeds[1] > speeds[0] or bits == 16


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8.25), ("int4", 4.5)])
def test_integers_are_planned_with_their_scales(folders: Path, kind: str, bits: float) -> None:
    plain, report = (
        make_plan(options(folders, drafter=None, num_gpus=1, quantization=each)) for each in (None, kind)
    )
    linear = target_shape(read_model(folders / "Qwen3-8B")).linear_params
    saved = [each["candidates"][0]["room"]["weights_bytes"] for each in (plain, report)]
    assert saved[0] - saved[1] == pytest.approx(linear * (16 - bits) / 8, rel=1e-6)
    assert report["ray_config"]["applications"][0]["args"]["quantization"] == kind
    target = write_quantized(folders / "quantized", "Qwen3-8B", GPTQ)
    with pytest.raises(ConfigError, match="quantized already"):
        make_plan(options(folders, model=target, drafter=None, quantization=kind))


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize(
    ("stated", "kind", "bits"),
    [
        (FP8, None, {"dense products": 8.25, "experts": 8.25}),
        (AWQ, None, {"dense products": 4 + 24 / 128, "experts": 4 + 24 / 128}),
        (None, "int4", {"dense products": 4.5, "experts": 4.5}),
        (None, "fp8", {"dense products": 8}),
        ({**GPTQ, "desc_act": True}, None, {}),
    ],
    ids=["FP8", "AWQ", "int4 at load", "fp8 at load", "act-order"],
)
def test_a_plan_tells_what_stays_packed_of_a_model_with_experts(
    folders: Path, stated: dict[str, Any] | None, kind: str | None, bits: dict[str, float]
) -> None:
    folder = Path(write_quantized(folders / "experts", "Qwen3-30B-A3B", stated or {}))
    if stated is None:
        (folder / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-30B-A3B"]))
    report = make_plan(options(folders, model=str(folder), drafter=None, num_gpus=1, quantization=kind))
    assert report["packed_bits"] == pytest.approx(bits, rel=0.04)  # dense ones with a router in 16 bits
    shape = target_shape(read_model(folder), quantization=kind)  # type: ignore[arg-type]
    ((experts, count),) = shape.routed
    assert 8 * experts.weight_bytes == pytest.approx(bits.get("experts", 16))
    held = report["candidates"][0]["room"]["weights_bytes"]
    of_experts = count * 128 * 3 * 2048 * 768 * experts.weight_bytes
    assert held > of_experts > 0.8 * held
    assert experts.inner_multiple == (128 if stated in (FP8, AWQ) else 1)


def test_an_existing_file_is_replaced_only_by_force(folders: Path, tmp_path: Path) -> None:
    file = tmp_path / "ray_config.yaml"
    file.write_text("edited: by hand\n")
    with pytest.raises(ConfigError, match=r"exists already.*--force"):
        make_plan(options(folders, output=file))
    said = CliRunner().invoke(app, ["render", "systemd", "--config", str(file), "-o", str(file)])
    assert isinstance(said.exception, ConfigError) and "--force" in str(said.exception)
    assert file.read_text() == "edited: by hand\n"
    make_plan(options(folders, output=file, force=True))
    assert "applications:" in file.read_text()
