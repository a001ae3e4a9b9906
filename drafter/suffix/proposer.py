"""Suffix decoding: drafts are what followed the longest earlier occurrence of a request's last tokens.

Each running request has a suffix automaton of its own tokens, extended when it drafts
(`suffix_automaton.py`). `AnswerCache` adds earlier answers if it is enabled; the longer match is continued,
the request's own text on a tie. Drafts have margins (`SuffixAutomaton.continuation`), which the scheduler's
acceptance model calibrates. Reads only the worker's mirror of token ids, so all ranks propose the same. Used
by `actors/targets/runners`, alone or through `mixing.py`.

Legend: R requests of the step, K most drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...cluster.step.scheduler_output import AdmittedRequest, SchedulerOutput
from ..step.inputs.proposals import Proposals
from ..step.inputs.row_layout import Ints, StepRows
from .suffix_automaton import NO_MATCH, Match, SuffixAutomaton

_MATCHED_TOKENS = 32  # at the end of a request's text, looked for in earlier answers


@dataclass(slots=True)
class _RequestText:
    """The tokens of the request in a slot.

    Attributes:
        prompt_length: tokens from this position on are the answer.
        cache_salt: answers are shared between requests with the same one, as prefixes are.
    """

    request_id: str
    prompt_length: int
    cache_salt: str | None
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)


class AnswerCache:
    """Automata of earlier answers, one per cache salt.

    Holds at most `max_requests` answers in two generations. When the newer one holds half of them, it
    replaces the older one.
    """

    def __init__(self, max_requests: int) -> None:
        self._generation_size = max(max_requests // 2, 1)
        self._num_newer = 0
        self._newer, self._older = dict[str | None, SuffixAutomaton](), dict[str | None, SuffixAutomaton]()

    def add(self, answer: list[int], cache_salt: str | None) -> None:
        if self._num_newer == self._generation_size:
            self._older, self._newer, self._num_newer = self._newer, {}, 0
        automaton = self._newer.setdefault(cache_salt, SuffixAutomaton())
        # A separator that occurs only once: no match crosses it, and no draft is negative.
        automaton.extend([*answer, -1 - len(automaton.tokens)])
        self._num_newer += 1

    def longest_match(self, text: list[int], cache_salt: str | None) -> tuple[SuffixAutomaton | None, Match]:
        """Return the longest suffix of the text in an answer of this salt, and the answer's automaton."""
        found, best = None, NO_MATCH
        for generation in (self._newer, self._older):
            if (automaton := generation.get(cache_salt)) is not None:
                match = automaton.match(text)
                if match.length > best.length:
                    found, best = automaton, match
        return found, best


class KnownTokens(Protocol):
    """Tokens of the running requests on the host (`drafter/step/request_states.py`)."""

    @property
    def device(self) -> torch.device: ...

    def num_known(self, plan: SchedulerOutput) -> Ints:
        """Return the number of known tokens [R] of each request."""
        ...

    def known_tokens(self, slot: int, begin: int, end: int) -> list[int]: ...


class SuffixProposer:
    """Copies drafts from the requests' own tokens and earlier answers.

    Args:
        max_cached_requests: number of earlier answers to keep; 0 keeps none.
    """

    def __init__(self, max_cached_requests: int = 0) -> None:
        self._texts: dict[int, _RequestText] = {}  # by slot
        self._answers = AnswerCache(max_cached_requests) if max_cached_requests else None

    def propose(self, plan: SchedulerOutput, states: KnownTokens) -> Proposals:
        """Return drafts and margins [R, K], the same on all ranks; K = 0 if no request drafts."""
        for request in plan.admitted:
            self._admit(request)
        if not plan.num_draft_tokens:
            return Proposals.none(plan.num_requests, states.device)
        num_drafts_R = plan.block_drafts
        shape = plan.num_requests, int(num_drafts_R.max())
        drafts_RK, margins_RK = np.full(shape, -1), np.full(shape, np.nan, dtype=np.float32)
        num_known_R = states.num_known(plan)
        for r in np.flatnonzero(num_drafts_R).tolist():
            slot = int(plan.slots[r])
            known = self._texts[slot].automaton.tokens
            new = states.known_tokens(slot, len(known), int(num_known_R[r]))
            tokens, margins = self._continuation(self._texts[slot], new, int(num_drafts_R[r]))
            drafts_RK[r, : len(tokens)], margins_RK[r, : len(tokens)] = tokens, margins
        drafts, margins = (torch.from_numpy(each).to(states.device) for each in (drafts_RK, margins_RK))
        return Proposals(drafts, margins, is_partial=True)

    def inject(
        self, taps_NmH: Tensor | None, rows: StepRows, token_ids_RW: Tensor, num_tokens_R: Tensor
    ) -> None:
        """Do nothing: tokens are read when they are needed."""

    def _admit(self, request: AdmittedRequest) -> None:
        """Begin a slot's text. The answer of the request before it is kept, up to its last drafts."""
        before = self._texts.get(request.slot)
        if self._answers is not None and before is not None and before.request_id != request.request_id:
            answer = before.automaton.tokens[before.prompt_length :]
            if answer:
                self._answers.add(answer, before.cache_salt)
        self._texts[request.slot] = _RequestText(
            request.request_id, request.sampling.prompt_length, request.cache_salt
        )

    def _continuation(self, text: _RequestText, new: list[int], count: int) -> tuple[list[int], list[float]]:
        """Return up to `count` drafts after the text and its new tokens, and their margins."""
        automaton = text.automaton
        automaton.extend(new)
        match = automaton.repeated_suffix()
        if self._answers is not None and match.length < _MATCHED_TOKENS:
            last = automaton.tokens[-_MATCHED_TOKENS:]
            cached, cached_match = self._answers.longest_match(last, text.cache_salt)
            if cached is not None and cached_match.length > match.length:
                return cached.continuation(cached_match, count)
        return automaton.continuation(match, count)
