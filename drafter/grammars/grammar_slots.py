"""Positions of requests in their grammars. Used by `matchers.py` and `tree_walks.py`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from llguidance import LLMatcher

from ...cluster.request.structured_outputs import SlotGrammar
from .compiler import MAX_FORCED

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class GrammarSlot:
    """A request's position in its grammar.

    Attributes:
        matcher: has consumed the committed tokens; None before the grammar begins.
        num_read: tokens of the request, prompt included, that have been consumed.
        recent: before the grammar begins, the last generated tokens: one less than its start marker.
        is_over: a committed token does not fit the grammar: the text has ended.
        has_failed: only an end token can follow; `is_renewed`: the matcher was recreated.
    """

    grammar_slot: SlotGrammar
    matcher: LLMatcher | None
    num_read: int
    recent: list[int] = field(default_factory=list[int])
    is_over: bool = False
    forces: bool = True
    is_renewed: bool = False
    has_failed: bool = False


def forced_tokens(slot: GrammarSlot, matcher: LLMatcher) -> list[int]:
    """Return the tokens that the grammar forces, unless computing them is disabled."""
    if not slot.forces:
        return []
    forced = matcher.compute_ff_tokens()
    slot.forces = len(forced) <= MAX_FORCED  # too expensive to compute again
    return forced


@contextmanager
def ending(slot: GrammarSlot) -> Iterator[None]:
    """Mark an answer as failed if its grammar raises anything, and log it."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of llguidance is no Exception
        fail(slot, f"{type(error).__name__}: {error}")


def fail(slot: GrammarSlot, cause: object) -> None:
    if not slot.has_failed:
        logger.warning("an answer ends early: its grammar failed (%s)", cause)
    slot.has_failed, slot.is_over = True, True


def end_of_start(slot: GrammarSlot, tokens: list[int]) -> int | None:
    """Return the number of tokens up to the end of the grammar's start marker; None without it."""
    wanted, before = slot.grammar_slot.grammar.after_token_ids, len(slot.recent)
    joined = (*slot.recent, *tokens)
    ends = range(max(before + 1, len(wanted)), len(joined) + 1)
    return next((end - before for end in ends if joined[end - len(wanted) : end] == wanted), None)
