"""Capture as the server sees it: answers are chosen, collected as they come, and given to a writing process.

    engine's thread ─▶ event loop: a list grows by a step's tokens; at the end one line of JSON, into a pipe
                                                          │ at most 8 MiB wait in it; what is more is dropped
                                                          ▼
                       writer.py, a process of its own: redaction, the ring of segments

Nothing waits for the writer, no step and no response: it may be slow, stand still or die. What it cannot take
is counted (`manta:captured_completions_total{result}`). Fed by `http/run.py`; all on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, cast

from ...cluster.config import EngineConfig
from ...cluster.errors import ConfigError
from ..asker import Asker
from ..checkpoints import tokenizer_folder
from ..http.settings import ServerSettings
from ..outputs import Begun, RequestOutput
from ..prompts import EncodedPrompt
from . import writer
from .records import CapturedRecord
from .writer import Outcome, WriterSettings

logger = logging.getLogger(__name__)

CaptureResult = Literal[Outcome, "behind"]

MAX_WAITING_BYTES = 8 * 2**20
END_S = 10.0  # for what waits, when the server ends
AGAIN_S = 1.0


@dataclass(slots=True, eq=False)
class CapturedAnswers:
    """The answers to one request that was chosen, as they come."""

    prompts: Sequence[EncodedPrompt]
    model: str
    asker: Asker
    token_ids: dict[tuple[int, int], list[int]]  # by prompt and completion

    def feed(self, prompt_index: int, output: RequestOutput) -> None:
        """What is new of them."""
        for completion in output.outputs:
            self.token_ids.setdefault((prompt_index, completion.index), []).extend(completion.token_ids)

    def records(self, *, prompts: bool) -> list[CapturedRecord]:
        """Of today."""
        day = datetime.now(UTC).date().isoformat()
        return [
            CapturedRecord(
                prompt_token_ids=self.prompts[index].token_ids if prompts else (),
                token_ids=tuple(token_ids),
                model=self.model,
                day=day,
                tenant=self.asker.named,
                category=self.asker.category,
            )
            for (index, _), token_ids in self.token_ids.items()
        ]


class TrafficCapture:
    """Of one engine.

    Args:
        settings: of the writing process.
        fraction: of the requests that are chosen.
        prompts: False keeps answers alone.
        count: told what became of each completion.
    """

    def __init__(
        self,
        settings: WriterSettings,
        fraction: float,
        count: Callable[[CaptureResult], None],
        *,
        prompts: bool,
    ) -> None:
        self._settings = settings
        self._fraction = fraction
        self._count = count
        self._prompts = prompts
        self._pipe: asyncio.WriteTransport | None = None
        self._unanswered = 0

    def choose(
        self, prompts: Sequence[EncodedPrompt], begun: Begun, model: str, asker: Asker
    ) -> CapturedAnswers | None:
        """Whether the answers to this request are among those to be kept: then feed what comes back.

        Args:
            begun: of its only completion, by another engine.
        """
        if random.random() >= self._fraction:
            return None
        known = {(0, 0): list(begun.token_ids)} if begun.token_ids else {}
        return CapturedAnswers(prompts, model, asker, known)

    def submit(self, answers: CapturedAnswers) -> None:
        """Whole answers."""
        for record in answers.records(prompts=self._prompts):
            line, pipe = record.line(), self._pipe
            if pipe is None or pipe.get_write_buffer_size() + len(line) > MAX_WAITING_BYTES:
                self._count("behind")
            else:
                self._unanswered += 1
                pipe.write(line)

    async def work_forever(self) -> None:
        """Have a writer, and another one if it dies. Cancelled at the end: what waits is written then."""
        while await self._with_writer():
            logger.warning("capture: the writing process has ended; another one is started")
            await asyncio.sleep(AGAIN_S)

    async def _with_writer(self) -> bool:
        """Until it ends; False if it refuses to begin, which another one would, too."""
        # The pipe is there before the process: what is answered meanwhile waits in it.
        read_end, write_end = os.pipe()
        loop, process = asyncio.get_running_loop(), None
        self._pipe, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(write_end, "wb"))
        words = asyncio.StreamReader()
        try:
            process = await asyncio.to_thread(_start, self._settings, read_end)
            assert process.stdout is not None
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(words), process.stdout)
            first = (await words.readline()).decode()
            if first.startswith("refused "):
                logger.error("nothing is captured: %s", first.removeprefix("refused ").rstrip())
                return False
            await self._listen(words)
            return True
        finally:
            self._pipe.close()  # when all that waits has gone through
            self._pipe = None
            if process is not None:
                await self._end(process, words)

    async def _listen(self, words: asyncio.StreamReader) -> None:
        """To what becomes of each line."""
        while line := await words.readline():
            outcome, _, why = line.decode().rstrip("\n").partition(" ")
            if why:
                logger.warning("capture: %s; completions like this one are not kept. Said once.", why)
            self._unanswered -= 1
            self._count(cast(Outcome, outcome))

    async def _end(self, process: subprocess.Popen[bytes], words: asyncio.StreamReader) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._listen(words)
        process.kill()
        await asyncio.to_thread(process.wait)
        for _ in range(self._unanswered):
            self._count("behind")
        self._unanswered = 0


def _start(settings: WriterSettings, lines: int) -> subprocess.Popen[bytes]:
    """The writing process; it reads from the pipe `lines`, which is its own then."""
    try:
        return subprocess.Popen(
            [sys.executable, "-m", writer.__name__, settings.argument()],
            stdin=lines,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    finally:
        os.close(lines)


def writer_settings(config: EngineConfig, settings: ServerSettings) -> WriterSettings | None:
    """None where nothing is captured. Raises ConfigError."""
    if settings.capture is None:
        return None
    tokenizer = None
    if settings.capture_redact is not None:
        if config.skip_tokenizer_init:
            raise ConfigError(
                "capture_redact needs a tokenizer, and there is none with skip_tokenizer_init. Drop one.",
                param="capture_redact",
            )
        tokenizer = str(tokenizer_folder(config))
    return WriterSettings(settings.capture, settings.capture_max_bytes, settings.capture_redact, tokenizer)


def open_capture(
    config: EngineConfig, settings: ServerSettings, count: Callable[[CaptureResult], None]
) -> TrafficCapture | None:
    """What `settings` ask for; None, and no process, where they ask for nothing. Raises ConfigError."""
    found = writer_settings(config, settings)
    if found is None:
        return None
    return TrafficCapture(found, settings.capture_fraction, count, prompts=settings.capture_prompts)
