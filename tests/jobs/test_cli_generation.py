"""`manta generate` and `manta chat` on a tiny pair: the streamed text is the answer, drafts or not."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from manta import LLM, SamplingParams
from manta.actors.targets.loading.resolved_config import resolve_config
from manta.cluster.config import EngineConfig
from manta.jobs.cli import main
from manta.jobs.common import generate as chat

SMALL = ("--dtype", "float32", "--num-threads", "1", "--max-model-len", "256", "--seed", "1")


@pytest.fixture(scope="module")
def llm(pair: tuple[Path, Path]) -> LLM:
    settings = {"dtype": "float32", "num_threads": 1, "max_model_len": 256}
    return LLM(str(pair[0]), speculative_config={"model": str(pair[1])}, **settings)


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, *SMALL])
    assert not ended.value.code
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_generate_streams_the_same_text_with_and_without_speculation(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    target, drafter = map(str, pair)
    flags = ("generate", "def main(", "-m", target, "--max-tokens", "24")
    plain, figures = command(capsys, *flags)
    assert plain.strip()
    assert "acceptance length" not in figures
    speculated, figures = command(capsys, *flags, "--spec-model", drafter)
    assert speculated == plain
    assert "mean acceptance length" in figures


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("generate", "def", "-m", "TARGET", "--max-tokens", "99999"), "Ask for at most"),
        (("generate", "def", "-m", "TARGET", "--max-tokens", "256"), "more than this model's context of 256"),
        (("generate", "def", "-m", "DRAFTER"), "is a drafter (dflash), not a target"),
        (("chat", "DRAFTER"), "--spec-model"),
    ],
)
def test_generate_refuses_what_http_refuses(
    pair: tuple[Path, Path], flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"TARGET": str(pair[0]), "DRAFTER": str(pair[1])}
    with pytest.raises(SystemExit) as ended:
        main([*(names.get(flag, flag) for flag in flags), *SMALL])
    assert ended.value.code == 1 and said in capsys.readouterr().err


def test_chat_reports_max_tokens_beyond_the_context(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["hello", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert "more than this model's context" in command(capsys, "chat", str(pair[0]), "--max-tokens", "256")[1]


def test_float16_on_a_cpu_causes_a_warning(pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    for dtype, warned in (("float16", True), ("float32", False), ("auto", False)):
        caplog.clear()
        resolve_config(EngineConfig.from_dict({"model": str(pair[0]), "dtype": dtype, "device": "cpu"}))
        assert ("float16" in caplog.text) is warned, dtype


def test_chat_answers_lines_keeps_a_history_and_can_reset_it(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["hello", "/reset", "/what", "", "hello", "word " * 300, "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    out, err = command(capsys, "chat", str(pair[0]), "-t", "0", "--max-tokens", "8")
    first, second, rest = out.split("\n", 2)
    assert first == second
    assert not rest
    assert "max_model_len" in err  # the long line is refused, and the conversation continues


def test_the_whole_conversation_is_sent(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4)
    conversation = chat.ChatSession(llm, params, "be brief")
    answer = conversation.say("one")
    conversation.say("two")
    roles = [message["role"] for message in conversation.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert conversation.messages[2]["content"] == answer
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "be brief"}]


def test_ctrl_c_ends_the_answer_and_keeps_the_conversation(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = llm.stream

    def interrupted(*arguments: object) -> object:
        for number, delta in enumerate(stream(*arguments)):  # type: ignore[arg-type]
            if number == 2:
                signal.raise_signal(signal.SIGINT)
            yield delta

    monkeypatch.setattr(llm, "stream", interrupted)
    conversation = chat.ChatSession(llm, SamplingParams(max_tokens=200, ignore_eos=True, seed=1), None)
    before = signal.getsignal(signal.SIGINT)
    conversation.say("tell me everything")
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]
    monkeypatch.undo()
    assert llm.stats().running == 0
    assert signal.getsignal(signal.SIGINT) is before
