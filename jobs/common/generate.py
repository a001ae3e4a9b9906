"""`manta generate` and `manta chat`: text on standard output, in this process and without Ray.

In a chat, Ctrl-C stops the current answer and keeps its text; at the prompt it clears the line. `limit` is
the user's max_tokens, if given; prompt and answer must fit into the context, as over HTTP.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict

from ...actors.engine.outputs import RequestMetrics, RequestOutput
from ...actors.llm import LLM
from ...actors.tokenization.prompts import Chat, Prompt, encode_prompt
from ...cluster.config import EngineConfig
from ...cluster.errors import RequestError
from ...cluster.request.request import SamplingParams
from ...cluster.step.limits import check_max_tokens

HELP = "/reset clears the conversation, /exit (or Ctrl-D) quits, Ctrl-C stops an answer."


def open_llm(config: EngineConfig) -> LLM:
    return LLM(**asdict(config))


def generate_text(
    config: EngineConfig, prompt: str, params: SamplingParams, limit: int | None = None
) -> None:
    """Stream the continuation of `prompt` to standard output and print statistics on standard error."""
    if not prompt:
        raise RequestError("prompt is empty: give some text to continue.", param="prompt")
    with open_llm(config) as llm:
        last = None
        for delta in stream_text(llm, prompt, params, limit):
            last = delta
        sys.stdout.write("\n")
        if last is not None:
            print(summary(last.metrics, llm), file=sys.stderr)


def stream_text(
    llm: LLM, prompt: Prompt, params: SamplingParams, limit: int | None
) -> Generator[RequestOutput]:
    encoded = encode_prompt(prompt, llm.tokenizer)
    check_max_tokens(len(encoded.token_ids), limit, llm.info.max_model_len)
    for delta in llm.stream(encoded, params):
        sys.stdout.write(delta.outputs[0].text)
        sys.stdout.flush()
        yield delta


def summary(metrics: RequestMetrics, llm: LLM) -> str:
    tokens = llm.stats().generation_tokens
    line = f"[{tokens} tokens, {tokens / max(metrics.e2e_s, 1e-9):.1f} tokens/s"
    if (length := metrics.mean_acceptance_length) is not None:
        line += f", mean acceptance length {length:.2f}"
    return line + "]"


class ChatSession:
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
