"""Every argument of `vllm serve` and key of its speculative_config is accepted or gets a message.

data/vllm_arguments.txt lists the names in vLLM 0.33's `EngineArgs`, `AsyncEngineArgs`, `FrontendArgs` and
`SpeculativeConfig`, without fields that no user sets.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import typer.main
from manta.actors.checkpoints.checkpoint_paths import target_folder, with_drafter
from manta.actors.http.config.settings import ServerSettings
from manta.actors.http.config.settings_mapping import split_settings
from manta.actors.tokenization.generation_config import GenerationDefaults
from manta.cluster.config import EngineConfig, SpeculativeConfig
from manta.cluster.errors import ConfigError
from manta.cluster.vllm_settings import ANSWERS, RENAMED, SETTINGS, SPECULATION, accept, accept_speculation
from manta.jobs.cli import app, main
from manta.jobs.common.config_loading import merge_settings, read_settings
from manta.jobs.common.vllm_flags import without_vllm_flags
from support.paths import DATA
from support.published.hub_standin import REVISION, hub_with_model

TOLD = (DATA / "vllm_arguments.txt").read_text().split("[")[1:]
NAMES = {part.partition("]")[0]: part.partition("]")[2].split() for part in TOLD}
OWN = {f.name for kind in (EngineConfig, ServerSettings) for f in fields(kind)}
PYTHON_ONLY = {"skip_tokenizer_init", "per_request_spec_decode_metrics"}  # settings here, without a flag


def options(command: str) -> set[str]:
    """Return every spelling of a command's options, spelled as settings."""
    parameters = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    return {
        name.strip("-").replace("-", "_")
        for each in parameters
        for name in (*each.opts, *each.secondary_opts)
    }


def test_every_vllm_argument_is_a_flag_or_gets_a_message() -> None:
    known = options("serve") | ANSWERS.keys() | PYTHON_ONLY
    assert len(NAMES["engine_args"]) > 180 and not {*NAMES["engine_args"], *NAMES["frontend_args"]} - known
    assert not ANSWERS.keys() & (OWN | RENAMED.keys())


def test_every_key_of_vllms_speculative_config_is_accepted_or_gets_a_message() -> None:
    plain: dict[str, object] = {"num_speculative_tokens_per_batch_size": [[1, 4, 7], [5, 64, 3]]}
    plain |= {"enable_adaptive_verification": True}
    own = {f.name for f in fields(SpeculativeConfig)}
    for key in NAMES["speculative_config"]:
        try:
            kept = accept_speculation({key: plain.get(key, "x")})
        except ConfigError as refused:
            assert key in str(refused)
        else:
            assert kept.keys() <= own, key


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "batch", "audit"])
def test_no_manta_flag_is_mistaken_for_a_vllm_one(command: str) -> None:
    assert not options(command) & ANSWERS.keys()


def test_no_setting_has_two_messages_and_sentences_have_no_period() -> None:
    for table in (SETTINGS, SPECULATION):
        names = [name for answer in table for name in answer.kinds()]
        assert len(names) == len(set(names))
        assert all(answer.message and not answer.message.endswith(".") for answer in table)


