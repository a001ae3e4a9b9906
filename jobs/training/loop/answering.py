"""Generates the target's answers to prompts and writes them in parts while the engine answers.

    part-000000.npz        the first ANSWERS_PER_PART answers that ended, with the numbers of their questions
    part-000000.outputs    the target's outputs for them, if they are recorded (`capture/target_outputs.py`)
    part-000001.npz        the next answers
    used_s                 seconds spent on them by all processes of the run

A part holds answers in the order in which they ended, so the engine never waits for the last answer of a
part: each answer that ends is replaced by the next question. A killed run loses the part that was not full
and the answers in progress. Called by `jobs/drafters/train/` and `models/recipe/`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ....actors.capture.target_outputs import OutputLayout, OutputShardWriter, SequenceOutputs
from ....actors.capture.target_recorder import RecordingExecutor, TargetRecorder
from ....actors.engine.uniproc_executor import make_executor
from ....actors.system.atomic_files import write_atomically
from ....actors.system.host_resources import owned_cores
from ....actors.system.wait_messages import counting, say
from ....cluster.config import EngineConfig
from ....cluster.engine.engine_core import EngineCore
from ....cluster.errors import ConfigError
from ....cluster.request.request import Request, SamplingParams
from ...common.progress import format_duration
from .continuations import MIN_ANSWER_TOKENS, ContinuationRequest, Continuations
from .training_loop import Report, TimeBudget

# Sampling temperatures of the training data, used in turn.
TEMPERATURES = (1.0, 0.7, 1.0, 0.0)
ANSWERS_PER_PART = 64
ANSWERS_SHARE = 0.25  # of a run limited by time; what answering leaves of it is for training
MAX_NEW_TOKENS = 192
NUM_RUNNING = 64  # concurrent answers
_USED_S = "used_s"
_LINE_S, _TERMINAL_S = 60.0, 0.5  # between two lines of a log; between two states of a terminal's line


def write_continuations(
    target: str | Path,
    asked: Sequence[ContinuationRequest],
    folder: Path,
    budget_s: float,
    report: Report,
    truncate: Callable[[Sequence[int]], list[int]] = list,
    max_new_tokens: int = MAX_NEW_TOKENS,
    layout: OutputLayout | None = None,
) -> Continuations:
    """Generate continuations (cut by `truncate`) until all are done or the time is over.

    They are generated in a random order, so that a run limited by time has answers to all kinds of questions,
    and returned in the order of the questions. Answers that began before the end of the time are completed,
    and the first NUM_RUNNING always begin. With a layout the target's outputs are recorded, if possible.
    """
    budget = TimeBudget(budget_s, seconds_used(folder))
    parts = _open_parts(folder, asked, max_new_tokens, layout, report)
    order = np.random.default_rng(0).permutation(len(asked)).tolist()
    left = [number for number in order if number not in parts]
    if left and not (len(parts) and budget.progress >= 1.0):
        counts = len(asked), len(parts)
        with counting("loading the target", say, begin=False):
            engine = parts.open_engine(target)
        with closing(engine), closing(AnswerProgress(folder.name, *counts, budget, report)) as progress:
            steps = answer_all(engine, asked, left, max_new_tokens, lambda: budget.progress >= 1.0)
            for num_tokens, ended in steps:
                progress.update(num_tokens, ended.values())
                for number, answer in ended.items():
                    parts.add(number, truncate(answer))
                    if parts.is_full:
                        parts.write(budget.used_s)
            parts.write(budget.used_s)
    return parts.read()


def usual_temperatures(*, is_small: bool) -> tuple[float, ...]:
    """Return the sampling temperatures of training data, used in turn. At 1 small targets write noise."""
    return (0.0, 0.7) if is_small else TEMPERATURES


def seconds_used(folder: Path) -> float:
    """Return the seconds that all processes of a run have spent on what is in this folder."""
    path = folder / _USED_S
    return float(path.read_text()) if path.exists() else 0.0


def keep_seconds_used(folder: Path, used_s: float) -> None:
    write_atomically(folder / _USED_S, lambda path: path.write_text(f"{used_s:.6f}"), synced=False)


def seconds_left(limit_s: float, used_s: float, param: str) -> float:
    """Return the seconds that answering has left for training. Raises ConfigError if there are none."""
    if used_s >= limit_s:
        raise ConfigError(
            f"{param}: answering took {format_duration(used_s)} of {format_duration(limit_s)}, and no time "
            "is left for training. Give more.",
            param=param,
        )
    return limit_s - used_s


def answer_all(
    engine: EngineCore,
    asked: Sequence[ContinuationRequest],
    numbers: Iterable[int],
    max_new_tokens: int,
    is_over: Callable[[], bool],
) -> Iterator[tuple[int, Mapping[int, list[int]]]]:
    """Answer these questions, NUM_RUNNING at once; yield each step's tokens, and its ended answers by number.

    When `is_over` after a step, no further answer begins. An answer includes its end token; it is empty if
    the model computed no numbers.
    """
    left, running, ends = iter(numbers), dict[int, list[int]](), False
    while True:
        while not ends and len(running) < NUM_RUNNING and (number := next(left, None)) is not None:
            engine.add_request(_request(number, asked[number], max_new_tokens, engine.clock()))
            running[number] = []
        if not running:
            return
        ended, num_tokens = dict[int, list[int]](), 0
        for update in engine.step():
            number, num_tokens = int(update.request_id), num_tokens + len(update.token_ids)
            running[number] += update.token_ids
            if update.finish_reason is not None:
                answer = running.pop(number)
                ended[number] = [] if update.finish_reason == "error" else answer
        yield num_tokens, ended
        ends = is_over()


def _request(number: int, asked: ContinuationRequest, max_new_tokens: int, now_s: float) -> Request:
    params = SamplingParams(
        temperature=asked.temperature, seed=asked.seed, max_tokens=max_new_tokens, detokenize=False
    )
    return Request(request_id=str(number), prompt_token_ids=asked.prompt_ids, params=params, arrival_s=now_s)


class AnswerParts:
    """The parts of a folder: those that earlier processes wrote, and the one that is being filled.

    Raises ConfigError if a part answers other questions.
    """

    def __init__(self, folder: Path, asked: Sequence[ContinuationRequest]) -> None:
        self._folder, self._asked = folder, asked
        self._paths = sorted(folder.glob("part-??????.npz"))
        self._answered = {number for path in self._paths for number in self._check(path)}
        self._part: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._answered)

    def __contains__(self, number: int) -> bool:
        return number in self._answered

    @property
    def is_full(self) -> bool:
        return len(self._part) == ANSWERS_PER_PART

    def open_engine(self, target: str | Path) -> EngineCore:
        config = _engine_config(target)
        return EngineCore(config, make_executor(config))

    def add(self, number: int, answer: list[int]) -> None:
        self._part[number] = answer

    def write(self, used_s: float) -> None:
        """Write the answers added since the last part, and the seconds used so far.

        Raises ConfigError if the folder cannot be written.
        """
        try:
            self._write(used_s)
        except OSError as error:
            raise ConfigError(
                f"output: {self._folder} cannot be written ({error.strerror}). Make room, and repeat the "
                "command; it continues after the last part.",
                param="output",
            ) from None

    def _write(self, used_s: float) -> None:
        if self._part:
            path = self._folder / f"part-{len(self._paths):06}.npz"
            questions = [self._asked[number] for number in self._part]
            data = Continuations.of(questions, list(self._part.values()))
            kept = [number for number, answer in self._part.items() if len(answer) >= MIN_ANSWER_TOKENS]
            self._write_outputs(path.stem, kept)
            data.save(path, answered=np.array([*self._part]), kept=np.array(kept, dtype=np.int64))
            self._paths.append(path)
            self._answered.update(self._part)
            self._part = {}
        keep_seconds_used(self._folder, used_s)

    def _write_outputs(self, name: str, kept: Sequence[int]) -> None:
        """Write no outputs of the target."""

    def read(self) -> Continuations:
        """Return the answers with a label, in the order of the questions."""
        if not self._paths:
            return Continuations.of_pairs([])
        kept = np.concatenate([_array(path, "kept") for path in self._paths])
        return Continuations.join([Continuations.load(path) for path in self._paths]).take(np.argsort(kept))

    def _check(self, path: Path) -> list[int]:
        """Return the numbers of the questions that a part answers."""
        data, answered = Continuations.load(path), _array(path, "answered").tolist()
        for place, number in enumerate(_array(path, "kept").tolist()):
            begin, first = data.bounds[place], data.first[place]
            prompt = tuple(data.ids[begin : begin + first].tolist())
            if number >= len(self._asked) or prompt != self._asked[number].prompt_ids:
                raise ConfigError(
                    f"output: {path} has answers to other prompts than those of the data. Give the data that "
                    "the run began with, or another output.",
                    param="output",
                )
        return answered


class RecordedParts(AnswerParts):
    """Parts with the target's outputs, which the engine computes when it answers.

    The outputs for running requests and for one part are in memory.
    """

    def __init__(self, folder: Path, asked: Sequence[ContinuationRequest], recorder: TargetRecorder) -> None:
        super().__init__(folder, asked)
        self._recorder, self._outputs = recorder, dict[int, SequenceOutputs]()

    def open_engine(self, target: str | Path) -> EngineCore:
        config = replace(_engine_config(target), enable_prefix_caching=False)
        return EngineCore(config, RecordingExecutor(config, self._recorder))

    def add(self, number: int, answer: list[int]) -> None:
        super().add(number, answer)
        num_tokens = len(self._asked[number].prompt_ids) + len(answer)
        self._outputs[number] = self._recorder.take(str(number), num_tokens)

    def _write_outputs(self, name: str, kept: Sequence[int]) -> None:
        with OutputShardWriter(self._folder, name, self._recorder.layout) as shard:
            for number in kept:
                prompt = self._asked[number].prompt_ids
                shard.add([*prompt, *self._part[number]], len(prompt), self._outputs[number])
        self._outputs.clear()


def _open_parts(
    folder: Path,
    asked: Sequence[ContinuationRequest],
    max_new_tokens: int,
    layout: OutputLayout | None,
    report: Report,
) -> AnswerParts:
    if layout is None or not asked:
        return AnswerParts(folder, asked)
    if torch.cuda.is_available():
        report("the target's outputs are computed after its answers: they are recorded on CPUs only")
        return AnswerParts(folder, asked)
    num_answer_tokens = max_new_tokens * len(asked)
    num_tokens = num_answer_tokens + sum(len(each.prompt_ids) for each in asked)
    report(f"if all answers are as long as allowed, {layout.describe_size(num_tokens, num_answer_tokens)}")
    return RecordedParts(folder, asked, TargetRecorder(layout, max_new_tokens))


def _engine_config(target: str | Path) -> EngineConfig:
    """Return the settings of an engine with at most as many threads as PyTorch has here."""
    num_threads = min(owned_cores(), torch.get_num_threads())
    settings = {"model": str(target), "max_num_seqs": NUM_RUNNING, "num_threads": num_threads}
    return EngineConfig.from_dict(settings)


def _array(path: Path, name: str) -> np.ndarray:
    with np.load(path) as arrays:
        return arrays[name]


class AnswerProgress:
    """Reports answers, tokens per second and the time left: on a terminal in one line, else once a minute.

    No time left is given before NUM_RUNNING answers have ended, as the first ones are short.
    """

    def __init__(self, name: str, total: int, num_before: int, budget: TimeBudget, report: Report) -> None:
        self._name, self._total, self._num_before, self._budget = name, total, num_before, budget
        self._report, self._is_terminal = report, say.is_terminal
        self._num_tokens = self._num_ended = self._num_ended_tokens = 0
        self._begin_s = self._shown_s = time.monotonic()

    def update(self, num_tokens: int, ended: Iterable[Sequence[int]]) -> None:
        """Add a step's tokens and the answers that ended in it."""
        for answer in ended:
            self._num_ended += 1
            self._num_ended_tokens += len(answer)
        self._num_tokens += num_tokens
        now_s = time.monotonic()
        if now_s - self._shown_s < (_TERMINAL_S if self._is_terminal else _LINE_S):
            return
        self._shown_s = now_s
        left_s = self._left_s()
        line = self._line() + ("" if left_s is None else f", about {format_duration(left_s)} left")
        if self._is_terminal:
            say.rewrite(line)
        else:
            self._report(line)

    def close(self) -> None:
        """Report the totals."""
        if self._is_terminal:
            say.erase()
        self._report(f"{self._line()}, in {format_duration(self._spent_s)}")

    def _line(self) -> str:
        done = self._num_before + self._num_ended
        rate = self._num_tokens / self._spent_s
        return f"{self._name}: {done} of {self._total} answered, {rate:.0f} tokens/s"

    def _left_s(self) -> float | None:
        if self._num_ended < NUM_RUNNING:
            return None
        expected_tokens = (self._total - self._num_before) * self._num_ended_tokens / self._num_ended
        left_s = max(0.0, expected_tokens / self._num_tokens - 1.0) * self._spent_s
        return min(left_s, max(0.0, self._budget.budget_s - self._budget.used_s))

    @property
    def _spent_s(self) -> float:
        return max(time.monotonic() - self._begin_s, 1e-9)
