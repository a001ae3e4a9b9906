"""The GPU's path end to end: its kernels, its runner, the scheduler running ahead; where, says `devices.py`.

In Triton's interpreter everything but CUDA's own part (streams, graphs) runs as it does on a GPU. It must
bring the tokens that PyTorch's kernels bring, one by one.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton")

from devices import DEVICE
from families import FAMILIES
from manta.actors.llm import LLM
from manta.cluster.engine import EngineStats
from manta.cluster.errors import ConfigError
from steps import settings
from test_lossless import KNOBS, tokens_of
from tiny import TINY_VOCAB, make_tiny_drafter, make_tiny_target

# Few and short, for the interpreter takes seconds for a step: two without filters, one with all of them.
KNOB_NAMES = ("greedy", "plain", "all")
CASES = [
    np.random.default_rng(i).integers(1, TINY_VOCAB - 1, length).tolist()
    for i, length in enumerate((15, 14, 3))
]
PARAMS = [replace(KNOBS[name], seed=7 + i, max_tokens=5 + i) for i, name in enumerate(KNOB_NAMES)]


def generate(
    target: Path, drafter: Path | None, backend: str, **changes: object
) -> tuple[list[list[int]], EngineStats]:
    spec = None
    if drafter is not None:
        spec = {"model": str(drafter), "num_speculative_tokens": 3, "adaptive": False}
    settings = {"speculative_config": spec, "max_num_seqs": 3, "max_model_len": 48, **changes}
    with LLM(
        str(target),
        skip_tokenizer_init=True,
        dtype="float32",
        num_threads=1,
        device=DEVICE.type,
        attention_backend=backend,
        **settings,
    ) as llm:
        return tokens_of(llm, CASES, PARAMS), llm.stats()


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_change_no_token(tmp_path: Path, family: str) -> None:
    """Of every family; where its layers slide, the drafter's first one does, too: pages are given back."""
    target = make_tiny_target(tmp_path / "target", family, seed=5)
    keys = json.loads((target / "config.json").read_text())
    slides = bool(keys.get("sliding_window"))
    drafter = make_tiny_drafter(
        tmp_path / "drafter", hidden_size=keys["hidden_size"], sliding_window=7 if slides else None
    )
    expected, _ = generate(target, None, "torch")
    got, stats = generate(target, drafter, "triton")
    wrong = [knob for knob, mine, theirs in zip(KNOB_NAMES, got, expected, strict=True) if mine != theirs]
    assert not wrong, "these differ"
    assert stats.num_drafts > 0


def test_running_ahead_changes_no_token(tiny_llama: Path, tiny_drafter: Path) -> None:
    expected, _ = generate(tiny_llama, None, "torch")
    ahead = {"async_scheduling": True, "num_pages": 3, "max_num_batched_tokens": 18}
    got, stats = generate(tiny_llama, tiny_drafter, "triton", **ahead)
    wrong = [knob for knob, mine, theirs in zip(KNOB_NAMES, got, expected, strict=True) if mine != theirs]
    assert not wrong, "these differ"
    assert stats.num_drafts > 0 and stats.preemptions > 0


@pytest.mark.skipif(DEVICE.type == "cuda", reason="one GPU is no two ranks; ray_session has none")
@pytest.mark.parametrize(
    ("ranks", "placement"), [(2, "colocated"), (1, "split")], ids=["two ranks", "a drafter split off"]
)
def test_kernels_change_no_token_in_worker_processes(
    ray_session: None, tiny_qwen3: Path, tiny_drafter: Path, ranks: int, placement: str
) -> None:
    """Two ranks keep logits sharded until a token is chosen; a split drafter is driven from the host."""
    expected, _ = generate(tiny_qwen3, None, "torch")
    spec = {"model": str(tiny_drafter), "num_speculative_tokens": 2, "placement": placement}
    got, stats = generate(
        tiny_qwen3, None, "triton", speculative_config=spec, tensor_parallel_size=ranks, async_scheduling=True
    )
    assert got == expected and stats.num_drafts > 0


def test_a_backend_that_cannot_run_here_is_refused(tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from manta.actors.executor import make_executor

    with pytest.raises(ConfigError, match="flash_attn") as caught:
        make_executor(settings(tiny_qwen3, attention_backend="flash_attn"))
    assert caught.value.param == "attention_backend"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="runs on GPUs") as caught:
        make_executor(settings(tiny_qwen3, attention_backend="triton", device="cpu"))
    assert caught.value.param == "attention_backend"
    with pytest.raises(ConfigError, match="attention_backend='tritn'"):
        settings(tiny_qwen3, attention_backend="tritn")
