"""Copies: suffixes' automaton against brute force; drafts of suffixes and n-grams through whole engines.

`test_lossless.py` has cells of the grid, `test_lossless_topologies.py` one with two ranks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from manta import LLM, SamplingParams, StructuredOutputsParams
from manta.actors.targets.loading.rank_loader import load_runner
from manta.cluster.engine.engine_stats import EngineStats
from manta.cluster.step.scheduler_output import AdmittedRequest, SchedulerOutput
from manta.drafter.step.inputs.proposals import Proposals
from manta.drafter.step.request_states import RequestStates
from manta.drafter.suffix.mixing import SuffixMixer
from manta.drafter.suffix.proposer import AnswerCache, SuffixProposer
from manta.drafter.suffix.suffix_automaton import SuffixAutomaton
from support.checkpoints.tiny import make_tiny_drafter
from support.engines.steps import GREEDY, Steps, settings
from support.engines.thread_ranks import ThreadRank, ThreadRanks
from support.oracles.recorded_chains import decode_alone, texts
from support.oracles.schemas import held_by

CACHED = "suffix_decoding_max_cached_requests"
COPIES: dict[str, dict[str, object]] = {
    "n-grams": {"method": "ngram", "num_speculative_tokens": 5},
    "suffixes": {"method": "suffix", CACHED: 8},
    "mixed": {"suffix_drafts": True, CACHED: 8},
}
TEXTS = st.lists(st.integers(0, 2), max_size=60) | st.lists(st.integers(0, 5), max_size=60)


def ends_of(text: list[int], run: list[int]) -> list[int]:
    """Ends of a run's occurrences in a text, in ascending order."""
    return [end for end in range(len(run), len(text) + 1) if text[end - len(run) : end] == run]


def longest_repeated(text: list[int]) -> int:
    """Length of the longest suffix that ends earlier, too."""
    lengths = range(len(text) - 1, 0, -1)
    return next((length for length in lengths if len(ends_of(text, text[-length:])) > 1), 0)


def copied(text: list[int], length: int) -> tuple[int, float]:
    """The token after the last earlier occurrence of the last `length` tokens, and its margin."""
    *earlier, _ = ends_of(text, text[-length:])
    token = text[earlier[-1]]
    return token, length * sum(text[end] == token for end in earlier) / len(earlier)


