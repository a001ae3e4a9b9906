"""A GGUF file's metadata becomes config.json as the model had it, or is refused by its key."""

from __future__ import annotations

import math
import tracemalloc
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType, GGUFWriter, RopeScalingType
from hypothesis import given, settings
from hypothesis import strategies as st
from manta.cluster.errors import CheckpointError
from manta.drafter.compute.checkpoint.gguf.architectures import config_of, generation_config_of
from manta.drafter.compute.checkpoint.gguf.gguf_file import GgufFile
from manta.drafter.compute.checkpoint.gguf.gguf_folder import GgufFolder

KEYS: dict[str, Any] = {  # Any: values of metadata
    "block_count": 1,
    "context_length": 4096,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 8,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 500000.0,
}
TYPES = {int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}
TYPES[bool] = GGUFValueType.BOOL


def opened(
    folder: Path,
    architecture: str = "llama",
    *,
    factors: list[float] | None = None,
    tokens: int = 16,
    whole: dict[str, Any] | None = None,
    **changes: Any,
) -> GgufFile:
    """Return a file with an embedding of 16 rows. None removes a key; two underscores are a dot."""
    writer = GGUFWriter(folder / "model.gguf", architecture)
    stated = KEYS | {key.replace("__", "."): value for key, value in changes.items()}
    keys = {f"{architecture}.{key}": value for key, value in stated.items()} | (whole or {})
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_key_value(key, value, TYPES[type(value)])
    writer.add_token_list([f"t{i}" for i in range(tokens)])
    writer.add_tensor("token_embd.weight", np.zeros((16, 64), np.float16))
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(folder / "model.gguf")


def llama3_factors(
    theta: float, dim: int, factor: float, low: float, high: float, length: int
) -> list[float]:
    """Factors of frequencies, as the publisher's own code has them."""
    found: list[float] = []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * theta ** (i / dim)
        smooth = (length / wavelength - low) / (high - low)
        found.append(1 / (1 / factor + (1 - 1 / factor) * min(max(smooth, 0.0), 1.0)))
    return found


def test_plain_values_are_those_that_were_written(tmp_path: Path) -> None:
    config = config_of(opened(tmp_path, whole={"tokenizer.ggml.bos_token_id": 3}))
    assert config["rms_norm_eps"] == 1e-5 and config["rope_parameters"]["rope_theta"] == 5e5
    assert (config["head_dim"], config["vocab_size"], config["tie_word_embeddings"]) == (8, 16, True)
    assert config["bos_token_id"] == 3 and "eos_token_id" not in config
    assert config["dtype"] == "bfloat16"


def test_end_tokens_and_sampling_are_those_of_the_file(tmp_path: Path) -> None:
    ids = {
        "tokenizer.ggml.eos_token_id": 5,
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.eom_token_id": 5,
    }
    stated = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.top_p": 0.95}
    found = generation_config_of(opened(tmp_path, whole=ids | stated))
    assert found == {
        "eos_token_id": [5, 7],
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    }


