"""Text in and out: the tokenizer, incremental detokenization, stop strings, several completions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from manta.actors.engine.output_processor import OutputProcessor
from manta.actors.tokenization.prompts import Chat, EncodedPrompt, SeedSource, encode_bad_words, encode_prompt
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.cluster.engine.engine_core import SequenceUpdate
from manta.cluster.errors import CheckpointError, RequestError
from manta.cluster.request.request import SamplingParams

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer with a chat template, as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("tokenizer")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([Path(__file__).read_text()], trainer)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def update(request_id: str, token_ids: list[int], **more: object) -> SequenceUpdate:
    plain = {
        "finish_reason": None,
        "stop_reason": None,
        "num_cached_tokens": 0,
        "num_drafted": 0,
        "num_accepted": 0,
    }
    return SequenceUpdate(request_id=request_id, token_ids=tuple(token_ids), **{**plain, **more})


def run(tokenizer: Tokenizer, text: str, blocks: int, **params: object) -> tuple[str, list[int], object, str]:
    """Feed `text` in blocks; return the text, the tokens, the stop reason, and the text of the deltas."""
    processor = OutputProcessor(tokenizer)
    wanted = SamplingParams(max_tokens=None, seed=0, **params)
    tracker, (request,) = processor.add("r", EncodedPrompt((300,)), wanted)
    ids, streamed = tokenizer.encode(text), ""
    for begin in range(0, len(ids), blocks):
        last = begin + blocks >= len(ids)
        piece = update(
            request.request_id, ids[begin : begin + blocks], finish_reason="length" if last else None
        )
        if (fed := processor.feed(piece)) is not None:
            streamed += fed[1].text
        if tracker.finished:
            break
    whole = tracker.complete_output().outputs[0]
    return whole.text, whole.token_ids, whole.stop_reason, streamed


def test_a_chat_template_renders_as_transformers_renders_it(folder: Path, tokenizer: Tokenizer) -> None:
    from transformers import PreTrainedTokenizerFast

    messages = [
        {"role": "user", "content": "What is `len`?"},
        {"role": "assistant", "content": "A function."},
    ]
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    for generation_prompt in (True, False):
        expected = theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation_prompt
        )
        ours = tokenizer.apply_chat_template(messages, add_generation_prompt=generation_prompt)
        assert ours == expected
    assert tokenizer.encode(expected) == theirs(expected)["input_ids"]


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


@given(st.text(), st.integers(1, 7))
def test_streamed_text_adds_up_for_any_blocks(text: str, blocks: int) -> None:
    tokenizer = _shared()
    text = text.encode("utf-8", "ignore").decode()
    whole, ids, _, streamed = run(tokenizer, text, blocks)
    assert whole == streamed == tokenizer.decode(ids)
    assert "\ufffd" not in streamed or "\ufffd" in text


@given(st.lists(st.integers(3, 399), min_size=1), st.integers(1, 7))
def test_invalid_utf8_gives_the_same_text_for_any_blocks(ids: list[int], blocks: int) -> None:
    detokenizer = _shared().detokenizer([300], skip_special_tokens=True)
    pieces = [detokenizer.step(ids[at : at + blocks]) for at in range(0, len(ids), blocks)]
    assert "".join(pieces) + detokenizer.flush() == _shared().decode(ids)


@given(
    st.text("ab \n", min_size=1),
    st.lists(st.text("ab \n", min_size=1, max_size=4), max_size=3),
    st.integers(1, 7),
)
def test_a_stop_string_truncates_the_text_the_same_for_any_blocks(
    text: str, stop: list[str], blocks: int
) -> None:
    tokenizer = _shared()
    one_by_one = run(tokenizer, text, 1, stop=tuple(stop))
    assert run(tokenizer, text, blocks, stop=tuple(stop)) == one_by_one
    whole, _, reason, streamed = one_by_one
    assert whole == streamed
    if any(s in text for s in stop):
        assert reason in stop
        assert not any(s in whole for s in stop)
        assert text.startswith(whole + str(reason))
    else:
        assert whole == text


def test_a_kept_stop_string_ends_the_text(tokenizer: Tokenizer) -> None:
    whole, _, reason, _ = run(tokenizer, "one two three", 2, stop=("two",), include_stop_str_in_output=True)
    assert (whole, reason) == ("one two", "two")


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    count = len(tokenizer.encode("a b a b a"))
    whole, _, _, _ = run(tokenizer, "a b a b a", 1, stop=("b",), min_tokens=count - 1)
    assert whole.startswith("a b a")


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


_SHARED: list[Tokenizer] = []


@pytest.fixture(autouse=True, scope="module")
def _share(tokenizer: Tokenizer) -> None:
    """Hypothesis tests cannot take function-scoped fixtures per example; this one is shared."""
    _SHARED.append(tokenizer)


def _shared() -> Tokenizer:
    return _SHARED[0]
