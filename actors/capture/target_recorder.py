"""Records the target's outputs while it answers: what a drafter sees in serving, and the likeliest tokens.

    steps of CpuModelRunner ─▶ TargetRecorder: taps of all rows, likeliest tokens of the rows that sample
    take(request)           ─▶ SequenceOutputs (`actors/capture/target_outputs.py`)

The recorder is a source of drafts that drafts nothing: it gets the taps that a drafter would get, and hears
the logits before rules and temperature edit them. A step without a recorder has no condition for it. Called
by `jobs/training/loop/answering.py`.

Shapes: N rows of a step, X rows that sample, m taps, H hidden, V vocabulary, R requests of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...cluster.config import EngineConfig
from ...cluster.step.executor import ExecutorInfo
from ...cluster.step.scheduler_output import SchedulerOutput
from ...drafter.step.inputs.proposals import Proposals
from ...drafter.step.inputs.row_layout import StepRows
from ...drafter.step.request_states import RequestStates
from ..engine.uniproc_executor import InProcessExecutor
from ..targets.loading.rank_loader import Checkpoints, resolve_config, start_runner
from ..targets.loading.resolved_config import ResolvedConfig
from ..targets.model.decoder import Decoder
from ..targets.runners.cpu_runner import CpuModelRunner
from ..targets.runners.runner_interface import Runner
from .target_outputs import OutputLayout, SequenceOutputs, likeliest_tokens


class TargetRecorder:
    """Keeps the outputs for each request, from its first step until they are taken.

    A preempted request is computed again, which overwrites its taps.

    Args:
        max_new_tokens: most tokens of an answer. Memory is taken for that many, and used as they come.
    """

    def __init__(self, layout: OutputLayout, max_new_tokens: int) -> None:
        self.layout, self._max_new_tokens = layout, max_new_tokens
        self._by_id: dict[str, _Record] = {}
        self._by_slot: dict[int, _Record] = {}
        self._step: list[_Record] = []  # of the requests of the step, in order
        self._likeliest_X = torch.empty(0), torch.empty(0)

    def propose(self, plan: SchedulerOutput, states: RequestStates) -> Proposals:
        """Draft nothing; remember the requests of the step."""
        for each in plan.admitted:
            if each.request_id not in self._by_id:
                self._by_id[each.request_id] = _Record(self.layout, len(each.token_ids), self._max_new_tokens)
            self._by_slot[each.slot] = self._by_id[each.request_id]
        self._step = [self._by_slot[slot] for slot in plan.slots.tolist()]
        return Proposals.none(plan.num_requests, states.device)

    def hear(self, logits_XV: Tensor) -> None:
        self._likeliest_X = likeliest_tokens(logits_XV, self.layout.num_likeliest)

    def inject(
        self, taps_NmH: Tensor | None, rows: StepRows, token_ids_RW: Tensor, num_tokens_R: Tensor
    ) -> None:
        assert taps_NmH is not None, "the plan has taps"
        taps_NF = taps_NmH.flatten(1).bfloat16().view(torch.uint16).cpu().numpy()
        ids_XK, log_probs_XK = (each.cpu().numpy() for each in self._likeliest_X)
        positions_N, row, sampled = rows.positions_N.cpu().numpy(), 0, 0
        counts_R = rows.counts_R.tolist()
        for record, num_rows, count in zip(self._step, rows.num_rows_R.tolist(), counts_R, strict=True):
            end = int(positions_N[row]) + num_rows
            record.taps[end - num_rows : end] = taps_NF[row : row + num_rows]
            if count:
                record.likeliest_ids[end - record.first] = ids_XK[sampled]
                record.log_probs[end - record.first] = log_probs_XK[sampled]
            row, sampled = row + num_rows, sampled + count

    def take(self, request_id: str, num_tokens: int) -> SequenceOutputs:
        """Return the outputs for the first tokens of a request that has ended, and forget it."""
        record = self._by_id.pop(request_id)
        rows = slice(num_tokens - record.first)
        return SequenceOutputs(
            record.taps[: num_tokens - 1], record.likeliest_ids[rows], record.log_probs[rows]
        )


class _Record:
    """The outputs for a request with a prompt of `first` tokens; its answer begins at that position."""

    def __init__(self, layout: OutputLayout, first: int, max_new_tokens: int) -> None:
        self.first = first
        self.taps = np.empty((first + max_new_tokens, layout.num_features), dtype=np.uint16)
        self.likeliest_ids = np.empty((max_new_tokens, layout.num_likeliest), dtype=np.int32)
        self.log_probs = np.empty((max_new_tokens, layout.num_likeliest), dtype=np.float16)


class _HeardDecoder(Decoder):
    """A view of a decoder that passes on the logits it returns."""

    def __init__(self, decoder: Decoder, hear: Callable[[Tensor], None]) -> None:
        vars(self).update(vars(decoder))
        self._hear = hear

    def logits(self, hidden_NH: Tensor) -> Tensor:
        logits_NV = super().logits(hidden_NH)
        self._hear(logits_NV)
        return logits_NV


class RecordingExecutor(InProcessExecutor):
    """An executor without drafts whose steps are recorded.

    The host must drive the steps (`ResolvedConfig.runs_on_device`), and prefixes are not cached, since rows
    that are found there are not computed.
    """

    def __init__(self, config: EngineConfig, recorder: TargetRecorder) -> None:
        assert config.speculative_config is None and not config.enable_prefix_caching
        assert not config.async_scheduling, "a step of an ended request would be recorded past its record"
        self._recorder = recorder
        super().__init__(config)

    def _load(self, config: EngineConfig) -> tuple[ResolvedConfig, Runner, ExecutorInfo]:
        plan = replace(resolve_config(config), recorded_layers=self._recorder.layout.layer_ids)
        runner, info = start_runner(plan, Checkpoints())
        assert isinstance(runner, CpuModelRunner), "the host drives the steps"
        runner.drafts, runner.model = self._recorder, _HeardDecoder(runner.model, self._recorder.hear)
        return plan, runner, info
