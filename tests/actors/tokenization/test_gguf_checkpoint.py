"""A GGUF file is found by its path, folder, part or name on the hub, and becomes one folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from manta import LLM, SamplingParams
from manta.actors.batch.ledger.job_spec import checkpoint_identity
from manta.actors.checkpoints.checkpoint_paths import (
    absolute_path,
    resolve_checkpoint,
    revision_of,
    served_name,
)
from manta.actors.checkpoints.gguf_checkpoint import DIGESTS, _matches_digests
from manta.actors.checkpoints.gguf_files import chosen, gguf_files
from manta.actors.http.config.settings import ServerSettings
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.cluster.errors import CheckpointError, ConfigError
from support.checkpoints.gguf_checkpoints import publish_gguf
from support.checkpoints.text_pair import make_text_pair

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MESSAGES = [{"role": "user", "content": "Hello  world"}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with a tokenizer as a GGUF file, and with the same values in safetensors."""
    folder = tmp_path_factory.mktemp("models")
    target, _ = make_text_pair(folder)
    _, plain = publish_gguf(target, folder / "published", "qwen3")
    return folder / "published" / "model.gguf", plain


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANTA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(models: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the file in a folder of its own."""
    return copied(models[0], tmp_path / "own" / "tiny-Q8_0.gguf")


def copied(file: Path, to: Path) -> Path:
    to.parent.mkdir(exist_ok=True, parents=True)
    to.write_bytes(file.read_bytes())
    return to


def resolve(name: Path | str) -> Path:
    return resolve_checkpoint(str(name), field="model")


def test_a_file_answers_as_the_folder_that_was_converted(models: tuple[Path, Path]) -> None:
    gguf, plain = models
    sampling = SamplingParams(max_tokens=12, temperature=0.0)
    answers = []
    for model in (gguf, plain):
        with LLM(str(model), dtype="float32", device="cpu", max_model_len=256) as llm:
            chats = [*llm.chat(MESSAGES, sampling), *llm.generate(["Once upon", "a\n\nb"], sampling)]
            outputs = [(each.prompt_token_ids, *each.outputs) for each in chats]
            answers.append([(ids, output.token_ids, output.text) for ids, output in outputs])
    assert answers[0] == answers[1]


def test_the_folder_is_written_once_and_names_the_file(model: Path, cache: Path) -> None:
    folder = resolve(model)
    assert folder.is_relative_to(cache)
    names = {path.name for path in folder.iterdir()}
    config = {"config.json", "generation_config.json"}
    assert names == {*config, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", DIGESTS}
    assert gguf_files(folder) == (model,)
    written = (folder / "tokenizer.json").stat()
    assert resolve(model) == folder
    assert (folder / "tokenizer.json").stat().st_mtime_ns == written.st_mtime_ns
    os.utime(model, (1, 1))
    assert resolve(model) != folder
    assert Tokenizer.load(folder).template is not None


def test_processes_that_resolve_at_the_same_time_share_one_folder(model: Path, cache: Path) -> None:
    code = (
        "from manta.actors.checkpoints.checkpoint_paths import resolve_checkpoint as resolve\n"
        f"print(resolve({str(model)!r}, field='model'))"
    )
    run = [sys.executable, "-c", code]
    started = [subprocess.Popen(run, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {process.communicate(timeout=600)[0].strip() for process in started}
    assert folders == {str(resolve(model))}
    assert len(list((cache / "gguf").iterdir())) == 1


def emptied(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"")


def piped(folder: Path) -> None:
    (folder / DIGESTS).unlink()
    os.mkfifo(folder / DIGESTS)


def extended(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")


def opened(folder: Path) -> None:
    (folder / "tokenizer.json").chmod(0o666)


@pytest.mark.parametrize("change", [emptied, piped, extended, opened])
def test_a_folder_that_was_changed_is_written_again(
    model: Path, cache: Path, change: Callable[[Path], None]
) -> None:
    folder = resolve(model)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    change(folder)
    _matches_digests.cache_clear()  # as in another process
    assert resolve(model) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert (folder / "tokenizer.json").stat().st_mode & 0o002 == 0
    assert len(list((cache / "gguf").iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_one_sentence(model: Path, cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(CheckpointError, match=r"^model: the folder .* cannot be written .* MANTA_CACHE_DIR"):
        resolve(model)


def test_any_part_names_the_whole_model(models: tuple[Path, Path], tmp_path: Path) -> None:
    target, _ = make_text_pair(tmp_path)
    publish_gguf(target, tmp_path / "split", "qwen3", split=8)
    parts = sorted((tmp_path / "split").glob("*.gguf"))
    assert len(parts) > 2
    folders = {resolve(part) for part in (*parts, tmp_path / "split")}
    assert len(folders) == 1
    assert gguf_files(folders.pop()) == tuple(parts)
    assert served_name(str(parts[1])) == "model"
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=f"^model: .*{parts[1].name} is missing: the model is split"):
        resolve(parts[0])


def test_a_folder_with_one_gguf_model_is_that_model(model: Path) -> None:
    (model.parent / "mmproj-tiny.gguf").write_bytes(b"an encoder of images")
    assert resolve(model.parent) == resolve(model)
    copied(model, model.with_name("tiny-F16.gguf"))
    several = (
        r"^model: .* holds several GGUF models: tiny-F16\.gguf, tiny-Q8_0\.gguf\. Give the path of one\."
    )
    with pytest.raises(CheckpointError, match=several):
        resolve(model.parent)
    (model.parent / "model.safetensors").touch()
    assert resolve(model.parent) == model.parent


def test_a_missing_file_and_a_revision_of_a_file_are_refused(model: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model='.*no\.gguf': there is no such file"):
        resolve(model.with_name("no.gguf"))
    with pytest.raises(ConfigError, match="is a file, which has no revision 'main'"):
        resolve_checkpoint(str(model), field="model", revision="main")
    model.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"^speculative_config\.model: .* ends before") as caught:
        resolve_checkpoint(str(model), field="speculative_config.model")
    assert caught.value.param == "speculative_config.model"


def test_paths_keep_the_name_of_a_link_and_names_of_models_the_files(model: Path) -> None:
    link = model.with_name("linked.gguf")
    link.symlink_to(model)
    assert absolute_path(os.path.relpath(link)) == str(link)
    assert ServerSettings().model_names(str(link)) == ("linked",)
    assert ServerSettings(served_model_name="own").model_names(str(link)) == ("own",)
    assert ServerSettings().model_names("owner/name:Q4_K_M") == ("owner/name:Q4_K_M",)


def test_another_file_is_another_job_wherever_it_lies(model: Path) -> None:
    identity = checkpoint_identity(resolve(model))
    moved = copied(model, model.parent / "elsewhere" / "renamed.gguf")
    assert checkpoint_identity(resolve(moved)) == identity
    content = bytearray(moved.read_bytes())
    for at in (content.rindex(b"im_start"), len(content) // 2, len(content) - 1):
        changed = content.copy()
        changed[at] ^= 1
        moved.write_bytes(changed)
        assert checkpoint_identity(resolve(moved)) != identity, f"byte {at}"


def test_a_quantization_on_the_hub_is_found_in_its_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cached = tmp_path / "hub" / "models--owner--tiny-GGUF"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(COMMIT)
    names = ("tiny-Q8_0.gguf", "tiny-Q4_K_M.gguf", "tiny-UD-Q4_K_M.gguf", "BF16/tiny-BF16.gguf")
    files = [copied(model, cached / "snapshots" / COMMIT / name) for name in names]

    def on_hub(name: str) -> tuple[Path, ...]:
        return gguf_files(resolve_checkpoint(name, field="model", download_dir=str(tmp_path / "hub")))

    assert on_hub("owner/tiny-GGUF:q8_0") == (files[0],)
    assert on_hub("owner/tiny-GGUF:UD-Q4_K_M") == (files[2],)
    assert on_hub("owner/tiny-GGUF:tiny-Q4_K_M.gguf") == (files[1],)
    assert on_hub("owner/tiny-GGUF:BF16") == (files[3],)
    assert revision_of("owner/tiny-GGUF:Q8_0", download_dir=str(tmp_path / "hub")) == COMMIT
    several = r"Q4_K_M names several files: tiny-Q4_K_M\.gguf, tiny-UD-Q4_K_M\.gguf\. Give the name of one"
    with pytest.raises(CheckpointError, match=several):
        on_hub("owner/tiny-GGUF:Q4_K_M")
    none = r"^model=owner/tiny-GGUF:Q2_K: no file of this quantization\. It has tiny-BF16\.gguf, tiny-Q4_K_M"
    with pytest.raises(CheckpointError, match=none):
        on_hub("owner/tiny-GGUF:Q2_K")
    with pytest.raises(CheckpointError, match=r"^model=nobody/nothing:Q8_0: the hub does not provide it"):
        on_hub("nobody/nothing:Q8_0")
    with pytest.raises(CheckpointError, match=several):  # Q4_K_M where no quantization is named
        on_hub("owner/tiny-GGUF")
    files[2].unlink()
    assert on_hub("owner/tiny-GGUF") == (files[1],)
    for file in (files[0], files[1]):
        file.unlink()
    assert on_hub("owner/tiny-GGUF") == (files[3],)
    assert revision_of("owner/tiny-GGUF", download_dir=str(tmp_path / "hub")) == COMMIT


def test_all_parts_of_a_quantization_are_chosen() -> None:
    parts = [f"Q4_K_M/big-Q4_K_M-0000{i}-of-00002.gguf" for i in (1, 2)]
    names = [*parts, "big-Q8_0.gguf", "mmproj-big-Q4_K_M.gguf", "README.md"]
    assert chosen(reversed(names), "q4_k_m", "model=a/b:q4_k_m", "model") == parts
    with pytest.raises(CheckpointError, match=r"^model=a/b:Q8_0: .* It has no GGUF file\.$"):
        chosen(["README.md"], "Q8_0", "model=a/b:Q8_0", "model")


def test_a_file_without_a_vocabulary_becomes_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    target, _ = make_text_pair(tmp_path)
    (target / "tokenizer.json").unlink()
    publish_gguf(target, tmp_path / "published", "qwen3")
    folder = resolve(tmp_path / "published" / "model.gguf")
    assert {path.name for path in folder.iterdir()} == {"config.json", "generation_config.json", DIGESTS}
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"
