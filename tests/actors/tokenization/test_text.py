"""Prompts of every kind as token ids, and the errors of those that are none."""

from __future__ import annotations

from pathlib import Path

import pytest
from manta.actors.engine.output_processor import OutputProcessor
from manta.actors.tokenization.prompts import Chat, EncodedPrompt, SeedSource, encode_bad_words, encode_prompt
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.cluster.errors import CheckpointError, RequestError
from manta.cluster.request.request import SamplingParams


def test_continue_final_message_leaves_the_message_open(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "def f"}]
    assert tokenizer.apply_chat_template(messages, continue_final_message=True).endswith("assistant\ndef f")


def test_template_errors_are_request_errors(tokenizer: Tokenizer) -> None:
    source = "{{ strftime_now(when) }}{% for x in xs %}{% endfor %}{{ raise_exception(why) if why }}"
    other = Tokenizer(tokenizer._backend, source, {})
    messages = [{"role": "user", "content": "Go"}]
    assert other.apply_chat_template(messages, variables={"when": "%%", "xs": []}) == "%"
    for variables in ({"when": 5}, {"when": "%%", "xs": 3}, {"when": "%%", "xs": [], "why": 7}):
        with pytest.raises(RequestError) as caught:
            other.apply_chat_template(messages, variables=variables)
        assert caught.value.param == "messages" and "\n" not in caught.value.message


def test_completions_of_a_request_have_their_own_seeds(tokenizer: Tokenizer) -> None:
    tracker, requests = OutputProcessor(tokenizer).add(
        "r", EncodedPrompt((5,), "x"), SamplingParams(n=3, seed=9)
    )
    assert [r.request_id for r in requests] == ["r-0", "r-1", "r-2"] == tracker.child_ids
    assert requests[0].params.seed == 9 and len({r.params.seed for r in requests}) == 3


def test_an_engine_seed_determines_the_series_of_seeds() -> None:
    first, again = SeedSource(5), SeedSource(5)
    plain = SamplingParams()
    series = [first.with_seed(plain).seed for _ in range(3)]
    assert series == [again.with_seed(plain).seed for _ in range(3)] and len(set(series)) == 3
    assert first.with_seed(SamplingParams(seed=77)).seed == 77


@pytest.mark.parametrize(
    "prompt", [{"text": "x"}, ["a", "b"], [1.5], [True], [], "", {"prompt_token_ids": "ab"}]
)
def test_a_prompt_of_a_wrong_kind_is_refused(tokenizer: Tokenizer, prompt: object) -> None:
    with pytest.raises(RequestError) as caught:
        encode_prompt(prompt, tokenizer)  # type: ignore[arg-type]
    assert caught.value.param == "prompt"


def test_a_prompt_is_text_ids_or_a_conversation(tokenizer: Tokenizer) -> None:
    assert encode_prompt("def", tokenizer) == EncodedPrompt(tuple(tokenizer.encode("def")), "def")
    assert encode_prompt([3, 4], None) == encode_prompt({"prompt_token_ids": (3, 4)}, None)
    assert encode_prompt({"prompt": "def", "prompt_token_ids": [9]}, None) == EncodedPrompt((9,), "def")
    messages = [{"role": "user", "content": "Go"}]
    said = encode_prompt(Chat(messages), tokenizer)
    assert said.text == tokenizer.apply_chat_template(messages)
    assert list(said.token_ids) == tokenizer.encode(said.text, add_special_tokens=False)
    assert encode_prompt(said, None) is said


def test_a_lone_surrogate_is_read_as_the_replacement_character(tokenizer: Tokenizer) -> None:
    for half, whole in (("a\ud83d", "a\ufffd"), ("\ude00\ud83d", "\ufffd\ufffd")):
        assert tokenizer.encode(half) == tokenizer.encode(whole) == tokenizer.encode_unlocked(half).ids
        assert encode_prompt(half, tokenizer).token_ids == encode_prompt(whole, tokenizer).token_ids
        words = SamplingParams(bad_words=(half,))
        assert encode_bad_words(words, tokenizer).bad_words_token_ids


@pytest.mark.parametrize("messages", [[], ["hi"], [None]])
def test_a_conversation_without_messages_is_refused(messages: list[object]) -> None:
    with pytest.raises(RequestError) as caught:
        Chat(messages)  # type: ignore[arg-type]
    assert caught.value.param == "messages"


def test_text_for_an_engine_without_a_tokenizer_is_refused_by_its_field() -> None:
    for prompt, param in (("x", "prompt"), (Chat([{"role": "user", "content": "x"}]), "messages")):
        with pytest.raises(RequestError, match="send token ids") as caught:
            encode_prompt(prompt, None)
        assert caught.value.param == param


def test_a_folder_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer.load(tmp_path)
