"""`manta chat`: a conversation in the terminal, in this process and without Ray.

Ctrl-C ends the answer that is being given and keeps what was said; at the prompt it clears the line.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

from ..actors.llm import LLM
from ..actors.prompts import Chat
from ..cluster.config import EngineConfig
from ..cluster.errors import RequestError
from ..cluster.request import SamplingParams
from .generate import open_llm, stream_text

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) ends, Ctrl-C stops an answer."


class Conversation:
    """The messages so far, and how they grow.

    Args:
        limit: of an answer's tokens, if the user gave it: it must fit the context beside the messages.
    """

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str | None, limit: int | None = None
    ) -> None:
        self._llm = llm
        self._params = params
        self._limit = limit
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = list(self._opening)

    def say(self, text: str) -> str:
        """Answer `text` on standard output. An answer that fails leaves the conversation as it was."""
        messages = [*self.messages, {"role": "user", "content": text}]
        answer: list[str] = []
        with (
            closing(stream_text(self._llm, Chat(messages), self._params, self._limit)) as stream,
            _interrupts() as interrupted,
        ):
            for delta in stream:
                answer.append(delta.outputs[0].text)
                if interrupted.is_set():
                    sys.stdout.write(" [stopped]")
                    break
        sys.stdout.write("\n")
        self.messages = [*messages, {"role": "assistant", "content": "".join(answer)}]
        return self.messages[-1]["content"]


def run_chat(
    config: EngineConfig, params: SamplingParams, system: str | None, limit: int | None = None
) -> None:
    """Read lines until the user leaves."""
    with open_llm(config) as llm:
        conversation = Conversation(llm, params, system, limit)
        print(HELP, file=sys.stderr)
        while (line := _read_line()) is not None:
            if line == "/exit":
                break
            if line == "/reset":
                conversation.reset()
            elif line.startswith("/"):
                print(HELP, file=sys.stderr)
            elif line:
                _answer(conversation, line)


def _answer(conversation: Conversation, line: str) -> None:
    try:
        conversation.say(line)
    except RequestError as error:  # e.g. the conversation outgrew the context: say so and stay
        print(f"error: {error.message}", file=sys.stderr)


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Ctrl-C sets the event and breaks nothing: a step of the engine is never torn in the middle."""
    event = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


def _read_line() -> str | None:
    """The next line, "" after Ctrl-C, None at the end."""
    try:
        return input("> ").strip()
    except KeyboardInterrupt:
        print()
        return ""
    except EOFError:
        print()
        return None
