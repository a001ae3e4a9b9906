"""Special tokens' names and chat templates, as transformers reads them from the same folder."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.actors.tokenization.tokenizer_config import read_special_tokens
from manta.cluster.errors import CheckpointError, RequestError
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

SPECIAL = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>", "<bos>", "<eos>"]
SAID = [{"role": "user", "content": "Go"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
DECLARED = {"added_tokens_decoder": {}}  # as transformers has written since 4.34
TOKEN = {"__type": "AddedToken", "content": "<s>", "lstrip": False, "normalized": True, "rstrip": False}
OLD = {"content": "<|im_end|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "image_token", "boi_token")
TELLS = "".join(f"[{{{{ {name} }}}}{{{{ {name} is defined }}}}]" for name in NAMES)

# What tokenizer_config.json, special_tokens_map.json and config.json hold.
FOLDERS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "named in the settings": ({"bos_token": "<s>", "eos_token": TOKEN}, {}, {}),
    "null": ({"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<|im_end|>"}, {}, {}),
    "null against a default": ({"tokenizer_class": "LlamaTokenizer", "bos_token": None}, {}, {}),
    "only in the old file": ({}, {"bos_token": "<s>", "eos_token": OLD}, {}),
    "the old file comes first": ({"eos_token": "</s>"}, {"eos_token": OLD}, {}),
    "the old file is stale": ({"eos_token": "</s>", **DECLARED}, {"eos_token": OLD, "bos_token": "<s>"}, {}),
    "names of the publisher's own": (
        {"image_token": "<bos>", "extra_special_tokens": {"boi_token": "<eos>"}, "add_bos_token": True},
        *({}, {}),
    ),
    "a list has no names": ({"additional_special_tokens": ["<|im_start|>"], "eos_token": "</s>"}, {}, {}),
    "no file names any": ({}, {}, {}),
}
CLASSES = (None, "PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2Tokenizer", "GPT2Tokenizer")
KINDS = ("llama", "qwen2", "qwen3", "qwen3_5", "gemma3_text", "mistral", "gpt_oss", "deepseek_v3", "glm4_moe")
for kind in KINDS:
    for name in CLASSES:
        given = {} if name is None else {"tokenizer_class": name}
        FOLDERS[f"{name} of {kind}"] = (given, {}, {"model_type": kind})
FOLDERS["a class in config.json"] = ({}, {}, {"model_type": "llama", "tokenizer_class": "GemmaTokenizer"})
FOLDERS["Gemma's"] = ({"tokenizer_class": "GemmaTokenizer"}, {}, {"model_type": "gemma3_text"})


@cache
def tokenizer_of(byte_level: bool) -> str:
    made = tokenizers.Tokenizer(models.BPE(unk_token=None if byte_level else "<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel() if byte_level else pre_tokenizers.Metaspace()
    made.decoder = decoders.ByteLevel() if byte_level else decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False)
    made.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    return made.to_str()


def write(
    folder: Path, *, byte_level: bool = True, template: object = TELLS, **files: dict[str, Any]
) -> Path:
    (folder / "tokenizer.json").write_text(tokenizer_of(byte_level), encoding="utf-8")
    files["tokenizer_config"] = {"chat_template": template, **files.get("tokenizer_config", {})}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.parametrize("byte_level", [True, False], ids=["bytes", "words"])
@pytest.mark.parametrize("case", FOLDERS)
@pytest.mark.one_in(2)
def test_special_tokens_have_the_names_that_transformers_gives_them(
    tmp_path: Path, case: str, byte_level: bool
) -> None:
    files = dict(zip(("tokenizer_config", "special_tokens_map", "config"), FOLDERS[case], strict=True))
    write(tmp_path, byte_level=byte_level, **files)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = read_special_tokens(tmp_path, byte_level=byte_level)
    assert ours == theirs.special_tokens_map
    said = Tokenizer.load(tmp_path).apply_chat_template(SAID)
    assert said == theirs.apply_chat_template(SAID, tokenize=False)


USED = "{{ tools }}"
# Templates in tokenizer_config.json, in chat_template.jinja, and in additional_chat_templates/.
LAYOUTS: dict[str, tuple[object, str | None, dict[str, str]]] = {
    "one": (f"one {USED}", None, {}),
    "a list": (
        [{"name": "default", "template": f"d {USED}"}, {"name": "tool_use", "template": f"t {USED}"}],
        None,
        {},
    ),
    "a list of three": (
        [{"name": n, "template": f"{n} {{{{ bos_token }}}}{USED}"} for n in ("rag", "default", "tool_use")],
        *(None, {}),
    ),
    "a list without tool_use": ([{"name": "default", "template": f"d {USED}"}], None, {}),
    "a list without a default": ([{"name": n, "template": n + USED} for n in ("tool_use", "rag")], None, {}),
    "a file comes first": ("settings", f"file {USED}", {}),
    "a file comes before a list": ([{"name": "tool_use", "template": f"t {USED}"}], f"file {USED}", {}),
    "a file and a folder": (
        "settings",
        f"file {USED}",
        {"tool_use": f"of the folder {USED}", "rag": f"r {USED}"},
    ),
    "a folder alone": (f"settings {USED}", None, {"tool_use": f"of the folder {USED}"}),
    "a default in the folder": (None, f"file {USED}", {"default": f"of the folder {USED}"}),
}


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("named", [None, "rag"], ids=["unnamed", "named"])
@pytest.mark.parametrize("case", LAYOUTS)
@pytest.mark.one_in(2)
def test_the_chosen_template_equals_transformers(
    tmp_path: Path, case: str, named: str | None, tools: list[dict[str, Any]] | None
) -> None:
    template, file, others = LAYOUTS[case]
    write(tmp_path, template=template, tokenizer_config={"bos_token": "<s>"})
    if file is not None:
        (tmp_path / "chat_template.jinja").write_text(file)
    (tmp_path / "additional_chat_templates").mkdir()
    for name, text in others.items():
        (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(text)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(tmp_path)
    several = theirs.chat_template if isinstance(theirs.chat_template, dict) else {}
    if named is not None and named not in several:
        with pytest.raises(RequestError, match="accepts no templates in requests"):  # to them it is Jinja
            ours.apply_chat_template(SAID, tools=tools, source=named)
        return
    try:
        expected = theirs.apply_chat_template(SAID, tools=tools, chat_template=named, tokenize=False)
    except ValueError:
        with pytest.raises(RequestError, match="none is the default; name one of "):
            ours.apply_chat_template(SAID, tools=tools, source=named)
    else:
        assert ours.apply_chat_template(SAID, tools=tools, source=named) == expected


def test_variables_of_every_template_are_known(tmp_path: Path) -> None:
    template = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "{{ tools }}{{ x }}"}]
    tokenizer = Tokenizer.load(write(tmp_path, template=template))
    assert tokenizer.template_uses("tools") and not tokenizer.template_uses("documents")


@pytest.mark.parametrize(
    "template", [5, ["d"], [{"name": "default"}], [{"name": 1, "template": "d"}], [{"template": "d"}]]
)
def test_malformed_templates_are_refused_by_file(tmp_path: Path, template: object) -> None:
    write(tmp_path, template=template)
    with pytest.raises(CheckpointError, match=r"config\.json: chat_template must be Jinja, or a list"):
        Tokenizer.load(tmp_path)


def test_a_broken_tool_template_is_found_at_start(tmp_path: Path) -> None:
    template = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "{% if %}"}]
    write(tmp_path, template=template)
    with pytest.raises(CheckpointError, match="it is no Jinja template"):
        Tokenizer.load(tmp_path)
