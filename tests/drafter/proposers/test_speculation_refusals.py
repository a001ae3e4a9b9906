"""Settings of speculation that a method does not have, or that cannot be, are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from manta.cluster.config import SpeculativeConfig
from manta.cluster.errors import ConfigError

CACHED = "suffix_decoding_max_cached_requests"
DFLASH, EAGLE3 = {"model": "m"}, {"method": "eagle3", "model": "m"}
MTP, ASSISTANT, SUFFIX = {"method": "mtp"}, {"method": "mtp", "model": "m"}, {"method": "suffix"}
SPLIT = {"model": "m", "placement": "split"}
NEVER = "is not supported with method"
# The method's settings, the setting that is wrong, its value, and words.
REFUSED: list[tuple[dict[str, Any], str, Any, str]] = [
    (SPLIT, "suffix_drafts", True, "placement"),
    (DFLASH, CACHED, 3, "no use"),
    (DFLASH, "draft_window", -1, "draft_window=-1 must be an integer of at least 0"),
    *((DFLASH, "input_embedding_scale", value, "must be a positive number") for value in (0, -1.0, True)),
    *((DFLASH, "input_embedding_scale", value, "must be a positive number") for value in ("a", float("inf"))),
    (EAGLE3, "placement", "split", NEVER),
    (EAGLE3, "placement", "shared", NEVER),
    (EAGLE3, "input_embedding_scale", 2.0, NEVER),
    (EAGLE3, "prompt_lookup_max", 3, NEVER),
    (MTP, "quantization", "int8", NEVER),
    (ASSISTANT, "tree_width", 2, NEVER),
    (ASSISTANT, "placement", "split", NEVER),
    (SUFFIX, "model", "m", NEVER),
    (SUFFIX, "suffix_drafts", True, NEVER),
    (SUFFIX, "draft_window", 64, NEVER),
    (SUFFIX, CACHED, -1, "at least 0"),
]


@pytest.mark.parametrize(("method", "name", "value", "words"), REFUSED)
def test_settings_without_use_are_refused(method: dict[str, Any], name: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        SpeculativeConfig(**method, **{name: value})
    assert refused.value.param == f"speculative_config.{name}"


def test_settings_of_a_drafters_file_are_those_of_an_assistant_too() -> None:
    spec = SpeculativeConfig(**ASSISTANT, hf_overrides={}, quantization="int8")
    assert spec.has_model and spec.drafter == "m"
    assert SpeculativeConfig(**MTP, suffix_drafts=True).copies_suffixes
