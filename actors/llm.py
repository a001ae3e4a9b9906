"""`manta.LLM`: offline generation like vLLM's class, in this process and without Ray.

Only a topology of several processes (tensor parallel, split drafter) starts Ray workers. Not thread-safe.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

from pydantic import ValidationError
from tqdm import tqdm

from ..cluster.config import EngineConfig
from ..cluster.engine.engine_core import EngineCore, SequenceUpdate
from ..cluster.engine.engine_stats import EngineStats
from ..cluster.errors import ENDINGS, MantaError, RequestError, brief
from ..cluster.request.request import FinishReason, SamplingParams
from ..cluster.step.executor import ExecutorInfo
from .engine.output_processor import OutputProcessor, RequestTracker
from .engine.output_streams import processing_failure
from .engine.outputs import RequestOutput
from .engine.speculation_cache import SpeculationCache
from .engine.uniproc_executor import make_executor
from .http.protocol.chat_completion import ChatTemplateOptions, Messages, conversation, unused_fields
from .http.wire.request_model import unknown_fields
from .structured_outputs.grammar_frontend import GrammarFrontend
from .system.wait_messages import counting, say
from .tokenization.client_messages import Message, without_surrogates
from .tokenization.prompts import Chat, EncodedPrompt, Prompt, SeedSource, encode_prompt, load_tokenizer
from .tokenization.special_tokens import map_texts
from .tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class LLM:
    """A target, optionally a drafter, and the engine that runs them.

    Nothing is written to standard output. While the models load, progress is shown on standard error if it is
    a terminal.

    Args:
        model: folder, GGUF file or hub id of the target.
        speculative_config: e.g. {"method": "dflash", "model": "models/drafter"}; None decodes plainly.
        **settings: any field of `EngineConfig`.

    Example:
        >>> llm = LLM("models/target", speculative_config={"model": "models/drafter"})
        >>> llm.generate("def main(", SamplingParams(temperature=0))[0].outputs[0].text
    """

    # Any: settings come from users as plain values and are checked by EngineConfig.
    def __init__(
        self, model: str, *, speculative_config: Mapping[str, Any] | None = None, **settings: Any
    ) -> None:
        self.config = EngineConfig.from_dict(
            {"model": str(model), "speculative_config": speculative_config, **settings}
        )
        with counting("loading the models", say, begin=False):
            from .targets.loading.backend_selection import COMPILES, compiles_loops  # imports torch

            if compiles_loops(self.config):
                logger.warning("%s", COMPILES)
            self.tokenizer: Tokenizer | None = load_tokenizer(self.config)
            self._executor = make_executor(self.config)
        self._engine = EngineCore(self.config, self._executor)
        self._speculation_cache = SpeculationCache(self.config, self.info, self._engine)
        self._speculation_cache.measure_steps()
        self._processor = OutputProcessor(self.tokenizer, self._engine.clock)
        self._grammars = GrammarFrontend.of(self.tokenizer, self.info, self.config)
        self._seeds = SeedSource(self.config.seed)
        self._ids = itertools.count()
        self._failures: dict[str, MantaError] = {}  # by request id, until raised or returned

    @property
    def info(self) -> ExecutorInfo:
        return self._executor.info

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] | None = None,
        max_draft_tokens: int | None = None,
        trace: bool = False,
    ) -> list[RequestOutput]:
        """Continue prompts, all at once; results in the order of the prompts.

        If its output cannot be processed, a request ends with finish_reason "error", and the log has the
        cause. Other requests are not affected.

        Args:
            prompts: a string, a list of token ids, {"prompt_token_ids": ...}, a `Chat`, or a list of those.
            sampling_params: for all, or one per prompt.
            use_tqdm: show progress, by default if stderr is a terminal; or a callable that creates a bar like
                tqdm.
            max_draft_tokens: maximum drafts per step of each prompt; 0 decodes plainly. The output does not
                change.
            trace: include every step in `metrics.trace` of each output (with one completion per prompt).
        """
        batch = _as_batch(prompts)
        params = _per_prompt(sampling_params, len(batch))
        trackers = self._add_all(batch, params, max_draft_tokens, trace=trace)
        show = sys.stderr.isatty() if use_tqdm is None else bool(use_tqdm)
        make = use_tqdm if callable(use_tqdm) else tqdm
        with make(total=len(trackers), disable=not show, unit="request") as bar:
            while self._engine.has_unfinished:
                bar.update(sum(delta.finished for delta in self._step()))
        for tracker in trackers:
            self._failures.pop(tracker.request_id, None)  # reported by the output's finish_reason
        return [tracker.complete_output() for tracker in trackers]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        max_draft_tokens: int | None = None,
        trace: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered with the model's chat template (vLLM's arguments, and
        those of `generate`). Messages and tools are read as /v1/chat/completions reads them.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
            raise RequestError(
                f"messages={brief(messages)} is not allowed: give a conversation, which is a list of "
                "messages, or a list of several.",
                param="messages",
            )
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        options: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
            "tools": tools,
            "chat_template": chat_template,
        }
        read = [ChatPrompt.read(each, **options) for each in conversations]  # type: ignore[arg-type]
        if names := {name: None for each in read for name in each.without_effect(self.tokenizer)}:
            logger.warning("Neither chat nor the chat template reads %s", ", ".join(names))
        prompts = [conversation(each, each.messages, self.tokenizer) for each in read]
        return self.generate(
            prompts, sampling_params, use_tqdm=use_tqdm, max_draft_tokens=max_draft_tokens, trace=trace
        )

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        max_draft_tokens: int | None = None,
        trace: bool = False,
    ) -> Iterator[RequestOutput]:
        """Continue one prompt; yield new output once per verified block. Leaving early aborts the request.

        Raises:
            OutputProcessingError: the output cannot be made from the tokens; the log has the cause.
        """
        params = _per_prompt(sampling_params, 1)
        (tracker,) = self._add_all([prompt], params, max_draft_tokens, trace=trace)
        try:
            while not tracker.finished:
                yield from (delta for delta in self._step() if delta.request_id == tracker.request_id)
                if (failure := self._failures.pop(tracker.request_id, None)) is not None:
                    raise failure
        finally:
            if not tracker.finished:
                self._drop([tracker])

    def close(self) -> None:
        """End the workers and free their memory. Idempotent."""
        self._speculation_cache.write()
        self._engine.save_pages_in_files()
        self._grammars.close()
        self._executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _step(self) -> list[RequestOutput]:
        return [output for update in self._engine.step() if (output := self._output(update)) is not None]

    def _output(self, update: SequenceUpdate) -> RequestOutput | None:
        """Process an update. An exception ends only this request."""
        tracker = self._processor.tracker_of(update.request_id)
        if tracker is None:
            return None
        try:
            if (fed := self._processor.feed(update)) is None:
                return None
            _, fresh, stopped = fed
            output = tracker.output([fresh])
        except ENDINGS:
            raise
        except BaseException as error:
            self._failures[tracker.request_id] = processing_failure(tracker.request_id, error)
            self._drop([tracker], "error")
            tracker.fail()
            return None
        if stopped:
            self._engine.abort(update.request_id, "stop")
        return output

    def _add_all(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        max_draft_tokens: int | None = None,
        *,
        trace: bool = False,
    ) -> list[RequestTracker]:
        """Add all or none: a bad prompt must not leave the good ones running."""
        trackers: list[RequestTracker] = []
        try:
            for prompt, wanted in zip(prompts, params, strict=True):
                encoded = encode_prompt(prompt, self.tokenizer)
                seeded = self._seeds.with_seed(self._grammars.compile(wanted))
                tracker, requests = self._processor.add(
                    str(next(self._ids)), encoded, seeded, max_draft_tokens=max_draft_tokens, trace=trace
                )
                trackers.append(tracker)
                self._engine.add_requests(requests)
        except BaseException:
            self._drop(trackers)
            raise
        return trackers

    def _drop(self, trackers: Sequence[RequestTracker], reason: FinishReason = "abort") -> None:
        child_ids = [child_id for tracker in trackers for child_id in tracker.child_ids]
        self._processor.forget(child_ids)
        for child_id in child_ids:
            self._engine.abort(child_id, reason)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str | Mapping | Chat | EncodedPrompt) or not isinstance(prompts, Sequence):
        return [prompts]
    is_one = bool(prompts) and not isinstance(prompts[0], str | Mapping | Sequence | Chat | EncodedPrompt)
    return [prompts] if is_one else prompts  # type: ignore[list-item, return-value]


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise RequestError(
            f"sampling_params={brief(params)} is not allowed: give SamplingParams(...), or one for each "
            "prompt.",
            param="sampling_params",
        )
    if len(params) != count:
        raise RequestError(
            f"sampling_params: {len(params)} given for {count} prompts; give one, or one each.",
            param="sampling_params",
        )
    return params


class ChatPrompt(ChatTemplateOptions):
    """A conversation and how it becomes a prompt, given in Python."""

    messages: Messages

    @classmethod
    def read(cls, messages: Sequence[Message], **options: Any) -> ChatPrompt:
        """Validate messages and options like a request body. Raises RequestError."""
        try:
            return cls.model_validate({"messages": _as_dicts(messages), **options})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise RequestError(f"{where}: {first['msg']}.", param=where) from None

    def without_effect(self, tokenizer: Tokenizer | None) -> list[str]:
        """Return the dotted names of fields that neither the chat template nor Manta reads."""
        unused = [] if tokenizer is None else unused_fields(self, self.messages, tokenizer)
        return [*unused, *unknown_fields(self)]


def _as_dicts(messages: object) -> object:
    """Make messages dictionaries with valid text; leave others for pydantic to refuse."""
    if not isinstance(messages, Sequence):
        return messages
    return [map_texts(each, without_surrogates) if isinstance(each, Mapping) else each for each in messages]