@pytest.mark.parametrize(
    ("given", "kept", "said"),
    [
        (["--max_num_seqs", "4"], ["--max_num_seqs", "4"], ""),
        (["--trust-remote-code", "m"], ["m"], "--trust-remote-code has no effect"),
        (["--no-trust-remote-code", "m"], ["m"], ""),
        (["--enforce_eager"], [], "--enforce_eager has no effect"),
        (["--disable-log-requests"], [], ""),
        (["--pipeline-parallel-size", "1", "m"], ["m"], ""),
        (["--kv-cache-dtype", "fp8", "m"], ["--kv-cache-dtype", "fp8", "m"], ""),
        (["-O3", "m"], ["m"], "-O has no effect"),
        (["--compilation-config.mode", "3", "m"], ["m"], "--compilation-config.mode has no effect"),
        (["--limit-mm-per-prompt", '{"image": 0}'], [], "Manta serves text"),
        (["--cudagraph-capture-sizes", "1", "2", "4", "--port", "1"], ["--port", "1"], "CUDA graphs"),
        (["--dtype", "half"], ["--dtype", "float16"], ""),
        (["--dtype=float"], ["--dtype=float32"], ""),
        (["--load-format", "safetensors"], ["--load-format", "auto"], ""),
        (
            ["serve", "m", "--served-model-name", "a", "b", "-tp", "2"],
            ["serve", "m", "--served-model-name=a", "--served-model-name=b", "-tp", "2"],
            "",
        ),
        (["-sc.method", "suffix", "x"], ["x", '--speculative-config={"method": "suffix"}'], ""),
        (
            ["--speculative-config.method=dflash", "--speculative_config.num_speculative_tokens", "7"],
            ['--speculative-config={"method": "dflash", "num_speculative_tokens": 7}'],
            "",
        ),
        (["-sc", '{"method": "suffix"}'], ["-sc", '{"method": "suffix"}'], ""),
        (
            [
                "--hf-overrides.rope.factor",
                "2.5",
                "--hf-overrides.ids+",
                "1,2",
                "--hf-overrides.n",
                "32k",
                "--",
            ],
            ['--hf-overrides={"rope": {"factor": 2.5}, "ids": [1, 2], "n": 32000}', "--"],
            "",
        ),
        (["--temperature", "-0.5"], ["--temperature", "-0.5"], ""),
        (["--spec-method", "deepseek_mtp"], ["--spec-method", "mtp"], ""),
        (["serve", "--served-model-name", "a", "m"], ["serve", "--served-model-name", "a", "m"], ""),
        (["x", "--", "--trust-remote-code"], ["x", "--", "--trust-remote-code"], ""),
    ],
)
def test_flags_without_effect_leave_the_command_line(
    given: list[str], kept: list[str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert without_vllm_flags(given) == kept
    assert (said in caplog.text) if said else not caplog.text


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--pipeline-parallel-size", "2"], "tensor_parallel_size"),
        (["-pp", "2"], "tensor_parallel_size"),
        (["--lora-modules", "a=b", "c=d"], "Merge the adapter"),
        (["--kv-cache-dtype-skip-layers", "1", "2"], "all layers"),
        (["--cpu-offload-gb", "4"], "manta plan"),
        (["--ssl-keyfile", "k"], "proxy"),
        (["--hf-token", "secret"], "HF_TOKEN"),
        (["--num-speculative-tokens", "5"], "--spec-tokens"),
        (["--runner", "pooling"], "generates text"),
        (["--spec-method", "eagle"], "EAGLE-3 is"),
    ],
)
def test_flags_with_a_needed_effect_are_refused_with_a_remedy(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "m", *flags])
    said = capsys.readouterr().err
    assert sentence in said and flags[0] in said and "secret" not in said


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("-sc.method medusa", "speculative_config.method=medusa is not served: Medusa's heads"),
        ("-sc.fly_window_size 6 -sc.model d", "speculative_config.fly_window_size is not served: it would"),
        ("-sc.method suffix -sc {}", "speculative_config is given whole and by keys"),
        ("--hf-overrides.a 1 --hf-overrides.a.b 2", "--hf-overrides.a.b: another flag gives"),
    ],
)
def test_keys_of_json_that_are_wrong_are_named(
    flags: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "m", *flags.split()])
    assert sentence in capsys.readouterr().err


def test_settings_in_yaml_and_python_get_the_same_messages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text("model: m\ntrust-remote-code: true\nblock-size: 32\ndtype: half\nenforce_eager: false\n")
    settings = read_settings(path)
    assert settings == {"model": "m", "page_size": 32, "dtype": "float16", "speculative_config": None}
    assert caplog.text.count("has no effect") == 1
    config, _ = split_settings({"model": "m", "trust_remote_code": True, "num_gpu_blocks_override": 9})
    assert config.num_pages == 9
    assert split_settings({"model": "m", "data_parallel_size": 2})[1].replicas == 2
    with pytest.raises(ConfigError, match="enable_lora is not served"):
        EngineConfig.from_dict({"model": "m", "enable_lora": True})
    with pytest.raises(ConfigError, match="vLLM's name of page_size"):
        accept({"block_size": 16, "page_size": 32})
    with pytest.raises(ConfigError, match="Did you mean max_num_seqs"):
        split_settings({"model": "m", "max_num_seq": 4})


