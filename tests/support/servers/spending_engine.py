"""The parts of an engine that receipts read; as a script it runs until it is killed."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from manta.actors.observability.usage_store import ReceiptWriter
from manta.cluster.config import EngineConfig
from manta.cluster.metrics.metric import UsageAccount
from manta.cluster.scheduler.scheduler_stats import Usage

NOON = 1_769_860_800.0  # 2026-01-31 12:00 UTC
ACME = UsageAccount("acme", "code")
SOME = Usage(tokens=30, steps=10, engine_s=2.0, compared_s=1.5, plain_s=3.0, aged_s=15.0)


@dataclass
class SpendingEngine:
    """An engine with two GPUs."""

    sums: dict[UsageAccount, Usage] = field(default_factory=dict)
    config: EngineConfig = field(default_factory=lambda: EngineConfig(model="m", tensor_parallel_size=2))
    info: Any = field(default_factory=lambda: SimpleNamespace(device="cuda:0"))

    def usage_by_account(self) -> dict[UsageAccount, Usage]:
        return dict(self.sums)

    def spend(self, account: UsageAccount, more: Usage) -> None:
        old = self.sums.get(account, Usage())
        self.sums[account] = Usage(*(a + b for a, b in zip(old, more, strict=True)))


def keeper(
    engine: SpendingEngine, folder: Path, labels: int = 8, clock: list[float] | None = None
) -> ReceiptWriter:
    """An engine whose clock is at the last of the times."""
    times = clock or [NOON]
    return ReceiptWriter(engine, folder, "m", labels, lambda: times[-1])  # type: ignore[arg-type]


if __name__ == "__main__":
    engine = SpendingEngine()
    writer = keeper(engine, Path(sys.argv[1]))
    while True:
        engine.spend(ACME, SOME)
        writer.write()
        print(int(engine.sums[ACME].tokens), flush=True)
