"""`manta drafter`: descriptions, every error by its name, and conversions that keep every bit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from manta.actors.checkpoints.published_drafters import PUBLISHED_DRAFTERS, drafters_for
from manta.cluster.errors import ConfigError, DatasetError
from manta.drafter.compute.checkpoint.safetensors_reader import TensorFolder
from manta.drafter.dflash.checkpoint import named_as_ours
from manta.drafter.dflash.config import DrafterConfig
from manta.drafter.eagle3.config_formats import is_eagle3, method_of_drafter
from manta.jobs.cli import app
from manta.jobs.drafters.common.drafter_files import method_of, open_drafter
from manta.jobs.drafters.common.format_conversion import convert_drafter
from manta.jobs.drafters.common.options import ExplainOptions
from manta.jobs.drafters.drafter_summary import find_drafters, summarize_drafter
from manta.jobs.drafters.explain.explain_drafter import explain_drafter
from manta.jobs.drafters.validate.card_check import compare_answers
from manta.jobs.drafters.validate.validate_pair import validate_pair
from support.checkpoints.broken_pairs import BROKEN, DRAFTER, TARGET, Broken, copied, tensors
from support.checkpoints.drafters import (
    EAGLE3,
    HIDDEN,
    TARGET_LAYERS,
    VARIANTS,
    VOCAB,
    drafter_tensors,
    sglang,
    write_drafter,
)
from support.checkpoints.tiny import TINY_VOCAB
from support.paths import DATA, ROOT
from support.published.hub_standin import REVISION, hub_with_model
from typer.testing import CliRunner


def run(*words: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["drafter", *map(str, words)])
    return done.exit_code, done.output


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_a_broken_pairs_defect_is_named(broken: Broken, tmp_path: Path):
    pair = copied(tmp_path / "pair")
    broken.change(pair)
    findings = validate_pair(str(pair / "drafter"), str(pair / "target"))
    named = [finding for finding in findings if finding.what == broken.what]
    assert any(re.search(broken.words, finding.message) for finding in named), findings
    assert any(finding.fatal for finding in findings) == broken.fatal, findings


def test_the_shipped_pair_has_no_finding_in_either_format(tmp_path: Path):
    assert len(BROKEN) >= 30
    assert validate_pair(str(DRAFTER), str(TARGET)) == []
    convert_drafter(str(DRAFTER), str(TARGET), "speculators", tmp_path / "other")
    assert validate_pair(str(tmp_path / "other"), str(TARGET)) == []


def test_validate_exits_with_1_only_for_errors(tmp_path: Path):
    pair = copied(tmp_path)
    changes = {broken.name: broken.change for broken in BROKEN}
    changes["another theta"](pair)
    code, said = run("validate", pair / "drafter", "--target", pair / "target")
    assert code == 0 and "warning rope" in said and "fits" in said
    changes["a tap beyond the target"](pair)
    code, said = run("validate", pair / "drafter", "--target", pair / "target", "--json")
    assert code == 1 and [each["fatal"] for each in json.loads(said)] == [True, False]


def test_a_trial_finds_a_fitting_drafter_that_predicts_nothing(tmp_path: Path):
    pair = copied(tmp_path)
    fresh = torch.Generator().manual_seed(0)

    def forget(found: dict[str, torch.Tensor]) -> None:
        for name, old in found.items():
            found[name] = torch.randn(old.shape, generator=fresh).bfloat16()

    tensors(forget)(pair)
    (finding,) = validate_pair(str(pair / "drafter"), str(pair / "target"), level="cpu")
    assert (finding.what, finding.fatal) == ("acceptance", False)
    assert 1.0 <= float(re.findall(r"length is ([\d.]+)", finding.message)[0]) < 1.1


def test_a_trial_passes_with_equal_tokens_and_more_than_one_per_step():
    assert list(compare_answers([[1, 2], [3]], [[1, 2], [3]], 1.8)) == []
    (finding,) = compare_answers([[1, 2], [3]], [[1, 2], [4]], 1.8)
    assert (finding.what, finding.fatal) == ("tokens", True)


def test_a_summary_has_the_figures_of_the_shipped_pair():
    summary = summarize_drafter(open_drafter(str(DRAFTER)))
    assert summary["target_layer_ids"] == (1, 4, 8, 12, 15) and summary["num_speculative_tokens"] == 15
    assert summary["borrowed"] == ("embedding", "head") and summary["dtypes"] == ("BF16",)
    assert summary["kv_bytes_per_token"] == 4 * 2 * 2 * 64 * 2
    files = TensorFolder(DRAFTER)
    assert summary["weight_bytes"] == sum(files.get(name).nbytes for name in files.shapes)
    assert summary["num_parameters"] == sum(files.get(name).numel() for name in files.shapes)
    assert summary["mean_acceptance_length"] == 2.3, "the lower total of its card"
    code, said = run("inspect", DRAFTER, "--json")
    assert code == 0 and json.loads(said)["mask_token_id"] == 4095


def test_only_headers_of_a_drafter_on_the_hub_are_downloaded(tmp_path: Path):
    sent: dict[str, int] = {}
    with hub_with_model("me/small", DRAFTER, sent) as address:
        done = subprocess.run(
            [sys.executable, "-m", "manta.jobs.cli", "drafter", "inspect", "me/small", "--json"],
            env={**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    reported, here = json.loads(done.stdout), summarize_drafter(open_drafter(str(DRAFTER)))
    assert (reported.pop("name"), reported.pop("revision")) == ("me/small", REVISION)
    assert reported == {key: json.loads(json.dumps(here[key])) for key in reported}
    assert 0 < sent["model.safetensors"] <= 100_001 < reported["weight_bytes"]
    assert not list(tmp_path.rglob("*.safetensors"))


def test_compare_marks_what_differs(tmp_path: Path):
    convert_drafter(str(DRAFTER), str(TARGET), "speculators", tmp_path / "other")
    code, said = run("compare", DRAFTER, tmp_path / "other")
    assert code == 0
    marked = {line.split("│")[1].strip() for line in said.splitlines() if "│ *" in line}
    assert {"* format", "* architecture", "* verifier"} <= marked
    assert not marked & {"* target layer ids", "* block size", "* num parameters"}


SECTIONS = ("Published DFlash drafters", "Published EAGLE-3 drafters")


def test_list_finds_drafters_and_skips_targets(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    shutil.copytree(DRAFTER, tmp_path / "one")
    shutil.copytree(TARGET, tmp_path / "two")
    assert list(find_drafters([tmp_path])) == [str(tmp_path / "one")]
    code, said = run("list", tmp_path / "one")
    assert code == 0 and "z-lab" in said and "1, 4, 8, 12, 15" in said


@pytest.mark.parametrize(
    ("model", "drafter"),
    [
        ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"),
        ("unsloth/Qwen3-8B-GGUF:Q4_K_M", "RedHatAI/Qwen3-8B-speculator.dflash2"),
        ("/data/Qwen3-8B-Q4_K_M.gguf", "deepseek-ai/dspark_qwen3_8b_block7"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
        (str(TARGET), "models/drafter"),
        ("smollm2", "smollm2-drafter"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-drafter"),
    ],
)
def test_list_names_the_published_drafters_of_a_target_in_any_form(model: str, drafter: str) -> None:
    assert drafter in [each.name for each in drafters_for(model)]
    code, said = run("list", "--for", model)
    assert code == 0 and "Published drafters" in said


def test_a_target_without_a_published_drafter_is_told_what_else_speculates() -> None:
    code, said = run("list", "--for", "gemma-3-270m-q4_k_m.gguf")
    assert code == 0 and "--spec-method suffix" in said
    assert not drafters_for("Qwen/Qwen3-8B-Base"), "another model's name begins so"


def test_the_guide_names_the_published_drafters_that_the_command_lists() -> None:
    text = (ROOT / "docs/families.md").read_text()
    parts = [text.partition(f"## {title}\n")[2].partition("\n## ")[0] for title in SECTIONS]
    named = set(re.findall(r"`([\w.-]+/[\w.-]+)`", "".join(parts)))
    listed = {each.name for each in PUBLISHED_DRAFTERS if each.kind != "assistant" and each.note != "shipped"}
    assert named == listed


def test_traffic_that_is_not_there_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manta.jobs.drafters.explain.explain_drafter.open_drafter", lambda _: 1 / 0)
    options = ExplainOptions(drafter=str(DRAFTER), target=str(TARGET), data=tmp_path / "mine.jsonl")
    with pytest.raises(DatasetError, match=r"mine\.jsonl"):
        explain_drafter(options)


def write_target_config(folder: Path, num_layers: int, **sizes: int) -> Path:
    """Write the config of the shipped target with other sizes, without weights."""
    raw = json.loads((TARGET / "config.json").read_text()) | sizes | {"eos_token_id": 1}
    raw |= {"num_hidden_layers": num_layers, "max_window_layers": num_layers}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw | {"layer_types": ["full_attention"] * num_layers}))
    return folder


@pytest.fixture(scope="module")
def target_of_variants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return write_target_config(folder, TARGET_LAYERS, hidden_size=HIDDEN, vocab_size=VOCAB)


# What Speculators' format has no word for.
INEXPRESSIBLE = {
    "z-lab causal everywhere": "layers",
    "z-lab causal, nested key": "layers",
    "z-lab scales and cap": "input_embedding_scale=5.5",
    "z-lab mask embedding": "mask_embedding|mask_token_id",
    "z-lab sinks and scaled values": "attention",
    "z-lab second, three taps": "output_multiplier",
    "z-lab JetSpec's causal head": "layers",
    **{name: "DSpark's heads or an anchor" for name in VARIANTS if "dspark" in name or "deepspec" in name},
}


def meaning(folder: Path) -> dict:
    """Return the config's content without its location and what formats repeat of the target."""
    config = DrafterConfig.load(folder)
    apart = ("file", "layout", "num_target_layers", "target_hidden_size", "input_embedding_scale")
    return {key: getattr(config, key) for key in DrafterConfig.__slots__ if key not in apart}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_round_trip_between_formats_keeps_every_bit(name: str, target_of_variants: Path, tmp_path: Path):
    config = VARIANTS[name]
    mask = torch.zeros(config["hidden_size"]) if "mask embedding" in name else None
    source = write_drafter(tmp_path / "source", config, drafter_tensors(config), mask)
    there, back = tmp_path / "there", tmp_path / "back"
    target = str(target_of_variants)
    if name in INEXPRESSIBLE:
        with pytest.raises(ConfigError, match=INEXPRESSIBLE[name]):
            convert_drafter(str(source), target, "speculators", there)
        assert not there.exists(), "nothing half done stays"
        return
    convert_drafter(str(source), target, "speculators", there)
    convert_drafter(str(there), target, "z-lab", back)
    assert DrafterConfig.load(there).layout == "speculators" and DrafterConfig.load(back).layout == "z-lab"
    assert meaning(source) == meaning(there) == meaning(back)
    first, last = TensorFolder(source), TensorFolder(back)
    assert {named_as_ours(name) for name in first.shapes} == last.shapes.keys()
    assert all(torch.equal(first.get(name), last.get(named_as_ours(name))) for name in first.shapes)


