"""Published targets and drafters by the files other than weights: facts, folders, and results.

`data/published_corpus.json` holds keys and values of config.json, tokenizer_config.json and ModelOpt's
hf_quant_config.json with the source of each. An entry is written as the changes to another one that it is
`like`, which is of the corpus or of published_configs.json. Long lists and texts (templates) are left out.
`python -m support.published.corpus`, run in tests/, writes the table of docs/benchmarks/published-files.md,
which test_published_corpus.py compares.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from manta.actors.targets.families import FAMILIES
from manta.actors.targets.loading.resolved_config import ResolvedConfig, resolve_config
from manta.cluster.config import EngineConfig
from manta.cluster.errors import CheckpointError

from support.paths import DATA, ROOT
from support.published.published import CONFIGS, replace_between

PAGE = ROOT / "docs" / "benchmarks" / "published-files.md"
CORPUS = json.loads((DATA / "published_corpus.json").read_text(encoding="utf-8"))
ENTRIES: dict[str, dict[str, Any]] = {**CORPUS["targets"], **CORPUS["drafters"]}

# Sizes that replace the published ones, if a config.json has the key.
SMALL = {
    **{"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rotary_dim": 16},
    **{"global_head_dim": 32, "num_global_key_value_heads": 1, "max_position_embeddings": 512},
    **{"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2},
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16},
    **{"qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 16, "shared_expert_intermediate_size": 64, "draft_vocab_size": 64},
    "num_target_layers": 4,
}
TAPS = ("target_layer_ids", "eagle_aux_hidden_state_layer_ids")
SMALL_TAPS = [0, 1, 2]


def config_of(name: str) -> dict[str, Any]:
    """config.json of an entry, with the published sizes."""
    if name not in ENTRIES:
        return CONFIGS[name]
    entry = ENTRIES[name]
    base = config_of(entry["like"]) if "like" in entry else {}
    return _changed(base, entry["config"], set(entry.get("without", ())))


def _changed(base: Mapping[str, Any], changes: Mapping[str, Any], without: set[str]) -> dict[str, Any]:
    made = {key: value for key, value in base.items() if key not in without}
    for key, value in changes.items():
        if isinstance(value, Mapping) and "cycle" in value:
            cycle = value["cycle"]
            made[key] = [cycle[at % len(cycle)] for at in range(value["length"])]
        elif isinstance(value, Mapping):
            inner = {path.removeprefix(f"{key}.") for path in without}
            made[key] = _changed(base.get(key) or {}, value, inner)
        else:
            made[key] = value
    return made


def write(name: str, folder: Path, *, small: bool) -> Path:
    """A folder with an entry's files; the tokenizer has its named tokens and no others."""
    entry, config = ENTRIES[name], config_of(name)
    files = {"config": cut(config) if small else config, "hf_quant_config": entry.get("hf_quant_config")}
    if (tokenizer := tokenizer_of(name)) is not None:
        added = [
            {"id": token_id, "content": text, "special": True, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            for text, token_id in tokenizer["tokens"].items()
        ]
        model = {"type": "WordLevel", "vocab": {"<unk>": 0, **tokenizer["tokens"]}, "unk_token": "<unk>"}
        bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        parts = {"pre_tokenizer": bytewise, "decoder": bytewise, "model": model}
        files["tokenizer"] = {"version": "1.0", "added_tokens": added, **parts}
        files["tokenizer_config"] = tokenizer["tokenizer_config"]
    folder.mkdir()
    for file, content in files.items():
        if content is not None:
            (folder / f"{file}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def tokenizer_of(name: str) -> dict[str, Any] | None:
    entry = ENTRIES.get(name, {})
    if "tokenizer" in entry:
        return CORPUS["tokenizers"][entry["tokenizer"]]
    return tokenizer_of(entry["like"]) if "like" in entry else None


def cut(raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with small sizes, first entries of lists by layer, and the first taps."""
    if "text_config" in raw:
        return {**raw, "text_config": cut(raw["text_config"])}
    small: dict[str, Any] = {key: value for key, value in SMALL.items() if raw.get(key)}
    depth = raw["num_hidden_layers"]
    small["num_hidden_layers"] = min(depth, small["num_hidden_layers"])
    for key, value in raw.items():
        if key in TAPS:
            small[key] = SMALL_TAPS
        elif isinstance(value, list) and len(value) == depth:
            small[key] = value[: small["num_hidden_layers"]]
        elif isinstance(value, dict):
            small[key] = {inner: SMALL_TAPS if inner in TAPS else each for inner, each in value.items()}
    return {**raw, **small}


def settings(name: str, folder: Path, *, small: bool = False) -> EngineConfig:
    """The config of an engine that runs an entry with random weights, a drafter with its target."""
    entry = ENTRIES[name]
    target = entry.get("target", name)
    made: dict[str, Any] = {
        **{"model": str(write(target, folder / "target", small=small)), "load_format": "dummy"},
        "device": "cpu",
        **{"skip_tokenizer_init": tokenizer_of(target) is None, "dtype": "float32", "num_threads": 1},
    }
    if small:
        made |= {"max_num_seqs": 1, "num_pages": 32, "max_model_len": 64}
        made["max_num_batched_tokens"] = 16
    if "target" in entry:
        drafter: dict[str, Any] = {"model": str(write(name, folder / "drafter", small=small))}
        drafter |= {"method": entry["method"]} if "method" in entry else {}
        made["speculative_config"] = drafter
    return EngineConfig.from_dict(made)


@cache
def plan_of(name: str) -> ResolvedConfig | str:
    """Return the plan for an entry in its published sizes, or the message that refuses it."""
    with TemporaryDirectory() as folder:
        try:
            return resolve_config(settings(name, Path(folder)))
        except CheckpointError as error:
            return error.message.replace(f"{folder}/", "")


def table() -> Iterator[str]:
    yield "| published | class | result |"
    yield "|---|---|---|"
    for name, entry in ENTRIES.items():
        planned = plan_of(name)
        (kind,) = config_of(name)["architectures"]
        if isinstance(planned, str):
            reported = f"refused: {_shortened(planned)}"
        elif "target" in entry:
            reported = f"drafts for {entry['target']}"
        else:
            file = FAMILIES[planned.target.architecture].__module__.rpartition(".")[2]
            reported = f"served: [{file}.py](../../actors/targets/families/{file}.py)"
            if planned.target.quantization is not None:
                reported += f", {planned.target.quantization}"
        yield f"| {name} | `{kind}` | {reported} |"


def _shortened(refusal: str) -> str:
    """The message without its file, its value, and the list of valid ones."""
    reported = refusal.partition("/")[2].removeprefix("config.json: ")
    reported = re.sub(r"one of (\w+, )+\w+[:;]? ?", "a known one; ", reported)
    return re.sub(r"^(quantization_config)=.*? must", r"\1 must", reported).replace("|", "\\|")


BEGIN, END = "<!-- written by tests/support/published/corpus.py -->", "<!-- to here: corpus.py -->"


def with_table(text: str) -> str:
    """The guide with this table written again."""
    return replace_between(text, BEGIN, END, table())


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"written: {PAGE}\n")
