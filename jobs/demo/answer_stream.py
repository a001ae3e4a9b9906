"""Streams answers of a server with and without speculation, and shows both side by side as they arrive."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..common.http_client import ServerClient
from .demo_models import Question

_MODES = {True: "with speculation", False: "without"}
_BLOCKS = ("bold green", "bold cyan")  # styles of blocks in turn


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """An answer: its tokens, the target's steps that gave them, and seconds until the last event."""

    text: str
    num_tokens: int
    num_steps: int
    seconds: float


class SideBySide:
    """Two columns of text that grow; off a terminal the first is printed once it is complete."""

    def __init__(self) -> None:
        self._console = Console()
        self._texts = {mode: Text() for mode in _MODES}
        self._num_blocks = 0
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="visible")

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
        elif error is None:
            print(self._texts[True].plain, flush=True)

    def grow(self, block: str, *, speculate: bool) -> None:
        self._num_blocks += 1
        self._texts[speculate].append(block, _BLOCKS[self._num_blocks % 2] if speculate else None)
        if self._console.is_terminal:
            columns = Table.grid(expand=True)
            for _ in _MODES:
                columns.add_column(ratio=1)
            columns.add_row(*(Panel(self._texts[mode], title=name) for mode, name in _MODES.items()))
            self._live.update(columns, refresh=True)


def stream_answer(
    client: ServerClient,
    question: Question,
    max_tokens: int,
    *,
    speculate: bool,
    view: SideBySide | None = None,
) -> ChatAnswer:
    body = {
        **question.body,
        "max_tokens": max_tokens,
        "temperature": 0,
        "speculative": {"enabled": speculate, "return_trace": True},
        "stream_options": {"include_usage": True},
    }
    last: Mapping[str, Any] = {}  # Any: JSON
    texts: list[str] = []
    begin_s = end_s = time.perf_counter()
    for last in client.stream_chat(body):
        for choice in last["choices"]:
            if text := choice["delta"].get("content"):
                texts.append(text)
                end_s = time.perf_counter()
                if view is not None:
                    view.grow(text, speculate=speculate)
    num_tokens = last["usage"]["completion_tokens"]
    return ChatAnswer("".join(texts), num_tokens, _num_steps(last, num_tokens), end_s - begin_s)


def _num_steps(event: Mapping[str, Any], num_tokens: int) -> int:
    """Return the steps in which the target gave an answer: without drafts, one a token."""
    acceptance = (event.get("metrics") or {}).get("speculative_decoding")
    return num_tokens if acceptance is None else acceptance["trace"]["steps"][-1] + 1
