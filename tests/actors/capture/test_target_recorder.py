"""The recorder against transformers: the same taps and likeliest tokens, however the engine computes them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from manta.actors.capture.target_outputs import OutputLayout, SequenceOutputs
from manta.actors.capture.target_recorder import RecordingExecutor, TargetRecorder
from manta.actors.targets.families import read_model
from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine_core import EngineCore
from manta.jobs.training.loop.answering import answer_all
from support.checkpoints.tiny import make_tiny_target, transformers_model
from support.jobs.training_run import questions

LAYERS, COUNT, MAX_NEW_TOKENS, VOCAB = (2, 0), 24, 20, 128
WHOLE = pytest.mark.if_changed


@dataclass(frozen=True)
class Sequence:
    ids: list[int]
    first: int
    outputs: SequenceOutputs


def record(folder: Path, **settings: Any) -> tuple[list[Sequence], int]:
    """Return the answered sequences, and the number of preemptions."""
    common = {"skip_tokenizer_init": True, "enable_prefix_caching": False, "max_num_seqs": 8, "page_size": 4}
    common |= {"num_threads": 1, "max_model_len": 64}
    config = EngineConfig.from_dict({"model": str(folder), **common, **settings})
    recorder = TargetRecorder(OutputLayout.of(LAYERS, read_model(folder).hidden_size, VOCAB), MAX_NEW_TOKENS)
    found: list[Sequence] = []
    with closing(EngineCore(config, RecordingExecutor(config, recorder))) as engine:
        asked = questions(COUNT)
        for _, ended in answer_all(engine, asked, range(COUNT), MAX_NEW_TOKENS, lambda: False):
            for number, answer in ended.items():
                ids, first = [*asked[number].prompt_ids, *answer], len(asked[number].prompt_ids)
                found.append(Sequence(ids, first, recorder.take(str(number), len(ids))))
        return found, engine.stats().preemptions


def check(sequences: list[Sequence], folder: Path, dtype: torch.dtype, tolerance: float) -> None:
    """Compare with one pass of transformers, in units of the largest tap, and in nats."""
    assert len(sequences) == COUNT
    length = max(len(each.ids) for each in sequences)
    padded = torch.tensor([each.ids + [0] * (length - len(each.ids)) for each in sequences])
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        passed = transformers_model(folder, dtype)(padded, output_hidden_states=True)
    torch.set_num_threads(before)
    taps_BTF = torch.cat([passed.hidden_states[i + 1] for i in LAYERS], dim=-1).float()
    log_probs_BTV = passed.logits.float().log_softmax(dim=-1)
    for row, each in enumerate(sequences):
        n, first = len(each.ids), each.first
        taps, expected = (
            torch.from_numpy(each.outputs.taps).view(torch.bfloat16).float(),
            taps_BTF[row, : n - 1],
        )
        assert taps.shape == expected.shape
        assert (taps - expected).abs().max() < (tolerance + 2**-7) * expected.abs().max()
        likeliest = torch.from_numpy(each.outputs.likeliest_ids).long()
        assert likeliest.shape == (n - first, 64)
        found = torch.from_numpy(each.outputs.log_probs.astype(np.float32))
        log_probs = log_probs_BTV[row, first - 1 : n - 1]
        torch.testing.assert_close(log_probs.gather(1, likeliest), found, atol=tolerance + 4e-3, rtol=0.0)
        torch.testing.assert_close(log_probs.topk(64).values, found, atol=tolerance + 4e-3, rtol=0.0)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {}),
        pytest.param(
            "qwen3", {"attention_backend": "torch", "max_num_batched_tokens": 9}, id="chunked prefill"
        ),
        pytest.param("gemma3", {}, marks=WHOLE),
        pytest.param("qwen3_next", {}, marks=WHOLE),
    ],
)
def test_records_equal_a_pass_of_transformers(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    folder = make_tiny_target(tmp_path, family)
    sequences, _ = record(folder, dtype="float32", **settings)
    check(sequences, folder, torch.float32, 1e-4)


def test_records_of_bfloat16_equal_a_pass_of_transformers(tmp_path: Path) -> None:
    folder = make_tiny_target(tmp_path, "qwen3", dtype="bfloat16")
    sequences, _ = record(folder, dtype="bfloat16")
    check(sequences, folder, torch.bfloat16, 0.05)


def test_preempted_requests_lose_nothing(tiny_qwen3: Path) -> None:
    sequences, preemptions = record(tiny_qwen3, dtype="float32", num_pages=24)
    assert preemptions > 0
    check(sequences, tiny_qwen3, torch.float32, 1e-4)
