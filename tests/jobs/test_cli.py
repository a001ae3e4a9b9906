"""The command line: settings, error messages, a light start."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
from manta.actors.checkpoints.model_card import sample_prompt
from manta.actors.http.config.settings import ServerSettings
from manta.actors.http.ui import USUAL_PROMPT
from manta.cluster.config import EngineConfig
from manta.cluster.errors import ConfigError
from manta.cluster.flag import parse_size
from manta.jobs.cli import app, main
from manta.jobs.common.config_loading import engine_config, merge_settings, read_settings
from manta.jobs.common.engine_flags import _PANEL_OF
from manta.jobs.common.llama_cpp_flags import FIELD, FLAGS
from manta.jobs.serve.preflight import example_request
from support.paths import MODELS, ROOT

SERVE_CONFIG = """
applications:
  - name: manta
    import_path: manta.actors.replica:build_app
    args:
      model: models/target
      served_model_name: small
      max_num_seqs: 8
      speculative_config: {model: models/drafter, num_speculative_tokens: 15}
"""


@pytest.fixture
def serve_config(tmp_path: Path) -> Path:
    path = tmp_path / "ray_config.yaml"
    path.write_text(SERVE_CONFIG)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    code = ended.value.code
    return (code if isinstance(code, int) else 1), capsys.readouterr().err


def test_help_needs_neither_torch_nor_ray() -> None:
    script = (
        "import sys; from manta.jobs.cli import main\n"
        "try: main(['generate', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=600)


@pytest.mark.parametrize("imported", ["typer", "rich.console", "manta.cluster.config"])
def test_a_ctrl_c_during_the_imports_ends_the_command_quietly(imported: str) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["manta"].partition(":")
    command = [sys.executable, "-c", PAUSED_IMPORT.format(imported, module, function), "--version"]
    pipe = subprocess.PIPE
    # Shells ignore Ctrl-C for what they start in the background, such as a run of these tests.
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, preexec_fn=_default_interrupt
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stderr.readline() == "paused\n"
        process.send_signal(signal.SIGINT)
        said = list(process.stderr)
        assert (process.wait(600), said, process.stdout.read()) == (130, [], "")


# Waits where a module is looked for, and then calls the entry point.
PAUSED_IMPORT = """
import sys, time

class Pause:
    def find_spec(self, name, path=None, target=None):
        if name == {0!r}:
            print("paused", file=sys.stderr, flush=True)
            time.sleep(240)