@settings(max_examples=60, deadline=None)
@given(
    theta=st.sampled_from([1e4, 5e5, 1e6]),
    factor=st.sampled_from([2.0, 8.0, 32.0]),
    ratio=st.sampled_from([2.0, 3.5, 4.0, 16.0]),
    length=st.integers(512, 32768),  # some wavelengths are longer
)
def test_llama_3_scaling_is_found_from_its_factors(
    theta: float, factor: float, ratio: float, length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    factors = llama3_factors(theta, 128, factor, 1.0, ratio, length)
    keys = {"attention__key_length": 128, "attention__value_length": 128, "rope__freq_base": theta}
    rope = config_of(opened(tmp_path_factory.mktemp("rope"), factors=factors, **keys))["rope_parameters"]
    assert rope["rope_type"] == "llama3" and rope["rope_theta"] == theta
    high, low = rope["high_freq_factor"], rope["low_freq_factor"]
    found = llama3_factors(theta, 128, rope["factor"], low, high, rope["original_max_position_embeddings"])
    assert np.allclose(found, factors, rtol=2e-5)


def test_yarn_and_linear_scaling_are_read(tmp_path: Path) -> None:
    linear = {"rope__scaling__type": RopeScalingType.LINEAR.value, "rope__scaling__factor": 4.0}
    assert config_of(opened(tmp_path, **linear))["rope_parameters"] == {
        **{"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}
    }
    yarn = linear | {"rope__scaling__type": "yarn", "rope__scaling__original_context_length": 1024}
    found = config_of(opened(tmp_path, **yarn, rope__scaling__yarn_beta_fast=16.0))["rope_parameters"]
    assert (found["original_max_position_embeddings"], found["beta_fast"]) == (1024, 16.0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"block_count": None}, r"llama\.block_count is missing; it must be a positive integer"),
        ({"block_count": 2**32 - 1}, r"llama\.block_count=4294967295 must be at most the number of tensors"),
        ({"block_count": "3"}, r"llama\.block_count='3' must be a positive integer"),
        ({"attention__head_count": [8, 8, 4]}, r"attention\.head_count=array.* must be a positive"),
        ({"rope__freq_base": True}, r"llama\.rope\.freq_base=True must be a number"),
        ({"rope__freq_base": math.nan}, r"llama\.rope\.freq_base=nan must be a number"),
        ({"rope__scaling__type": "longrope"}, r"rope\.scaling\.type='longrope' must be none, linear or yarn"),
        ({"attention__value_length": 4}, r"attention\.value_length=4 must be 8, as attention\.key_length"),
        ({"attention__causal": False}, r"attention\.causal=False must be true"),
        ({"expert_count": 8}, r"llama\.expert_count=8 must be 0 or absent: Mixtral is not supported"),
        ({"nextn_predict_layers": 1}, r"llama\.nextn_predict_layers=1 must be less than block_count"),
        ({"tokens": 15}, r"has 15 tokens in tokenizer\.ggml\.tokens, but 16 rows of token_embd\.weight"),
        ({"factors": [1.0, 2.0, 3.0]}, r"rope_freqs\.weight has 3 factors for 8 rotated dimensions"),
        ({"factors": [1.0, 2.0, 1.0, 8.0]}, r"rope_freqs\.weight holds other factors than those of Llama 3"),
        ({"architecture": "mamba2"}, r"general\.architecture='mamba2' must be one of llama, qwen2,"),
        ({"architecture": "deepseek2", "rope__dimension_count": 4, "attention__key_length": 8,
          "attention__value_length": 8}, r"deepseek2\.expert_gating_func=0 must be 2, a sigmoid"),
        ({"architecture": "gemma4"}, r"gemma4\.attention\.sliding_window_pattern is missing"),
    ],
)  # fmt: skip
def test_what_config_json_cannot_say_is_refused_by_its_key(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        config_of(opened(tmp_path, **changes))
    assert "\n" not in caught.value.message


@cache
def small(architecture: str) -> bytes:
    """A file with most of the keys that any architecture has."""
    more = {
        f"attention__{name}": 8 for name in ("key_length", "value_length", "key_length_swa", "kv_lora_rank")
    }
    more |= {
        "expert_count": 0,
        "expert_used_count": 1,
        "expert_feed_forward_length": 8,
        "leading_dense_block_count": 1,
    }
    more |= {
        f"ssm__{name}": 2
        for name in ("time_step_rank", "group_count", "state_size", "inner_size", "conv_kernel")
    }
    more |= {"attention__sliding_window": 4, "rope__dimension_count": 8, "expert_gating_func": 2}
    with TemporaryDirectory() as folder:
        return opened(Path(folder), architecture, factors=[1.0] * 4, **more).path.read_bytes()


@settings(max_examples=200, deadline=None)
@given(
    architecture=st.sampled_from(["llama", "gemma3", "gemma4", "deepseek2", "qwen35", "gpt-oss", "qwen3moe"]),
    at=st.integers(0, 2**12),
    by=st.sampled_from([0, 1, 3, 255, 2**31, 2**32 - 1]).map(lambda n: n.to_bytes(4, "little")),
)
def test_damaged_metadata_is_an_error_of_checkpoints_and_takes_no_time(
    architecture: str, at: int, by: bytes
) -> None:
    content = small(architecture)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        path.write_bytes(content[:at] + by + content[at + len(by) :])
        tracemalloc.start()
        try:
            file = GgufFile(path)
            config_of(file)
            generation_config_of(file)
            GgufFolder(folder, file)
        except CheckpointError as error:
            assert "\n" not in error.message
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    assert peak < 1_000_000
