"""Requests fed to a drafter by hand: random taps of a target, blocks and pages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from manta.cluster.step.scheduler_output import AdmittedRequest, SchedulerOutput, SlotSampling
from manta.drafter.compute.layers.linear import Linear
from manta.drafter.dflash.checkpoint import load_drafter
from manta.drafter.dflash.model import DFlashDrafter
from manta.drafter.dflash.proposer import DFlashProposer
from manta.drafter.dflash.target_features import EmbeddingCopies, TargetFacts
from manta.drafter.step.request_states import RequestStates

from support.checkpoints import drafters as checkpoints
from support.checkpoints.drafters import HIDDEN, TARGET_LAYERS, VOCAB
from support.oracles.oracle_dflash import Oracle

FACTS = TargetFacts(hidden_size=HIDDEN, num_layers=TARGET_LAYERS, vocab_size=VOCAB, max_model_len=128)
PAGE_SIZE, NUM_PAGES, NUM_SLOTS = 8, 80, 8
GREEDY = SlotSampling(0.0, 0, 1.0, 0.0, 0, 0, ())


def i32(values) -> np.ndarray:
    return np.array(list(values), dtype=np.int32)


def plan_of(slots, computed, rows, drafts, *, admitted=(), pages=(), samples=None) -> SchedulerOutput:
    """Make a step; `pages` are (slot, index, id)."""
    where = np.array(list(pages), dtype=np.int32).reshape(-1, 3)
    return SchedulerOutput(
        step=0,
        admitted=tuple(admitted),
        page_groups=0 * where[:, 0],
        page_slots=where[:, 0],
        page_indices=where[:, 1],
        page_ids=where[:, 2],
        slots=i32(slots),
        num_computed=i32(computed),
        num_rows=i32(rows),
        num_drafts=i32(drafts),
        samples=np.ones(len(slots), dtype=bool) if samples is None else np.array(samples),
    )


@dataclass
class Pair:
    """Our drafter, and the oracle on the same weights."""

    ours: DFlashDrafter
    oracle: Oracle


def load_pair(
    folder: Path,
    config: dict,
    dtype: torch.dtype = torch.float32,
    own: torch.Tensor | None = None,
) -> Pair:
    """Args:
    own: embedding and head [2, V, H] of the drafter's files, if they have them.
    """
    generator = torch.Generator().manual_seed(5)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    head = torch.randn(VOCAB, HIDDEN, generator=generator) * HIDDEN**-0.5
    nested = config.get("dflash_config", {})
    mask = torch.randn(HIDDEN, generator=generator) if nested.get("mask_token_id", 0) >= VOCAB else None
    tensors = checkpoints.drafter_tensors(config)
    if own is not None:
        tensors |= {"embed_tokens.weight": own[0].clone(), "lm_head.weight": own[1].clone()}
    checkpoints.write_drafter(folder, config, tensors, mask)
    shared_embeddings = EmbeddingCopies(embedding.to(dtype), Linear(head.to(dtype)))
    return Pair(
        load_drafter(folder, FACTS, shared_embeddings, dtype, "cpu"),
        Oracle(config, tensors, embedding, head, mask),
    )


class Requests:
    """Requests at scattered pages whose context has been written: `lengths` tokens each, then an anchor."""

    def __init__(
        self,
        drafter: DFlashDrafter,
        lengths: list[int],
        taps: list[torch.Tensor],
        params: list[SlotSampling] | None = None,
    ) -> None:
        rng = np.random.default_rng(1)
        self.lengths = lengths
        self.anchors = [int(a) for a in rng.integers(0, 80, len(lengths))]
        self.states = RequestStates(NUM_SLOTS, FACTS.max_model_len, (NUM_PAGES,), PAGE_SIZE, "cpu")
        self.proposer = DFlashProposer(drafter, drafter.new_cache(NUM_PAGES, PAGE_SIZE))
        self.proposer.cache.kv.normal_()  # content of earlier requests
        order = iter(rng.permutation(NUM_PAGES).tolist())
        pages = [(s, i, next(order)) for s, n in enumerate(lengths) for i in range(-(-(n + 16) // PAGE_SIZE))]
        admitted = [AdmittedRequest(s, str(s), i32([]), p) for s, p in enumerate(params or ())]
        self.states.apply(plan_of([], [], [], [], admitted=admitted, pages=pages, samples=[]))
        for slot, (length, anchor) in enumerate(zip(lengths, self.anchors, strict=True)):
            self.states.token_ids[slot, length] = anchor
            for begin, end in ((0, length // 2), (length // 2, length)):
                if begin < end:
                    self._write(slot, begin, taps[slot][begin:end])

    def _write(self, slot: int, begin: int, taps: torch.Tensor) -> None:
        plan = plan_of([slot], [begin], [len(taps)], [0], samples=[False])
        rows = self.states.lay_out_rows(plan)
        self.proposer.inject(taps, rows, rows.counts_R)

    def plan(self, drafts: list[int]) -> SchedulerOutput:
        """A step with a number of drafts each."""
        return plan_of(range(len(drafts)), self.lengths, [k + 1 for k in drafts], drafts)

    def block_logits(self, drafts: list[int]) -> list[torch.Tensor]:
        """Logits per request for a number of drafts each."""
        owner, plan = [r for r, k in enumerate(drafts) if k], self.plan(drafts)
        config = self.proposer.drafter.config
        block = self.states.lay_out_block(plan, config.mask_token_id, samples_anchor=config.samples_anchor)
        assert block is not None
        logits = self.proposer.drafter.block_logits(block, self.proposer.cache)
        parts = iter(logits.split([drafts[r] for r in owner]))
        return [next(parts) if k else logits[:0] for k in drafts]


def random_taps(lengths: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(n, 3, HIDDEN, generator=generator) for n in lengths]


def assert_blocks_equal(pair: Pair, lengths: list[int], drafts: list[int], *, atol: float = 3e-5) -> None:
    """Compare the logits of blocks, drafted together, with the oracle's."""
    taps = random_taps(lengths)
    requests = Requests(pair.ours, lengths, taps)
    blocks = requests.block_logits(drafts)
    for ours, context, anchor, count in zip(blocks, taps, requests.anchors, drafts, strict=True):
        if count:
            expected = pair.oracle.logits(context, anchor, count)
            kept = expected.isfinite()
            assert torch.equal(kept, ours.isfinite())
            assert torch.allclose(ours[kept], expected[kept], atol=atol)
