"""Adaptive draft lengths on simulated machines: as fast as the best fixed length, never slower than none.

Short forms; `MANTA_GRID=whole` plays every machine, load and chance.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import pytest
from manta.cluster.errors import RequestError
from manta.cluster.scheduler.request_queues import RequestWeights
from manta.cluster.simulation.simulated_drafts import SimulatedDrafts
from manta.cluster.speculation.acceptance_model import AcceptanceModel
from manta.cluster.speculation.loss_budget import LossBudget
from manta.cluster.speculation.step_cost_model import StepCostModel, StepLoad
from manta.cluster.step.scheduler_output import FloatArray, IntArray, SchedulerOutput, StepTimings
from support.engines.cluster_checker import make_info, make_request, simulated_engine

MOST = 15
WHOLE = os.environ.get("MANTA_GRID") == "whole"
Seconds = Callable[[int, int], tuple[float, float]]  # of drafting and of the rest: (drafter's rows, rows)

MACHINES: dict[str, Seconds] = {
    "flat": lambda drafted, rows: (0.001, 0.010),  # one request on a GPU
    "linear": lambda drafted, rows: (5e-5 + 2e-6 * drafted, 1e-4 + 1e-5 * rows),  # a CPU, or many requests
    "tiles": lambda drafted, rows: (1e-4 + 1e-4 * -(-drafted // 16), 1e-3 + 5e-4 * -(-rows // 16)),
    "experts": lambda drafted, rows: (5e-4, 2e-3 + 8e-3 * (1 - (1 - 1 / 16) ** rows)),
    "dear drafter": lambda drafted, rows: (1e-2, 1e-3),
}


class Machine:
    """Times that vary by a twentieth, with occasional long ones."""

    def __init__(self, seconds: Seconds) -> None:
        self._seconds, self._random = seconds, np.random.default_rng(0)

    def __call__(self, plan: SchedulerOutput) -> StepTimings:
        drafted = int((plan.num_drafts + (plan.num_drafts > 0)).sum())
        draft_s, non_draft_s = self._seconds(drafted, plan.num_batched_tokens)
        noise, hangs = self._random.lognormal(0, 0.05, 2), self._random.random() < 0.003
        draft_s *= bool(drafted) * noise[0]
        return StepTimings(draft_s=draft_s, verify_s=non_draft_s * noise[1] * (4 if hangs else 1))


class Play:
    """A constant number of requests of random lengths, one starting when one ends.

    Args:
        measures: measure steps first, as every start of an engine does.
        max_rows: of a step.
    """

    def __init__(
        self,
        machine: Seconds,
        chance: float,
        *,
        length: int | None = None,
        hardness: Callable[[str], float] = lambda name: 1.0,
        measures: bool = True,
        max_rows: int = 8192,
    ) -> None:
        info = make_info(
            vocab_size=1000,
            max_model_len=8192,
            num_pages=(60_000,),
            num_speculative_tokens=MOST if length is None else max(length, 1),
        )
        self.engine = simulated_engine(
            info,
            [chance**k for k in range(1, MOST + 1)],
            Machine(machine),
            hardness=lambda name: 1.0 if name == "warm-up" else hardness(name),
            max_num_seqs=256,
            max_num_batched_tokens=max_rows,
            speculative_config={"model": "simulated", "adaptive": length is None},
        )
        self.clock = self.engine.clock
        if measures and length is None:
            self.engine.measure_steps(1.0)
        self._plain, self._made, self.tokens, self.begin_s = length == 0, 0, 0, self.clock()
        self.text: dict[str, list[int]] = {}

    def rate(self, num_requests: int, tokens_each: int) -> float:
        """Tokens per second, over about a given number of tokens of each request."""
        while len(self.engine.scheduler.queues.running) > num_requests:
            self.step()
        tokens, begin_s = self.tokens, self.clock()
        while self.tokens < tokens + num_requests * tokens_each:
            self.fill(num_requests)
            self.step()
        return (self.tokens - tokens) / (self.clock() - begin_s)

    def fill(self, num_requests: int) -> None:
        """Add requests until there are so many."""
        queues = self.engine.scheduler.queues
        for _ in range(num_requests - len(queues.running) - len(queues.waiting)):
            self.add()

    def step(self) -> None:
        for update in self.engine.step():
            self.tokens += len(update.token_ids)
            self.text.setdefault(update.request_id, []).extend(update.token_ids)

    def add(self) -> None:
        self._made += 1
        length, maximum = 100 + 37 * self._made % 150, 0 if self._plain else None
        fields = {"seed": self._made, "max_tokens": length, "ignore_eos": True, "max_draft_tokens": maximum}
        self.engine.add(f"r{self._made}", range(2, 12 + self._made % 13), **fields)


CASES = [
    (name, chance, num_requests)
    for name in MACHINES
    for chance in (0.0, 0.5, 0.8, 0.95)
    for num_requests in (1, 8, 64)
]
MORE = [("linear", 0.8, 8), ("tiles", 0.5, 8), ("experts", 0.8, 1)]
FEW = [
    ("flat", 0.8, 1),
    ("dear drafter", 0.8, 8),
    *(pytest.param(*case, marks=pytest.mark.if_changed) for case in MORE),
]


@pytest.mark.parametrize(("name", "chance", "num_requests"), CASES if WHOLE else FEW)
def test_adaptive_is_as_fast_as_the_best_fixed_length(name: str, chance: float, num_requests: int):
    lengths, tokens = ((0, 1, 3, 5, 7, 11, 15), 600) if WHOLE else ((0, 3, 15), 300)
    fixed = [Play(MACHINES[name], chance, length=n).rate(num_requests, tokens // 2) for n in lengths]
    play = Play(MACHINES[name], chance)
    first = play.rate(num_requests, tokens // 4)
    assert first > 0.85 * fixed[0], "the beginning is no slower than plain decoding"
    rate = play.rate(num_requests, tokens)
    assert rate > 0.93 * max(fixed), (rate / max(fixed), lengths[int(np.argmax(fixed))])


@pytest.mark.parametrize("name", list(MACHINES) if WHOLE else ["linear"])
def test_drafts_that_are_never_accepted_cost_little(name: str):
    assert Play(MACHINES[name], 0.0).rate(8, 200) > 0.97 * Play(MACHINES[name], 0.0, length=0).rate(8, 200)


def test_a_useless_drafter_costs_no_more_at_a_start_or_a_change_of_load():
    """The loss is bounded by one budget of a hundredth, not by trials for each load."""
    play, plain = Play(MACHINES["flat"], 0.0), Play(MACHINES["flat"], 0.0, length=0)
    for num_requests in (2, 32, 5, 64, 1):
        play.rate(num_requests, 60)
        plain.rate(num_requests, 60)
    speed, plainly = (each.tokens / (each.clock() - each.begin_s) for each in (play, plain))
    assert speed > 0.97 * plainly, speed / plainly


def test_more_requests_than_half_of_a_steps_rows_decode_plainly():
    """No length above 0 fits then; a review finds that as well."""
    play = Play(MACHINES["flat"], 0.8, max_rows=256)
    play.rate(8, 100)
    assert play.rate(200, 150) > 0.99 * Play(MACHINES["flat"], 0.8, length=0, max_rows=256).rate(200, 150)


def test_an_equally_good_length_is_kept():
    play, lengths = Play(MACHINES["tiles"], 0.8, measures=False), list[int]()
    controller = play.engine.scheduler.controller
    play.rate(8, 100)
    begin = play.tokens
    while play.tokens < begin + 8 * 600:
        play.fill(8)
        play.step()
        choice = controller.last_choice()
        if len(choice.num_drafts_R) == 8 and not choice.is_trial:  # other loads have lengths of their own
            lengths.append(choice.length)
    changes = sum(a != b for a, b in itertools.pairwise(lengths))
    assert len(lengths) > 150 and changes <= len(lengths) // 40, lengths


def test_drafting_pauses_once_it_has_lost_its_budget_and_random_losses_do_not_count():
    budget, plain_s = LossBudget(), 1e-3
    assert not budget.balance_s, "nothing is covered before anything is known"
    budget.begin(plain_s)
    assert budget.balance_s == pytest.approx(4 * plain_s)
    for _ in range(1000):  # as quick as plain decoding, with good and bad steps
        assert budget.record_step(-3e-3, plain_s) == (False, False)
        must_review, must_pause = budget.record_step(3e-3, plain_s)
        assert must_review and not must_pause, "three plain steps are lost since the last review"
    lost_s, num_reviews, must_pause = 0.0, 0, False
    while not must_pause:
        must_review, must_pause = budget.record_step(0.2e-3, plain_s)
        lost_s += 0.2e-3
        num_reviews += must_review
    assert lost_s <= 16.21 * plain_s
    assert 6 <= num_reviews <= 8, "one for each two plain steps that are lost"
    assert not budget.balance_s, "it was paid for"
    budget.earn(100 * plain_s, plain_s)
    assert budget.balance_s == pytest.approx(plain_s)


def test_mixed_easy_and_hard_texts_are_faster_than_with_any_fixed_length():
    def hardness(name: str) -> float:
        return 0.3 if int(name[1:]) % 2 else 8.0

    linear = MACHINES["linear"]
    fixed = [Play(linear, 0.8, length=length, hardness=hardness).rate(8, 200) for length in (0, 1, 3, 7)]
    play = Play(linear, 0.8, hardness=hardness)
    play.rate(8, 50)
    assert play.rate(8, 200) > max(fixed)


def test_the_policy_follows_a_change_of_load_and_changes_no_token():
    play, plain = Play(MACHINES["linear"], 0.8), Play(MACHINES["linear"], 0.8, length=0)
    for num_requests in (16, 1):
        play.rate(num_requests, 100)
        plain.rate(num_requests, 100)
    assert play.rate(1, 150) > 1.4 * plain.rate(1, 150)
    for name in play.text.keys() & plain.text.keys():
        both = play.text[name], plain.text[name]
        count = min(map(len, both))
        assert both[0][:count] == both[1][:count]


class Saved(Protocol):
    def as_json(self) -> Any: ...


def saved(learned: Saved) -> Any:  # Any: JSON
    """Return what was learned as the next start reads it."""
    return json.loads(json.dumps(learned.as_json()))


def estimates(acceptance: AcceptanceModel, slots: IntArray) -> FloatArray:
    """Return the mean estimates by slot and position."""
    return acceptance.samples(slots, 16).mean(axis=0)


def test_margins_are_learned_and_predicted_probabilities_match():
    drafts, acceptance = SimulatedDrafts([0.8**k for k in range(1, 8)]), AcceptanceModel(7, 16)
    slots, position = np.arange(16, dtype=np.int32), np.zeros(16, np.int32)
    acceptance.admit(slots, [0.0] * 16)
    all_drafts, hardness = np.full(16, 7, np.int32), np.where(slots % 2, 0.5, 3.0)
    for _ in range(150):
        margins, stands = drafts.propose(slots.astype(np.uint64), position, all_drafts, hardness)
        accepted = np.minimum(stands.sum(axis=1), 5).astype(np.int32)  # the last two are always cut
        acceptance.observe(
            slots, np.full(16, 5, np.int32), accepted, np.ones(16, np.bool_), all_drafts, margins
        )
        position += accepted + 1
    assert max(acceptance.calibration_error) < 0.08
    true = np.array([[0.8 ** (h * k) for k in range(1, 8)] for h in hardness])
    assert estimates(acceptance, slots).mean(axis=0) == pytest.approx(true.mean(axis=0), abs=0.08)
    again = AcceptanceModel(7, 16)
    again.read(saved(acceptance))
    assert estimates(again, slots)[0] == pytest.approx(true.mean(axis=0), abs=0.1), "at the next start"
    acceptance.reset()
    assert estimates(acceptance, slots)[0, 0] == pytest.approx(0.75), "another drafter, another curve"


def test_a_new_drafter_starts_with_its_cards_acceptance_length():
    acceptance, slots = AcceptanceModel(7, 16), np.arange(16, dtype=np.int32)
    acceptance.admit(slots, [0.0] * 16)
    for length in (1.0, 2.3, 5.0, 8.0, 99.0):
        acceptance.set_prior(length)
        assert 1 + estimates(acceptance, slots)[0].sum() == pytest.approx(min(length, 8.0), abs=1e-3)


def test_a_margin_counts_less_at_a_higher_temperature_for_new_requests_too():
    random, acceptance = np.random.default_rng(2), AcceptanceModel(3, 16)
    slots = np.arange(16, dtype=np.int32)
    heats = np.where(slots % 2, 1.0, 0.0)
    many = np.full(16, 3, np.int32)
    margins = np.zeros((16, 3))
    for step in range(200):
        if step % 20 == 0:
            acceptance.admit(slots, heats.tolist())
        margins = random.lognormal(1.0, 0.8, (16, 3))
        chances = 1 / (1 + np.exp(-(0.8 - 2.0 * heats[:, None] + 1.2 * (np.log1p(margins) - 1))))
        accepted = np.logical_and.accumulate(random.random((16, 3)) < chances, axis=1).sum(axis=1)
        fixed = slots, many, accepted.astype(np.int32), np.ones(16, np.bool_), many
        acceptance.observe(*fixed, margins.astype(np.float32))
    acceptance.update()
    acceptance.admit(slots, heats.tolist())
    cold, hot = acceptance.offsets(slots)[:2].tolist()
    assert cold - hot == pytest.approx(2.0, abs=0.5)
    assert max(acceptance.calibration_error) < 0.08
    kept = saved(acceptance)
    again = AcceptanceModel(3, 16)
    again.read(kept)
    again.admit(slots, heats.tolist())
    assert again.offsets(slots)[:2].tolist() == [cold, hot], "and the next engine"
    for wrong in (
        {},
        [],
        kept | {"theta": "x"},
        kept | {"theta": [10**400] * 4},
        kept | {"theta": [1e300] * 4},
        kept | {"reached": [float("nan")] * 3},
        kept | {"reached": [-1.0] * 3},
        kept | {"accepted": [1e5] * 3},
        kept | {"curvature": (-4.0 * np.eye(4)).tolist()},
        kept | {"curvature": np.arange(16.0).reshape(4, 4).tolist()},
    ):
        with pytest.raises(ValueError, match=r"not a saved|not between|curvature|accepted than reached"):
            again.read(wrong)
    with pytest.raises(ValueError, match="another block size"):
        AcceptanceModel(4, 16).read(kept)
    for _ in range(40):  # other texts
        none = np.zeros(16, np.int32)
        again.observe(slots, many, none, np.ones(16, np.bool_), many, margins.astype(np.float32))
    again.update()
    assert estimates(again, slots)[:, 0].mean() < 0.1, "what is kept gives way"


def test_a_slower_machine_is_slower_at_all_rows_and_one_slow_step_is_not_enough():
    costs, few, many = StepCostModel(), StepLoad(8, 0, 3000.0), StepLoad(40, 0, 3000.0)
    for _ in range(50):
        costs.observe(few, 0, 0, 0.0, 1e-3, 0)
        costs.observe(many, 0, 0, 0.0, 2e-3, 0)
    costs.observe(StepLoad(16, 0, 3000.0), 0, 0, 0.0, 30e-3, 0)
    assert costs.non_draft_s(few, 8)[-1] <= 2e-3, "no more than twice of half the rows"
    assert costs.bounds_s(few, (0, 1))[1][1] <= 1.55e-3
    for _ in range(200):
        costs.observe(many, 0, 0, 0.0, 3e-3, 0)
    assert costs.non_draft_s(few, 0)[0] == pytest.approx(1.5e-3, rel=0.15)
    assert costs.non_draft_s(many, 0)[0] == pytest.approx(3e-3, rel=0.1)


def test_costs_increase_with_rows_and_are_saved_between_starts():
    random, costs = np.random.default_rng(1), StepCostModel()
    for _ in range(400):
        drafts = int(random.integers(0, 40))
        hangs = 20 if random.random() < 0.02 else 1
        costs.observe(StepLoad(8, 0, 3000.0), drafts, 64, 1e-3, (1e-3 + 1e-4 * (8 + drafts)) * hangs, 8)
    load = StepLoad(8, 0, 3000.0)
    seconds = costs.non_draft_s(load, 39)
    assert (np.diff(seconds) >= 0).all()
    assert seconds == pytest.approx(1e-3 + 1e-4 * np.arange(8, 48), rel=0.1)
    again = StepCostModel()
    again.read(saved(costs))
    assert again.non_draft_s(load, 39) == pytest.approx(seconds, rel=0.05)
    kept = costs.as_json()
    rest = kept["rest"]
    times = [[-1.0], [1e300] * len(rest["seconds"]), [10**400] * len(rest["seconds"]), [[1.0]]]
    for wrong in (
        {},
        [],
        {"draft": 3},
        *(kept | {"rest": rest | {"seconds": each}} for each in times),
        *(kept | {"rest": rest | {"first_s": each}} for each in (0.0, 1e300, 10**400, float("nan"))),
    ):
        with pytest.raises(ValueError, match=r"cost|from|inhomogeneous"):
            again.read(wrong)
    assert again.non_draft_s(load, 39) == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize(
    "wrong",
    [
        "drafts are dear",
        "all is cheap",
        pytest.param("drafts hang", marks=pytest.mark.if_changed),
        pytest.param("all is dear", marks=pytest.mark.if_changed),
    ],
)
def test_saved_costs_are_replaced_by_contradicting_measurements(wrong: str):
    """Costs that were measured at bad moments say that no drafts pay, or few."""
    fresh = Play(MACHINES["tiles"], 0.9)
    fresh.rate(4, 300)
    assert fresh.engine.costs is not None
    kept = saved(fresh.engine.costs)
    for name, times in kept.items():
        for key, value in times.items():
            times[key] = np.multiply(value, slower(wrong, name)).tolist()
    misled, plain = Play(MACHINES["tiles"], 0.9), Play(MACHINES["tiles"], 0.9, length=0)
    assert misled.engine.costs is not None
    misled.engine.costs.read(kept)
    if not misled.engine.would_draft:  # as at every start
        misled.engine.reset_speculation()
    assert misled.rate(4, 150) > 0.95 * plain.rate(4, 150)
    misled.rate(4, 300)
    assert misled.rate(4, 600) > 0.85 * fresh.rate(4, 600)


def test_the_first_decode_step_drafts_with_saved_costs():
    earlier = Play(MACHINES["linear"], 0.8)
    earlier.rate(1, 300)
    play = Play(MACHINES["linear"], 0.8, measures=False)
    assert earlier.engine.costs is not None and play.engine.costs is not None
    play.engine.costs.read(saved(earlier.engine.costs))
    assert play.engine.would_draft
    play.add()
    lengths = list[int]()
    for _ in range(12):
        play.step()
        lengths.append(play.engine.scheduler.controller.last_choice().length)
    assert lengths[1] > 0, "the step after the prompt's"
    assert sum(length > 0 for length in lengths[1:]) >= 6, lengths


def slower(wrong: str, part: str) -> float:
    if wrong.startswith("all"):
        return 4.0 if wrong.endswith("dear") else 0.25
    return {"drafts are dear": 20.0, "drafts hang": 1e3}[wrong] if part == "draft" else 1.0


def test_another_request_costs_more_than_a_row_also_at_unseen_loads():
    """Four requests of a row each take longer than one of four rows; both are predicted from other loads."""
    random, costs = np.random.default_rng(3), StepCostModel()

    def seconds(requests: int, rows: int) -> float:
        return 1e-3 + 2e-4 * requests + 1e-4 * rows

    for _ in range(300):
        requests, drafts = int(random.choice([1, 2, 8])), int(random.integers(0, 8))
        rows = requests * (1 + drafts)
        spent_s = seconds(requests, rows) * float(random.lognormal(0, 0.05))
        costs.observe(StepLoad(requests, 0, 200.0 * requests), rows - requests, 0, 0.0, spent_s, 0)
    for requests, rows in ((1, 16), (4, 4), (4, 16), (16, 16), (16, 64)):
        load = StepLoad(requests, 0, 200.0 * requests)
        foreseen_s = costs.non_draft_s(load, rows - requests)[-1]
        assert foreseen_s == pytest.approx(seconds(requests, rows), rel=0.15), (requests, rows)


@pytest.mark.parametrize("context", [100.0, 65536.0])
def test_the_cost_of_many_requests_is_learned_in_few_steps_at_any_context(context: float):
    """On a GPU contexts are read once for any number of rows: drafts cost little with long contexts."""
    costs, load = StepCostModel(), StepLoad(64, 0, 64 * context)
    costs.observe(StepLoad(0, 40, context), 0, 0, 0.0, 1e-3, 0)

    def seconds(rows: int) -> float:
        return 4e-3 + 1e-9 * 64 * context * 30 + 2e-5 * rows

    for drafts in (0, 0, 0, 0, 64, 64, 64, 192, 192, 192):
        costs.observe(load, drafts, 0, 0.0, seconds(64 + drafts), 0)
    for length, low in zip((0, 1, 3), costs.bounds_s(load, (0, 1, 3))[1], strict=True):
        true_s = seconds(64 * (1 + length))
        assert costs.non_draft_s(load, 64 * length)[-1] == pytest.approx(true_s, rel=0.05)
        assert low > 0.8 * true_s


def test_plain_steps_are_predicted_in_a_machine_phase_without_any():
    """A machine that becomes slower or faster while drafting also has slower or faster plain steps."""
    random, costs, load = np.random.default_rng(4), StepCostModel(), StepLoad(4, 0, 800.0)

    def learn(drafts: int, phase: float) -> None:
        noise = phase * float(random.lognormal(0, 0.08))
        costs.observe(load, drafts, 4 + drafts, 0.4e-3 * noise, (1e-3 + 2e-4 * (4 + drafts)) * noise, 4)

    for _ in range(20):
        learn(0, 1.0)
        learn(12, 1.0)
    for phase in (1.4, 0.8, 1.2):
        for _ in range(1500):
            learn(12, phase)
        assert costs.non_draft_s(load, 0)[0] == pytest.approx(1.8e-3 * phase, rel=0.08), phase


def test_passes_of_fixed_sizes_cost_as_the_next_one():
    costs = StepCostModel((8, 16, 32))
    for _ in range(9):
        for drafts, seconds in ((0, 1e-3), (8, 1.2e-3), (24, 2e-3)):
            costs.observe(StepLoad(8, 0, 100.0), drafts, 0, 0.0, seconds, 0)
    assert costs.non_draft_s(StepLoad(8, 0, 100.0), 9) == pytest.approx([1e-3, *[1.2e-3] * 8, 2e-3], rel=0.05)


def test_late_requests_weigh_more_and_background_work_less():
    weights = RequestWeights(4, by_priority=True)
    wishes = {"tpot_ms": 10.0}, {"tpot_ms": 1000.0}, {"priority": -2}, {"background": True}
    for slot, fields in enumerate(wishes):
        weights.admit(slot, make_request(f"r{slot}", **fields))
    slots = np.arange(4, dtype=np.int32)
    weights.count_tokens(slots, np.ones(4, np.int32), 0.0)
    weights.count_tokens(slots, np.full(4, 10, np.int32), 0.5)
    late, early, preferred, background = weights.of(slots, 0.5).tolist()
    assert (late, early, background) == (4.0, 0.5, 0.5) and preferred > 1
    with pytest.raises(RequestError, match="tpot_ms"):
        make_request("r", tpot_ms=0.0)


def test_estimates_use_each_requests_own_last_blocks_at_its_temperature() -> None:
    """A request that has not drafted for long, and one at a temperature that drafts suit less."""
    model = AcceptanceModel(2, 2)
    slots, counts, continues = np.arange(2), np.array([2, 2]), np.ones(2, dtype=np.bool_)
    model.admit(slots, [0.0, 1.0])
    rng = np.random.default_rng(0)
    for _ in range(200):  # at both temperatures margins are equal, and say little
        margins_RK = rng.uniform(1.0, 2.0, (2, 2)).astype(np.float32)
        accepted = np.array([2, int(rng.random() < 0.3)])
        model.observe(slots, counts, accepted, continues, counts, margins_RK)
    certain_RK = np.full((1, 2), 40.0, dtype=np.float32)
    for _ in range(100):  # slot 1 makes no drafts, slot 0's margins are those of certain drafts
        model.observe(slots[:1], counts[:1], counts[:1], continues[:1], counts[:1], certain_RK)
    model.update()
    sure, unsure = model.samples(slots, 4)[..., 0].mean(axis=0)
    assert sure > 0.95 and unsure < 0.5
    model.admit(slots[1:], [0.0])  # a new request of slot 1, with the earlier one's margins as expectation
    assert model.samples(slots[1:], 4)[..., 0].mean() > 0.75