sys.meta_path.insert(0, Pause())
import {1} as entry
entry.{2}()
"""


def _default_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


PANELS = ["Arguments", "Most used", "Model", "Speculation", "Memory", "HTTP", "Keys", "Operation", "Options"]


def test_the_help_of_serve_has_panels_and_the_ten_most_used_flags_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    assert re.findall(r"^([A-Z][\w ]*):$", text, re.M) == PANELS
    flags = {panel: re.findall(r"^  (-\S.*?)(?:  |$)", body, re.M) for panel, body in panels(text).items()}
    assert len(flags["Most used"]) == 10 and any("--spec-model" in flag for flag in flags["Most used"])
    assert all("key" in flag or flag.startswith(("--ten", "--allowed", "--prefix")) for flag in flags["Keys"])
    assert any("--gpu-memory-utilization" in flag for flag in flags["Memory"])
    assert set(_PANEL_OF) <= {each.name for each in serve_parameters()}, "each is a flag"


def panels(text: str) -> dict[str, str]:
    parts = re.split(r"^([A-Z][\w ]*):$", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def serve_parameters() -> list[Any]:  # Any: typer's own
    group: Any = typer.main.get_command(app)
    return group.commands["serve"].params


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["serve", "--spec-modl", "x"], "--spec-model?"),
        (["generate", "x", "--max-model-length", "3"], "--max-model-len?"),
        (["drafter", "train", "--target", "x", "--hour", "3"], "--hours?"),
        (["srve"], "serve"),
        (["drafter", "trian"], "train"),
    ],
)
def test_an_unknown_flag_or_command_suggests_the_nearest(
    arguments: list[str], nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = run(capsys, *arguments)
    assert code == 2 and "Did you mean" in said and nearest in said.split("Did you mean")[1]


def test_a_shell_completes_commands_and_flags(tmp_path: Path) -> None:
    """In bash itself, with the script that --show-completion prints."""
    if (bash := shutil.which("bash")) is None:
        pytest.skip("there is no bash here")
    (tmp_path / "manta").write_text(f'#!/bin/sh\nexec {sys.executable} -m manta.jobs.cli "$@"\n')
    (tmp_path / "manta").chmod(0o755)
    script = """
        eval "$(manta --show-completion bash)"
        for line in "manta mod" "manta serve --spec-mo"; do
            COMP_WORDS=($line) COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
            _manta_completion manta
            echo "${COMPREPLY[@]}"
        done
    """
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HOME": str(tmp_path)}
    done = subprocess.run([bash, "-c", script], env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines() == ["models", "--spec-model"], done.stderr


def test_help_explains_the_off_by_one_of_speculative_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "block size - 1" in words
    assert "its 16 is 15 here" in words


def test_flags_override_the_file_and_keys_in_a_file_are_refused(
    serve_config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requested: list[dict[str, object]] = []

    def start(settings: dict[str, object], *_: object, **__: object) -> None:
        requested.append(settings)
        raise ConfigError("far enough")

    monkeypatch.setattr("manta.jobs.serve.server.start_server", start)
    flags = ["--api-key", "a", "--api-key", "b", "--api-key-file", "/run/keys", "--admin-api-key", "root"]
    flags += ["--unknown-params", "reject", "--sse-keep-alive-interval", "5", "--max-request-bytes", "1M"]
    flags += ["--served-model-name", "x", "--allowed-origins", "https://a.example", "--batch-storage", "b"]
    flags += ["--allowed-origins", '["https://b.example", "https://c.example"]']
    assert run(capsys, "serve", "--config", str(serve_config), *flags)[0] == 1
    wanted = {
        "api_key": ["a", "b"],
        "api_key_file": "/run/keys",
        "admin_api_key": ["root"],
        "unknown_params": "reject",
        "sse_keep_alive_interval": 5.0,
        "max_request_bytes": 2**20,
        "served_model_name": ["x"],
        "allowed_origins": ["https://a.example", "https://b.example", "https://c.example"],
        "batch_storage": str(Path("b").absolute()),
        "shutdown_timeout": 30.0,
        "max_num_seqs": 8,
    }
    assert {name: requested[0][name] for name in wanted} == wanted
    serve_config.write_text(SERVE_CONFIG + "      api-key: hidden\n")
    code, said = run(capsys, "serve", "--config", str(serve_config))
    assert code == 1 and "api_key_file" in said and "hidden" not in said and len(requested) == 1


@pytest.mark.parametrize(
    ("flags", "in_file", "wanted"),
    [
        ([], "", "auto"),
        ([], "kv_tier_path: null", None),
        ([], "kv_tier_path: none", None),
        ([], "kv_tier_path: /there", "/there"),
        (["--kv-tier-path", "none"], "", None),
        (["--kv-tier-path", ""], "kv_tier_path: /there", None),
        (["--kv-tier-path", "auto"], "kv_tier_path: none", "auto"),
        (["--kv-tier-path", "there"], "", str(Path("there").absolute())),
    ],
)
def test_only_a_server_keeps_pages_in_the_default_folder_unless_it_is_told_otherwise(
    flags: list[str],
    in_file: str,
    wanted: str | None,
    serve_config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    requested: list[dict[str, object]] = []

    def start(settings: dict[str, object], *_: object, **__: object) -> None:
        requested.append(settings)
        raise ConfigError("far enough")

    monkeypatch.setattr("manta.jobs.serve.server.start_server", start)
    serve_config.write_text(f"{SERVE_CONFIG}      {in_file}\n")
    run(capsys, "serve", "--config", str(serve_config), *flags)
    assert engine_config(requested[0]).kv_tier_path == wanted
    of_others = engine_config(merge_settings({}, serve_config)).kv_tier_path
    assert of_others == ("/there" if "/there" in in_file else None)


def test_kv_tier_clear_deletes_the_pages_of_the_default_folder_or_of_a_given_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MANTA_CACHE_DIR", str(tmp_path))
    for given, folder in (([], tmp_path / "kv"), ([str(tmp_path / "mine")], tmp_path / "mine")):
        page = folder / "subject" / "0" / f"0-{'a' * 32}"
        page.parent.mkdir(parents=True)
        page.write_bytes(bytes(2**20))
        for size in ("1.0", "0.0"):
            with pytest.raises(SystemExit) as ended:
                main(["kv-tier", "clear", *given])
            assert ended.value.code == 0
            assert capsys.readouterr().out == f"deleted {size} MiB in {folder}\n"
        assert not page.exists()
    code, said = run(capsys, "kv-tier", "clear", str(tmp_path / "nowhere"))
    assert code == 1 and "no folder" in said


def test_every_command_reads_a_serve_config_and_flags_take_precedence(serve_config: Path) -> None:
    settings = merge_settings({"max_num_seqs": 2, "page_size": None}, serve_config)
    assert settings["served_model_name"] == "small"
    config = engine_config(settings)
    assert (config.model, config.max_num_seqs, config.page_size) == ("models/target", 2, None)
    assert config.speculative_config is not None
    assert config.speculative_config.num_speculative_tokens == 15


@pytest.mark.parametrize("typo", ["arg", "arguments", "arsg", "Args"])
def test_a_misspelled_args_of_a_serve_config_is_named(serve_config: Path, typo: str) -> None:
    serve_config.write_text(SERVE_CONFIG.replace("args:", f"{typo}:"))
    with pytest.raises(ConfigError, match=rf"applications\[0\]\.{typo} of .*args"):
        read_settings(serve_config)


def test_a_yaml_file_of_flag_names_is_also_a_config(tmp_path: Path) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text("model: m\nmax-num-seqs: 3\nblock-size: 32\nspec-model: d\nspec-tokens: 4\n")
    config = engine_config(read_settings(path))
    assert (config.max_num_seqs, config.page_size) == (3, 32)
    assert config.speculative_config is not None
    assert config.speculative_config.num_speculative_tokens == 4


def test_the_yaml_of_the_working_directory_is_read_unless_a_model_is_named(
    serve_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(serve_config.parent)
    assert merge_settings({})["max_num_seqs"] == 8
    assert merge_settings({"model": "other"}) == {"model": "other", "speculative_config": None}


@pytest.mark.parametrize(
    "flags", [{"no_speculation": True}, {"speculative_config": "none"}, {"speculative_config": "null"}]
)
def test_speculation_can_be_switched_off(flags: dict[str, object], serve_config: Path) -> None:
    assert merge_settings(flags, serve_config)["speculative_config"] is None


def test_spec_flags_refine_the_file_and_the_json_flag_but_repeat_no_key(serve_config: Path) -> None:
    refined = merge_settings({"spec_tokens": 3}, serve_config)["speculative_config"]
    assert refined == {"model": "models/drafter", "num_speculative_tokens": 3}
    flags = {"spec_tokens": 3, "speculative_config": json.dumps({"model": "d"})}
    assert merge_settings(flags)["speculative_config"] == {"model": "d", "num_speculative_tokens": 3}
    for more in ({"spec_model": "d"}, {"no_speculation": True}):
        with pytest.raises(ConfigError, match=r"is also given|excludes"):
            merge_settings({**flags, **more})


SPEC = '{"model": "d", "num_speculative_token": 4}'
# Command line, exit code, words of the answer. The files are made by the test.
WRONG = [
    ("genrate", 2, "Did you mean 'generate'"),
    ("generate x --dtyp a", 2, "--dtype"),
    ("generate x -m m --dtype float8", 2, "Invalid value for '--dtype': 'float8' is not one of 'auto'"),
    ("generate x -m m --max-model-len long", 2, "not a whole number"),
    ("chat a --model b", 2, "not both"),
    ("generate x -m m --max-num-seqs 0", 1, "max_num_seqs=0"),
    ("generate x -m m --temperature -1", 1, "temperature=-1"),
    ("generate x --config nowhere.yaml", 1, "nowhere.yaml cannot be read"),
    ("generate x --config sixties.yaml", 1, "line 2: 1:4 without quotes"),
    ("render systemd --config sixties.yaml", 1, 'Write "1:4"'),
    ("generate x -m m --spec-tokens 4", 1, "give spec_model, too"),
    (f"generate x -m m --speculative-config '{SPEC}'", 1, "Did you mean speculative_config.num_specula"),
    ("generate x -m m --speculative-config {model", 1, "is not JSON"),
    ("generate x -m /nowhere/target", 1, "/nowhere/target"),
    ("serve m --port PORT", 1, "port=PORT"),
    ("serve m --host 192.0.2.1", 1, "host=192.0.2.1 is no address of this machine"),
    ("serve m --host no.such.host.invalid", 1, "host=no.such.host.invalid is no address of this machine"),
    ("serve smolm2", 1, "Did you mean smollm2?"),
    ("serve m -c 8192", 2, "-c is llama.cpp's. Here: --max-model-len"),
    ("serve -hf owner/name", 2, "-hf is llama.cpp's. Here: the same names, without the flag"),
    ("chat m -ngl 99", 2, "-ngl is llama.cpp's. Here: --device"),
    ("serve m --metrics", 2, "--metrics is llama.cpp's. Here: always"),
    ("batch -m m -i nowhere.jsonl -o out", 1, "nowhere.jsonl cannot be read"),
    ("batch -m m -i rows.parquet -o out", 1, "not a readable Parquet file"),
    ("batch -m m -i rows.parquet -o out --concurrency 0", 1, "concurrency=0"),
    ("bench m", 1, "speculative_config is missing"),
    (
        "bench models/target --spec-model models/drafter --prompts bad.jsonl",
        1,
        "bad.jsonl, row 2: The line is not valid JSON",
    ),
    ("batch -m m -i lists.jsonl -o out", 1, "none of its first rows is a JSON object with fields"),
    ("demo --target nowhere", 1, "nowhere is missing"),
]


def test_the_request_to_try_asks_what_the_model_can_answer(tmp_path: Path) -> None:
    """Its card's example, as one argument of a shell; without a card what every chat model can answer."""
    shutil.copytree(MODELS / "target", tmp_path / "any", ignore=shutil.ignore_patterns("*.md"))
    for folder, asked in (
        (MODELS / "target", sample_prompt(MODELS / "target")),
        (tmp_path / "any", USUAL_PROMPT),
    ):
        config = EngineConfig(model=str(folder))
        words = shlex.split(example_request("http://h:1", config, ServerSettings()))
        body = json.loads(words[words.index("-d") + 1])
        assert body["messages"] == [{"role": "user", "content": asked}] and body["temperature"] == 0


