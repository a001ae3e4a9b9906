"""The recorder against transformers: the same taps and likeliest tokens, however the engine computes them."""

from __future__ import annotations

from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from manta.actors.capture.target_outputs import OutputLayout, SequenceOutputs
from manta.actors.capture.target_recorder import RecordingExecutor, TargetRecorder
from manta.actors.engine.uniproc_executor import InProcessExecutor
from manta.actors.targets.families import read_model
from manta.actors.targets.runners.drafts.draft_source import DraftSource
from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine_core import EngineCore
from manta.cluster.step.scheduler_output import SchedulerOutput
from manta.drafter.step.inputs.proposals import Proposals
from manta.drafter.step.inputs.row_layout import StepRows
from manta.drafter.step.request_states import RequestStates
from manta.jobs.training.loop.answering import answer_all
from support.checkpoints.tiny import TINY_TAPS, make_tiny_drafter, make_tiny_target, transformers_model
from support.jobs.training_run import questions

LAYERS, COUNT, MAX_NEW_TOKENS, VOCAB = (2, 0), 24, 20, 128
WHOLE = pytest.mark.if_changed


@dataclass(frozen=True)
class Sequence:
    ids: list[int]
    first: int
    outputs: SequenceOutputs


def engine_config(folder: Path, **settings: Any) -> EngineConfig:
    common = {"skip_tokenizer_init": True, "enable_prefix_caching": False, "max_num_seqs": 8, "page_size": 4}
    common |= {"num_threads": 1, "max_model_len": 64}
    return EngineConfig.from_dict({"model": str(folder), **common, **settings})


def record(folder: Path, layers: tuple[int, ...] = LAYERS, **settings: Any) -> tuple[list[Sequence], int]:
    """Return the answered sequences, and the number of preemptions."""
    config = engine_config(folder, **settings)
    recorder = TargetRecorder(OutputLayout.of(layers, read_model(folder).hidden_size, VOCAB), MAX_NEW_TOKENS)
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


class ServedDrafter:
    """A drafter in serving, with the taps that it got by request and position."""

    def __init__(self, drafts: DraftSource) -> None:
        self._drafts, self._plan = drafts, None
        self._ids: dict[int, str] = {}  # by slot
        self.taps: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)

    def propose(self, plan: SchedulerOutput, states: RequestStates) -> Proposals:
        self._ids |= {each.slot: each.request_id for each in plan.admitted}
        self._plan = plan
        return self._drafts.propose(plan, states)

    def inject(self, taps_NmH, rows: StepRows, token_ids_RW, num_tokens_R) -> None:
        row = 0
        for slot, num_rows in zip(self._plan.slots.tolist(), rows.num_rows_R.tolist(), strict=True):
            for at in range(row, row + num_rows):  # rejected rows are overwritten by later ones
                self.taps[self._ids[slot]][int(rows.positions_N[at])] = taps_NmH[at].flatten().bfloat16()
            row += num_rows
        self._drafts.inject(taps_NmH, rows, token_ids_RW, num_tokens_R)


def test_records_equal_what_a_drafter_gets_in_serving(tiny_qwen3: Path, tmp_path: Path) -> None:
    spec = {"method": "dflash", "model": str(make_tiny_drafter(tmp_path)), "adaptive": False}
    config = engine_config(tiny_qwen3, dtype="float32", speculative_config=spec)
    executor, answers = InProcessExecutor(config), dict[int, list[int]]()
    drafter = executor._runner.drafts = ServedDrafter(executor._runner.drafts)
    with closing(EngineCore(config, executor)) as engine:
        for _, ended in answer_all(engine, questions(COUNT), range(COUNT), MAX_NEW_TOKENS, lambda: False):
            answers |= ended
        assert engine.stats().num_accepted_tokens > 0
    sequences, _ = record(tiny_qwen3, TINY_TAPS, dtype="float32")
    numbers = {tuple(question.prompt_ids): number for number, question in enumerate(questions(COUNT))}
    for each in sequences:
        number = numbers[tuple(each.ids[: each.first])]
        assert each.ids[each.first :] == answers[number]
        served = torch.stack([drafter.taps[str(number)][at] for at in range(len(each.ids) - 1)])
        recorded = torch.from_numpy(each.outputs.taps).view(torch.bfloat16)
        torch.testing.assert_close(recorded, served, rtol=2**-7, atol=1e-4)
