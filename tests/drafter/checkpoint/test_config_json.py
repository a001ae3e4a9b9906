"""Reading config.json: strict types, one sentence per mistake, the text part of multimodal files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import pytest
from manta.cluster.errors import CheckpointError
from manta.drafter.compute.checkpoint.hf_config import (
    Count,
    HfConfig,
    Off,
    parse,
    read_json,
    text_config,
    wrong,
)
from pydantic import AliasChoices, Field, field_validator, model_validator


class Nested(HfConfig):
    mask: int
    ids: tuple[int, ...] = ()


class Config(HfConfig):
    heads: Count
    kv_heads: Count | None = None
    eps: float = 1e-6
    tied: bool = False
    act: Literal["silu", "gelu"] = "silu"
    experts: Count = Field(1, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    ends: int | tuple[int, ...] = ()
    model_type: str = ""
    sinks: Off = False
    factor: float = Field(1.0, ge=1)
    archs: tuple[str, ...] = Field(("A",), min_length=1)
    even: int = Field(2, description="even")
    nested: Nested | None = None

    @field_validator("even")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("must be even")
        return value

    @model_validator(mode="after")
    def _divides(self) -> Config:
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must be a divisor of heads ({self.heads})")
        return self


def read(**raw: object) -> Config:
    return parse(Config, {"heads": 4, **raw}, "config.json")


def test_null_is_absent_and_unknown_keys_are_ignored():
    nulls = dict.fromkeys(Config.model_fields, None) | {"heads": 4}
    assert parse(Config, nulls, "config.json") == read(architectures=["A"]) == parse(Config, {"heads": 4}, "")


def test_json_values_arrive_as_frozen_python_values():
    nested = {"mask": 7, "ids": []}
    config = read(heads=8.0, eps=1, ends=[1, 2.0], num_local_experts=3, sinks=0, nested=nested)
    assert (config.heads, config.eps, config.ends, config.experts) == (8, 1.0, (1, 2), 3)
    assert config.nested == Nested(mask=7)
    assert isinstance(config.heads, int)
    assert hash(config) == hash(config.model_copy())


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ({"heads": None}, "heads is missing; it must be a positive integer."),
        ({"heads": 0}, "heads=0 must be a positive integer."),
        ({"heads": True}, "heads=True must be a positive integer."),
        ({"heads": "4"}, "heads='4' must be a positive integer."),
        ({"heads": 4.5}, "heads=4.5 must be a positive integer."),
        ({"kv_heads": [2]}, "kv_heads=[2] must be a positive integer."),
        ({"kv_heads": 0}, "kv_heads=0 must be a positive integer."),
        ({"kv_heads": 3}, "kv_heads=3 must be a divisor of heads (4)."),
        ({"eps": "1e-6"}, "eps='1e-6' must be a number."),
        ({"eps": True}, "eps=True must be a number."),
        ({"eps": float("nan")}, "eps=nan must be a finite number."),
        ({"tied": 1}, "tied=1 must be true or false."),
        ({"act": "relu"}, "act='relu' must be 'silu' or 'gelu'."),
        ({"num_experts": -1}, "num_experts=-1 must be a positive integer."),
        ({"num_local_experts": 1.5}, "num_local_experts=1.5 must be a positive integer."),
        ({"ends": ["a"]}, "ends=['a'] must be an integer or a list of integers."),
        ({"model_type": 3}, "model_type=3 must be a string."),
        ({"sinks": True}, "sinks=True must be absent or false: not yet supported."),
        ({"factor": 0.5}, "factor=0.5 must be greater than or equal to 1."),
        ({"archs": []}, "archs=[] must be a list of strings."),
        ({"even": 3}, "even=3 must be even."),
        ({"nested": 3}, "nested=3 must be an object."),
        ({"nested": {}}, "nested.mask is missing; it must be an integer."),
        ({"nested": {"mask": 1, "ids": [1, True]}}, "nested.ids=[1, True] must be a list of integers."),
    ],
)
def test_a_mistake_gives_one_sentence_with_file_key_value_and_remedy(raw: dict, sentence: str):
    with pytest.raises(CheckpointError) as caught:
        read(**raw)
    assert caught.value.message == f"config.json: {sentence}"
    assert caught.value.param == re.split("[= ]", sentence)[0]
    assert caught.value.__cause__ is caught.value.__context__ is None


def test_a_long_value_is_truncated():
    assert len(wrong("config.json", "layer_types", ["full_attention"] * 90, "shorter").message) < 280


def test_the_text_config_inherits_common_keys():
    raw = {
        "architectures": ["Outer"],
        "torch_dtype": "bfloat16",
        "eos_token_id": [1, 106],
        "tie_word_embeddings": True,
        "quantization_config": {"bits": 4},
        "vision_config": {"hidden_size": 1},
        "text_config": {"hidden_size": 2, "eos_token_id": 7, "architectures": None, "dtype": "float16"},
    }
    assert text_config(raw) == {
        "architectures": ["Outer"],
        "tie_word_embeddings": True,
        "quantization_config": {"bits": 4},
        "hidden_size": 2,
        "eos_token_id": 7,
        "dtype": "float16",
    }
    assert text_config({**raw, "text_config": {"a": 1}})["torch_dtype"] == "bfloat16"
    assert text_config(raw["text_config"]) is raw["text_config"]


@pytest.mark.parametrize("param", ["model", "speculative_config.model"])
def test_files_that_cannot_be_read_name_the_setting(param: str, tmp_path: Path):
    assert read_json(tmp_path, "generation_config.json", param=param, required=False) == {}
    cases = {
        None: f"does not exist. Set `{param}`",
        "{": "cannot be read as JSON",
        "[]": "must hold a JSON object",
    }
    for text, words in cases.items():
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=words) as caught:
            read_json(tmp_path, param=param)
        assert caught.value.param == param
        assert str(tmp_path / "config.json") in caught.value.message
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        read_json(tmp_path, param=param)
