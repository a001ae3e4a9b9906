"""Captures traffic in the server: selects requests, sends their answers to a writing process.

    engine's thread ─▶ event loop: a list grows by a step's tokens; at the end one JSON line, into a pipe
                                                          │ holds at most 8 MiB; what exceeds that is dropped
                                                          ▼
                       writer_process.py: redaction, the ring of segments

Neither steps nor responses wait for the writer, which may be slow, stop or die. Completions that it cannot
take are counted (`manta:captured_completions_total{result}`). Runs on the event loop.
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
from ...cluster.request.caller import Tenant
from ..checkpoints.checkpoint_paths import tokenizer_folder
from ..engine.outputs import RequestOutput, ResumeState
from ..http.config.settings import ServerSettings
from ..tokenization.prompts import EncodedPrompt
from . import writer_process as writer
from .records import CapturedRecord
from .writer_process import Outcome, WriterSettings

logger = logging.getLogger(__name__)

CaptureResult = Literal[Outcome, "behind"]

MAX_WAITING_BYTES = 8 * 2**20
END_S = 10.0  # for buffered completions when the server ends
RESTART_DELAY_S = 1.0


@dataclass(slots=True, eq=False)
class CapturedAnswers:
    prompts: Sequence[EncodedPrompt]
    model: str
    tenant: Tenant
    temperature: float
    token_ids: dict[tuple[int, int], list[int]]  # by prompt index and completion index

    def feed(self, prompt_index: int, output: RequestOutput) -> None:
        for completion in output.outputs:
            self.token_ids.setdefault((prompt_index, completion.index), []).extend(completion.token_ids)

    def records(self, *, prompts: bool) -> list[CapturedRecord]:
        day = datetime.now(UTC).date().isoformat()
        return [
            CapturedRecord(
                prompt_token_ids=self.prompts[index].token_ids if prompts else (),
                token_ids=tuple(token_ids),
                model=self.model,
                day=day,
                tenant=self.tenant.named,
                category=self.tenant.category,
                temperature=self.temperature,
            )
            for (index, _), token_ids in self.token_ids.items()
        ]


class TrafficCapture:
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
        self._num_pending = 0

    def choose(
        self,
        prompts: Sequence[EncodedPrompt],
        resume_state: ResumeState,
        model: str,
        tenant: Tenant,
        temperature: float,
    ) -> CapturedAnswers | None:
        if random.random() >= self._fraction:
            return None
        known = {(0, 0): list(resume_state.token_ids)} if resume_state.token_ids else {}
        return CapturedAnswers(prompts, model, tenant, temperature, known)

    def submit(self, answers: CapturedAnswers) -> None:
        for record in answers.records(prompts=self._prompts):
            line, pipe = record.line(), self._pipe
            if pipe is None or pipe.get_write_buffer_size() + len(line) > MAX_WAITING_BYTES:
                self._count("behind")
            else:
                self._num_pending += 1
                pipe.write(line)

    async def work_forever(self) -> None:
        """Run the writer, restarting it if it dies. When cancelled, buffered completions are written."""
        while await self._run_writer():
            logger.warning("capture: the writing process died; starting another one")
            await asyncio.sleep(RESTART_DELAY_S)

    async def _run_writer(self) -> bool:
        """Run one writer until it ends; False if it refuses to start, as another would, too."""
        # The pipe is created before the process, so that answers can be buffered in the meantime.
        read_end, write_end = os.pipe()
        loop, process = asyncio.get_running_loop(), None
        self._pipe, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(write_end, "wb"))
        replies = asyncio.StreamReader()
        try:
            process = await asyncio.to_thread(_start, self._settings, read_end)
            assert process.stdout is not None
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(replies), process.stdout)
            first = (await replies.readline()).decode()
            if first.startswith("refused "):
                logger.error("nothing is captured: %s", first.removeprefix("refused ").rstrip())
                return False
            await self._count_outcomes(replies)
            return True
        finally:
            self._pipe.close()  # after everything buffered was written
            self._pipe = None
            if process is not None:
                await self._end(process, replies)

    async def _count_outcomes(self, replies: asyncio.StreamReader) -> None:
        while line := await replies.readline():
            outcome, _, why = line.decode().rstrip("\n").partition(" ")
            if why:
                logger.warning("capture: %s; such completions are not stored. Logged once.", why)
            self._num_pending -= 1
            self._count(cast(Outcome, outcome))

    async def _end(self, process: subprocess.Popen[bytes], replies: asyncio.StreamReader) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._count_outcomes(replies)
        process.kill()
        await asyncio.to_thread(process.wait)
        for _ in range(self._num_pending):
            self._count("behind")
        self._num_pending = 0


def _start(settings: WriterSettings, read_end: int) -> subprocess.Popen[bytes]:
    """Start the writing process, which reads `read_end`; closes the descriptor here."""
    try:
        return subprocess.Popen(
            [sys.executable, "-m", writer.__name__, settings.argument()],
            stdin=read_end,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    finally:
        os.close(read_end)


def writer_settings(config: EngineConfig, settings: ServerSettings) -> WriterSettings | None:
    if settings.capture is None:
        return None
    tokenizer = None
    if settings.capture_redact is not None:
        if config.skip_tokenizer_init:
            raise ConfigError(
                "capture_redact needs a tokenizer, which skip_tokenizer_init disables. Remove one of them.",
                param="capture_redact",
            )
        tokenizer = str(tokenizer_folder(config))
    return WriterSettings(settings.capture, settings.capture_max_bytes, settings.capture_redact, tokenizer)


def open_capture(
    config: EngineConfig, settings: ServerSettings, count: Callable[[CaptureResult], None]
) -> TrafficCapture | None:
    writer = writer_settings(config, settings)
    if writer is None:
        return None
    return TrafficCapture(writer, settings.capture_fraction, count, prompts=settings.capture_prompts)
