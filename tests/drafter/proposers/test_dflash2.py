"""DFlash2 and DSpark: drafts follow their path with each request's settings, and every term has an effect.

The oracle is `oracle_dflash.py`, in fp64. `test_drafter_model.py` compares blocks of all variants with it,
including convolutions.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from manta.cluster.step.scheduler_output import SlotSampling
from manta.drafter.dflash.proposer import DFlashProposer
from manta.drafter.step.cpu_numba.step_ops import LOOPS
from manta.drafter.step.sampling.step_ops import DEFINITION, StepOperators
from support.checkpoints.drafters import VARIANTS, dspark_speculators
from support.oracles.drafter_requests import GREEDY, VOCAB, Pair, Requests, load_pair, random_taps
from support.oracles.oracle_dflash import Oracle, gumbel

PATHS = sorted(name for name in VARIANTS if "second" in name or "selector" in name or "dspark" in name)
LENGTHS, DRAFTS = [1, 40, 5, 17, 33], [15, 3, 7, 0, 1]
SEED = -(2**40) - 3
KNOBS = {
    "greedy": GREEDY,
    "warm": SlotSampling(2.5, 0, 1.0, 0.0, SEED, 0, ()),
    "top-k": SlotSampling(2.0, 3, 1.0, 0.0, SEED, 0, ()),
    "top-k beyond the candidates": SlotSampling(2.5, 30, 1.0, 0.0, SEED, 0, ()),
    "top-p": SlotSampling(1.5, 0, 0.6, 0.0, SEED, 0, ()),
    "all": SlotSampling(3.0, 40, 0.9, 0.05, SEED, 0, ()),
    "early stops": SlotSampling(0.0, 0, 1.0, 0.0, SEED, 100, tuple(range(0, 80))),
}


def doubled(pair: Pair) -> Oracle:
    oracle = pair.oracle
    tensors = {n: t.double() if t.is_floating_point() else t for n, t in oracle.tensors.items()}
    return Oracle(oracle.config, tensors, oracle.embedding.double(), oracle.head.double())


def kept_by_filters(params: SlotSampling, scores: torch.Tensor) -> torch.Tensor:
    """Return the tokens that filters keep, from their definition over probabilities after temperature."""
    p = (scores / params.temperature).softmax(-1)
    kept = p >= p.max() * params.min_p
    if params.top_k > 0:
        kept &= torch.tensor([bool((p[kept] > x).sum() < params.top_k) for x in p])
    p = torch.where(kept, p, 0.0) / p[kept].sum()
    return kept & torch.tensor([bool(p[p > x].sum() < params.top_p) for x in p])


def noised(params: SlotSampling, position: int, scores: torch.Tensor) -> torch.Tensor:
    return scores + params.temperature * gumbel(params.seed, position, VOCAB)


def choice(params: SlotSampling, position: int, scores: torch.Tensor) -> tuple[int, float]:
    """Apply filters, then noise, by definition; return the token and its distance to the second best.

    If only one token is kept, the distance is without noise and filters.
    """
    if params.temperature == 0:
        return best(scores)
    kept = kept_by_filters(params, scores)
    place, margin = best(torch.where(kept, noised(params, position, scores), -math.inf))
    return place, best(scores)[1] if kept.sum() == 1 else margin


def rank(params: SlotSampling, position: int, logits: torch.Tensor) -> torch.Tensor:
    """Return the order of candidates: kept tokens by logit and noise first, then the rest by logit."""
    if params.temperature == 0:
        return logits
    return torch.where(kept_by_filters(params, logits), 1e6 + noised(params, position, logits), logits)


def best(scores: torch.Tensor) -> tuple[int, float]:
    values, places = scores.topk(2)
    return int(places[0]), float(values[0] - values[1])


@pytest.mark.parametrize("operators", [DEFINITION, LOOPS], ids=["definition", "loops"])
@pytest.mark.parametrize("variant", PATHS)
@pytest.mark.one_in(2)
def test_drafts_equal_the_oracles_paths(variant: str, operators: StepOperators, tmp_path: Path):
    """Requests run together, with their own settings, lengths and numbers of drafts."""
    pair, taps = load_pair(tmp_path, VARIANTS[variant]), random_taps(LENGTHS)
    oracle, names, contexts = doubled(pair), list(KNOBS), [each.double() for each in taps]
    for turn in range(len(names)):
        mine = [names[(turn + r) % len(names)] for r in range(len(LENGTHS))]
        requests = Requests(pair.ours, LENGTHS, taps, [KNOBS[name] for name in mine])
        proposer = DFlashProposer(pair.ours, requests.proposer.cache, operators)
        proposals = proposer.propose(requests.plan(DRAFTS), requests.states)
        got, margins = proposals.drafts_RK, proposals.margins_RK
        assert got.shape == margins.shape == (5, 15)
        for r, (length, count, name) in enumerate(zip(LENGTHS, DRAFTS, mine, strict=True)):
            sure: list[float] = []

            def choose(
                z: torch.Tensor, k: int, name: str = name, length: int = length, sure: list[float] = sure
            ) -> int:
                place, margin = choice(KNOBS[name], length + 1 + k, z)
                sure.append(margin)
                return place

            def edit(z: torch.Tensor, k: int, name: str = name, length: int = length) -> torch.Tensor:
                is_early = length + 1 + k < KNOBS[name].min_length
                stops = torch.tensor(KNOBS[name].stop_token_ids if is_early else (), dtype=torch.long)
                return z.index_fill(0, stops, -math.inf)

            def ranked(z: torch.Tensor, k: int, name: str = name, length: int = length) -> torch.Tensor:
                return rank(KNOBS[name], length + 1 + k, z)

            anchor, c = requests.anchors[r], contexts[r]
            expected = oracle.drafts(c, anchor, count, choose, edit, ranked) if count else []
            assert got[r, :count].tolist() == expected, name
            if (chances := oracle.confidences(c, anchor, expected) if count else None) is not None:
                sure = [math.sqrt((1 + m) / (1 - p)) - 1 for m, p in zip(sure, chances, strict=True)]
            assert margins[r, :count].tolist() == pytest.approx(sure, abs=2e-3), name
            assert margins[r, count:].isnan().all()
            assert (got[r, count:] == -1).all()


CONV, SELECTOR = "layers.1.{}_conv", "candidate_selector"


def without(tensors: dict[str, torch.Tensor], term: str) -> dict[str, torch.Tensor]:
    """Return the weights of a drafter that lacks a term."""
    name, *where = term.split(" ")
    left = {n: t.clone() for n, t in tensors.items()}
    if not where:
        left[name].zero_()
    elif name.endswith("base_kernel"):
        left[name][int(where[0]), int(where[1])] = 0
    else:
        left[name].view(2, 2, -1, left[name].shape[1])[int(where[0]), int(where[1])] = 0
    return left


TERMS = [
    f"{CONV.format(kind)}.{name} {side} {tap}"
    for kind in ("attention", "mlp")
    for name in ("base_kernel", "kernel_projection.weight")
    for side in (0, 1)
    for tap in (0, 1)
]


@pytest.mark.parametrize("term", TERMS)
def test_without_a_term_of_the_convolutions_blocks_differ(term: str, tmp_path: Path):
    config, taps = VARIANTS["z-lab second"], random_taps([12])
    pair = load_pair(tmp_path, config)
    lacking = Oracle(config, without(pair.oracle.tensors, term), pair.oracle.embedding, pair.oracle.head)
    requests = Requests(pair.ours, [12], taps)
    difference = (requests.block_logits([7])[0] - lacking.logits(taps[0], requests.anchors[0], 7)).abs()
    assert difference.max() > 1e-3  # where the whole is within 3e-5


WALKS = [
    *(("z-lab second", f"{SELECTOR}.{name}_codebook") for name in ("predecessor", "successor")),
    ("z-lab second", f"{SELECTOR}.hidden_projection.weight"),
    *(("deepspec dspark", f"markov_head.{name}.weight") for name in ("markov_w1", "markov_w2")),
]


@pytest.mark.parametrize(("variant", "term"), WALKS)
def test_without_a_term_of_the_selector_or_the_markov_head_paths_differ(
    variant: str, term: str, tmp_path: Path
):
    pair, taps = load_pair(tmp_path, VARIANTS[variant]), random_taps([12])
    requests = Requests(pair.ours, [12], taps)
    got = requests.proposer.propose(requests.plan([15]), requests.states).drafts_RK[0].tolist()
    tensors = pair.oracle.tensors
    assert got == _greedy(pair, tensors, taps[0], requests.anchors[0])
    assert got != _greedy(pair, without(tensors, term), taps[0], requests.anchors[0])


def _greedy(pair: Pair, tensors: dict[str, torch.Tensor], taps: torch.Tensor, anchor: int) -> list[int]:
    oracle = Oracle(pair.oracle.config, tensors, pair.oracle.embedding, pair.oracle.head)
    return oracle.drafts(taps, anchor, 15, lambda z, _: int(z.argmax()), rank=lambda z, _: z)


def test_a_markov_heads_bias_is_for_all_tokens_where_the_vocabulary_is_small(tmp_path: Path):
    """The published walk looks at all tokens; here they are the 64 best, which are all with this `d2t`."""
    config, taps = dspark_speculators(draft_vocab_size=64), random_taps(LENGTHS)
    pair = load_pair(tmp_path, config)
    requests, oracle = Requests(pair.ours, LENGTHS, taps), doubled(pair)
    proposals = requests.proposer.propose(requests.plan([15] * 5), requests.states)
    for r, anchor in enumerate(requests.anchors):
        expected = oracle.drafts(taps[r].double(), anchor, 15, lambda z, _: int(z.argmax()))
        assert proposals.drafts_RK[r].tolist() == expected