def test_a_draft_schedule_by_batch_size_becomes_its_maximum_and_true_is_refused() -> None:
    schedule = [[1, 4, 7], [5, 64, 3]]
    config = accept_speculation({"model": "d", "num_speculative_tokens_per_batch_size": schedule})
    assert config == {"model": "d", "num_speculative_tokens": 7}
    assert accept_speculation({"enable_adaptive_verification": False}) == {"adaptive": False}
    assert merge_settings({"model": "m", "speculative_config": '{"method": "ngram_gpu"}'})[
        "speculative_config"
    ] == {"method": "ngram"}
    with pytest.raises(ConfigError, match="must be a list like"):
        accept_speculation({"num_speculative_tokens_per_batch_size": 7})


def test_methods_of_vllm_are_served_under_another_name_or_refused_with_a_reason() -> None:
    """`data/vllm_arguments.txt` has the values of vLLM's `SpeculativeMethod`."""
    for method in NAMES["speculative_methods"]:
        try:
            kept = accept_speculation({"method": method})["method"]
        except ConfigError as refused:
            assert f"speculative_config.method={method} is not served: " in refused.message
        else:
            assert kept in ("dflash", "eagle3", "mtp", "ngram", "suffix"), method


def test_true_does_not_count_as_the_default_1(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        accept({"scheduler_reserve_full_isl": True})
    assert "has no effect" in caplog.text


def test_sampling_defaults_come_from_a_folder_and_can_be_overridden(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.7, "top_k": 20, "max_new_tokens": 9}')
    override = {"override_generation_config": {"temperature": 0.1, "max_new_tokens": 5}}
    settings = split_settings({"model": "m", "generation_config": str(tmp_path), **override})[1]
    found = GenerationDefaults.load(Path(settings.generation_config))
    assert found == GenerationDefaults(temperature=0.7, top_k=20, max_tokens=9)
    found = found.overridden(settings.override_generation_config)
    assert found == GenerationDefaults(temperature=0.1, top_k=20, max_tokens=5)
    assert split_settings({"model": "m", "generation_config": "vllm"})[1].generation_config == "openai"


@pytest.mark.parametrize(
    "settings",
    [
        {"override_generation_config": {"temprature": 1}},
        {"override_generation_config": {"temperature": -1}},
        {"override_generation_config": {"top_p": "high"}},
        {"override_generation_config": 3},
        {"generation_config": "/nowhere"},
    ],
)
def test_wrong_sampling_defaults_are_refused_before_anything_starts(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="generation_config"):
        split_settings({"model": "m", **settings})


SNAPSHOT = """
import sys
from manta.actors.checkpoints.checkpoint_paths import drafter_folder, drafter_commit, target_folder
from manta.cluster.config import EngineConfig
config = EngineConfig.from_dict({
    "model": "me/small", "revision": "v2", "download_dir": sys.argv[1],
    "speculative_config": {"model": "me/small", "revision": "v3"},
})
print(target_folder(config), drafter_folder(config, "me/small"), drafter_commit(config, "me/small"))
"""


def test_hub_downloads_use_the_revision_and_the_download_dir(tmp_path: Path) -> None:
    kept, requested = tmp_path / "kept", dict[str, int]()
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    with hub_with_model("me/small", tmp_path / "model", requested) as address:
        hub = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-c", SNAPSHOT, kept]
        done = subprocess.run(command, env={**os.environ, **hub}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    snapshot = str(kept / "models--me--small/snapshots" / REVISION)
    assert done.stdout.split() == [snapshot, snapshot, REVISION]
    assert {"@v2", "@v3"} <= requested.keys() and "@main" not in requested


def test_a_folder_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder, which has no revision"):
        target_folder(EngineConfig(model=str(tmp_path), revision="v2"))
    config = EngineConfig.from_dict(
        {"model": "m", "speculative_config": {"model": "me/small", "revision": "v3"}}
    )
    other = with_drafter(config, "me/other").speculative_config
    assert other is not None and (other.model, other.revision) == ("me/other", None)
