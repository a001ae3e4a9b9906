"""User errors in checkpoints and settings: the error names the field and the remedy."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from manta.actors.checkpoints.checkpoint_paths import resolve_checkpoint
from manta.actors.targets.loading import backend_selection as backends
from manta.actors.targets.loading import cpu_autotune, rank_loader
from manta.actors.targets.loading import memory_budget as memory
from manta.actors.targets.loading import warmup as warm_up
from manta.actors.targets.loading.rank_loader import load_runner, resolve_config
from manta.actors.targets.model.weights import TargetWeights
from manta.actors.targets.runners.cpu_runner import CpuModelRunner
from manta.actors.targets.runners.runner_interface import Runner
from manta.cluster.errors import CheckpointError, ConfigError
from manta.cluster.step.dummy_steps import dummy_step
from manta.cluster.step.scheduler_output import SchedulerOutput
from manta.drafter.compute.cpu_fused import backend as compiled_backend
from manta.drafter.compute.cpu_numba.cpu_features import Instructions
from support.checkpoints.tiny import TINY_BLOCK, TINY_VOCAB, changed, make_tiny_drafter, make_tiny_target
from support.engines.devices import record_captures
from support.engines.steps import settings, short_warm_up


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(TargetWeights, "part", refuse)


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "architectures.*GemmaForCausalLM.*Qwen3ForCausalLM"),
        ({"architectures": None}, "architectures"),
        ({"hidden_size": "64"}, "hidden_size='64' must be a positive integer"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing; it must be a positive integer"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers=1000000 must be a positive integer up to 1024"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads=3 must be a divisor of num_attention_heads \(4\)"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method='hqq'.*use the unquantized"),
        ({"quantization_config": {"quant_method": "awq"}}, "says awq: AWQ INT4.*but no matrix is stored so"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type='dynamic'.*others are not supported"),
        ({"num_hidden_layers": 5}, "tensor model.layers.4.input_layernorm.weight is missing"),
        ({"vocab_size": 200}, r"model.embed_tokens.weight has shape \[128, 64\].*\[200, 64\]"),
        ({"attention_bias": True}, "self_attn.q_proj.bias is missing"),
        ({"tie_word_embeddings": False}, "lm_head.weight is missing"),
    ],
)
def test_an_unsupported_target_is_refused(
    tiny_qwen3: Path, tmp_path: Path, changes: dict, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_runner(settings(changed(tiny_qwen3, tmp_path / "copy", **changes)))


@pytest.mark.usefixtures("nothing_loads")
def test_a_context_that_cannot_fit_is_refused_before_anything_is_allocated(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    long = changed(tiny_qwen3, tmp_path / "copy", max_position_embeddings=10**9)
    with pytest.raises(ConfigError, match=r"max_model_len=16777216 needs .* bytes of K/V pages"):
        load_runner(settings(long, max_model_len=None))


@pytest.mark.usefixtures("nothing_loads")
def test_a_drafter_that_does_not_fit_is_refused(tiny_qwen3: Path, tiny_drafter: Path, tmp_path: Path) -> None:
    narrow = changed(tiny_drafter, tmp_path / "narrow", hidden_size=32)
    with pytest.raises(CheckpointError, match="hidden_size=32 must be the target's hidden_size 64"):
        load_runner(settings(tiny_qwen3, narrow))


@pytest.mark.parametrize("field", ["model", "speculative_config.model"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/nowhere/at all", "there is no such folder, and it is not a hub id"),
        ("nobody/no-such-model", "the hub does not provide it.*connection"),
        ("../nowhere", "not a hub id"),
    ],
)
def test_a_missing_checkpoint_is_named_with_its_field(
    tiny_qwen3: Path, field: str, name: str, message: str
) -> None:
    config = settings(Path(name)) if field == "model" else settings(tiny_qwen3, Path(name))
    with pytest.raises(CheckpointError, match=message) as caught:
        resolve_config(config)
    assert caught.value.param == field
    assert field in caught.value.message and name in caught.value.message


def test_a_folder_of_the_repository_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (resolve_checkpoint("models/target", field="model") / "tokenizer.json").is_file()
    (tmp_path / "models" / "target").mkdir(parents=True)
    assert resolve_checkpoint("models/target", field="model") == tmp_path / "models" / "target"


def test_an_empty_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not exist.*Set `model`"):
        resolve_config(settings(tmp_path))


@pytest.mark.parametrize("damage", ["cut short", "not safetensors", "missing", "shard missing"])
@pytest.mark.parametrize("which", ["target", "drafter"])
def test_damaged_weights_name_their_file(
    tiny_qwen3: Path, tiny_drafter: Path, tmp_path: Path, damage: str, which: str
) -> None:
    copy = changed(tiny_qwen3 if which == "target" else tiny_drafter, tmp_path / "copy")
    file = copy / "model.safetensors"
    if damage == "cut short":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "not safetensors":
        file.write_bytes(b"\x10" * 4096)
    else:
        file.unlink()
    if damage == "shard missing":
        index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
        (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    config = settings(copy) if which == "target" else settings(tiny_qwen3, copy)
    with pytest.raises(CheckpointError, match=r"copy.*(corrupt|missing|no \.safetensors)"):
        load_runner(config)


def test_sharded_files_load_as_one(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    whole = make_tiny_target(tmp_path / "whole", "llama")
    AutoModelForCausalLM.from_pretrained(whole).save_pretrained(tmp_path / "parts", max_shard_size="100KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    runners = [load_runner(settings(folder))[0] for folder in (whole, tmp_path / "parts")]
    ids = torch.arange(20)
    with torch.inference_mode():
        states = [r.model.logits(r.model.shared_embeddings.embed(ids)) for r in runners]
    assert torch.equal(*states)


def test_a_tokenizer_of_another_model_is_refused(tiny_qwen3: Path, shipped_pair: tuple[Path, Path]) -> None:
    config = settings(tiny_qwen3, skip_tokenizer_init=False, tokenizer=str(shipped_pair[0]))
    with pytest.raises(CheckpointError, match=rf"token ids up to \d+.*vocab_size is {TINY_VOCAB}") as caught:
        resolve_config(config)
    assert caught.value.param == "tokenizer"


def test_drafts_per_step_default_to_the_block_size_minus_one(tiny_qwen3: Path, tiny_drafter: Path) -> None:
    assert resolve_config(settings(tiny_qwen3, tiny_drafter)).num_speculative_tokens == TINY_BLOCK - 1
    spec = {"model": str(tiny_drafter), "num_speculative_tokens": 4}
    assert resolve_config(settings(tiny_qwen3, speculative_config=spec)).num_speculative_tokens == 4
    assert resolve_config(settings(tiny_qwen3)).num_speculative_tokens == 0


TORCH = {"attention_backend": "torch", "device": "cpu"}
COMPILED = {"attention_backend": "compiled", "dtype": "bfloat16", "device": "cpu"}
# Settings of the target, of its drafter, the one that is named, and words.
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"kv_cache_dtype": "fp8_e5m2"}, {}, "kv_cache_dtype", "auto, fp8, fp8_e4m3"),
    ({"kv_cache_dtype": "fp8", **COMPILED}, {}, "attention_backend", "keeps K/V in bfloat16"),
    ({"quantization": "int3"}, {}, "quantization", "quantization='int3' is not known.*fp8"),
    ({"quantization": "fp8", **TORCH}, {}, "quantization", "needs Triton's kernels.*torch on cpu"),
    ({"hf_overrides": "four"}, {}, "hf_overrides", "hf_overrides='four' must be a mapping"),
    (TORCH, {"quantization": "int3"}, "quantization", "quantization='int3' is not known"),
    (TORCH, {"quantization": "fp8"}, "quantization", "needs Triton's kernels"),
    (TORCH, {"hf_overrides": "four"}, "hf_overrides", "hf_overrides='four' must be a mapping"),
    (TORCH, {"num_speculative_tokens": 16}, "num_speculative_tokens", "=16.*15 is the most.*SGLang"),
    (TORCH, {"draft_window": 15}, "draft_window", "less than the drafter's block of 16"),
]


@pytest.mark.parametrize(("changes", "of_drafter", "name", "words"), REFUSED)
def test_settings_that_cannot_be_are_refused_by_name(
    tiny_qwen3: Path, tiny_drafter: Path, changes: dict, of_drafter: dict, name: str, words: str
) -> None:
    spec = {"speculative_config": {"model": str(tiny_drafter), **of_drafter}} if of_drafter else {}
    with pytest.raises(ConfigError, match=words) as caught:
        resolve_config(settings(tiny_qwen3, **changes, **spec))
    assert caught.value.param == ("speculative_config." if of_drafter else "") + name


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_device_is_refused(tiny_qwen3: Path) -> None:
    with pytest.raises(ConfigError, match=r'device="cuda".*no CUDA device') as caught:
        resolve_config(settings(tiny_qwen3, device="cuda"))
    assert caught.value.param == "device"


def test_the_maximum_length_is_what_both_models_allow(
    tiny_qwen3: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    assert resolve_config(settings(tiny_qwen3, max_model_len=None)).max_model_len == 512
    short = changed(tiny_drafter, tmp_path / "copy", max_position_embeddings=200)
    assert resolve_config(settings(tiny_qwen3, short, max_model_len=None)).max_model_len == 200
    with pytest.raises(ConfigError, match=r"max_model_len=513.*the target's.*at most 512\."):
        resolve_config(settings(tiny_qwen3, tiny_drafter, max_model_len=513))
    with pytest.raises(ConfigError, match=r"max_model_len=201.*the drafter's.*at most 200, or drop specul"):
        resolve_config(settings(tiny_qwen3, short, max_model_len=201))


def test_end_tokens_come_from_generation_config_first(tiny_qwen3: Path, tmp_path: Path) -> None:
    copy = changed(tiny_qwen3, tmp_path / "copy", eos_token_id=[7])
    (copy / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert load_runner(settings(copy))[1].eos_token_ids == (3, 4)
    (copy / "generation_config.json").unlink()
    assert load_runner(settings(copy))[1].eos_token_ids == (7,)


@pytest.mark.parametrize("invariant", [True, False])
def test_dtype_auto_on_a_cpu_is_bf16_if_native_and_exact(
    tiny_qwen3: Path, shipped_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, invariant: bool
) -> None:
    monkeypatch.setattr(cpu_autotune, "measured", lambda _: {})  # another test's engine may have timed them
    monkeypatch.setattr(backends, "rows_are_invariant", lambda *_, **__: invariant)
    native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    by_products = resolve_config(settings(tiny_qwen3, dtype="auto", device="cpu")).dtype
    assert by_products is (torch.bfloat16 if native and invariant else torch.float32)
    monkeypatch.setattr(compiled_backend, "bf16_instructions", lambda: Instructions.AMX)
    compiled = resolve_config(settings(shipped_pair[0], dtype="auto", device="cpu"))
    assert compiled.dtype is torch.bfloat16 and compiled.attention_backend == "compiled"
    assert resolve_config(settings(tiny_qwen3, device="cpu")).dtype is torch.float32


def test_gemma_3_is_computed_in_bf16_as_its_file_says_and_another_dtype_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu_autotune, "measured", lambda _: {})
    monkeypatch.setattr(backends, "rows_are_invariant", lambda *_, **__: False)
    monkeypatch.setattr(compiled_backend, "bf16_instructions", lambda: Instructions.AMX)
    caplog.set_level("INFO")

    def chosen(name: str, **sizes: int) -> tuple[torch.dtype, str]:
        folder = make_tiny_target(tmp_path / name, "gemma3", **sizes)
        plan = resolve_config(
            settings(changed(folder, tmp_path / f"{name} bf16", dtype="bfloat16"), dtype="auto", device="cpu")
        )
        return plan.dtype, plan.attention_backend

    assert chosen("even", hidden_size=64, head_dim=32) == (torch.bfloat16, "compiled")
    assert not caplog.messages
    assert chosen("odd", hidden_size=72) == (torch.float32, "torch")
    assert "bfloat16 is computed in float32, because attention_backend=compiled needs sizes" in caplog.text


def test_the_page_size_depends_on_the_device(tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def page_size(**changes: object) -> int:
        return resolve_config(settings(tiny_qwen3, **changes)).page_size

    assert (page_size(device="cpu"), page_size(device="cpu", page_size=32)) == (16, 32)
    stand_in_gpu(monkeypatch)
    assert (page_size(), page_size(page_size=32)) == (64, 32)
    monkeypatch.setattr(backends, "why_not", lambda *_: None)
    assert page_size(attention_backend="flash_attn", dtype="bfloat16") == 256


def test_a_steps_rows_depend_on_the_device(tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(**changes: object) -> int:
        return resolve_config(settings(tiny_qwen3, **changes)).max_num_batched_tokens

    assert (rows(device="cpu"), rows(device="cpu", max_num_batched_tokens=99)) == (2048, 99)
    h100, b300, a100, part, rtx = ((9, 79), (10, 268), (8, 79), (9, 39), (12, 31))
    for device, expected in ((h100, 8192), (b300, 8192), (a100, 2048), (part, 2048), (rtx, 2048)):
        stand_in_gpu(monkeypatch, *device)
        assert (rows(), rows(max_num_batched_tokens=99)) == (expected, 99)


def stand_in_gpu(monkeypatch: pytest.MonkeyPatch, capability: int = 9, gib: int = 79) -> None:
    properties = SimpleNamespace(major=capability, minor=0, total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


PAGE_BYTES = 4 * 16 * 2 * 2 * 16 * 4  # layers, tokens, k and v, kv heads, head_dim, fp32


def test_the_number_of_pages_follows_settings_then_memory(tiny_qwen3: Path, tiny_drafter: Path) -> None:
    def pages(*models: Path, **changes: object) -> int:
        return load_runner(settings(*models, **changes))[1].num_pages[0]

    assert pages(tiny_qwen3, num_pages=11) == 11
    assert pages(tiny_qwen3) == 4 * 128 // 16  # max_num_seqs sequences of max_model_len
    assert pages(tiny_qwen3, kv_cache_memory_bytes=20 * PAGE_BYTES) == 20
    # The drafter's pages (2 layers to the target's 4) count too.
    assert pages(tiny_qwen3, tiny_drafter, kv_cache_memory_bytes=30 * PAGE_BYTES) == 20


def test_ram_limits_the_pages(tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_ram_bytes", lambda: 4 * 10 * PAGE_BYTES)
    assert load_runner(settings(tiny_qwen3))[1].num_pages == (10,)
    with pytest.raises(
        ConfigError, match=r"max_model_len=512 needs 524288 bytes of K/V pages.*at most 160"
    ) as caught:
        load_runner(settings(tiny_qwen3, max_model_len=512))
    assert caught.value.param == "max_model_len"


def test_a_start_says_what_memory_it_takes_and_warns_where_that_is_too_much(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "free_ram_bytes", lambda: 2**30)
    with caplog.at_level("INFO"):
        load_runner(settings(tiny_qwen3, kv_cache_memory_bytes=2**29))
    (said,) = [each for each in caplog.records if each.getMessage().startswith("memory: ")]
    assert "K/V pages and states take up to 0.50 GiB" in said.getMessage() and said.levelname == "INFO"
    assert "1.00 GiB are free of" in said.getMessage()
    caplog.clear()
    monkeypatch.setattr(memory, "free_ram_bytes", lambda: 2**10)
    load_runner(settings(tiny_qwen3, kv_cache_memory_bytes=2**29))
    weights, pages = [each.getMessage() for each in caplog.records if "memory: " in each.getMessage()]
    assert "the target's weights are" in weights and "too little. Lower max_model_len" in pages


def test_planned_sizes_equal_loaded_sizes(tiny_qwen3: Path, tmp_path: Path) -> None:
    drafter = make_tiny_drafter(tmp_path / "drafter", block_size=8)
    plan = resolve_config(settings(tiny_qwen3, drafter))
    assert (plan.tap_ids, plan.split, plan.num_speculative_tokens) == ((0, 1, 2), False, 7)
    runner, info = load_runner(settings(tiny_qwen3, drafter))
    assert (info.max_model_len, info.vocab_size, info.device) == (plan.max_model_len, TINY_VOCAB, "cpu")
    assert runner.model.dtype == plan.dtype


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float32"}, "computes bfloat16 on CPUs"),
        ({"page_size": 8}, "page_size that is a multiple of 16"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=1"),
        ({}, "multiples of 32, not all of the target's are"),
    ],
)
def test_an_impossible_compiled_pass_is_refused_before_a_weight_is_read(
    tiny_qwen3: Path,
    monkeypatch: pytest.MonkeyPatch,
    nothing_loads: None,
    changes: dict[str, object],
    message: str,
) -> None:
    monkeypatch.setattr(compiled_backend, "bf16_instructions", lambda: Instructions.AMX)
    config = settings(tiny_qwen3, **{"dtype": "bfloat16", "attention_backend": "compiled", **changes})
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_config(config)
    assert caught.value.param == "attention_backend"
    auto = resolve_config(settings(tiny_qwen3, **{"dtype": "bfloat16", **changes}))
    assert auto.attention_backend == "torch", "it is chosen by itself only where it runs"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_step_memory_is_measured_by_allocating_everything_once(
    tiny_qwen3: Path, tiny_drafter: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU two readings enclose states, workspaces and prompts, two more decoding and graphs.

    Small steps come before, in a runner of their own: they measure products, and their buffer is no step's.
    """
    pytest.importorskip("triton")
    from manta.actors.targets.runners.gpu_runner import GpuModelRunner

    small_steps: list[SchedulerOutput] = []
    spec = {"model": str(tiny_drafter), "num_speculative_tokens": 1}
    small = {"max_num_seqs": 3, "max_model_len": 6, "max_num_batched_tokens": 9, "num_pages": 3}
    config = settings(tiny_qwen3, speculative_config=spec, attention_backend=backend, **small)
    readings, made, steps = iter((100, 150, 160, 185)), [], []
    monkeypatch.setattr(warm_up, "used_gpu_bytes", lambda device: next(readings))

    def make_runner() -> Runner:
        small_steps[:] = steps
        runner = load_runner(config)[0]
        made.append(weakref.ref(runner))
        steps.clear()  # those of the warm-up
        return runner

    for kind in (CpuModelRunner, GpuModelRunner):
        execute = kind.execute
        monkeypatch.setattr(kind, "execute", lambda *of, do=execute: steps.append(of[1]) or do(*of))
    assert warm_up.measure_step_bytes(make_runner, resolve_config(config)) == 75
    assert [step.num_rows.tolist() for step in steps] == [[6], [3, 3, 3], [2, 2, 2]]
    assert [step.num_drafts.max() for step in steps] == [0, 0, 1]
    assert [step.num_rows.tolist() for step in small_steps] == [[6], [2]]
    assert len(made) == 2 and not any(runner() for runner in made), "given back"


