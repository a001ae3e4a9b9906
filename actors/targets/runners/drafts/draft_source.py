"""The verbs by which a step knows what drafts: propose drafts, and take in the target's features.

`DraftSource` is called by a host-driven step, `DeviceDrafts` by a device-driven one. `NoDrafts`, and the base
class of the latter, are for plain decoding.

| method | host | device |
|---|---|---|
| DFlash | `ColocatedDrafter` over `drafter/dflash/proposer.py` | `DeviceBlocks` |
| EAGLE-3, MTP, assistant | `ColocatedDrafter` over `drafter/eagle3/proposer.py` | `DeviceChains` |
| a drafter in another process | `workers/drafter/remote_drafter.py` | `RemoteExchange` |
| prompt lookup | `drafter/ngram/proposer.py` | `DeviceLookup` |
| suffix decoding | `drafter/suffix/proposer.py` | `HostCopies`, by `DeviceSuffixes` |

Legend: R requests, N rows, X sampled rows, K most drafts, W = K + 1, m taps, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from .....cluster.step.scheduler_output import SchedulerOutput
from .....drafter.dflash.config import DrafterConfig
from .....drafter.dflash.model import DFlashDrafter
from .....drafter.eagle3.model import Eagle3Drafter
from .....drafter.step.inputs.proposals import Proposals
from .....drafter.step.inputs.row_layout import StepRows
from .....drafter.step.request_states import RequestStates
from ...model.assistant import AssistantDrafter
from ...model.mtp import MtpDrafter
from ...model.tensor_parallel import Communicator

if TYPE_CHECKING:  # these need Triton
    from .....drafter.step.gpu_triton.inputs.row_layout import DeviceStepRequests, DeviceStepRows
    from .....drafter.step.gpu_triton.request_states import DeviceStates
    from .....drafter.step.gpu_triton.sampling.sampler import SamplingWorkspace
    from .device_trees import StepTrees

ChainedDrafter = Eagle3Drafter | MtpDrafter | AssistantDrafter
Drafter = DFlashDrafter | ChainedDrafter


class DraftSource(Protocol):
    """Provides drafts and receives the target's features, on every rank of a host-driven step."""

    def propose(self, plan: SchedulerOutput, states: RequestStates) -> Proposals:
        """Return drafts, equal on all ranks; K = 0 if no request drafts."""
        ...

    def inject(
        self, taps_NmH: Tensor | None, rows: StepRows, token_ids_RW: Tensor, num_tokens_R: Tensor
    ) -> None:
        """Write the drafter's context from taps and committed tokens; called if the plan writes context."""
        ...


class NoDrafts:
    """The source of a rank that decodes plainly, without taps."""

    def propose(self, plan: SchedulerOutput, states: RequestStates) -> Proposals:
        assert not plan.num_draft_tokens, "drafts were planned, but there is no drafter"
        return Proposals.none(plan.num_requests, states.device)

    def inject(
        self, taps_NmH: Tensor | None, rows: StepRows, token_ids_RW: Tensor, num_tokens_R: Tensor
    ) -> None:
        pass


class DraftBuffer(NamedTuple):
    """Memory for a part of what a remote drafter sends, and the value that fills it if that is late."""

    values: Tensor
    value_if_late: float


class RemoteDrafter(Protocol):
    """The connection to a remote drafter where the device drives the steps; on every rank."""

    def receive(self, buffers: Sequence[DraftBuffer]) -> None:
        """Write what the drafter has sent to the buffers of all ranks, or the values for late drafts.

        Drafts, int64, per row of `lay_out_block`'s blocks, or trees (`DeviceTrees`), int32 [R, E]; margins,
        fp32, per row; and for grammars the candidates of `StepTrees`.
        """
        ...

    def features(self, taps_NmH: Tensor) -> Tensor | None:
        """Return what the drafter gets of taps [N, H]; None on ranks that send nothing."""
        ...

    def send(self, num_drafts_R: Tensor, chosen_X: Tensor, features_NH: Tensor) -> None:
        """Send numbers of drafts, the target's choices (from which it finds accepted drafts), and features.

        Those are of verified drafts, or of the accepted paths of trees.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Memory that the passes of a rank's drafter and target read and write.

    Attributes:
        workspace: for sampling, over the whole vocabulary or this rank's part of it; the margins of drafts.
    """

    states: DeviceStates
    workspace: SamplingWorkspace
    communicator: Communicator


@dataclass(frozen=True, slots=True)
class VerifiedRows:
    """A target's pass over the participating requests, with what it chose.

    Attributes:
        requests: with the drafts that were verified.
        rows: with the slots of the context, where trees were verified.
        num_tokens_R: int32, tokens that the step produced; the requests have already advanced.
        trees: the requests' draft trees, if drafts may form trees.
    """

    requests: DeviceStepRequests
    rows: DeviceStepRows
    chosen_X: Tensor
    taps_NmH: Tensor
    num_tokens_R: Tensor
    trees: StepTrees | None


class DeviceDrafts:
    """A source of drafts in passes of a device; `propose` and `inject` can be captured in graphs.

    This class drafts nothing, as in plain decoding.

    Attributes:
        has_context: whether `inject` does anything.
        has_margins: whether its drafts have margins.
        can_be_forced: whether a grammar may replace its drafts by forced tokens.
        tree_config: of a drafter whose candidates can grow trees; else None.
        kept_by_page: all that is kept of the tokens in a page: [A, P + 1, ...] each.
    """

    has_context: bool = False
    has_margins: bool = True
    can_be_forced: bool = True
    tree_config: DrafterConfig | None = None
    kept_by_page: Sequence[Tensor] = ()

    def receive(self, num_rows: int, trees: StepTrees | None, *, has_grammars: bool) -> None:
        """Get ready for `propose` over blocks of `num_rows` rows; may wait for another process."""

    def propose(self, requests: DeviceStepRequests, trees: StepTrees | None, *, filters: bool) -> None:
        """Leave drafts in the requests' tokens, or trees, and margins in the workspace, by row of blocks.

        Args:
            requests: decoding requests, of which all that may draft do.
            trees: grown from the blocks' candidates, if drafts may form trees.
            filters: see `TargetPass`.
        """
        raise AssertionError("drafts were planned, but there is no drafter")

    def inject(self, verified: VerifiedRows) -> None:
        """Write the drafter's context from the target's taps."""

    def send(self, num_requests: int, num_chosen: int, num_rows: int) -> None:
        """Pass on what `inject` got for so many requests, sampled rows and rows."""

    def with_drafter(self, drafter: Drafter) -> DeviceDrafts:
        """Return a source with another drafter of the same shape, over the same pages."""
        raise AssertionError("the drafter is colocated")