@given(TEXTS)
def test_after_every_token_the_longest_repeated_suffix_and_what_follows_are_found(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for end in range(1, len(text) + 1):
        automaton.extend(text[end - 1 : end])
        match, length = automaton.repeated_suffix(), longest_repeated(text[:end])
        assert match.length == length
        if length:
            tokens, margins = automaton.continuation(match, 1)
            token, margin = copied(text[:end], length)
            assert tokens == [token]
            assert margins == pytest.approx([margin])
        else:
            assert automaton.continuation(match, 1) == ([], [])


@given(TEXTS, TEXTS)
def test_the_longest_suffix_of_another_text_is_matched(text: list[int], other: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    lengths = range(len(other), 0, -1)
    longest = next((length for length in lengths if ends_of(text, other[-length:])), 0)
    assert automaton.match(other).length == longest


@given(TEXTS, st.integers(1, 20))
def test_drafts_follow_their_context_somewhere_in_the_text(text: list[int], count: int) -> None:
    """Also after the end of the text, where the copy goes on after its own drafts."""
    automaton = SuffixAutomaton()
    automaton.extend(text)
    tokens, margins = automaton.continuation(automaton.repeated_suffix(), count)
    assert len(tokens) == len(margins) <= count
    for place, (token, margin) in enumerate(zip(tokens, margins, strict=True)):
        extended = [*text, *tokens[:place]]
        assert margin > 0
        assert ends_of(text, [*extended[-1:], token]), "a pair that does not occur"


def test_text_that_repeats_is_continued_for_as_many_drafts_as_are_wanted() -> None:
    automaton = SuffixAutomaton()
    automaton.extend([7, 8, 9] * 3)
    tokens, margins = automaton.continuation(automaton.repeated_suffix(), 20)
    assert tokens == ([7, 8, 9] * 7)[:20]
    assert min(margins) >= 3


def test_counts_of_long_runs_of_one_token_are_exact() -> None:
    automaton = SuffixAutomaton()
    automaton.extend([1] * 5000)
    match = automaton.repeated_suffix()
    assert match.length == 4999
    assert automaton.continuation(match, 3)[0] == [1, 1, 1]


def test_earlier_answers_are_matched_within_their_salt_until_they_are_dropped() -> None:
    cache = AnswerCache(4)
    cache.add([1, 2, 3, 4, 5], "mine")
    automaton, match = cache.longest_match([9, 2, 3], "mine")
    assert automaton is not None
    assert automaton.continuation(match, 9)[0] == [4, 5], "no draft beyond the answer"
    for other in ("theirs", None):
        assert cache.longest_match([9, 2, 3], other)[1].length == 0
    for number in range(10, 14):
        assert cache.longest_match([9, 2, 3], "mine")[1].length == 2
        cache.add([number] * 3, "mine")
    assert cache.longest_match([9, 2, 3], "mine")[1].length == 0, "four newer answers"


def admitted(name: str, tokens: list[int], prompt_length: int, salt: str | None = None) -> AdmittedRequest:
    sampling = replace(GREEDY, prompt_length=prompt_length)
    return AdmittedRequest(0, name, np.array(tokens, np.int32), sampling, cache_salt=salt)


def proposed(proposer: SuffixProposer, states: RequestStates, plan: SchedulerOutput) -> list[list[int]]:
    states.apply(plan)
    return proposer.propose(plan, states).drafts_RK.tolist()


def test_a_slots_next_request_copies_the_answer_before_it_if_it_has_the_same_salt() -> None:
    for salt, expected in (("mine", [[24, 25]]), ("theirs", [[-1, -1]])):
        states, steps, proposer = RequestStates(2, 64, (16,), 4, "cpu"), Steps(4), SuffixProposer(2)
        first = admitted("first", [1, 2, 21, 22, 23, 24, 25], 2, "mine")
        plan = steps.plan([0], [6], [3], [2], admitted=[first])
        assert proposed(proposer, states, plan) == [[-1, -1]], "nothing occurs twice"
        second = admitted("second", [7, 22, 23], 3, salt)
        plan = steps.plan([0], [2], [3], [2], admitted=[second])
        assert proposed(proposer, states, plan) == expected


class Text:
    """A request whose tokens are known, decoded with drafts of both kinds."""

    def __init__(self, tokens: list[int], prompt_length: int) -> None:
        self.states, self._steps = RequestStates(1, len(tokens) + 8, (len(tokens),), 4, "cpu"), Steps(4)
        self.mixer = SuffixMixer(SuffixProposer(), 4, 1)
        self._tokens, self._known = tokens, prompt_length
        self._admitted = [admitted("text", tokens[:prompt_length], prompt_length)]
        self.num_skipped = 0

    def step(self, right: int, margin: float) -> tuple[Proposals, int]:
        """Mix drafts of which the first `right` are right; return the result and how many are accepted.

        Where the mixer does not need them, they are not made.
        """
        plan = self._steps.plan([0], [self._known - 1], [5], [4], admitted=self._admitted)
        self._admitted = []
        self.states.apply(plan)
        drafts = self._tokens[self._known : self._known + 4]
        drafts[right:] = [99] * (4 - right)
        drafted = Proposals(torch.tensor([drafts]), torch.full((1, 4), margin))
        skips = self.mixer.copy(plan, self.states)
        self.num_skipped += skips
        mixed = self.mixer.mix(None if skips else drafted, plan, self.states.device)
        following = torch.tensor(self._tokens[self._known : self._known + 4])
        accepted = int((mixed.drafts_RK[0] == following).cumprod(0).sum())
        new = self._tokens[self._known : self._known + accepted + 1] + [-1] * (4 - accepted)
        self.states.advance(plan, torch.tensor([new]), torch.tensor([accepted + 1]))
        self._known += accepted + 1
        return mixed, accepted


def test_copies_are_verified_where_the_drafter_is_wrong_and_its_drafts_elsewhere() -> None:
    chance = np.random.default_rng(0)
    fresh = chance.integers(0, 90, 800).tolist()
    repeated, unique = Text(fresh[:300] * 2, 300), Text(fresh, 300)
    of_copies = [repeated.step(right=1, margin=1.0)[1] for _ in range(40)]
    assert np.mean(of_copies[10:]) > 3.5
    of_drafter = [unique.step(right=3, margin=1.0)[1] for _ in range(100)]
    assert np.mean(of_drafter[10:]) == 3


def test_passes_are_left_out_only_where_copies_win_and_made_again_where_they_end() -> None:
    chance = np.random.default_rng(0)
    fresh = chance.integers(0, 90, 900).tolist()
    text = Text([*fresh[:300] * 2, *fresh[300:600]], 300)
    while text._known < 580:
        text.step(right=1, margin=1.0)
    assert text.num_skipped > 30, "of about 60 steps"
    text.num_skipped = 0
    for _ in range(24):  # the copy ends among these, and an update of the copies' chances is due
        text.step(right=3, margin=1.0)
    assert text.num_skipped < 8
    text.num_skipped = 0
    accepted = [text.step(right=3, margin=1.0)[1] for _ in range(40)]
    assert (text.num_skipped, set(accepted)) == (0, {3})


def test_a_drafter_that_is_better_than_copies_drafts_in_every_step() -> None:
    """Copies are right, but short of what the drafter gives: every other token is new."""
    chance = np.random.default_rng(2)
    known, new = chance.integers(0, 60, 300).tolist(), chance.integers(60, 90, 300).tolist()
    text = Text([*known, *(token for pair in zip(known, new, strict=True) for token in pair)], 300)
    for _ in range(60):
        text.step(right=4, margin=20.0)
    assert text.num_skipped == 0


def test_chosen_copies_have_margins_on_the_drafters_scale() -> None:
    """Of drafts that are nearly always right, the margin is the drafter's that is nearly always right."""
    text = Text(np.random.default_rng(1).integers(0, 90, 300).tolist() * 2, 300)
    for _ in range(40):
        mixed, _ = text.step(right=1, margin=0.5)
    assert mixed.margins_RK is not None
    assert mixed.is_partial
    assert (mixed.margins_RK[0] > 0.5).all()


@pytest.mark.parametrize("kind", ["n-grams", "suffixes", "mixed"])
def test_two_ranks_verify_the_same_drafts_and_return_the_plain_tokens(
    tiny_qwen3: Path, tmp_path: Path, kind: str
) -> None:
    """Without a drafter, as many drafts are verified as on one rank."""
    repeats = [7, 8, 9, 10] * 6 + [7, 8]
    plain = texts(decode_alone(load_runner(settings(tiny_qwen3))[0], repeats, 0, 12))
    drafter = {"model": str(make_tiny_drafter(tmp_path))} if kind == "mixed" else {}
    spec = {**COPIES[kind], **drafter, "adaptive": False, "num_speculative_tokens": 5}
    config = settings(tiny_qwen3, tensor_parallel_size=2, speculative_config=spec)

    def work(rank: ThreadRank | None) -> list[tuple[list[int], int, list[float]]]:
        ranks = 1 if rank is None else rank.world_size
        return decode_alone(load_runner(replace(config, tensor_parallel_size=ranks), rank)[0], repeats, 5, 12)

    first, second = ThreadRanks(2).run(work)
    assert texts(first) == texts(second)
    assert texts(first)[: len(plain)] == plain
    assert max(count for _, count, _ in first) == 5
    if kind == "n-grams":
        assert first == second == work(None)
        assert {0, 5} == {count for _, count, _ in first[1:]}, "none, or as many as were asked for"


@pytest.mark.parametrize("trees", [{}, {"tree_width": 2, "tree_size": 6}], ids=["chains", "trees"])
def test_an_answer_that_repeats_itself_needs_few_passes_of_the_drafter(
    tiny_qwen3: Path, tmp_path: Path, trees: dict[str, int]
) -> None:
    """With small blocks, so that there are many steps; a second request joins and leaves."""
    drafter = str(make_tiny_drafter(tmp_path))
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (110, 12)]
    found, batch = [], [{"prompt_token_ids": ids} for ids in ([7, 8, 9, 10], [5])]
    for spec in (
        None,
        {"model": drafter, "suffix_drafts": True, "adaptive": False, "num_speculative_tokens": 3, **trees},
    ):
        how = {"dtype": "float32", "num_threads": 1, "max_model_len": 128, "skip_tokenizer_init": True}
        with LLM(str(tiny_qwen3), speculative_config=spec, **how) as llm:
            found.append([answer.outputs[0].token_ids for answer in llm.generate(batch, params)])
            stats = llm.stats()
    assert found[0] == found[1]
    assert stats.skipped_passes > 5
    assert stats.step_seconds["draft"] > 0.0
    assert 0 < stats.num_copied_accepted_tokens <= stats.num_accepted_tokens
    assert (stats.num_trees > 0) == bool(trees)


@pytest.fixture(scope="module")
def plain_answers(pair: tuple[Path, Path]) -> list[list[list[int]]]:
    """Two rounds of constrained answers by plain decoding."""
    return answers_of(pair[0], None)[0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("kind", COPIES)
def test_constrained_answers_equal_plain_decoding(
    pair: tuple[Path, Path], plain_answers: list[list[list[int]]], kind: str, adaptive: bool
) -> None:
    drafter = {"model": str(pair[1])} if kind == "mixed" else {}
    found, stats = answers_of(pair[0], {**COPIES[kind], **drafter, "adaptive": adaptive})
    assert found == plain_answers
    if not adaptive:
        assert stats.num_accepted_tokens > 0
        copied, accepted = stats.num_copied_draft_tokens, stats.num_copied_accepted_tokens
        assert (copied > 0) == (accepted > 0) == (kind == "mixed")


def answers_of(target: Path, spec: dict[str, object] | None) -> tuple[list[list[list[int]]], EngineStats]:
    """Answer twice: one answer repeats itself, drafts are trimmed, and earlier answers are copied, too."""
    regex, choice = "(ab){12}[a-z]*", held_by({"enum": ["yes yes yes", "no no no no"]})
    params = [SamplingParams(temperature=0.7, seed=2, max_tokens=40)]
    params += [
        SamplingParams(seed=3, max_tokens=40, structured_outputs=each)
        for each in (StructuredOutputsParams(regex=regex), choice)
    ]
    how = {"dtype": "float32", "num_threads": 1, "max_model_len": 256, "speculative_config": spec}
    with LLM(str(target), **how) as llm:
        rounds = [llm.generate(["a b a b a b", "say ab", "yes or no"], params) for _ in range(2)]
        return [[answer.outputs[0].token_ids for answer in answers] for answers in rounds], llm.stats()
