"""Pairs that cannot work, or work badly: each is the shipped pair with one change.

A line: its name, what is changed, what `manta drafter validate` calls it, and words of what it says.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from manta.jobs.drafters.common.format_conversion import convert_drafter
from safetensors.torch import load_file, save_file

from support.paths import MODELS

TARGET, DRAFTER = MODELS / "target", MODELS / "drafter"
Tensors = dict[str, torch.Tensor]


def copied(pair: Path) -> Path:
    """A folder with target/ and drafter/, whose files are links that can be replaced."""
    for source, name in ((TARGET, "target"), (DRAFTER, "drafter")):
        (pair / name).mkdir(parents=True)
        for file in source.iterdir():
            (pair / name / file.name).symlink_to(file)
    return pair


@dataclass(frozen=True)
class Broken:
    """One broken pair; `change` gets the pair's folder."""

    name: str
    change: Callable[[Path], None]
    what: str
    words: str
    fatal: bool = True


def edit(file: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    """Change a JSON file of the pair."""

    def apply(pair: Path) -> None:
        value = json.loads((pair / file).read_text())
        change(value)
        write(pair / file, json.dumps(value).encode())

    return apply


def write(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def config(**keys: object) -> Callable[[Path], None]:
    return edit("drafter/config.json", lambda raw: raw.update(keys))


def dflash(**keys: object) -> Callable[[Path], None]:
    return edit("drafter/config.json", lambda raw: raw["dflash_config"].update(keys))


def target(**keys: object) -> Callable[[Path], None]:
    return edit("target/config.json", lambda raw: raw.update(keys))


def tensors(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    def apply(pair: Path) -> None:
        found = load_file(pair / "drafter/model.safetensors")
        change(found)
        (pair / "drafter/model.safetensors").unlink()
        save_file(found, pair / "drafter/model.safetensors")

    return apply


def speculators(**keys: object) -> Callable[[Path], None]:
    """The drafter in Speculators' format, with changed keys."""

    def apply(pair: Path) -> None:
        convert_drafter(str(pair / "drafter"), str(pair / "target"), "speculators", pair / "other")
        shutil.rmtree(pair / "drafter")
        (pair / "other").rename(pair / "drafter")
        config(**keys)(pair)

    return apply


def with_tokenizer(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """The drafter has its own tokenizer: the target's with a change."""

    def apply(pair: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(TARGET / name, pair / "drafter" / name)
        edit("drafter/tokenizer.json", change)(pair)

    return apply


def with_template(pair: Path) -> None:
    with_tokenizer(lambda raw: None)(pair)
    edit("drafter/tokenizer_config.json", lambda raw: raw.update(chat_template="{{ messages }} /think"))(pair)


def swap_two_tokens(raw: Any) -> None:
    vocab = raw["model"]["vocab"]
    one, other = sorted(vocab)[:2]
    vocab[one], vocab[other] = vocab[other], vocab[one]


def prefixed(found: Tensors) -> None:
    for name in list(found):
        found[f"model.{name}"] = found.pop(name)


def cut(pair: Path) -> None:
    write(pair / "drafter/model.safetensors", (DRAFTER / "model.safetensors").read_bytes()[:1000])


def missing_shard(pair: Path) -> None:
    whole = pair / "drafter/model.safetensors"  # which goes before shards
    whole.rename(whole.with_name("model-00001-of-00002.safetensors"))
    index = {"weight_map": {"fc.weight": "model-00002-of-00002.safetensors"}}
    write(pair / "drafter/model.safetensors.index.json", json.dumps(index).encode())


ROPE = {"rope_type": "linear", "factor": 4.0}
VERIFIER = {"verifier": {"name_or_path": "x/y", "architectures": ["LlamaForCausalLM"]}}
GATE = "layers.1.mlp.gate_proj.weight"
TAPS = "dflash_config.target_layer_ids"
PROJECTOR = "dflash_config.projector_type"
FIRST_GATE = "layers.0.mlp.gate_proj.weight"
QUARK = {"quant_method": "quark"}
MAMBA, HEAD = ["MambaForCausalLM"], ["LlamaForCausalLMEagle3"]
ONE_LESS = config(num_hidden_layers=3, layer_types=None)
ONE_HIGHER = r"each is one higher: write \[2, 5, 9, 13, 16\]"


def without_weights(pair: Path) -> None:
    (pair / "drafter/model.safetensors").unlink()


def cut_config(pair: Path) -> None:
    write(pair / "drafter/config.json", b'{"a')


def one_row_less(pair: Path) -> None:
    target(vocab_size=4095)(pair)
    config(vocab_size=4095)(pair)


def in_half(found: Tensors) -> None:
    found.update({name: tensor.half() for name, tensor in found.items()})


def in_fp8(found: Tensors) -> None:
    found[GATE] = found[GATE].to(torch.float8_e4m3fn)


def without_a_row(found: Tensors) -> None:
    found[GATE] = found[GATE][:-1].clone()


def with_rows(name: str) -> Callable[[Tensors], None]:
    """A tensor of eight rows."""
    return lambda found: found.update({f"{name}.weight": torch.zeros(8, 192)})


FATAL = [
    Broken("hidden size of another target", config(hidden_size=256), "hidden_size", "hidden_size 192"),
    Broken("states of another width", speculators(target_hidden_size=256), "target_hidden_size", "192"),
    Broken("a deeper target", config(num_target_layers=36), "num_target_layers", "hidden_layers 18"),
    Broken("a tap beyond the target", dflash(target_layer_ids=[1, 4, 8, 12, 18]), TAPS, "from 0 to 17"),
    Broken("a tap before the target", dflash(target_layer_ids=[-1, 4, 8, 12, 15]), TAPS, "from 0"),
    Broken("a tap twice", dflash(target_layer_ids=[1, 4, 8, 12, 12]), TAPS, "all different"),
    Broken(
        "fewer taps than fc has", dflash(target_layer_ids=[1, 8, 15]), "fc.weight", r"\[192, 960\].*192, 576"
    ),
    Broken("another vocabulary", config(vocab_size=8192), "vocab_size", "vocab_size 4096"),
    Broken("a mask beyond the vocabulary", dflash(mask_token_id=4096), "mask_token_id", "below the target's"),
    Broken("FP8 without scales", tensors(in_fp8), GATE, "config.json does not name"),
    Broken("a tensor missing", tensors(lambda t: t.pop(GATE)), GATE, "is missing"),
    Broken("a tensor of another size", tensors(without_a_row), GATE, r"\[511, 192\]"),
    Broken("a layer too many", ONE_LESS, "unused tensors", "11 unused tensors.*layers.3"),
    Broken("a prefix on every name", tensors(prefixed), "unused tensors", "Remove the prefix 'model.'"),
    Broken("another embedding", tensors(with_rows("embed_tokens")), "embed_tokens.weight", r"\[4096, 192\]"),
    Broken("another head", tensors(with_rows("lm_head")), "lm_head.weight", r"\[4096, 192\]"),
    Broken("another MLP", config(intermediate_size=768), FIRST_GATE, r"\[768, 192\]"),
    Broken("weights cut short", cut, "file", "corrupt or cut short"),
    Broken("a shard missing", missing_shard, "file", "although the index names it"),
    Broken("no weights", without_weights, "file", r"no \.safetensors"),
    Broken("config.json cut short", cut_config, "speculative_config.model", "cannot be read as JSON"),
    Broken("called an EAGLE-3 head", config(architectures=HEAD), "block_size", "must be absent"),
    Broken("no word of DFlash", config(dflash_config=None), "dflash_config", "is missing"),
    Broken("another projector", dflash(projector_type="domino"), PROJECTOR, "is not supported"),
    Broken("quark", config(quantization_config=QUARK), "quantization_config.quant_method", "others are not"),
    Broken("no room for a draft", config(block_size=1), "block_size", "from 2"),
    Broken("another target", target(architectures=MAMBA), "architectures", "others are not served"),
    Broken("another tokenizer", with_tokenizer(swap_two_tokens), "tokenizer", "differs from the target's"),
    Broken("a tokenizer larger than the embedding", one_row_less, "tokenizer", "4096 tokens, .* 4095 rows"),
]
WARNED = [
    Broken(
        "Speculators' ids of z-lab",
        dflash(target_layer_ids=[2, 5, 9, 13, 16]),
        "layer ids",
        "as Speculators counts",
    ),
    Broken("z-lab's ids", speculators(aux_hidden_state_layer_ids=[1, 4, 8, 12, 15]), "layer ids", ONE_HIGHER),
    Broken("taps out of order", dflash(target_layer_ids=[15, 12, 8, 4, 1]), "layer ids", "not ascending"),
    Broken("a mask that is a word", dflash(mask_token_id=300), "mask token in use", "ordinary text"),
    Broken("a mask of the template", dflash(mask_token_id=4093), "mask token in use", "chat template writes"),
    Broken("a mask that ends texts", dflash(mask_token_id=4094), "mask_token_id", "end-of-sequence token"),
    Broken("another theta", config(rope_theta=1e6), "rope", "theta 1e.06, .* default with theta 10000"),
    Broken("another rope", config(rope_scaling=ROPE), "rope", "is linear with theta"),
    Broken("fewer", config(max_position_embeddings=256), "max_position_embeddings", "256 positions"),
    Broken("another type", tensors(in_half), "dtype", "F16, the target's BF16"),
    Broken("for another class", speculators(speculators_config=VERIFIER), "verifier", "trained for Llama"),
    Broken("another template", with_template, "chat template", "thinking on or off"),
]
BROKEN = [*FATAL, *(replace(each, fatal=False) for each in WARNED)]
