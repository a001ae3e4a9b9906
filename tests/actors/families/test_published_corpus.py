"""Published files load, or are refused with a clear sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from manta import LLM, SamplingParams
from manta.actors.targets.families import FAMILIES, read_model
from manta.actors.targets.loading.operator_factory import kept_codes
from manta.actors.targets.loading.rank_loader import Checkpoints
from manta.actors.targets.loading.resolved_config import resolve_config
from manta.actors.targets.model.tensor_parallel import Sharding
from manta.actors.targets.model.weights import target_shapes
from manta.cluster.config import EngineConfig
from manta.drafter.compute.checkpoint.dummy_weights import RandomTensors
from manta.drafter.compute.checkpoint.quantization.awq import AWQ
from manta.drafter.compute.checkpoint.quantization.eight_bit import EightBit
from manta.drafter.compute.checkpoint.quantization.fp4 import CompressedNvfp4, ModelOptNvfp4, Mxfp4Linear
from manta.drafter.compute.checkpoint.quantization.gptq import GPTQ
from manta.drafter.compute.checkpoint.quantization.packed_integers import PackedIntegers
from manta.drafter.compute.checkpoint.quantization.scheme import Scheme
from manta.drafter.compute.checkpoint.quantized_matrix import QuantizedMatrix
from safetensors.torch import save_file
from support.oracles.quantized_checkpoints import Encoder, awq, fp8, gptq, mxfp4, nvfp4, packed
from support.published.corpus import (
    CORPUS,
    ENTRIES,
    PAGE,
    config_of,
    plan_of,
    settings,
    tokenizer_of,
    with_table,
    write,
)

# Sizes that groups of 128 inputs divide.
_SIZES = {
    **dict.fromkeys(("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 128),
    **{"intermediate_size": 256, "vocab_size": 512, "eos_token_id": 1},
    **dict.fromkeys(("v_head_dim", "swa_v_head_dim", "linear_value_head_dim"), 32),
}


def write_packed(name: str, folder: Path) -> Path:
    """Write an entry of the corpus with small sizes and weights."""
    write(name, folder, small=True)
    file = folder / "config.json"
    file.write_text(json.dumps(_resized(json.loads(file.read_text()))))
    spec = read_model(folder)
    assert spec.quantization is not None, "a quantized checkpoint"
    body = "model.language_model." if spec.architecture.endswith("ForConditionalGeneration") else "model."
    random, shapes, tensors = np.random.default_rng(0), target_shapes(spec), dict[str, torch.Tensor]()
    plain = RandomTensors(shapes, torch.bfloat16, torch.device("cpu"))
    for ours, shape in shapes.items():
        stored = body + ours.removeprefix("model.") if ours.startswith("model.") else ours
        module = stored.removesuffix(".weight")
        scheme = (
            spec.quantization.scheme_of(module) if stored.endswith(".weight") and len(shape) == 2 else None
        )
        if scheme is None or "embed_tokens" in stored or stored.endswith(".gate.weight"):
            tensors[stored] = plain.get(ours)
            continue
        matrix = encoder_of(scheme)(random, *shape)
        tensors |= {f"{module}.{part}": tensor.clone() for part, tensor in matrix.tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _resized(raw: dict[str, Any]) -> dict[str, Any]:
    if "text_config" in raw:
        return {**raw, "text_config": _resized(raw["text_config"])}
    return {**raw, **{key: size for key, size in _SIZES.items() if key in raw}}


def encoder_of(scheme: Scheme) -> Encoder:
    match scheme:
        case EightBit(code="F8_E4M3", block=None, granularity="channel"):
            return fp8("weight_scale", lambda o, i: (o, 1), lambda o, i: (o, 0))
        case EightBit(code="F8_E4M3", block=None):
            return fp8("weight_scale", lambda o, i: (), lambda o, i: ())
        case EightBit(code="F8_E4M3", block=(rows, columns)):
            return fp8(
                "weight_scale_inv",
                lambda o, i: (-(-o // rows), -(-i // columns)),
                lambda o, i: (o // rows, i // columns),
            )
        case PackedIntegers(packing=packing, bits=bits, group=group, act_order=act_order):
            if packing == AWQ:
                return awq(group)
            if packing == GPTQ:
                return gptq(bits, group, offset=scheme.zero_offset, act_order=act_order)
            return packed(bits, group, symmetric=scheme.symmetric, act_order=act_order)
        case ModelOptNvfp4() | CompressedNvfp4():
            return nvfp4(compressed=isinstance(scheme, CompressedNvfp4))
        case Mxfp4Linear():
            return mxfp4
    raise AssertionError(f"no encoder for {scheme}")


SERVED = [name for name, entry in ENTRIES.items() if "refused" not in entry]


def _one_of_each(names: list[str]) -> list[str]:
    found: dict[object, str] = {}
    for name in names:
        found.setdefault((config_of(name)["architectures"][0], ENTRIES[name].get("method")), name)
    return list(found.values())


# Loops of these shapes are compiled for none of the others.
COMPILED = {"XiaomiMiMo/MiMo-V2-Flash", "MiniMaxAI/MiniMax-M2.5"}
QUICK = {*_one_of_each(SERVED)} - COMPILED
EACH = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SERVED]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ENTRIES)
def test_a_published_config_is_planned_or_refused_with_a_sentence(name: str) -> None:
    entry, planned = ENTRIES[name], plan_of(name)
    if isinstance(planned, str):
        assert "refused" in entry, planned
        assert re.search(entry["refused"], planned), planned
        assert planned.endswith(".") and "\n" not in planned
        return
    assert "refused" not in entry
    assert planned.target.architecture in FAMILIES and planned.doubts == ()
    own = config_of(entry.get("target", name))
    own = {**own, **own.get("text_config", {})}.get("eos_token_id", [])
    ends = {*own} if isinstance(own, list) else {own}
    tokenizer = tokenizer_of(entry.get("target", name))
    assert {*planned.target.eos_token_ids} == ends | ({tokenizer["end"]} if tokenizer else set())


@pytest.mark.parametrize("name", EACH)
@pytest.mark.one_in(2)
def test_a_published_config_runs_with_random_weights_and_reduced_sizes(name: str, tmp_path: Path) -> None:
    config = settings(name, tmp_path, small=True)
    with LLM(**{field: getattr(config, field) for field in config.__dataclass_fields__}) as llm:
        prompt = {"prompt_token_ids": [1, 2, 3]}
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3


def _is_quantized(name: str) -> bool:
    planned = plan_of(name)
    return not isinstance(planned, str) and planned.target.quantization is not None


@pytest.mark.parametrize("name", CORPUS["targets"])
def test_weights_in_the_declared_form_are_read_as_codes(name: str, tmp_path: Path) -> None:
    """Small ones, with all keys of the published files; `manta plan` counts what is kept as codes."""
    if not _is_quantized(name):
        pytest.skip("not quantized, or refused")
    folder = write_packed(name, tmp_path / "target")
    fixed = {"dtype": "bfloat16", "device": "cpu", "skip_tokenizer_init": True, "max_model_len": 64}
    plan = resolve_config(EngineConfig.from_dict({"model": str(folder), **fixed}))
    spec = plan.target
    assert spec.quantization is not None and kept_codes(plan)
    weights = Checkpoints().target(plan, Sharding(spec, 0, 1))
    body, kept = weights._prefixes[0], 0
    for layer in range(spec.num_layers):
        parts = weights.layer(layer)
        rule = spec.tensors["delta_out" if parts.delta is not None else "o"]
        module = f"{body}{rule.name.format(layer=layer)}".removesuffix(".weight")
        is_packed = isinstance(parts.o_HO, QuantizedMatrix)
        assert is_packed == (spec.quantization.packed_form(module) is not None)
        kept += is_packed
    assert kept or any(layer.routed for layer in spec.layers), "some have quantized experts alone"


def test_the_corpus_is_large_and_every_fact_has_a_source() -> None:
    assert len(ENTRIES) >= 60 and len(CORPUS["drafters"]) >= 10
    assert {entry["source"] for entry in ENTRIES.values()} == {*CORPUS["sources"]}
    assert all(tokenizer["source"] for tokenizer in CORPUS["tokenizers"].values())


def test_the_guides_table_lists_each_config() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_table(text) == text, "write it anew: python -m support.published.corpus, in tests/"
