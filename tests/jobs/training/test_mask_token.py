"""The mask token of a new drafter: it occurs in no text and no chat, also where the vocabulary is full."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manta.actors.targets.families import read_model
from manta.actors.targets.model.model_spec import ModelSpec
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.cluster.errors import ConfigError
from manta.jobs.drafters.train.train_run import TrainOptions, train_drafter
from manta.jobs.training.heads.mask_token import mask_token
from support.checkpoints.byte_tokenizer import byte_tokenizer
from support.paths import MODELS

CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
# The special tokens of SmolLM2 besides <|endoftext|> and <|im_end|>.
CODE_TOKENS = ["<|im_start|>", "<repo_name>", "<file_sep>", "<jupyter_script>", "<empty_output>"]
ENDS = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def with_vocabulary(folder: Path, special: list[str], named: dict[str, str], template: str = CHAT) -> int:
    """Write a byte tokenizer with these special tokens, and return the number of its tokens."""
    tokenizer = byte_tokenizer(template, special)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, "chat_template": template}))
    return tokenizer.vocab_size


@pytest.fixture
def spec(tiny_qwen3: Path) -> ModelSpec:
    return read_model(tiny_qwen3)


def chosen(spec: ModelSpec, folder: Path, num_tokens: int) -> tuple[str | None, str]:
    reported: list[str] = []
    full = replace(spec, vocab_size=num_tokens, eos_token_ids=())
    token_id = mask_token(full, folder, None, reported.append)
    (line,) = reported
    return Tokenizer.load(folder).tokens([token_id])[0], line


@pytest.mark.parametrize(
    ("special", "named", "expected"),
    [
        ([*CODE_TOKENS, "<|fim_mask|>"], ENDS, "<|fim_mask|>"),
        (CODE_TOKENS, ENDS, "<empty_output>"),
        (["<|im_start|>", "<|reserved_7|>", "<file_sep>"], ENDS, "<|reserved_7|>"),
        (["<|im_start|>", "<voice>"], ENDS | {"eos_token": "<voice>"}, "À"),
        (["<|im_start|>", "<|vision_pad|>", "<|end_of_turn|>", "<s>", "<unk>"], ENDS, "À"),
    ],
)
def test_a_full_vocabulary_has_a_token_for_the_mask(
    special: list[str], named: dict[str, str], expected: str, spec: ModelSpec, tmp_path: Path
) -> None:
    num_tokens = with_vocabulary(tmp_path, special, named)
    found, line = chosen(spec, tmp_path, num_tokens)
    assert found == expected and f"({expected})" in line
    assert chosen(spec, tmp_path, num_tokens + 3)[0] in (None, "<|fim_mask|>"), (
        "an unused id, unless named so"
    )


def test_a_token_that_the_template_writes_is_not_the_mask(spec: ModelSpec, tmp_path: Path) -> None:
    template = CHAT.replace("<|im_start|>", "<empty_output><|im_start|>")
    num_tokens = with_vocabulary(tmp_path, CODE_TOKENS, ENDS, template)
    assert chosen(spec, tmp_path, num_tokens)[0] == "<jupyter_script>"


@settings(max_examples=50, deadline=None)
@given(text=st.text())
def test_no_text_contains_the_byte_that_is_the_mask(
    text: str, tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("full")
    num_tokens = with_vocabulary(folder, ["<|im_start|>"], ENDS)
    full = replace(read_model(tiny_qwen3), vocab_size=num_tokens, eos_token_ids=())
    mask_id = mask_token(full, folder, None, lambda _: None)
    assert mask_id not in Tokenizer.load(folder).encode(text + "À")


def test_the_shipped_target_has_a_mask(tmp_path: Path) -> None:
    folder = MODELS / "target"
    token_id = mask_token(read_model(folder), folder, None, lambda _: None)
    assert Tokenizer.load(folder).tokens([token_id]) == ["<|mask|>"]


def test_a_mask_is_decided_before_any_data_is_read(tiny_qwen3: Path, tmp_path: Path) -> None:
    (data := tmp_path / "data.jsonl").write_text("no JSON\n")
    options = TrainOptions(target=str(tiny_qwen3), folder=tmp_path / "run", data=(str(data),))
    with pytest.raises(ConfigError, match=r"mask_token_id: .* has no tokenizer .* does not occur in text"):
        train_drafter(options)
    with pytest.raises(ConfigError, match="mask_token_id=128: the target has the tokens 0 to 127"):
        train_drafter(replace(options, mask_token_id=128))
