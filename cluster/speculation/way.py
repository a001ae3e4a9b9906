"""What a policy has settled for about as many requests, and what it has tried there. Used by `policy.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

MUCH_BETTER = 1.05  # than before: that is no noise
_TRIED_AGAIN, _TRIED_AGAIN_MOST = 8, 1024  # steps between trials of one length, more after each


@dataclass(slots=True)
class Way:
    """What is chosen for about as many requests.

    Attributes:
        length: the best one.
        rate, worth, plain_s, cuts: of it, as of `Choice`.
        steps: planned, the one of the next review, and how many there were of these.
        challenger: whether a longer one (1) or a shorter one (-1) was better at the last review.
        trial: a length that is to be tried, and in how many steps.
        tried: by length, how often it was in vain, the step from which on it may be again, and what it might
            have brought per second.
    """

    length: int = 0
    rate: float = 0.0
    worth: float = 0.0
    plain_s: float = 0.0
    cuts: bool = True
    steps: int = 0
    review_at: int = 0
    reviews: int = 0
    challenger: int = 0
    trial: tuple[int, int] = (0, 0)
    tried: dict[int, tuple[int, int, float]] = field(default_factory=dict[int, tuple[int, int, float]])

    def may_try(self, length: int, hope: float) -> bool:
        """If it may bring so much per second."""
        return self.steps >= self.tried.get(length, (0, 0, 0.0))[1] or self.has_more_hope(length, hope)

    def has_more_hope(self, length: int, hope: float) -> bool:
        """Than when it was tried; where there are drafts already, hope comes and goes with their texts."""
        return not self.length and length in self.tried and hope > MUCH_BETTER * self.tried[length][2]

    def will_try(self, length: int, steps: int, hope: float) -> None:
        """What was often tried is tried seldom, unless there is more to hope for than there was."""
        self.trial = length, steps
        times = 0 if self.has_more_hope(length, hope) else self.tried.get(length, (0,))[0]
        again_at = self.steps + steps + min(_TRIED_AGAIN << times, _TRIED_AGAIN_MOST)
        self.tried[length] = times + 1, again_at, hope
