"""`kv_cache_dtype`: K/V in e4m3, in either model and with every kernel (device: see `devices.py`).

The grid of `test_lossless.py` has cells of such engines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from manta.actors.targets.loading.memory_budget import affordable_pages, page_bytes
from manta.actors.targets.loading.resolved_config import resolve_config
from manta.cluster.errors import ConfigError
from manta.cluster.pages.kv_cache_groups import KVCacheSpec
from manta.drafter.compute.checkpoint.packed_codes import PackedCodes
from manta.drafter.compute.gpu_triton.common.e4m3 import as_stored
from manta.drafter.compute.gpu_triton.moe import moe as gpu_experts
from manta.drafter.compute.memory.kv_cache import E4M3_MAX, KVScales, PagedKVCache
from support.checkpoints.gpt_oss_checkpoints import publish
from support.checkpoints.tiny import make_tiny_drafter, make_tiny_target
from support.engines.device_engines import generate, opened
from support.engines.devices import DEVICE
from support.engines.steps import open_runner, settings

pytestmark = pytest.mark.xdist_group("device runner")


@triton.jit
def _store(values_ptr, stored_ptr, scale, COUNT: tl.constexpr):
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(stored_ptr + at, as_stored(tl.load(values_ptr + at), stored_ptr.dtype.element_ty, scale))


@pytest.mark.parametrize("scale", [None, 0.37, 1e-6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.one_in(3)
def test_kernels_round_every_value_as_the_definition(dtype: torch.dtype, scale: float | None) -> None:
    """All values of 16 bits: ties, subnormals, values beyond the largest, infinities and NaNs."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=DEVICE).to(torch.int16)
    values = bits.view(torch.float16).float() if dtype is torch.float32 else bits.view(dtype)
    scales = [KVScales(scale, scale)] if scale else []
    cache = PagedKVCache(1, 2**10, 2, KVCacheSpec(1, 16, 16), torch.float8_e4m3fn, DEVICE, scales=scales)
    cache.write(0, torch.arange(2**11, device=DEVICE), values.view(2**11, 32))
    stored = torch.empty(2**16, dtype=torch.float8_e4m3fn, device=DEVICE)
    _store[(16,)](values, stored, scale, COUNT=2**12)
    definition = cache.slots(0)[0, : 2**11].flatten()
    assert torch.equal(stored.view(torch.uint8), definition.view(torch.uint8))
    finite = values.float().abs() < torch.inf
    nearest = (values[finite].float() / (scale or 1.0)).clamp(-E4M3_MAX, E4M3_MAX)
    assert ((definition[finite].float() - nearest).abs() <= nearest.abs() / 16 + 2**-10).all()
    assert not definition[~finite].float().any()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3", "gpt_oss"])
def test_kernels_give_the_definitions_tokens_over_e4m3(tmp_path: Path, family: str) -> None:
    target = make_tiny_target(tmp_path / "target", family, seed=5)
    hidden = resolve_config(settings(target)).target.hidden_size
    drafter = make_tiny_drafter(tmp_path / "drafter", hidden_size=hidden)
    expected, _ = generate(target, None, "torch", kv_cache_dtype="fp8")
    got, stats = generate(target, drafter, "triton", kv_cache_dtype="fp8_e4m3")
    assert got == expected
    assert stats.num_drafts > 0


def test_packed_experts_over_e4m3_give_the_definitions_tokens(tmp_path: Path) -> None:
    """gpt-oss as published, with MXFP4 experts, windows and sinks; drafts change nothing."""
    saved = make_tiny_target(tmp_path / "saved", "gpt_oss", seed=5)
    target = publish(saved, tmp_path / "published")
    hidden = resolve_config(settings(target)).target.hidden_size
    drafter = make_tiny_drafter(tmp_path / "drafter", hidden_size=hidden)
    expected, _ = generate(target, None, "torch", kv_cache_dtype="fp8")
    multiplied = set[type]()
    multiply = gpu_experts.multiply_tiles

    def watched(x: torch.Tensor, weights: object, *rest: Any, **more: Any) -> torch.Tensor:
        multiplied.add(type(weights))
        return multiply(x, weights, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_experts, "multiply_tiles", watched)
        got, stats = generate(target, drafter, "triton", kv_cache_dtype="fp8")
    assert got == expected
    assert stats.num_drafts > 0 and multiplied == {PackedCodes}
    assert 0 < stats.experts_read <= stats.routed_layers * 8


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_values_are_rounded_in_both_models(tiny_qwen3: Path, tiny_drafter: Path, backend: str) -> None:
    dtypes: list[torch.dtype] = []
    make = PagedKVCache.__init__

    def watched(self: PagedKVCache, *arguments: object, **named: object) -> None:
        make(self, *arguments, **named)  # type: ignore[arg-type]
        dtypes.append(self.kv.dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagedKVCache, "__init__", watched)
        with opened(tiny_qwen3, tiny_drafter, backend, kv_cache_dtype="fp8"):
            pass
    assert dtypes[-2:] == [torch.float8_e4m3fn] * 2, "the target's and the drafter's, after trials"


def test_the_same_memory_holds_twice_the_tokens(tiny_qwen3: Path, tiny_drafter: Path) -> None:
    """By the pages' books, by what is allocated and by what an engine reports."""
    how = {"dtype": "bfloat16", "attention_backend": "torch", "kv_cache_memory_bytes": 2**20}
    counts: dict[str, tuple[int, ...]] = {}
    for kept in ("auto", "fp8"):
        config = settings(tiny_qwen3, tiny_drafter, kv_cache_dtype=kept, **how)
        plan = resolve_config(config)
        counts[kept] = affordable_pages(plan, page_bytes(plan), None)
        runner, info = open_runner(tiny_qwen3, tiny_drafter, kv_cache_dtype=kept, **how)
        assert info.num_pages == counts[kept]
        assert runner.cache.kv.nbytes * page_bytes(plan)[0] / page_bytes(plan, drafter=False)[0] > 0.9 * 2**20
        assert runner.cache.kv.nbytes <= 2**20 + page_bytes(plan)[0]
    assert [count // 2 for count in counts["fp8"]] == list(counts["auto"])


def test_a_gpu_without_e4m3_is_refused(tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from manta.actors.targets.loading import backend_selection as selection
    from manta.drafter.compute.backend import DeviceCapabilities

    monkeypatch.setattr(selection, "why_not", lambda name, *_: None if name == "triton" else "is not here")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    config = settings(tiny_qwen3, kv_cache_dtype="fp8")
    machine = DeviceCapabilities(torch.device("cuda"), torch.bfloat16, 64, 1, torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='fp8' needs a GPU.*8\.9"):
        selection.choose_backend(config, [], machine)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert selection.choose_backend(config, [], machine) == "triton"