def test_llama_cpps_flags_are_answered_as_in_the_guide() -> None:
    guide = (ROOT / "docs/how-to/from-llama-cpp.md").read_text()
    rows = [line.split("|")[1:3] for line in guide.splitlines() if line.startswith("| `")]
    here = {flag: right for left, right in rows for flag in re.findall(r"(?<![\w-])--?[\w-]+", left)}
    for flag, replacement in FLAGS.items():
        if replacement == FIELD:
            assert f"`{flag}`" in guide and "are fields of a request" in " ".join(guide.split())
        elif flag in here:
            assert replacement in here[flag], flag
    assert {flag for flag in FLAGS if len(flag) <= 4} - {"-n"} <= here.keys()


@pytest.mark.parametrize(("command", "code", "said"), WRONG)
def test_wrong_input_ends_with_a_message_not_a_traceback(
    command: str,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sixties.yaml").write_text("model: m\nreplicas: 1:4\n")
    Path("rows.parquet").write_bytes(b"not parquet")
    Path("bad.jsonl").write_text('{"prompt": "a"}\nno JSON\n')
    Path("lists.jsonl").write_text("[1]\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        got, err = run(capsys, *shlex.split(command.replace("PORT", port)))
    assert said.replace("PORT", port) in " ".join(err.split())
    assert "Traceback" not in err
    assert got == code
    assert not Path("out").exists()


def test_the_repositorys_own_config_is_valid() -> None:
    config = engine_config(read_settings(ROOT / "ray_config.yaml"))
    assert config.speculative_config is not None
    assert (config.model, config.speculative_config.model) == ("models/target", "models/drafter")


def test_an_unknown_key_in_the_yaml_suggests_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: m\nmax_num_seq: 3\n")
    with pytest.raises(ConfigError, match="Did you mean max_num_seqs"):
        engine_config(read_settings(path))


def test_sizes_are_written_as_in_vllm() -> None:
    assert [parse_size(text) for text in ("4096", "32k", "1G", "1.5g")] == [4096, 32000, 2**30, 1_500_000_000]


C_LOCALE = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
C_LOCALE |= {"PYTHONIOENCODING": "ascii"}


@pytest.mark.parametrize(
    ("arguments", "given", "code", "said"),
    [
        (["generate", "-"], b"d\xff\xfe", 1, b"error: prompt: standard input is not UTF-8 (byte 1"),
        (["render", "systemd", "--config", "né.yaml"], b"", 1, rb"n\xe9.yaml"),
    ],
)
def test_commands_work_in_a_locale_without_utf8(
    arguments: list[str], given: bytes, code: int, said: bytes
) -> None:
    command = [sys.executable, "-m", "manta.jobs.cli", *arguments]
    found = subprocess.run(
        command, input=given, capture_output=True, timeout=600, env={**os.environ, **C_LOCALE}, cwd=ROOT
    )
    assert found.returncode == code and said in found.stderr, found.stderr
    assert b"Traceback" not in found.stderr


def test_a_low_limit_of_open_files_is_reported_before_ray_starts() -> None:
    script = 'ulimit -n 64; exec "$0" -m manta.jobs.cli serve models/target --port 0'
    found = subprocess.run(
        ["bash", "-c", script, sys.executable], capture_output=True, text=True, timeout=600, cwd=ROOT
    )
    assert found.returncode == 1 and "Traceback" not in found.stderr
    assert "open files: the limit is 64" in found.stderr
