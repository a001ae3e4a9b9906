"""Grammars that overflow a stack or take too much time or memory are refused while streams continue."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from manta import LLM, SamplingParams, StructuredOutputsParams
from manta.actors.engine.async_engine import AsyncEngine
from manta.actors.http.config.settings import ServerSettings
from manta.actors.structured_outputs.grammar_frontend import GrammarFrontend
from manta.actors.structured_outputs.grammar_validator import QUICK_S, SLOW_S, GrammarValidator
from manta.actors.structured_outputs.grammar_verdicts import GrammarVerdict, VerdictCache
from manta.actors.structured_outputs.rank_grammars import MAX_LARGE
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.actors.workers.base.grammar_compilation import GrammarLanes, serve_lanes
from manta.actors.workers.ray_executor import RayExecutor
from manta.actors.workers.shm.step_channel import StepChannel, WorkerChannel, connect
from manta.cluster.config import EngineConfig
from manta.cluster.errors import RequestError
from manta.cluster.request.request import Request
from manta.cluster.request.structured_outputs import Grammar, SlotGrammar
from manta.drafter.grammars import compiler as compiler_module
from manta.drafter.grammars.compiler import GrammarCompiler, GrammarError
from manta.drafter.grammars.matchers import GrammarStates
from manta.drafter.step.cpu_numba.step_ops import LoopStepOperators
from support.checkpoints.text_pair import VOCAB, LiveServer
from support.waiting import wait_until
from trials.abuse.abuse_grammars import HOSTILE, SHORT, STATUSES, chain

EOS = (0, 2)
SHORT_ONES = [(name, path, body) for name, path, body in HOSTILE if name in SHORT]
SLOW = "(a|b)?" * 20_000
AMPLE_S = 30.0
PATTERNS = {"type": "object", "patternProperties": {f"^a{i}[a-z]*$": {"type": "integer"} for i in range(60)}}


@pytest.fixture(scope="module")
def trials(tokenizer: Tokenizer) -> Iterator[GrammarValidator]:
    trials = GrammarValidator(tokenizer.to_json(), VOCAB, EOS)
    yield trials
    trials.close()


@pytest.fixture(scope="module")
def server(pair: tuple[Path, Path]) -> Iterator[LiveServer]:
    spec = {"model": str(pair[1]), "adaptive": False}
    how = {"dtype": "float32", "max_num_seqs": 8, "num_pages": 512, "num_threads": 1}
    config = EngineConfig.from_dict({"model": str(pair[0]), "speculative_config": spec, **how})
    with LiveServer(config, ServerSettings(served_model_name="tiny", tool_call_parser="hermes")) as server:
        yield server


class Stream:
    """A long answer that is read alongside, event by event."""

    def __init__(self, url: str) -> None:
        self.num_events, self._url, self._ends = 0, url, threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Stream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(timeout=600)

    def _read(self) -> None:
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
        while not self._ends.is_set():
            with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=600) as response:
                for _ in response.iter_lines():
                    self.num_events += 1
                    if self._ends.is_set():
                        return


def test_hostile_grammars_are_answered_or_refused_by_name_during_a_stream(server: LiveServer) -> None:
    assert len(SHORT_ONES) == len(SHORT)
    with Stream(server.url) as stream, httpx.Client(base_url=server.url, timeout=600) as http:
        for name, path, body in SHORT_ONES:
            response = http.post(path, json=body)
            assert response.status_code in STATUSES, (name, response.text)
            if response.status_code == 400:
                error = response.json()["error"]
                assert error["message"].startswith(error["param"].split(".")[0]), name
        harmless = {"prompt": "x", "max_tokens": 9, "structured_outputs": {"regex": "[0-9]{3}"}}
        answer = http.post("/v1/completions", json=harmless).json()["choices"][0]["text"]
        assert answer.isdigit() and http.get("/health").status_code == 200
    assert stream.num_events > 100


@pytest.mark.parametrize(
    ("kind", "text", "word"),
    [
        ("json_schema", json.dumps(chain(1500, "allOf")), "nested"),
        ("regex", SLOW, "memory"),
        ("grammar", "\n" * 120_000, "time"),
        ("grammar", 'start: /[yz]/ s\ns: "abcdefgh" s', "items"),
        ("json_schema", json.dumps(chain(50, "allOf")), None),
        ("grammar", 'root ::= "a" [0-9]+', None),
    ],
)
def test_a_trial_says_which_limit_was_exceeded(
    trials: GrammarValidator, kind: str, text: str, word: str | None
) -> None:
    # CPU time grows with a machine's load: where another limit is meant, there is enough of it.
    refusal = trials.try_grammar(kind, text, QUICK_S if word == "time" else AMPLE_S).refusal
    assert refusal is None if word is None else word in (refusal or "")


def test_a_grammar_that_cannot_begin_by_the_requests_other_rules_is_refused(
    trials: GrammarValidator, tokenizer: Tokenizer
) -> None:
    def beginning_with(letters: str) -> tuple[int, ...]:
        begins = tuple(letters.encode())
        return tuple(i for i in range(VOCAB) if (tokenizer.token_bytes(i) or b" ")[0] in begins)

    def refusal(text: str, **rules: str) -> str:
        given = {name: beginning_with(letters) for name, letters in rules.items()}
        return trials.try_grammar("regex", text, SLOW_S, **given).refusal or ""

    assert "allowed_token_ids" in refusal("[ab]x", allowed="c")
    assert "allowed_token_ids" in refusal("[ab]x", allowed="a", forbidden="a")
    assert "bad_words" in refusal("[ab]x", forbidden="ab")
    assert not refusal("[ab]x", allowed="ca") and not refusal("[ab]x", forbidden="a")
    assert not refusal("([ab]x)?", allowed="c")


def test_a_request_drafts_no_more_than_its_masks_can_be_computed_for(trials: GrammarValidator) -> None:
    assert trials.try_grammar("regex", "[a-z]{1,40}", SLOW_S).mask_s > 0

    def most_drafts(mask_s: float, **more: Any) -> int:
        params = SamplingParams(grammar=Grammar("regex", "a", mask_s=mask_s), seed=0)
        return Request(request_id="a", prompt_token_ids=(1,), params=params, **more).max_drafts(15)

    assert [most_drafts(mask_s) for mask_s in (0.0, 1e-4, 0.01, 0.025, 0.04, 1.0)] == [15, 15, 4, 1, 0, 0]
    assert most_drafts(0.01, max_draft_tokens=2) == 2


def test_a_killed_process_of_trials_is_restarted(tokenizer: Tokenizer) -> None:
    trials = GrammarValidator(tokenizer.to_json(), VOCAB, EOS)
    assert trials.pid is None, "it starts with the first grammar"
    assert trials.try_grammar("regex", "[a-z]+", SLOW_S).refusal is None
    pid = trials.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert trials.try_grammar("regex", "[0-9]+", SLOW_S).refusal is None
    assert trials.pid not in (None, pid)
    trials.close()
    assert trials.pid is None


def test_verdicts_are_kept_by_all_that_decides_on_them(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = list[str]()
    try_grammar = GrammarValidator.try_grammar

    def recording(trials: GrammarValidator, kind: str, text: str, *arguments: Any, **named: Any) -> Any:
        tried.append(text)
        return try_grammar(trials, kind, text, *arguments, **named)

    monkeypatch.setattr(GrammarValidator, "try_grammar", recording)
    frontend = GrammarFrontend(tokenizer, VOCAB, EOS)
    asked = [regex("[a-z]+"), regex("("), replace(regex("[a-z]+"), allowed_token_ids=(70,)), regex("[a-z]+")]
    answers = []
    for params in [*asked, *asked]:
        try:
            answers.append(frontend.compile(params).grammar)
        except RequestError as error:
            answers.append(error.message)
    frontend.close()
    assert tried == ["[a-z]+", "(", "[a-z]+"] and answers[:4] == answers[4:]
    assert isinstance(answers[0], Grammar) and isinstance(answers[1], str) and "regex" in answers[1]


def test_kept_verdicts_are_limited_by_number_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manta.actors.structured_outputs.grammar_verdicts.MAX_VERDICTS", 3)
    monkeypatch.setattr("manta.actors.structured_outputs.grammar_verdicts.MAX_CHARS", 10)
    cache = VerdictCache()
    for name in b"abcd":
        cache.put(bytes([name]), GrammarVerdict(refusal=("no", None)))
    assert [cache.get(bytes([name])) is not None for name in b"abcd"] == [False, True, True, True]
    for name in b"xyx":
        cache.put(bytes([name]), GrammarVerdict(Grammar("regex", "123456")))
    assert cache.get(b"x") is not None and cache.get(b"y") is None


def test_the_sandbox_ends_with_its_parent(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    code = f"""
import os, pathlib, signal
from manta.actors.structured_outputs.grammar_validator import GrammarValidator
trials = GrammarValidator(pathlib.Path({str(tmp_path / "tokenizer.json")!r}).read_text(), {VOCAB}, {EOS})
trials.try_grammar("regex", "a", 1.0)
print(trials.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    wait_until(lambda: not Path(f"/proc/{int(run.stdout)}").exists())


def test_llm_refuses_grammars_that_would_kill_its_process(pair: tuple[Path, Path]) -> None:
    requested = SamplingParams(structured_outputs=StructuredOutputsParams(json=chain(1500, "allOf")))
    with LLM(str(pair[0]), dtype="float32", num_threads=1, max_model_len=128) as llm:
        with pytest.raises(RequestError, match="nested deeper"):
            llm.generate("x", requested)
        assert llm.generate("x", SamplingParams(max_tokens=2))


def test_warm_up_runs_every_step_operator_before_the_first_request(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loops are compiled at their first call: half a second in which every stream waits."""
    called = set[tuple[str, Any]]()

    def recording(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            called.add((name, getattr(arguments[0], "dtype", None)))  # each has its own code
            return operator(*arguments, **named)

        return call

    for name in [name for name in dir(LoopStepOperators) if not name.startswith("_")]:
        operator = getattr(LoopStepOperators, name)
        monkeypatch.setattr(LoopStepOperators, name, staticmethod(recording(name, operator)))
    spec = {"model": str(pair[1])}
    with LLM(str(pair[0]), speculative_config=spec, dtype="bfloat16", max_model_len=128) as llm:
        loaded = set(called)
        called.clear()
        requested = None, StructuredOutputsParams(regex="[0-9]+")
        for grammar, temperature, penalty in product(requested, (0.0, 1.0), (0.0, 0.5)):
            params = SamplingParams(
                max_tokens=40,
                temperature=temperature,
                presence_penalty=penalty,
                top_k=9,
                structured_outputs=grammar,
            )
            llm.generate("x", params)
    assert {"mask_tokens", "noisy_argmax_margin"} <= {name for name, _ in called}
    assert called <= loaded, called - loaded


# Held in parallel with the steps.


def test_a_held_grammar_stays_cached_and_no_step_compiles_it(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "MAX_CACHED", 1)
    held = Grammar("regex", "held[0-9]")
    compiler.hold(held)
    for text in ("x", "y", "z"):
        compiler.matcher(Grammar("regex", text))

    def compile_again(written: object) -> None:
        pytest.fail(f"{written} was compiled again")

    with monkeypatch.context() as patched:
        patched.setattr(compiler, "compile", compile_again)
        assert not compiler.matcher(held).is_error()
    compiler.release(held)
    for text in ("x", "y"):
        compiler.matcher(Grammar("regex", text))
    with monkeypatch.context() as patched, pytest.raises(pytest.fail.Exception):
        patched.setattr(compiler, "compile", compile_again)
        compiler.matcher(held)


class Holder:
    """Holds grammars like an executor."""

    def __init__(self) -> None:
        self.held: list[Grammar] = []
        self.entered, self.may_hold = threading.Event(), threading.Event()
        self.may_hold.set()

    def hold_grammar(self, grammar: Grammar) -> None:
        self.entered.set()
        assert self.may_hold.wait(timeout=600)
        self.held.append(grammar)

    def release_grammar(self, grammar: Grammar) -> None:
        self.held.remove(grammar)


def regex(text: str) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(regex=text))


def test_a_grammar_is_held_while_its_request_is_open_and_released_on_disconnect(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        holder = Holder()
        frontend = GrammarFrontend(tokenizer, VOCAB, EOS, holder)
        try:
            async with frontend.hold(regex("[a-z]+")) as params:
                assert params.grammar is not None and holder.held == [params.grammar]
            holder.may_hold.clear()
            holder.entered.clear()
            leaving = asyncio.create_task(hold(frontend, regex("[a-z]+")))
            assert await asyncio.to_thread(holder.entered.wait, 300)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            holder.may_hold.set()
            await asyncio.to_thread(wait_until, lambda: not holder.held)
        finally:
            frontend.close()

    asyncio.run(check())


async def hold(frontend: GrammarFrontend, params: SamplingParams) -> None:
    async with frontend.hold(params):
        pass


def test_the_number_of_large_grammars_in_use_is_limited(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        monkeypatch.setattr("manta.actors.structured_outputs.grammar_validator.CHEAP_S", 0.0)
        frontend = GrammarFrontend(tokenizer, VOCAB, EOS, Holder())
        try:
            open_ones = [frontend.hold(regex(f"x{i}")) for i in range(MAX_LARGE)]
            for each in open_ones:
                await each.__aenter__()
            await hold(frontend, regex("x0"))  # held already
            waiting = asyncio.create_task(hold(frontend, regex("one more")))
            await asyncio.sleep(0.5)  # time to go wrong; on a slower machine less is tested
            assert not waiting.done()
            await open_ones[0].__aexit__(None, None, None)
            await waiting
        finally:
            frontend.close()

    asyncio.run(check())


def test_grammar_compilation_yields_to_steps(
    tokenizer: Tokenizer, trials: GrammarValidator, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, found = os.getpriority(os.PRIO_PROCESS, 0), list[int]()
    trials.try_grammar("regex", "nice", SLOW_S)
    found.append(os.getpriority(os.PRIO_PROCESS, trials.pid or 0))
    compiler = GrammarCompiler(tokenizer.to_json(), VOCAB, EOS)
    compile_one = compiler.compile

    def compile_watched(written: Any) -> Any:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return compile_one(written)

    monkeypatch.setattr(compiler, "compile", compile_watched)
    ours, theirs = multiprocessing.Pipe()
    serve_lanes([theirs], compiler)
    ours.send_bytes(json.dumps(["hold", "regex", "nice"]).encode())
    assert ours.recv_bytes() == b""
    ours.close()
    assert found == [min(own + 5, 19)] * 2 and os.getpriority(os.PRIO_PROCESS, 0) == own


def test_every_rank_compiles_grammars_and_reports_failures(compiler: GrammarCompiler) -> None:
    channel = StepChannel(2)
    workers: list[WorkerChannel] = []

    def work(rank: int) -> None:
        worker = WorkerChannel(connect(channel.address, rank), rank)
        workers.append(worker)
        serve_lanes(worker.lanes, compiler)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    channel.accept()
    for thread in threads:
        thread.join()
    lanes = GrammarLanes(tuple(channel.lanes.values()), lambda: None)
    cheap, large = Grammar("regex", "lane[0-9]", is_cheap=True), Grammar("regex", "lane[a-z]")
    for grammar in (cheap, large):
        lanes.hold(grammar)
        assert compiler._held[("regex", grammar.text)] == 2
        lanes.release(grammar)
        assert not compiler._held[("regex", grammar.text)]
    with pytest.raises(GrammarError, match="regex"):
        lanes.hold(Grammar("regex", "("))
    for worker in workers:
        worker.close()
    channel.close()


# One answer's grammar fails.


class Failing:
    """A matcher that raises after a number of calls."""

    def __init__(self, matcher: Any, num_calls: int) -> None:
        self._matcher, self._left = matcher, num_calls

    def is_error(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("raised on purpose")
        return getattr(self._matcher, name)


@pytest.mark.parametrize("num_calls", range(3))  # read, forced, mask
def test_a_matcher_that_raises_ends_only_its_own_answer(compiler: GrammarCompiler, num_calls: int) -> None:
    grammar = SlotGrammar(Grammar("regex", "[a-z]{40}"), prompt_length=1)

    def read(slot: int, begin: int, end: int) -> list[int]:
        return [5, 70, 71][begin:end]

    masks = []
    for fails in (False, True):
        states = GrammarStates(compiler, 1)
        for slot in (0, 1):
            states.admit(slot, grammar)
        if fails:
            states.slots[1].matcher = Failing(states.slots[1].matcher, num_calls)  # type: ignore[assignment]
        found = states.constrain_drafts(
            np.array([0, 1]), np.array([3, 3]), np.array([1, 1]), np.empty((2, 0), np.int64), read
        )
        assert found is not None
        masks.append(found.bits_MW.copy())
    assert (masks[0][0] == masks[1][0]).all(), "the other answer goes on"
    assert masks[0][1].any() and not masks[1][1].any(), "this one ends"


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_ray_workers_compile_in_parallel_with_their_steps(pair: tuple[Path, Path]) -> None:
    config = EngineConfig.from_dict(
        {"model": str(pair[0]), "dtype": "float32", "num_threads": 1, "max_model_len": 128, "device": "cpu"}
    )

    async def check() -> None:
        engine = AsyncEngine(config, RayExecutor)
        await engine.start()
        try:
            prompt = await engine.encoder.prompt("x")
            bad = SamplingParams(structured_outputs=StructuredOutputsParams(json=chain(1500, "allOf")))
            with pytest.raises(RequestError, match="nested deeper"):
                await engine.complete("1", prompt, bad)
            large = StructuredOutputsParams(json=PATTERNS)  # which no step may compile
            for i, requested in enumerate((StructuredOutputsParams(regex="[0-9]{3}"), large, large)):
                params = SamplingParams(structured_outputs=requested, max_tokens=9)
                answer = await engine.complete(f"{i} good", prompt, params)
                assert answer.outputs[0].text[0] in "0123456789{"
            engine.check_health()
        finally:
            await asyncio.to_thread(engine.close)

    asyncio.run(check())
