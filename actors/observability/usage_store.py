"""Stores an engine's usage per day in a folder as receipts that survive restarts and kills.

A process has its own file for each day, `2026-01-31.NAME.jsonl`, and appends a line for each account that has
changed: its *totals* of that day in that process. The last line of an account counts, so nothing is counted
twice, a truncated line is skipped, and a kill loses at most the seconds since the last write. A long file is
rewritten with one line per account. The receipts of a day are the sums over all its files, so replicas share
a folder.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from ...cluster.config import EngineConfig
from ...cluster.engine.usage_report import DeviceKind, ReceiptSubject, UsageTotals, receipt_json
from ...cluster.errors import RequestError, brief
from ...cluster.metrics.metric import ANY, BoundedLabels, UsageAccount
from ...cluster.request.caller import Tenant
from ...cluster.scheduler.scheduler_stats import Usage
from ..engine.async_engine import AsyncEngine
from ..system.atomic_files import PRIVATE_FILE, check_writable, open_own, write_atomically

logger = logging.getLogger(__name__)

WRITE_INTERVAL_S = 5.0
_LONG = 16  # lines per account before a file is rewritten
_FILE = re.compile(r"(\d{4}-\d{2}-\d{2})\.[\w-]+\.jsonl", re.ASCII)


class ReceiptWriter:
    """Writes the receipts of one engine. Raises ConfigError if the folder cannot be written."""

    def __init__(
        self,
        engine: AsyncEngine,
        folder: Path,
        model: str,
        max_label_values: int,
        clock: Callable[[], float] = time.time,
        categories: Sequence[str] = (ANY,),
    ) -> None:
        check_writable(folder, "receipts")
        self.folder = folder
        self._engine, self._model, self._clock = engine, model, clock
        self._devices = num_devices(engine.config)
        self._device: DeviceKind = "CPU" if engine.info.device == "cpu" else "GPU"
        self._tenants = BoundedLabels(max_label_values)
        self._categories = BoundedLabels(max_label_values, categories)
        self._requests: Counter[UsageAccount] = Counter()  # incremented on the event loop, read by `write`
        self._name = secrets.token_hex(8)
        self._lock = threading.Lock()
        # The lock guards everything below.
        self._seen: dict[UsageAccount, Usage] = {}
        self._seen_requests: Counter[UsageAccount] = Counter()
        self._day = ""
        self._amounts: dict[UsageAccount, UsageTotals] = {}  # of that day
        self._unwritten: set[UsageAccount] = set()
        self._num_lines = 0  # in the file; -1 if its end may be damaged
        self._logs_failure = True

    def account(self, requester: Tenant, *, begins: bool = True) -> UsageAccount:
        """Return a request's account, on the event loop. `begins`: False if another engine has counted it."""
        account = UsageAccount(self._tenants.of(requester.tenant), self._categories.of(requester.category))
        self._requests[account] += begins
        return account

    async def write_forever(self) -> None:
        try:
            while True:
                await asyncio.sleep(WRITE_INTERVAL_S)
                await asyncio.to_thread(self.write)
        finally:
            self.write()

    def write(self) -> None:
        """Add the usage since the last call to today's totals and write them. Thread-safe."""
        with self._lock:
            self._add_usage()
            if not self._unwritten:
                return
            try:
                self._write()
            except OSError as error:
                self._num_lines = -1
                if self._logs_failure:
                    logger.warning("receipts cannot be written in %s: %s; retrying", self.folder, error)
                self._logs_failure = False
            else:
                self._unwritten.clear()
                self._logs_failure = True

    def _add_usage(self) -> None:
        today = datetime.fromtimestamp(self._clock(), UTC).date().isoformat()
        if today != self._day:  # drop unwritten lines of the previous day: writing them has kept failing
            self._day, self._amounts, self._num_lines = today, {}, 0
            self._unwritten.clear()
        spent, requests = self._engine.usage_by_account(), self._requests.copy()
        for account in {*spent, *requests}:
            now, before = spent.get(account, Usage()), self._seen.get(account, Usage())
            came = requests[account] - self._seen_requests[account]
            if more := UsageTotals.between(before, now, self._devices, came):
                self._amounts[account] = self._amounts.get(account, UsageTotals()) + more
                self._unwritten.add(account)
        self._seen, self._seen_requests = spent, requests

    def _write(self) -> None:
        path = self.folder / f"{self._day}.{self._name}.jsonl"
        lines = self._num_lines + len(self._unwritten)
        if self._num_lines < 0 or lines > _LONG * len(self._amounts) + _LONG:
            text = "".join(self._line(account) for account in self._amounts)
            write_atomically(path, lambda target: target.write_text(text, encoding="utf-8"), private=True)
            self._num_lines = len(self._amounts)
            return
        handle = open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, PRIVATE_FILE)
        with os.fdopen(handle, "ab") as file:
            file.write("".join(self._line(account) for account in sorted(self._unwritten)).encode())
            file.flush()
            os.fsync(file.fileno())
        self._num_lines = lines

    def _line(self, account: UsageAccount) -> str:
        line_fields = {"model": self._model, **account._asdict(), "device": self._device}
        return json.dumps(line_fields | asdict(self._amounts[account])) + "\n"


def num_devices(config: EngineConfig) -> int:
    """Return the number of GPUs; a drafter shared by several engines is not counted."""
    spec = config.speculative_config
    return config.tensor_parallel_size + (spec is not None and spec.placement == "split")


def read_receipts(folder: Path, day: str | None = None, tenant: str | None = None) -> list[dict[str, Any]]:
    """Return the receipts of a folder, sorted by day and name, as JSON (`receipt_json`).

    `day`: YYYY-MM-DD, in UTC. None: all. Raises RequestError if `day` is not valid; OSError.
    """
    if day is not None:
        day = _checked_day(day)
    sums: dict[tuple[ReceiptSubject, str], UsageTotals] = {}
    for path in sorted(folder.iterdir()):
        found = _FILE.fullmatch(path.name)
        if found is None or day not in (None, found[1]):
            continue
        for subject, device, amounts in _of_file(path, found[1]):
            if tenant in (None, subject.tenant):
                key = subject, device
                sums[key] = sums.get(key, UsageTotals()) + amounts
    return [receipt_json(*key, sums[key]) for key in sorted(sums)]


def _of_file(path: Path, day: str) -> Iterator[tuple[ReceiptSubject, str, UsageTotals]]:
    last: dict[tuple[ReceiptSubject, str], UsageTotals] = {}
    for line in path.read_bytes().splitlines():
        try:
            receipt = json.loads(line)
            subject = ReceiptSubject(
                day, receipt.pop("model"), receipt.pop("tenant"), receipt.pop("category")
            )
            device = str(receipt.pop("device"))
            last[subject, device] = UsageTotals(**receipt)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue  # a truncated line
    for (subject, device), amounts in last.items():
        yield subject, device, amounts


def _checked_day(day: str) -> str:
    try:
        if date.fromisoformat(day).isoformat() == day:
            return day
    except ValueError:
        pass
    raise RequestError(f"day={brief(day)} must be a day like 2026-01-31 (of UTC).", param="day")