def test_the_memory_of_graphs_is_extrapolated_from_a_few(
    tiny_qwen3: Path, tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest take the memory that all share, and each one some of its own."""
    pytest.importorskip("triton")
    from manta.actors.targets.runners.cuda_graphs import PassKind, StepGraphs
    from manta.actors.targets.runners.gpu_runner import GpuModelRunner

    spec = {"model": str(tiny_drafter), "num_speculative_tokens": 3}
    config = settings(tiny_qwen3, speculative_config=spec, attention_backend="triton", num_pages=3)
    with short_warm_up():
        runner = load_runner(config)[0]
    assert isinstance(runner, GpuModelRunner)
    captured: list[PassKind] = []
    monkeypatch.setattr(runner, "_captures", True)
    monkeypatch.setattr(StepGraphs, "capture", lambda _, kinds: captured.extend(kinds))
    largest = dummy_step([1], [4], [3])
    taken = runner.profile_run(largest, lambda: 10**6 + 7 * len(captured) + 5000 * bool(captured))
    kinds = runner._kinds.all()
    assert len(set(captured)) == len(captured) < len(kinds)
    assert taken == 5000 + 7 * len(kinds)


@torch.inference_mode()
def test_captures_share_a_pool_and_give_back_what_runs_before_them_took(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from manta.actors.targets.runners.gpu_runner import GpuModelRunner

    with short_warm_up():
        runner = load_runner(settings(tiny_qwen3, attention_backend="triton", num_pages=3))[0]
    assert isinstance(runner, GpuModelRunner)
    calls = record_captures(monkeypatch)
    kinds = runner._kinds.all()
    runner._graphs.capture(kinds[:2])
    runner._graphs.capture(kinds[-1:])
    assert calls == [*["begin in pool 0", "end"] * 2, "emptied", "begin in pool 0", "end", "emptied"]
    calls.clear()
    runner._graphs.rebuild(runner.models)
    runner._graphs.capture(kinds[-1:])
    assert calls[:2] == ["emptied", "begin in pool 1"], "a pool is freed with its graphs, before others"


@pytest.mark.parametrize("placement", ["colocated", "split"])
def test_the_context_of_a_split_drafters_process_is_in_the_budget(
    tiny_qwen3: Path, tiny_drafter: Path, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = {"model": str(tiny_drafter), "placement": placement}
    resolved = replace(
        resolve_config(settings(tiny_qwen3, speculative_config=spec)), device=torch.device("cuda")
    )
    monkeypatch.setattr(rank_loader, "measure_step_bytes", lambda make, resolved: 10**6)
    rank: Any = SimpleNamespace(_resolved=resolved)
    step_bytes = rank_loader._Rank._step_bytes(rank)
    assert (step_bytes >= 2**29) == (placement == "split")
