"""Tries grammars in a process that may be killed (`compile_sandbox.py`).

The process is started for the first grammar, and again after it was killed. It ends with `close` or when this
process ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...cluster.errors import OverloadedError

ANSWER_TIMEOUT_S = 60.0  # for a very busy machine, including the start of the process
QUICK_S, SLOW_S = 0.1, 1.0  # CPU seconds of one core
# A grammar that compiles this fast, in this little memory, may be compiled again in the middle of a response.
CHEAP_S, CHEAP_BYTES = 0.05, 16 << 20
NICENESS = 5  # of the process, including its start: steps on a CPU have priority
_MODULE = "drafter.grammars.compile_sandbox"


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The outcome of a trial.

    Attributes:
        text: the grammar to compile if it differs from the one sent: EBNF converted to Lark.
        is_cheap, forces, mask_s: as in `Grammar`.
        refusal: why it was rejected, as the end of a sentence; None if it was accepted.
        is_slow: it exceeded the given time.
        cpu_s: CPU time that the trial took.
    """

    text: str | None = None
    is_cheap: bool = False
    forces: bool = False
    mask_s: float = 0.0
    refusal: str | None = None
    is_slow: bool = False
    cpu_s: float = 0.0


class GrammarValidator:
    """Tries grammars for one model's tokens. Thread-safe."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        model = {"tokenizer_json": tokenizer_json, "vocab_size": vocab_size, "eos_token_ids": eos_token_ids}
        self._model = json.dumps(model).encode()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def try_grammar(
        self,
        kind: str,
        text: str,
        cpu_s: float,
        *,
        allowed: tuple[int, ...] | None = None,
        forbidden: tuple[int, ...] = (),
    ) -> TrialResult:
        """Block until there is a result or the time is exceeded. Raises OverloadedError.

        `allowed`, `forbidden`: tokens by the request's other rules, as in `CompileQuestion`.
        """
        question = {"kind": kind, "text": text, "cpu_s": cpu_s, "allowed": allowed, "forbidden": forbidden}
        return _trial_result(self._answer(question), cpu_s, text)

    def close(self) -> None:
        """End the process. Idempotent; the next `try_grammar` starts another."""
        with self._lock:
            self._end()

    def _answer(self, question: Mapping[str, object]) -> Mapping[str, Any]:
        sent = json.dumps(question).encode()
        for _ in range(2):  # twice, since the process may have been killed
            with self._lock:
                control = self._running()
            with suppress(OSError):
                if received := _exchange(control, sent):
                    return json.loads(received)
            with self._lock:
                if self._control is control:
                    self._end()
        raise OverloadedError("The process that tries grammars does not answer. Retry.")

    def _running(self) -> socket.socket:
        """Return the socket to the process; start it if needed."""
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        self._end()
        self._control, theirs = socket.socketpair()
        model = os.memfd_create("manta-grammars")
        try:
            _write_all(model, self._model)
            os.lseek(model, 0, os.SEEK_SET)
            package = __name__.split(".")[0]
            root = Path(__file__).absolute().parents[3]
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{package}.{_MODULE}", str(theirs.fileno()), str(model)],
                pass_fds=(theirs.fileno(), model),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)])},
            )
            os.setpriority(os.PRIO_PROCESS, self._process.pid, os.nice(0) + NICENESS)
        finally:
            os.close(model)
            theirs.close()
        return self._control

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def _exchange(control: socket.socket, sent: bytes) -> bytes:
    """Return the answer, on a connection of its own; b"" if the process has ended."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            socket.send_fds(control, [b"?"], [theirs.fileno()])
        ours.settimeout(ANSWER_TIMEOUT_S)
        ours.sendall(sent)
        ours.shutdown(socket.SHUT_WR)
        with ours.makefile("rb") as stream:
            return stream.readline()


def _trial_result(answer: Mapping[str, Any], cpu_s: float, text: str) -> TrialResult:
    spent_s = answer["cpu_s"]
    if "signal" in answer:
        killed_by = answer["signal"]
        refusal = f"{_reason(killed_by, cpu_s)}. Make it simpler"
        return TrialResult(refusal=refusal, is_slow=killed_by == signal.SIGPROF, cpu_s=spent_s)
    if "error" in answer:
        return TrialResult(refusal=answer["error"], cpu_s=spent_s)
    is_cheap = spent_s <= CHEAP_S and answer["grown_bytes"] <= CHEAP_BYTES
    other = None if answer["text"] == text else answer["text"]
    return TrialResult(other, is_cheap, answer["forces"], answer["mask_s"], cpu_s=spent_s)


def _reason(killed_by: int, cpu_s: float) -> str:
    match killed_by:
        case signal.SIGPROF:
            return f"compiling it takes longer than the time limit of {cpu_s:g} s of a core"
        case signal.SIGABRT | signal.SIGKILL:
            return "compiling it takes more than the memory limit"
        case signal.SIGSEGV | signal.SIGBUS:
            return "it is nested deeper than the limit: parts in parts, or references to references"
        case _:
            return f"compiling it ends with signal {killed_by}"


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