def test_a_target_with_fewer_usual_taps_than_the_drafter_has_is_checked(tmp_path: Path):
    config = VARIANTS["z-lab second, three taps"]
    target = write_target_config(tmp_path / "target", 4, hidden_size=HIDDEN, vocab_size=VOCAB)
    drafter = write_drafter(tmp_path / "drafter", config, drafter_tensors(config), None)
    assert all(finding.what != "layer ids" for finding in validate_pair(str(drafter), str(target)))


def test_convert_overwrites_nothing(tmp_path: Path):
    code, _ = run("convert", DRAFTER, "--to", "zlab", "--target", TARGET, "-o", tmp_path)
    assert code == 1 and list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def target_of_eagle3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target_config(tmp_path_factory.mktemp("target"), 4, hidden_size=64, vocab_size=TINY_VOCAB)


@pytest.mark.parametrize("name", EAGLE3)
def test_an_eagle3_drafter_is_described_and_checked(name: str, target_of_eagle3: Path, tmp_path: Path):
    config = EAGLE3[name]
    folder = write_drafter(tmp_path / "head", config)
    block = config.get("transformer_layer_config", config)
    summary = summarize_drafter(open_drafter(str(folder)))
    assert summary["format"] == ("speculators" if block is not config else "sglang")
    assert summary["block_size"] is summary["mask_token_id"] is None
    assert summary["num_speculative_tokens"] == 5
    assert summary["target_layer_ids"] == ((2, 0, 1) if "vLLM" in name else (0, 1, 2))
    files = TensorFolder(folder)
    assert summary["num_parameters"] == sum(files.get(name).numel() for name in files.shapes)
    lent = {"embed_tokens.weight": "embedding", "lm_head.weight": "head"}
    assert set(summary["borrowed"]) == {what for tensor, what in lent.items() if tensor not in files.shapes}
    assert method_of(str(folder)) == "eagle3" and list(find_drafters([tmp_path])) == [str(folder)]
    assert validate_pair(str(folder), str(target_of_eagle3)) == []
    (finding,) = validate_pair(str(folder), str(TARGET))
    assert finding.fatal and finding.what in ("target_hidden_size", "vocab_size")


