"""Usage receipts: resources used by a tenant's requests of a category on a day, and savings by speculation.

Saved steps are tokens - steps, as plain decoding takes a step per token. Saved seconds only cover steps that
were compared with measured plain decoding; None if there were none. `cluster/scheduler/scheduler_stats.py`
counts what steps were used for; `actors/observability/usage_store.py` has the days and files.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, Self

from ..scheduler.scheduler_stats import Usage

DeviceKind = Literal["GPU", "CPU"]


class ReceiptSubject(NamedTuple):
    """Key of a receipt; `day` is YYYY-MM-DD in UTC."""

    day: str
    model: str
    tenant: str
    category: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageTotals:
    """Sums of usage. Device-seconds are an engine's seconds times its GPUs; CPUs count as one device.

    Names are those of `Usage`; `aged_s` is the sum of `compared_s` times the age of the plain measurement.
    """

    requests: float = 0
    tokens: float = 0
    steps: float = 0
    device_s: float = 0.0
    compared_s: float = 0.0
    plain_s: float = 0.0
    aged_s: float = 0.0
    kept_s: float = 0.0

    @classmethod
    def between(cls, before: Usage, now: Usage, devices: int, requests: int) -> Self:
        """Return the difference between two snapshots of an engine with `devices` devices."""
        tokens, steps, *seconds = (b - a for a, b in zip(before, now, strict=True))
        device_s, compared_s, plain_s, aged_s, kept_s = (devices * each for each in seconds)
        return cls(
            requests=requests,
            tokens=tokens,
            steps=steps,
            device_s=device_s,
            compared_s=compared_s,
            plain_s=plain_s,
            aged_s=aged_s,
            kept_s=kept_s,
        )

    def __add__(self, more: UsageTotals) -> UsageTotals:
        return UsageTotals(**{f.name: getattr(self, f.name) + getattr(more, f.name) for f in fields(self)})

    def __bool__(self) -> bool:
        return self != UsageTotals()

    @property
    def saved_s(self) -> float | None:
        """Device-seconds saved over plain decoding; may be negative, None if not compared."""
        return self.plain_s - self.compared_s if self.compared_s else None

    @property
    def plain_age_s(self) -> float | None:
        """Mean age of the plain measurements; None if this engine made none."""
        fresh_s = self.compared_s - self.kept_s
        return self.aged_s / fresh_s if fresh_s > 0.0 else None


def receipt_json(subject: ReceiptSubject, device: str, amounts: UsageTotals) -> dict[str, Any]:  # Any: JSON
    """Return the receipt as JSON; null means "not measured"."""

    def seconds(value: float | None) -> float | None:
        return None if value is None else round(value, 3)

    return {
        **subject._asdict(),
        "requests": round(amounts.requests),
        "tokens": round(amounts.tokens),
        "steps": round(amounts.steps),
        "steps_saved": round(amounts.tokens - amounts.steps),
        "device": device,
        "device_seconds": seconds(amounts.device_s),
        "device_seconds_saved": seconds(amounts.saved_s),
        "compared_device_seconds": seconds(amounts.compared_s),
        "plain_device_seconds": seconds(amounts.plain_s) if amounts.compared_s else None,
        "plain_age_seconds": seconds(amounts.plain_age_s),
        "kept_device_seconds": seconds(amounts.kept_s),
    }
