"""The GPU's sampling against `sample_rows` and `filter_logits` (device: see `devices.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from manta.actors.targets.runners.drafts.tp_sampling import surest_of_ranks
from manta.drafter.step.gpu_triton.sampling.sampler import (
    DeviceSamplingMetadata,
    SamplingWorkspace,
    margins_between,
)
from manta.drafter.step.gpu_triton.sampling.sampler import sample_rows as sample_rows_in_kernels
from manta.drafter.step.gpu_triton.sampling.sampling_metadata import (
    negative_gumbel as negative_gumbel_in_kernel,
)
from manta.drafter.step.gpu_triton.sampling.sampling_metadata import noise_keys as noise_keys_in_kernel
from manta.drafter.step.inputs.gumbel_noise import negative_gumbel, noise_keys
from manta.drafter.step.inputs.sampling_metadata import SamplingMetadata
from manta.drafter.step.sampling.sampler import sample_rows, sample_with_margins
from manta.drafter.step.sampling.top_k_top_p import filter_logits
from support.engines.devices import DEVICE, ON_GPU, Launches
from support.engines.thread_ranks import OtherRank

pytestmark = pytest.mark.usefixtures("on_the_device")


def on_device(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values).to(DEVICE)


@dataclass
class Requests:
    """Slots of requests with random settings, and rows of some of them."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seed: np.ndarray
    min_length: np.ndarray
    stop_ids: np.ndarray
    slots: np.ndarray
    positions: np.ndarray

    @classmethod
    def of(cls, rows: int, *, vocab: int, rng: np.random.Generator | None = None, **fixed) -> Requests:
        """Make one row per slot, in another order; fields are neutral unless given (per slot)."""
        rng = rng or np.random.default_rng(0)
        neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "min_length": 0}
        neutral |= {"seed": rng.integers(-(2**63), 2**63 - 1, rows), "positions": rng.integers(0, 9000, rows)}
        stops = -np.sort(-rng.integers(-1, vocab, (rows, 3)))  # -1, if any, last
        neutral |= {"stop_ids": stops, "slots": rng.permutation(rows)}
        values = {name: np.asarray(value) for name, value in (neutral | fixed).items()}
        shape = {"stop_ids": values["stop_ids"].shape}
        spread = {n: np.broadcast_to(v, shape.get(n, (rows,))).copy() for n, v in values.items()}
        return cls(**spread)

    def state(self) -> DeviceSamplingMetadata:
        def put(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
            return on_device(values).to(dtype)

        return DeviceSamplingMetadata(
            temperature=put(self.temperature, torch.float32),
            top_k=put(self.top_k, torch.int32),
            top_p=put(self.top_p, torch.float32),
            min_p=put(self.min_p, torch.float32),
            seed=put(self.seed, torch.int64),
            min_length=put(self.min_length, torch.int32),
            stop_ids=put(self.stop_ids, torch.int32),
        )

    def oracle(self) -> SamplingMetadata:
        at = self.slots
        early = np.flatnonzero(self.positions < self.min_length[at])
        pairs = [(row, token) for row in early for token in self.stop_ids[at[row]] if token >= 0]
        return SamplingMetadata.build(
            temperature=self.temperature[at].astype(np.float32),
            top_k=self.top_k[at].astype(np.int64),
            top_p=self.top_p[at].astype(np.float32),
            min_p=self.min_p[at].astype(np.float32),
            seed=self.seed[at],
            position=self.positions.astype(np.int64),
            forbidden_F=torch.tensor(pairs, device=DEVICE).T if pairs else None,
            device=DEVICE,
        )

    def choose(
        self,
        logits: torch.Tensor,
        *,
        filters: bool,
        chunk: int = 512,
        room: int = 256,
        memory: SamplingWorkspace | None = None,
        start: int = 0,
        seconds: torch.Tensor | None = None,
        margins: torch.Tensor | None = None,
        ahead: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return sample_rows_in_kernels(
            logits,
            on_device(self.slots).to(torch.int32),
            on_device(self.positions) - ahead,
            self.state(),
            filters=filters,
            workspace=memory or workspace(logits, chunk, room),
            vocab_start=start,
            ahead=ahead,
            seconds_N=seconds,
            margins_N=margins,
        )

    def choose_surely(self, logits: torch.Tensor, **how) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and margins, which are those between the two best scores that ranks exchange."""
        seconds, margins = torch.empty(2, len(logits), device=DEVICE)
        ids, scores = self.choose(logits.clone(), seconds=seconds, **how)
        same_ids, _ = self.choose(logits, margins=margins, ahead=1, **how)
        assert ids.equal(same_ids) and margins.equal(margins_between(scores, seconds))
        return ids, margins

    def kept(self, logits: torch.Tensor, *, chunk: int = 512, room: int = 256) -> torch.Tensor:
        """Return the tokens that the floors keep, [N, V]; every row must have a filter."""
        memory = workspace(logits, chunk, room)
        self.choose(logits, filters=True, memory=memory)
        scaled = logits.float() / on_device(self.temperature[self.slots]).float()[:, None]
        return scaled >= memory.filters.floor_N[: len(scaled), None]


def workspace(logits: torch.Tensor, chunk: int, room: int) -> SamplingWorkspace:
    """Return memory for one extra row, so that row strides matter."""
    rows, vocab = logits.shape
    return SamplingWorkspace.build(rows + 1, vocab, DEVICE, chunk_size=chunk, max_candidates=room)


def normal(rows: int, vocab: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator(DEVICE).manual_seed(seed)) * scale


def mixed(rng: np.random.Generator, rows: int, vocab: int) -> Requests:
    """Make all kinds of requests together, some of which may not stop yet."""
    return Requests.of(
        rows,
        vocab=vocab,
        rng=rng,
        temperature=rng.choice([0, 0.3, 0.7, 1.0, 1.5], rows),
        top_k=rng.choice([0, 0, 1, 2, 20, vocab + 5], rows),
        top_p=rng.choice([1.0, 1.0, 0.5, 0.9, 0.99], rows),
        min_p=rng.choice([0.0, 0.0, 0.01, 0.3], rows),
        min_length=rng.choice([0, 10_000], rows),
    )


@triton.jit
def _noise(seeds, positions, out, COUNT: tl.constexpr):
    row = tl.program_id(0)
    key_0, key_1 = noise_keys_in_kernel(tl.load(seeds + row), tl.load(positions + row))
    tokens = tl.arange(0, COUNT)
    tl.store(out + row * COUNT + tokens, negative_gumbel_in_kernel(key_0, key_1, tokens))


def test_a_kernels_noise_equals_sampling_up_to_the_last_places():
    seeds = np.array([0, 1, -1, 2**63 - 1, -(2**63), 123456789012345])
    positions, count = np.array([0, 1, 7, 4095, 131071, 2]), 1 << 16
    out = torch.empty(len(seeds), count)
    _noise[len(seeds),](on_device(seeds), on_device(positions), out, count)
    expected = negative_gumbel(on_device(noise_keys(seeds, positions))[:, :, None], count)
    assert torch.allclose(out, expected, rtol=3e-7, atol=2e-7)  # near 0 what counts is E next to 1
    assert expected.min() < -11 and expected.max() > 2.3  # both tails are there


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.sanitized
def test_greedy_and_noisy_rows_choose_as_sample_rows(dtype: torch.dtype):
    rng, rows, vocab = np.random.default_rng(3), 8, 1337
    requests = mixed(rng, rows, vocab)
    requests.top_k[:] = rng.choice([0, 1], rows)
    requests.top_p[:], requests.min_p[:] = 1.0, 0.0
    logits = normal(rows, vocab, 1).to(dtype)
    ids, scores = requests.choose(logits, filters=False)
    assert ids.dtype == torch.int64 and ids.equal(sample_rows(logits.clone(), requests.oracle()))
    greedy = (requests.temperature[requests.slots] == 0) | (requests.top_k[requests.slots] == 1)
    assert 0 < greedy.sum() < rows
    best = logits.float()[np.arange(rows), ids]
    assert scores[greedy].equal(best[greedy])


@pytest.mark.parametrize("filters", [False, True])
def test_margins_equal_those_of_sampling(filters: bool):
    """Rows include some with one kept, one or no possible, or several equal tokens."""
    rng, rows, vocab = np.random.default_rng(5), 12, 900
    requests = mixed(rng, rows, vocab)
    requests.min_length[:], requests.slots[:] = 0, np.arange(rows)
    requests.temperature[:4], requests.top_p[3], requests.top_k[3] = [0.0, 1.0, 0.0, 1.0], 1e-6, 0
    if not filters:
        requests.top_k[:], requests.top_p[:], requests.min_p[:] = 0, 1.0, 0.0
    logits = normal(rows, vocab, 11)
    logits[0, [40, 700]] = 30.0
    logits[1] = -float("inf")
    logits[1, 77] = 0.5
    logits[2] = -float("inf")
    ids, margins = requests.choose_surely(logits, filters=filters, chunk=256)
    expected_ids, expected = sample_with_margins(logits.clone(), requests.oracle())
    assert ids.equal(expected_ids) and torch.allclose(margins, expected, rtol=1e-5, atol=5e-6)
    assert margins[:3].tolist() == [0.0, float("inf"), 0.0] and 0 < margins[3] < float("inf")


FILTERS = {
    "top-k": {"top_k": [1000, 2, 20, 199, 700, 50]},
    "top-p": {"top_p": [0.5, 0.9, 0.99, 1e-6, 0.999, 0.2]},
    "min-p": {"min_p": [0.5, 0.1, 0.01, 1.0, 1e-4, 0.9]},
    "all": {
        "top_k": [0, 40, 600, 5, 0, 300],
        "top_p": [0.6, 0.8, 0.95, 0.7, 0.9, 1.0],
        "min_p": [0.02, 0.0, 0.001, 0.1, 0.0, 0.05],
    },
}


@pytest.mark.parametrize("room", [16, 4096], ids=["few candidates fit", "all candidates fit"])
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.one_in(2)
@pytest.mark.sanitized
def test_filter_floors_keep_exactly_what_filter_logits_keeps(filters: str, room: int):
    vocab, temperature = 700, [0.5, 1.0, 1.7, 1.0, 0.8, 3.0]
    requests = Requests.of(6, vocab=vocab, temperature=temperature, **FILTERS[filters])
    logits = normal(6, vocab, 5)
    expected = filter_logits(logits, requests.oracle()).isfinite()
    assert requests.kept(logits, room=room).equal(expected)
    assert 1 <= expected.sum(-1).min() < expected.sum(-1).max()


@pytest.mark.parametrize(
    ("filters", "count"), [({"top_k": 3}, 5), ({"top_p": 0.5}, 5), ({"top_k": 4, "top_p": 0.5}, 2)]
)
def test_tokens_as_likely_as_the_last_kept_one_are_kept(filters: dict, count: int):
    logits = torch.full((1, 130), -6.0)
    logits[0, [3, 70, 99, 129, 10]] = torch.tensor([1.0, 1.0, 0.5, 0.5, 0.5])
    logits[0, 20:23] = torch.tensor([0.0, -0.0, 0.25])
    requests = Requests.of(1, vocab=130, **filters)
    expected = filter_logits(logits, requests.oracle()).isfinite()
    assert requests.kept(logits, chunk=64).equal(expected) and expected.sum() == count


def test_filters_apply_in_the_order_min_p_top_k_top_p():
    """Among tokens 0 and 1 the first has 4/7 of the mass, so p = 0.55 keeps only it; over all it has 0.4."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().repeat(3, 1)
    settings = {"slots": [0, 1, 2], "top_p": 0.55, "top_k": [0, 2, 0], "min_p": [0.0, 0.0, 0.7]}
    kept = Requests.of(3, vocab=4, **settings).kept(logits, chunk=64)
    assert kept.tolist() == [[True, True, False, False], [True] + [False] * 3, [True] + [False] * 3]


def test_a_nucleus_of_nearly_all_tokens_is_found():
    logits = torch.linspace(0, 0.1, 700).repeat(2, 1)
    requests = Requests.of(2, vocab=700, top_p=[0.9, 0.3])
    assert requests.kept(logits).equal(filter_logits(logits, requests.oracle()).isfinite())


def test_filters_see_no_forbidden_tokens_and_none_at_minus_infinity():
    logits = torch.full((3, 600), -float("inf"))
    logits[:, [7, 300, 599]] = torch.tensor([9.0, 1.0, 0.5])
    filters = {"top_k": [2, 5, 0], "top_p": [1.0, 0.5, 0.5], "temperature": 1.0, "min_length": 10_000}
    requests = Requests.of(3, vocab=600, stop_ids=[[7, -1]] * 3, **filters)
    ids, _ = requests.choose(logits, filters=True, room=4)
    assert ids.equal(sample_rows(logits.clone(), requests.oracle())) and 7 not in ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_tokens_are_forbidden_below_the_minimum_length_only(temperature: float):
    logits = torch.zeros(3, 200)
    logits[:, 150], logits[:, 3] = 90.0, 60.0
    settings = {"stop_ids": [[150, -1]] * 3, "min_length": 8, "slots": [1, 1, 2], "positions": [7, 8, 9]}
    requests = Requests.of(3, vocab=200, temperature=temperature, **settings)
    assert requests.choose(logits, filters=False, chunk=64)[0].tolist() == [3, 150, 150]


def test_greedy_ties_go_to_the_lowest_id_across_chunks():
    logits = torch.zeros(3, 300)
    logits[0, [40, 70, 299]] = 1.0
    logits[1, [299, 200, 130]] = 2.0
    logits[2] = -float("inf")
    requests = Requests.of(3, vocab=300, temperature=0.0)
    assert requests.choose(logits, filters=False, chunk=64)[0].tolist() == [40, 130, 0]


def test_padding_rows_choose_token_0_and_read_nothing():
    logits = normal(4, 500, 2)
    logits[[1, 3]] = float("nan")
    settings = {"slots": [2, -1, 0, -1], "positions": [5, 10**9, 6, -7], "top_k": 7}
    requests = Requests.of(4, vocab=500, **settings)
    ids, scores = requests.choose(logits, filters=True)
    assert ids[[1, 3]].tolist() == [0, 0] and scores[[1, 3]].tolist() == [-float("inf")] * 2
    alone = Requests(
        **{**vars(requests), "slots": requests.slots[[0, 2]], "positions": requests.positions[[0, 2]]}
    )
    assert ids[[0, 2]].equal(sample_rows(logits[[0, 2]], alone.oracle()))


def test_the_best_of_two_shards_is_the_best_of_the_whole_vocabulary():
    rows, vocab, cut = 6, 1000, 430
    settings = {"temperature": [0.0, 1.0, 0.5, 2.0, 0.0, 1.0], "min_length": [10_000, 0, 10_000, 0, 0, 0]}
    requests = Requests.of(rows, vocab=vocab, **settings)
    logits = normal(rows, vocab, 8)
    logits[0, requests.stop_ids[requests.slots[0]]] = 99.0
    logits[3, 17], logits[5, 429] = 30.0, 30.0
    memory = workspace(logits, 256, 256)  # of the whole vocabulary: a rank chooses from either in it
    low_ids, low = requests.choose(logits[:, :cut], filters=False, memory=memory)
    high_ids, high = requests.choose(logits[:, cut:], filters=False, memory=memory, start=cut)
    chosen = torch.where(high > low, high_ids, low_ids)
    assert chosen.equal(sample_rows(logits.clone(), requests.oracle()))
    assert (chosen < cut).any() and (chosen >= cut).any()
    seconds = torch.empty(2, rows, device=DEVICE)
    low, high = (
        requests.choose(part, filters=False, memory=memory, start=start, seconds=seconds[i])
        for i, (part, start) in enumerate(((logits[:, :cut], 0), (logits[:, cut:], cut)))
    )
    theirs = torch.stack((high[1].view(torch.int32), seconds[1].view(torch.int32), high[0].int()))
    found = surest_of_ranks(*low, seconds[0], OtherRank(theirs.unsqueeze(0)))
    expected = sample_with_margins(logits.clone(), requests.oracle())
    assert found[0].equal(expected[0]) and torch.allclose(found[1], expected[1], rtol=1e-5, atol=5e-6)


def test_an_undefined_logit_never_yields_an_id_outside_the_vocabulary():
    logits = torch.full((2, 100), float("nan"))
    ids, _ = Requests.of(2, vocab=100, temperature=[0.0, 1.0], top_p=[1.0, 0.9]).choose(logits, filters=True)
    assert ((ids >= 0) & (ids < 100)).all()


def test_numbers_take_precedence_over_nan():
    logits = normal(2, 300, 6)
    logits[:, [5, 70, 299]] = float("nan")
    requests = Requests.of(2, vocab=300, top_k=[0, 9], top_p=[1.0, 0.8])
    ids, _ = requests.choose(logits, filters=True, chunk=64)
    assert ids.equal(sample_rows(logits.nan_to_num(nan=-float("inf")), requests.oracle()))


def test_qwen3_s_settings_and_a_wide_nucleus_over_its_whole_vocabulary():
    vocab = 151936
    settings = {"temperature": [0.6, 1.0], "top_k": [20, 0], "top_p": 0.95, "slots": [0, 1]}
    requests = Requests.of(2, vocab=vocab, **settings)
    logits = normal(2, vocab, 4)
    logits[1] /= 10
    logits[1, 5000:9000] += 12
    logits = logits.half()
    memory = SamplingWorkspace.build(2, vocab, DEVICE)
    ids, _ = requests.choose(logits, filters=True, memory=memory)
    assert ids.equal(sample_rows(logits.clone(), requests.oracle()))
    scaled = logits.float() / torch.tensor(settings["temperature"])[:, None]
    kept = (scaled >= memory.filters.floor_N[:, None]).sum(1)
    assert 1 < kept[0] <= 20 and 3000 < kept[1] < 4000


def test_no_order_of_programs_changes_a_choice(monkeypatch: pytest.MonkeyPatch):
    """The last program of a row has all results of the others; each launch counts from zero."""
    if ON_GPU:
        pytest.skip("a GPU has an order of its own")
    from triton.runtime.interpreter import interpreter_builder

    rows, vocab = 4, 700
    requests = mixed(np.random.default_rng(2), rows, vocab)
    logits = normal(rows, vocab, 9)
    memory = workspace(logits, 128, 256)
    ids, scores = requests.choose(logits, filters=True, memory=memory)
    place, order = interpreter_builder.set_grid_idx, list(range(6))
    monkeypatch.setattr(interpreter_builder, "set_grid_idx", lambda x, y, z: place(order[x], y, z))
    for order[:] in ((5, 4, 3, 2, 1, 0), (2, 5, 0, 4, 1, 3)):
        memory.score_NC.fill_(float("nan"))
        memory.filters.chunk_max_NC.fill_(float("nan"))
        again, their_scores = requests.choose(logits, filters=True, memory=memory)
        assert again.equal(ids) and their_scores.equal(scores)


@pytest.mark.parametrize("filters", [False, True])
def test_a_choice_is_one_launch(launches: Launches, filters: bool):
    Requests.of(2, vocab=130, top_k=3).choose(normal(2, 130, 0), filters=filters, chunk=64)
    assert [kernel for kernel, _ in launches] == ["_choose"]
