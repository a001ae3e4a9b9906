"""The target's side of a remote drafter: a rank's source of drafts, and the results that it sends back.

    plan arrives rank 0 requests drafts
    step         drafts, or zeros ─▶ all ranks ─▶ verify ─▶ rank 0 sends: verdict, features

Only target rank 0 talks to the drafter (`drafter_client.py`); the other ranks get the drafts from it through
the target's own group. So no group spans target and drafter, and none breaks when the drafter dies
([why](../../docs/decisions/split-drafter.md)). If no drafts come in time, tokens of id 0 without margins
replace them, or trees without a node. Features are computed on the target's side, as they are num_taps times
smaller than the taps. Nothing is sent for a plan that writes no context.

A step runs when its drafts have arrived (`SplitRunner`). Until then the next plan may arrive and be
requested, so that one half of the requests is drafted while the other is verified. Where the device drives
the steps, a step is launched then, behind those that still run.

Legend: N rows, R requests, K most drafts, X sampled rows, m taps, H hidden.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ....cluster.step.executor import ExecutorInfo
from ....cluster.step.scheduler_output import DrafterUse, IntArray, SchedulerOutput, StepResult
from ....drafter.compute.backend import Backend
from ....drafter.compute.checkpoint.loading.quantized_tensors import open_folder
from ....drafter.dflash.checkpoint import named_as_ours
from ....drafter.dflash.config import DrafterConfig
from ....drafter.dflash.model import ContextFeatures
from ....drafter.drafter_weights import read_weights
from ....drafter.step.inputs.proposals import BlockCandidates, Proposals
from ....drafter.step.inputs.row_layout import StepRows
from ....drafter.step.request_states import RequestStates
from ...targets.loading.operator_factory import own_backend
from ...targets.loading.resolved_config import ResolvedConfig
from ...targets.model.tensor_parallel import Communicator
from ...targets.runners.drafts.colocated_drafter import broadcast_proposals
from ...targets.runners.drafts.draft_source import DraftBuffer
from ...targets.runners.runner_interface import Runner
from ..shm.endpoint import SpinWaiter
from ..shm.tensor_mailbox import Kinds
from .drafter_client import DrafterClient
from .drafter_protocol import Hello, Sizes, draft_kinds

# The engine's next plan follows a result within about this time; its drafting overlaps the current step.
GRACE_S = 2e-3
WELCOME_WITHIN_S = 60.0


class RemoteDrafterSource:
    """A target rank's source of drafts. `communicator`: that of the target's ranks."""

    def __init__(self, resolved: ResolvedConfig, backend: Backend, communicator: Communicator) -> None:
        self._resolved, self._communicator = resolved, communicator
        self._backend = own_backend(resolved, backend)
        self._device = resolved.device
        # Computes what the drafter gets of the taps; only rank 0 sends it.
        self._features = _context_features(resolved, self._backend) if communicator.rank == 0 else None
        self._link: DrafterClient | None = None
        # Another drafter that `load` has read, until `use` switches to it.
        self._loaded: tuple[ResolvedConfig, ContextFeatures | None] | None = None
        # Of the current step: its number, how many parts of its results were sent, and how many there are.
        self._step, self._num_sent_parts, self._num_parts = -1, 0, 1
        self._drafts_arrived = False  # in time for the current step
        self._grammar_slots = set[int]()  # slots whose requests have a grammar

    @property
    def link(self) -> DrafterClient | None:
        """Rank 0's connection to the drafter; None before the first one, and after it was lost."""
        return self._link

    def connect(self, address: str, name: str, info: ExecutorInfo, waiter: SpinWaiter) -> None:
        """Connect to a drafter, closing the previous connection. Raises PeerLostError."""
        if self._features is None:
            return
        self.disconnect()
        plan, drafter = self._resolved, self._resolved.drafter
        assert isinstance(drafter, DrafterConfig), "other drafters are colocated"
        max_rows = plan.max_num_batched_tokens
        config = replace(
            plan.config,
            max_model_len=plan.max_model_len,
            page_size=plan.page_size,
            max_num_batched_tokens=max_rows,
        )
        rows = config.max_num_seqs, max_rows, plan.num_speculative_tokens
        num_candidates = drafter.num_candidates if plan.draft_shape.branches else None
        sizes = Sizes.of(*rows, drafter.hidden_size, plan.dtype, num_candidates, _values_each(plan))
        hello = Hello(name, config, info.num_pages, sizes, mailbox=None)
        self._link = DrafterClient(address, hello, plan.device, waiter)

    def load(self, resolved: ResolvedConfig) -> None:
        """Load this rank's part of another drafter, next to that of the current one."""
        features = _context_features(resolved, self._backend) if self._features is not None else None
        self._loaded = resolved, features

    def use(self) -> None:
        """Switch to the loaded drafter, and disconnect from the old one."""
        assert self._loaded is not None, "call load() first"
        (self._resolved, self._features), self._loaded = self._loaded, None
        self.disconnect()

    def wait_for_session(self) -> None:
        """Wait at start for the drafter's answer. Raises its refusal, PeerLostError, TimeoutError."""
        if self._link is not None:
            self._link.wait_for_welcome(WELCOME_WITHIN_S)

    def disconnect(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def request_drafts(self, plan: SchedulerOutput) -> None:
        if self._link is not None:
            has_grammars = not self._grammar_slots.isdisjoint(plan.slots.tolist())
            self._link.request_drafts(plan, has_grammars=has_grammars)

    def admit(self, plan: SchedulerOutput) -> None:
        """Take in which of a plan's admitted requests have a grammar."""
        for request in plan.admitted:
            self._grammar_slots.discard(request.slot)
            if request.sampling.grammar is not None:
                self._grammar_slots.add(request.slot)

    def is_answered(self, plan: SchedulerOutput) -> bool:
        """Return whether the plan's step would run without waiting for drafts."""
        return self._link is None or self._link.is_answered(plan.step)

    def wait_for_drafts(self, plan: SchedulerOutput) -> None:
        """Wait until the plan's drafts have arrived or are late."""
        if self._link is not None:
            self._link.wait_for_drafts(plan.step)

    def take_use(self) -> DrafterUse | None:
        """Return the drafter's use since the last call; None without a drafter."""
        return self._link.take_use() if self._link is not None else None

    def begin(self, plan: SchedulerOutput, num_parts: int) -> None:
        """Prepare for a plan's step; its results are sent in `num_parts` parts."""
        self._step, self._num_sent_parts, self._num_parts = plan.step, 0, num_parts
        self._drafts_arrived = False

    # Driven by the host.

    def propose(self, plan: SchedulerOutput, states: RequestStates) -> Proposals:
        if self._step != plan.step:
            self.begin(plan, 1)
        if not plan.num_draft_tokens:
            return Proposals.none(plan.num_requests, self._device)
        assert isinstance(self._resolved.drafter, DrafterConfig), "other drafters are colocated"
        kinds = draft_kinds(plan, self._resolved.drafter.num_candidates)
        proposals, candidates = self._receive_drafts(kinds)
        if not candidates:
            return proposals
        counts_R = torch.from_numpy(plan.block_drafts.astype(np.int64))
        ids_XC, scores_XPC = candidates
        return replace(proposals, candidates=(BlockCandidates(ids_XC, scores_XPC, counts_R),))

    def inject(
        self, taps_NmH: Tensor | None, rows: StepRows, token_ids_RW: Tensor, num_tokens_R: Tensor
    ) -> None:
        assert taps_NmH is not None, "a target with a drafter has taps"
        num_drafts_R = (rows.counts_R - 1).clamp(min=0).int().cpu().numpy()
        token_ids_RW = token_ids_RW[:, : 1 + int(num_drafts_R.max(initial=0))]  # the trimmed plan's width
        if self._link is not None and (features_NH := self.features(taps_NmH)) is not None:
            self._send_results(token_ids_RW, num_tokens_R, features_NH, num_drafts=num_drafts_R)

    # Driven by the device.

    def receive(self, buffers: Sequence[DraftBuffer]) -> None:
        received = self._drafts([(tuple(each.values.shape), each.values.dtype) for each in buffers])
        if received is None:
            for buffer in buffers:
                buffer.values.fill_(buffer.value_if_late)
        else:
            for buffer, values in zip(buffers, received, strict=True):
                buffer.values.copy_(values)
        if self._communicator.world_size > 1:
            # One broadcast for tensors of all dtypes, as int32 words.
            words = [each.values.flatten().view(torch.int32) for each in buffers]
            words_of_rank_0 = self._communicator.broadcast(torch.cat(words))
            for mine, theirs in zip(words, words_of_rank_0.split([len(each) for each in words]), strict=True):
                mine.copy_(theirs)

    def features(self, taps_NmH: Tensor) -> Tensor | None:
        return None if self._features is None else self._features(taps_NmH)

    def send(self, num_drafts_R: Tensor, chosen_X: Tensor, features_NH: Tensor) -> None:
        self._send_results(num_drafts_R, chosen_X, features_NH)

    def _receive_drafts(self, kinds: Kinds) -> tuple[Proposals, Sequence[Tensor]]:
        """Return drafts, or zeros with unknown margins, equal on all ranks; and on rank 0 candidates."""
        received = self._drafts(kinds)
        shape = kinds[0][0]
        drafts = torch.zeros(shape, dtype=torch.int64, device=self._device)
        margins = torch.full(shape, torch.nan, dtype=torch.float32, device=self._device)
        for buffer, values in zip((drafts, margins), received or (), strict=False):
            buffer.copy_(values)
        return broadcast_proposals(Proposals(drafts, margins), self._communicator), (received or ())[2:]

    def _drafts(self, kinds: Kinds) -> Sequence[Tensor] | None:
        """Return what the drafter sent for the current step; None if it is late, and on other ranks."""
        received = self._link.drafts(self._step, kinds) if self._link is not None else None
        self._drafts_arrived = received is not None
        return received

    def _send_results(self, *values: Tensor, num_drafts: IntArray | None = None) -> None:
        part, self._num_sent_parts = self._num_sent_parts, self._num_sent_parts + 1
        if self._link is None:
            return
        is_last = self._num_sent_parts == self._num_parts
        self._link.send_results(
            self._step, part, values, followed=self._drafts_arrived, num_drafts=num_drafts, is_last=is_last
        )


class SplitRunner:
    """Wraps a rank's runner, and adds drafts from another process."""

    def __init__(self, runner: Runner, drafts: RemoteDrafterSource, resolved: ResolvedConfig) -> None:
        self._runner, self._drafts = runner, drafts
        self._on_device = resolved.runs_on_device
        # plans and the times of their requests
        self._waiting: deque[tuple[SchedulerOutput, float]] = deque()
        # of steps that the device runs: for how long it had nothing to do but wait for their drafts
        self._waits_s: deque[float] = deque()
        self._free_s = 0.0  # time since which the target is idle
        self._grace_until_s = 0.0

    def submit(self, plan: SchedulerOutput) -> None:
        self._drafts.admit(plan)
        if plan.writes_context:
            self._drafts.request_drafts(plan)
        self._waiting.append((plan, time.monotonic()))
        if self._on_device:
            self._launch_answered()

    def is_ready(self) -> bool:
        """Return whether the oldest step has ended or, if the host drives it, should run now."""
        if self._drafts.link is not None:
            self._drafts.link.receive()  # sends results that the device has written
        if self._on_device:
            self._launch_answered()
            return bool(self._waits_s) and self._runner.is_ready()
        return time.monotonic() > self._grace_until_s and self._drafts.is_answered(self._waiting[0][0])

    def collect(self) -> StepResult:
        if not self._waits_s:
            self._launch()
        while self._on_device and self._waiting and not self._runner.is_ready():
            self._launch_answered()
        waited_s = self._waits_s.popleft()
        result = self._runner.collect()
        self._free_s = time.monotonic()
        if self._waiting:
            self._grace_until_s = self._free_s + GRACE_S
        timings = result.timings  # the wait for drafts is the time spent on drafting
        return replace(
            result,
            timings=replace(timings, draft_s=timings.draft_s + waited_s),
            drafter_use=self._drafts.take_use(),
        )

    def _launch_answered(self) -> None:
        """Launch the steps that need not wait for drafts."""
        while self._waiting and self._drafts.is_answered(self._waiting[0][0]):
            self._launch()

    def _launch(self) -> None:
        """Launch the oldest waiting step, once it has its drafts or they are late."""
        plan, requested_s = self._waiting.popleft()
        self._drafts.wait_for_drafts(plan)
        is_idle = not self._waits_s and plan.num_draft_tokens
        waited_s = time.monotonic() - max(requested_s, self._free_s) if is_idle else 0.0
        self._waits_s.append(waited_s)
        num_parts = 1
        if self._on_device:
            decodes_R = (plan.num_rows == plan.num_drafts + 1) & plan.samples
            num_parts = int(decodes_R.any()) + int(not decodes_R.all())
        self._drafts.begin(plan, num_parts)
        self._runner.submit(plan)


def _context_features(resolved: ResolvedConfig, backend: Backend) -> ContextFeatures:
    assert resolved.drafter_folder is not None, "a split drafter has a checkpoint"
    assert isinstance(resolved.drafter, DrafterConfig), "other drafters are colocated"
    folder = open_folder(resolved.drafter_folder, resolved.drafter.quantization, resolved.dtype)
    names = {named_as_ours(name): name for name in folder.shapes}
    read = {name: names[name] for name in ("fc.weight", "hidden_norm.weight")}
    weights = read_weights(folder, read, resolved.dtype, resolved.device, backend)
    norm_H = weights["hidden_norm.weight"]
    return ContextFeatures(weights.matrix("fc.weight"), norm_H, resolved.drafter.rms_norm_eps, backend)


def _values_each(resolved: ResolvedConfig) -> int:
    """Return the int32 values of a request's drafts if a device makes more of them than tokens; else 0."""
    if not (resolved.runs_on_device and resolved.draft_shape.branches):
        return 0
    from .gpu_drafter_session import values_each

    return values_each(resolved)
