"""`manta chat`: a chat in the terminal, in this process and without Ray.

Ctrl-C stops the current answer and keeps its text; at the prompt it clears the line.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

from ..actors.llm import LLM
from ..actors.tokenization.prompts import Chat
from ..cluster.config import EngineConfig
from ..cluster.errors import RequestError
from ..cluster.request.request import SamplingParams
from .common.generate import open_llm, stream_text

HELP = "/reset clears the conversation, /exit (or Ctrl-D) quits, Ctrl-C stops an answer."


class ChatSession:
    """The messages of a chat.

    `limit`: max_tokens if the user gave it; messages and answer must fit into the context.
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
        """Stream the answer to `text` to standard output. A failed answer does not change the messages."""
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
    with open_llm(config) as llm:
        conversation = ChatSession(llm, params, system, limit)
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


def _answer(conversation: ChatSession, line: str) -> None:
    try:
        conversation.say(line)
    except RequestError as error:  # such as a conversation longer than the context
        print(f"error: {error.message}", file=sys.stderr)


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Make Ctrl-C set the event instead of raising, so that it never interrupts a step of the engine."""
    event = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


def _read_line() -> str | None:
    """Return the next line, "" after Ctrl-C, None at the end of input."""
    try:
        return input("> ").strip()
    except KeyboardInterrupt:
        print()
        return ""
    except EOFError:
        print()
        return None
