"""`batch_invariant`: no token depends on speculation or the batch in half precision; else it is refused.

In Triton's interpreter in fp16 (its bf16 products are broken) with few short requests; on a GPU
(`devices.py`) in bf16, with all knobs and block lengths.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from manta.actors.llm import LLM
from manta.actors.targets.loading.backend_selection import choose_backend
from manta.actors.targets.loading.resolved_config import resolve_config
from manta.actors.targets.loading.warmup import check_invariance
from manta.cluster.errors import ConfigError
from manta.drafter.compute.backend import DeviceCapabilities
from manta.drafter.compute.batch_invariance import rows_are_invariant
from manta.drafter.compute.block_weights import Projection
from manta.drafter.compute.eager.backend import EagerBackend
from manta.drafter.compute.gpu_triton.backend import TritonBackend
from support.checkpoints.tiny import TINY_VOCAB
from support.engines.devices import DEVICE, HALVES, ON_GPU
from support.engines.steps import settings, short_warm_up
from support.oracles.sampling_cases import KNOBS, tokens_of
from torch import Tensor

DTYPE = HALVES[0]
NAMES, DRAFTS, LENGTHS, TOKENS = (
    (tuple(KNOBS), (1, 3, 15), (1, 14, 40, 89), 24) if ON_GPU else (("greedy", "plain"), (3,), (14, 3), 3)
)
PROMPTS = [np.random.default_rng(n).integers(1, TINY_VOCAB - 1, n).tolist() for n in LENGTHS]
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def open_llm(target: Path, drafter: Path | None, num_drafts: int = 0, **changes: object) -> LLM:
    spec = {"model": str(drafter), "num_speculative_tokens": num_drafts, "adaptive": False}
    with short_warm_up():
        return LLM(
            str(target),
            speculative_config=spec if drafter else None,
            skip_tokenizer_init=True,
            dtype=str(DTYPE).removeprefix("torch."),
            device=DEVICE.type,
            attention_backend="triton",
            batch_invariant=True,
            num_threads=1,
            **{"max_num_seqs": 4, "max_model_len": 128 if ON_GPU else 32, **changes},
        )


def test_speculation_and_other_requests_change_no_token_in_half_precision(
    tiny_qwen3: Path, tiny_drafter: Path
) -> None:
    requested = [
        (prompt, replace(KNOBS[name], seed=i, max_tokens=TOKENS))
        for name in NAMES
        for i, prompt in enumerate(PROMPTS)
    ]
    if not ON_GPU:  # a step takes the interpreter a second
        requested = requested[1:3]
    prompts, params = [p for p, _ in requested], [s for _, s in requested]
    with open_llm(tiny_qwen3, None, enable_prefix_caching=False) as llm:
        expected = [tokens_of(llm, [p], [s])[0] for p, s in requested]
    for num_drafts in DRAFTS:
        with open_llm(tiny_qwen3, tiny_drafter, num_drafts, max_num_batched_tokens=11) as llm:
            assert tokens_of(llm, prompts, params) == expected
            assert llm.stats().num_drafts > 0


@pytest.mark.skipif(
    not ON_GPU, reason="the interpreter takes a minute; it checks products and attention apart"
)
def test_rows_of_the_fused_passes_are_invariant_on_the_device() -> None:
    backend = TritonBackend(DEVICE, batch_invariant=True)
    assert rows_are_invariant(backend, DTYPE, DEVICE, (64, 128))


class _SummedAlone(EagerBackend):
    """A product that sums in another order for a single row, as libraries do."""

    def linear(self, weight_OH: Tensor, bias_O: Tensor | None = None) -> Projection:
        whole, halves = super().linear(weight_OH), weight_OH.tensor_split(2, dim=1)

        def project(x_NH: Tensor, residual_NO: Tensor | None = None) -> Tensor:
            if len(x_NH) > 1:
                return whole(x_NH, residual_NO)
            parts = [x @ w.T for x, w in zip(x_NH.tensor_split(2, dim=1), halves, strict=True)]
            return parts[0] + parts[1] if residual_NO is None else parts[0] + parts[1] + residual_NO

        return project


def test_batch_invariance_that_does_not_hold_is_detected_at_start_and_refused(tiny_qwen3: Path) -> None:
    plan = resolve_config(settings(tiny_qwen3, batch_invariant=True, attention_backend="torch", device="cpu"))
    with pytest.raises(ConfigError, match=r"batch_invariant does not hold here.*dtype to float32") as caught:
        check_invariance(plan, _SummedAlone())
    assert caught.value.param == "batch_invariant"
    check_invariance(replace(plan, config=replace(plan.config, batch_invariant=False)), _SummedAlone())


@pytest.mark.parametrize(
    ("backend", "device", "ranks", "match"),
    [
        ("torch", CUDA, 1, r"attention_backend='torch'.*triton"),
        ("auto", CUDA, 4, r"tensor_parallel_size=4.*1 or 2"),
        ("auto", CPU, 4, r"tensor_parallel_size=4.*1 or 2"),
    ],
)
def test_impossible_batch_invariance_is_refused_before_a_weight_is_read(
    tiny_qwen3: Path, backend: str, device: torch.device, ranks: int, match: str
) -> None:
    config = settings(tiny_qwen3, attention_backend=backend, batch_invariant=True)
    machine = DeviceCapabilities(device, torch.bfloat16, 16, ranks)
    with pytest.raises(ConfigError, match=match) as caught:
        choose_backend(config, [], machine)
    assert caught.value.param == "batch_invariant"
    choose_backend(replace(config, batch_invariant=False), [], machine)


def test_on_a_gpu_without_triton_the_mode_says_what_is_missing(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from manta.actors.targets.loading import backend_selection as backends

    monkeypatch.setattr(backends, "why_not", lambda *_: "needs the package triton")
    with pytest.raises(ConfigError, match=r"batch_invariant does not hold.*triton needs the package triton"):
        choose_backend(
            settings(tiny_qwen3, batch_invariant=True), [], DeviceCapabilities(CUDA, torch.bfloat16, 16, 1)
        )
