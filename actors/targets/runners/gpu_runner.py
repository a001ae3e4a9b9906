"""Steps on a GPU, launched without waiting, with decoding steps as CUDA graphs; results are collected later.

The counterpart of `cpu_runner.py` (for CPUs) with the same results. Decoding requests replay two graphs
(`cuda_graphs.py`): one drafts, one verifies. Prompt rows are launched after them, kernel by kernel, while the
graphs run. Neither waits for the previous step or the host.

    submit(plan): the plan's arrays ─▶ [draft] ─▶ [trim ─▶ verify ─▶ sample ─▶ inject]  decoding requests
                  (one copy)           [verify ─▶ sample ─▶ inject]                     prompts
                                       [log probabilities]  requested rows (`logprobs.py`)
                                       ─▶ outcomes ─▶ host (one copy)
    collect():    wait for that copy

On a CPU, where tests run these kernels in Triton's interpreter, everything but the graphs is the same.

Legend: R requests, G requests of one iteration, W most tokens of a request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....cluster.request.request import MAX_LOGPROBS
from ....cluster.speculation.draft_tree import TreeSizes
from ....cluster.step.scheduler_output import IntArray, SchedulerOutput, StepResult, StepTimings
from ....drafter.compute.memory.kv_cache import PagedKVCache
from ....drafter.step.gpu_triton.inputs.row_layout import DeviceStepRequests
from ....drafter.step.gpu_triton.inputs.transfers import (
    MAX_IN_FLIGHT,
    PendingResult,
    ResultCopier,
    StepOutput,
    Upload,
)
from ....drafter.step.sampling.logprobs import num_packed_values
from ..model.decoder import Decoder
from .cuda_graphs import PassKind, StepGraphs, StepKinds
from .drafts.device_suffixes import NO_SUFFIXES, CopyChoice, HostCopies, NoSuffixes
from .drafts.device_trees import TreeMemory
from .drafts.draft_source import Drafter
from .grammar_masks import NO_GRAMMARS, NoGrammars
from .logprobs import Computed, RequestedLogprobs
from .page_mover import PageMover
from .plan_layout import PlanLayout, decoding_and_prompts
from .runner_interface import ReadsMeter
from .step_passes import DeviceModels, TargetPass

if TYPE_CHECKING:
    from ....drafter.grammars.matchers import GrammarStates

Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class _Share:
    """One iteration's share of a step: its requests, and the shape of its outcome.

    Attributes:
        requests_G: their indices in the plan.
        parts: the parts that are timed.
        shape: of the outcome, including padding (`PassKind.outcome_shape`).
    """

    requests_G: Indices
    parts: tuple[str, ...]
    shape: tuple[int, int, int]

    @property
    def num_values(self) -> int:
        return StepOutput.num_values(*self.shape)

    def views_of(self, values: Tensor) -> StepOutput:
        """Return a view of the outcome at the beginning of `values`."""
        return StepOutput.views_of(values, *self.shape)


class _Gathered:
    """A step's outcome on the host, gathered from its iterations' shares.

    Attributes:
        max_drafts: K, the most drafts of a request in the plan.
        token_ids: int32 [R, 1 + K], new tokens, then -1.
        num_tokens, num_drafts: int32 [R]; new tokens and verified drafts.
        margins: fp32 [R, K], nan where there is no draft.
        seconds: by part of the step, summed over iterations.
        num_reads: the device's count of expert reads.
        trees: requests with trees, and the trees' values (`TreeMemory.results`); None if there are none.
    """

    def __init__(self, plan: SchedulerOutput) -> None:
        num_requests, self.max_drafts = plan.num_requests, int(plan.block_drafts.max(initial=0))
        self.token_ids = np.full((num_requests, 1 + self.max_drafts), -1, dtype=np.int32)
        self.num_tokens, self.num_drafts = (np.zeros(num_requests, dtype=np.int32) for _ in range(2))
        self.margins = np.full((num_requests, self.max_drafts), np.nan, dtype=np.float32)
        self.seconds: dict[str, float] = {}
        self.num_reads = 0
        self.trees: tuple[Indices, Tensor] | None = None

    def add(self, share: _Share, outcome: StepOutput) -> None:
        requests_G, (_, width, num_tree_values) = share.requests_G, share.shape
        count, kept = len(requests_G), min(width, 1 + self.max_drafts)
        rows_GW1 = outcome.rows_RW1.numpy()[:count]
        self.num_reads = int(outcome.reads_1)
        self.token_ids[requests_G, :kept] = rows_GW1[:, :kept]
        self.num_tokens[requests_G] = rows_GW1[:, -1]
        if width > 1:
            self.num_drafts[requests_G] = outcome.num_drafts_R.numpy()[:count]
            self.margins[requests_G] = outcome.margins_RD.numpy()[:count, : self.max_drafts]
        if num_tree_values:
            self.trees = requests_G, outcome.trees_RE[:count]
        spans_s = np.diff(outcome.times.numpy()[: len(share.parts) + 1]) / 1e9
        for part, span_s in zip(share.parts, spans_s.tolist(), strict=True):
            self.seconds[part] = self.seconds.get(part, 0.0) + span_s


@dataclass(frozen=True, slots=True)
class _Pending:
    """A submitted step, with the host memory that its outcome is copied to."""

    plan: SchedulerOutput
    shares: Sequence[_Share]
    copied: CopyChoice
    logprob_rows: RequestedLogprobs
    arrival: PendingResult


class GpuModelRunner:
    """A loaded rank with device-driven steps.

    Args:
        max_requests: most requests that run at once.
        num_drafts: most drafts of a block.
        max_rows: most rows of a step.
        tree: the largest draft trees; None if drafts form chains.
        grammars: restrict requests that have one.
        suffixes: make drafts on the host, alone or beside a drafter; then no step may be submitted before
            the last one is collected.
        mover: moves pages to a tier below them and back; None without one.
        captures: whether decoding steps are captured as CUDA graphs.
    """

    def __init__(
        self,
        models: DeviceModels,
        max_requests: int,
        num_drafts: int,
        max_rows: int,
        tree: TreeSizes | None = None,
        grammars: NoGrammars = NO_GRAMMARS,
        suffixes: NoSuffixes = NO_SUFFIXES,
        mover: PageMover | None = None,
        *,
        captures: bool,
    ) -> None:
        self._grammars, self._suffixes, self._captures = grammars, suffixes, captures
        self.mover = mover
        self._kinds = StepKinds(max_requests, num_drafts, max_rows, tree)
        self._layout = layout = PlanLayout(
            max_requests,
            num_drafts,
            tree,
            saves_states=models.recurrent.is_kept,
            num_margins=suffixes.num_rows,
        )
        states = models.memory.states
        self._upload = Upload(states.arena, layout.num_values, states.max_changes)
        values, trim = self._upload.values, layout.trim(self._upload.values)
        self._decoding, self._prompts = layout.part(values, "decoding"), layout.part(values, "prompts")
        # Index 0 is for decoding requests, index 1 for prompts.
        self._saves = layout.part(values, "saves")
        self._copies = HostCopies(layout.part(values, "margins").view(torch.float32), models.memory)
        if suffixes.num_rows and not models.drafts.has_context:
            models = replace(models, drafts=self._copies)
        if tree is not None and (config := models.drafts.tree_config) is not None:
            lists = self._decoding, layout.part(values, "blocks")
            num_kept = self._kinds.max_block_rows if grammars.states is not None else 0
            memory = TreeMemory.build(tree, max_requests, lists, trim, config, num_kept)
            models = replace(models, trees=memory)
        self.models = models
        max_outcome = max(StepOutput.num_values(*kind.outcome_shape) for kind in self._kinds.all())
        self._vocab_size = models.target.spec.vocab_size
        max_logprobs = max_rows * num_packed_values(MAX_LOGPROBS, self._vocab_size)
        self._outcomes = ResultCopier(
            max_outcome + StepOutput.num_values(max_requests, 1) + max_logprobs, models.target.device
        )
        self._graphs = StepGraphs(models, self._decoding, trim, self._outcomes.values)
        self._pending, self._expert_reads = deque[_Pending](), ReadsMeter(models.target)

    @torch.inference_mode()
    def submit(self, plan: SchedulerOutput) -> None:
        assert len(self._pending) < MAX_IN_FLIGHT, "in-flight steps' outcomes would overwrite each other"
        decoding, prompts = decoding_and_prompts(plan)
        self._grammars.admit(plan)
        uploaded = self._send(plan, decoding, prompts)
        models, values, num_values = self.models, self._outcomes.values, 0
        models.recurrent.admit(plan)
        shares: list[_Share] = []
        passes: list[Computed] = []
        if len(decoding):
            share = self._decode(plan, decoding, uploaded)
            shares.append(share)
            outcome = share.views_of(values)
            drafts_R = outcome.num_drafts_R if share.shape[1] > 1 else None
            paths_RD = None if models.trees is None else models.trees.trees.paths_RD
            passes.append(Computed(decoding.tolist(), models.hidden, outcome.rows_RW1, drafts_R, paths_RD))
            num_values = share.num_values
            if plan.saves is not None:
                models.recurrent.save_accepted(self._decoding[0, : len(decoding)], self._saves[0])
        if len(prompts):
            share, hidden_NH = self._prefill(plan, prompts, num_values)
            shares.append(share)
            rows_RW1 = share.views_of(values[num_values:]).rows_RW1
            passes.append(Computed(prompts.tolist(), hidden_NH, rows_RW1, None, None))
            num_values += share.num_values
        states = models.memory.states
        logprob_rows = RequestedLogprobs.of(plan, states, self._vocab_size)
        num_values += logprob_rows.launch(plan, passes, models.target, states, values[num_values:])
        arrival = self._outcomes.copy_to_host(num_values)
        self._pending.append(_Pending(plan, shares, self._suffixes.choice, logprob_rows, arrival))

    def is_ready(self) -> bool:
        return self._pending[0].arrival.is_done

    def collect(self) -> StepResult:
        step = self._pending.popleft()
        plan, values, models = step.plan, step.arrival.wait(), self.models
        found = _Gathered(plan)
        for share in step.shares:
            found.add(share, share.views_of(values))
            values = values[share.num_values :]
        self._suffixes.append(plan, found.token_ids, found.num_tokens)
        step.copied.drop_missing(found.margins)
        learned = gain = reads = None
        if found.trees is not None and models.trees is not None:
            tokens = found.num_drafts, found.token_ids, found.num_tokens
            learned, gain = models.trees.results(plan, *found.trees, *tokens)
        if models.target.num_routed:
            reads = self._expert_reads.of(found.num_reads, num_passes=len(step.shares))
        return StepResult(
            plan.step,
            found.token_ids,
            found.num_tokens,
            StepTimings(**found.seconds),
            *step.logprob_rows.read(values),
            num_drafts=None if plan.trim is None and plan.tree is None else found.num_drafts,
            margins=found.margins if found.max_drafts and models.drafts.has_margins else None,
            trees=learned,
            tree_gain=gain,
            expert_reads=reads,
            is_copied=step.copied.is_copied_R,
            is_pass_skipped=step.copied.is_pass_skipped,
        )

    def execute(self, plan: SchedulerOutput) -> StepResult:
        self.submit(plan)
        return self.collect()

    def _send(self, plan: SchedulerOutput, decoding: Indices, prompts: Indices) -> IntArray:
        """Send a plan, changed states and copied drafts to the device at once; return its integers."""
        states = self.models.memory.states
        uploaded, copies = self._layout.pack(plan, decoding, prompts), self._suffixes.copy(plan, decoding)
        self._layout.write_margins(uploaded, copies.margins_N)
        changes = states.changes(plan)
        if len(copies.slots_M):
            changes = np.concatenate((changes, states.draft_changes(*copies[:3])))
        self._upload.send(uploaded, changes)
        return uploaded

    def _decode(self, plan: SchedulerOutput, requests_G: Indices, uploaded: IntArray) -> _Share:
        """Run the passes of decoding requests; `uploaded` are the step's integers."""
        filters, restricted = self._filters(plan, requests_G), self._grammars.restricts(plan, requests_G)
        block, kind = self._kinds.of(plan, requests_G, filters=filters or restricted)
        trees, drafts = self.models.trees, self.models.drafts
        if block is not None:
            step_trees = None if trees is None else trees.of_requests(block.num_requests)
            drafts.receive(block.num_rows, step_trees, has_grammars=restricted)
            self._draft(plan, requests_G, block, uploaded)
        if restricted:
            grown = None if block is None else trees
            self._grammars.write(plan, requests_G, self._graphs.verified(kind), grown)
        self._graphs.replay(kind)
        if kind.writes_context:
            drafts.send(kind.num_requests, kind.num_context_rows, kind.num_context_rows)
        if restricted:
            self._grammars.clear()  # once the pass has read them
        return _Share(requests_G, self._graphs.parts(kind), kind.outcome_shape)

    def _draft(self, plan: SchedulerOutput, requests_G: Indices, block: PassKind, uploaded: IntArray) -> None:
        """Run the drafter's pass, or take copies: instead of it, or after it for some requests."""
        suffixes, memory = self._suffixes, self.models.memory
        if not suffixes.choice.is_made:
            return self._graphs.replay(block)
        if suffixes.choice.is_pass_skipped:
            return self._graphs.drafting(block).replace_by(self._copies)
        self._graphs.replay(block)
        copies = suffixes.mix(plan, requests_G, memory.states.tables.token_ids, memory.workspace.margins_N)
        if copies is not None:
            self._layout.write_margins(uploaded, copies.margins_N)
            self._upload.send(uploaded, memory.states.draft_changes(*copies[:3]))
        self._graphs.drafting(block).end_with(None if copies is None else self._copies)

    def _prefill(self, plan: SchedulerOutput, requests_G: Indices, offset: int) -> tuple[_Share, Tensor]:
        """Launch the prompts' rows and return their hidden states.

        Their outcome is written at `offset` in the outcome memory.
        """
        num_requests, num_sampled = len(requests_G), int(plan.samples[requests_G].sum())
        first_G, rows_G = plan.num_computed[requests_G], plan.num_rows[requests_G]
        assert (first_G >= 0).all(), "a prompt's position is known on the host"
        requests = DeviceStepRequests.prompts(self._prompts, first_G, rows_G, num_sampled)
        outcome = StepOutput.views_of(self._outcomes.values[offset:], num_requests, 1)
        filters = self._filters(plan, requests_G)
        pass_ = TargetPass(
            self.models,
            requests,
            outcome,
            filters=filters,
            writes_context=plan.writes_context,
            masks=self._grammars.of_prompts(plan, requests_G, requests),
            saves=None if plan.saves is None else self._saves[1],
        )
        hidden_NH = pass_.run()
        if plan.writes_context:
            self.models.drafts.send(num_requests, num_sampled, requests.num_rows)
        return _Share(requests_G, pass_.parts, (num_requests, 1, 0)), hidden_NH

    def _filters(self, plan: SchedulerOutput, requests_G: Indices) -> bool:
        return self.models.memory.states.filters(plan.slots[requests_G])

    @property
    def model(self) -> Decoder:
        return self.models.target

    @property
    def cache(self) -> PagedKVCache:
        return self.models.cache

    @property
    def grammars(self) -> GrammarStates | None:
        return self._grammars.states

    @torch.inference_mode()
    def prepare(self) -> None:
        if self._captures:
            self._graphs.capture(self._kinds.all())
            self._expert_reads.forget()

    @torch.inference_mode()
    def swap_drafter(self, drafter: Drafter) -> None:
        """Replace the drafter, and capture the graphs again, as they hold the old drafter's weights."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        self.models = replace(self.models, drafts=self.models.drafts.with_drafter(drafter))
        self._suffixes.on_drafter_replaced()
        self._graphs.rebuild(self.models)
        self.prepare()

    @torch.inference_mode()
    def profile_run(self, largest: SchedulerOutput, used_bytes: Callable[[], int]) -> int:
        if self._captures:
            return self._graphs.measure_bytes(self._kinds, used_bytes)
        used_before = used_bytes()
        self.execute(largest)
        return used_bytes() - used_before