def test_unspecified_taps_of_an_eagle3_drafter_are_not_invented(tmp_path: Path):
    folder = write_drafter(tmp_path / "head", sglang(eagle_config=None))
    assert summarize_drafter(open_drafter(str(folder)))["target_layer_ids"] == ()
    for command in ("inspect", "list"):
        code, said = run(command, folder)
        assert code == 0 and "sglang" in said, said
    code, said = run("compare", folder, DRAFTER)
    assert code == 0 and "* block size" in said


def test_a_drafter_of_another_kind_is_run_with_its_method():
    assert method_of(str(DRAFTER)) == "dflash"
    assert not is_eagle3(json.loads((TARGET / "config.json").read_text()))
    assert not is_eagle3({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32})
    published = json.loads((DATA / "published_configs.json").read_text())
    drafters = {name for name, raw in published.items() if method_of_drafter(raw) is not None}
    assert drafters == {"Qwen3-8B-DFlash-b16"}
    assert method_of_drafter({"speculators_model_type": "dflash2"}) == "dflash"
    assert method_of_drafter({"architectures": ["MuseGlimmerAssistantModel"]}) == "dflash"
    assert method_of_drafter({"architectures": ["LlamaForCausalLMEagle3"]}) == "eagle3"
    assert method_of_drafter({"architectures": ["Gemma4AssistantForCausalLM"]}) == "mtp"
