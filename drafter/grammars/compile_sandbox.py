"""A process that test-compiles grammars, each in a child process with limits. Imports neither torch nor Ray.

    python -m manta.drafter.grammars.compile_sandbox CONTROL MODEL

Some small grammars make llguidance overflow its stack or compute for minutes. A child compiles each grammar
with a limited stack, memory and CPU time, and consumes a few tokens with it. If the child dies, the grammar
is refused and nothing else is affected.

`CONTROL` is the descriptor of a socket: each message carries one descriptor of a connection, on which a
client sends a question and reads the answer (`CompileQuestion`, `CompileAnswer`). The process ends when the
control socket closes. `MODEL` is the descriptor of a file with the arguments of `GrammarCompiler` as JSON.
The client is `actors/structured_outputs/grammar_validator.py`.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NotRequired, TypedDict

from .compiler import MAX_FORCED, GrammarCompiler, GrammarError, lark_of, reason_of, run_on_stack

# Smaller than the stacks of threads that compile (`STACK_BYTES`) and make masks.
TRIAL_STACK_BYTES = 1 << 20
TRIAL_BYTES = 128 << 20
NUM_TOKENS = 4  # consumed after compiling: some grammars fail at the first


class CompileQuestion(TypedDict):
    """A grammar to try within `cpu_s` seconds; kind "grammar" is Lark, or EBNF to convert to Lark.

    A grammar whose texts cannot begin by the request's other rules is refused.
    """

    kind: str
    text: str
    cpu_s: float
    allowed: NotRequired[Sequence[int] | None]  # the request's `allowed_token_ids`
    forbidden: NotRequired[Sequence[int]]  # its `bad_words` of one token


class CompileAnswer(TypedDict):
    """The outcome of a trial; only `signal` and `cpu_s`, if a signal killed the child.

    `text` is the grammar with EBNF converted to Lark, `error` why llguidance refuses it, `cpu_s` and
    `grown_bytes` what it took. `forces` and `mask_s` are as in `Grammar`, without the first mask, which makes
    most of the lexer's states.
    """

    text: NotRequired[str]
    forces: NotRequired[bool]
    mask_s: NotRequired[float]
    cpu_s: NotRequired[float]
    grown_bytes: NotRequired[int]
    error: NotRequired[str]
    signal: NotRequired[int]


def try_grammar(
    compiler: GrammarCompiler,
    kind: str,
    text: str,
    allowed: Sequence[int] | None = None,
    forbidden: Sequence[int] = (),
) -> CompileAnswer:
    """Compile a grammar, consume a few tokens, and return `text`, `forces`, `mask_s`; or GrammarError."""
    if kind == "grammar":
        kind, text = "lark", lark_of(text)
    assert kind in ("json_schema", "regex", "lark")
    matcher = compiler.compile((kind, text))
    if allowed is not None or forbidden:
        _check_beginning(matcher.compute_bitmask(), compiler.eos_token_ids, allowed, forbidden)
    max_forced, masks_s = len(matcher.compute_ff_tokens()), list[float]()
    for token, mask_s in _tokens(matcher.compute_bitmask):
        masks_s.append(mask_s)
        matcher.try_consume_tokens([token])
        max_forced = max(max_forced, len(matcher.compute_ff_tokens()))
        if matcher.is_error():
            raise GrammarError(reason_of(matcher))
        if matcher.is_stopped():
            break
    mask_s = max(masks_s[1:], default=0.0)
    return CompileAnswer(text=text, forces=max_forced <= MAX_FORCED, mask_s=mask_s)


def _check_beginning(
    bits: bytes, eos_token_ids: Sequence[int], allowed: Sequence[int] | None, forbidden: Sequence[int]
) -> None:
    """Raise GrammarError unless a token that the mask allows is possible, or an empty text is."""

    def begins(token: int) -> bool:
        return token >> 3 < len(bits) and bool(bits[token >> 3] >> (token & 7) & 1)

    never = {*forbidden}
    if allowed is None:
        is_possible = int.from_bytes(bits, "little").bit_count() > sum(map(begins, never))
    else:
        is_possible = any(begins(token) for token in allowed if token not in never)
    if not is_possible and not any(map(begins, eos_token_ids)):
        field = "bad_words" if allowed is None else "allowed_token_ids"
        raise GrammarError(f"by {field}, no text that fits it can begin. Leave out one of the two")


def _tokens(mask: Callable[[], bytes]) -> Iterator[tuple[int, float]]:
    """Yield allowed tokens, chosen pseudo-randomly with a fixed seed, and the CPU time of their masks."""
    chance = random.Random(0)
    for _ in range(NUM_TOKENS):
        began_s = time.thread_time()  # the process's is only updated with each tick while its timer is set
        bits = mask()
        mask_s = time.thread_time() - began_s
        places = [place for place, byte in enumerate(bits) if byte]
        if not places:
            return
        place = chance.choice(places)
        yield 8 * place + chance.choice([bit for bit in range(8) if bits[place] >> bit & 1]), mask_s


class _Server:
    def __init__(self, control: socket.socket, compiler: GrammarCompiler) -> None:
        self._control, self._compiler = control, compiler
        self._children: dict[int, tuple[int, socket.socket]] = {}  # by descriptor of the process
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._control:
                    self._reap(key.fd)
                elif not self._begin():
                    return

    def _begin(self) -> bool:
        """Accept a connection and fork a child that answers on it. Return False if the client is gone."""
        message, files, _, _ = socket.recv_fds(self._control, 16, 1)
        if not message:
            return False
        connection = socket.socket(fileno=files[0])
        pid = os.fork()
        if pid == 0:
            try:
                self._control.close()
                for _, other in self._children.values():
                    other.close()  # or its client would wait for this child too
                _answer(connection, self._compiler)
            finally:
                os._exit(0)
        child = os.pidfd_open(pid)
        self._children[child] = pid, connection
        self._selector.register(child, selectors.EVENT_READ)
        return True

    def _reap(self, child: int) -> None:
        """Send the client the signal that killed a child, if one did."""
        pid, connection = self._children.pop(child)
        self._selector.unregister(child)
        os.close(child)
        _, status, used = os.wait4(pid, 0)
        with connection:
            if os.WIFSIGNALED(status):
                cpu_s = used.ru_utime + used.ru_stime
                _send(connection, CompileAnswer(signal=os.WTERMSIG(status), cpu_s=cpu_s))


def _answer(connection: socket.socket, compiler: GrammarCompiler) -> None:
    """Read a question, limit this process, and answer. Runs in a child."""
    with connection.makefile("rb") as stream:
        question: CompileQuestion = json.loads(stream.read())
    memory_bytes = _data_bytes()
    stack_bytes = memory_bytes + TRIAL_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (stack_bytes, stack_bytes))
    began_s, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # llguidance writes a trace on out-of-memory
    signal.setitimer(signal.ITIMER_PROF, question["cpu_s"])  # SIGPROF ends the process
    try:
        rules = question.get("allowed"), question.get("forbidden", ())
        tried = run_on_stack(
            TRIAL_STACK_BYTES, lambda: try_grammar(compiler, question["kind"], question["text"], *rules)
        )
    except GrammarError as error:
        answer = CompileAnswer(error=str(error)[:2000])
    except MemoryError:
        os.kill(os.getpid(), signal.SIGABRT)  # as llguidance does on out-of-memory
        return
    else:
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        answer = tried | CompileAnswer(grown_bytes=grown << 10)
    signal.setitimer(signal.ITIMER_PROF, 0)
    _send(connection, answer | CompileAnswer(cpu_s=time.process_time() - began_s))


def _send(connection: socket.socket, answer: CompileAnswer) -> None:
    with suppress(OSError):  # the client is gone
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _data_bytes() -> int:
    """Return the size of this process's private memory, as RLIMIT_DATA counts it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))


def main() -> None:
    control_file, model_file = (int(argument) for argument in sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends when its client does
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with os.fdopen(model_file, encoding="utf-8") as stream:
        model = json.load(stream)
    compiler = GrammarCompiler(model["tokenizer_json"], model["vocab_size"], tuple(model["eos_token_ids"]))
    gc.disable()  # the collector would write to pages shared with children, which copies them
    gc.freeze()
    _Server(socket.socket(fileno=control_file), compiler).run()


if __name__ == "__main__":
    main()
