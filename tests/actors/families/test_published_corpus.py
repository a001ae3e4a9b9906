"""Published files load, or are refused with a clear sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from manta import LLM, SamplingParams
from manta.actors.targets.families import FAMILIES
from manta.actors.targets.loading.load_plan import plan_load
from manta.actors.targets.loading.operator_factory import keeps_codes
from manta.actors.targets.loading.rank_loader import Checkpoints
from manta.actors.targets.model.tensor_parallel import Sharding
from manta.cluster.config import EngineConfig
from manta.drafter.compute.checkpoint.quantized_matrix import QuantizedMatrix
from support.published.corpus import CORPUS, ENTRIES, config_of, plan_of, settings, tokenizer_of, with_table
from support.published.packed_weights import write_packed
from support.published.published import GUIDE

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
    plan = plan_load(EngineConfig.from_dict({"model": str(folder), **fixed}))
    spec = plan.target
    assert spec.quantization is not None and keeps_codes(plan)
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
    text = GUIDE.read_text(encoding="utf-8")
    assert with_table(text) == text, "write it anew: python -m support.published.corpus, in tests/"
