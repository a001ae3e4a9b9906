"""Incremental detokenization: the library's text of prompt and answer, without the prompt.

The oracle is `tokenizers.Tokenizer.decode` of everything at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from manta.actors.engine.output_processor import OutputProcessor, resumed_text
from manta.actors.engine.outputs import NOT_RESUMED, CompletionOutput, OutputLogprobs, ResumeState
from manta.actors.http.protocol.logprobs import chat_logprobs, completion_logprobs
from manta.actors.tokenization.prompts import EncodedPrompt
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine_core import SequenceUpdate
from manta.cluster.request.logprobs import TokenLogprobs
from manta.cluster.request.request import SamplingParams
from manta.cluster.step.executor import Executor
from support.checkpoints.text_pair import LiveServer, make_text_pair, tiny_settings
from support.engines.scripted_executor import ScriptedExecutor
from support.servers.server_probes import events, http_client
from tokenizers import AddedToken, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode

CHARS = "a é\n日😀❤\ufe0f\ufffd▁"
BROKEN = (0x80, 0xA0, 0xC3, 0xE2, 0x9D, 0xED, 0xEF, 0xF0, 0x9F, 0xFF)
SPECIALS = ("<s>", "</s>", "<\uff5cend▁of text\uff5c>")
WORDS = ("▁", "▁the", "the", "▁▁x▁y", "日本", "##ing", "<0xZZ>", "")
SPELLING = bytes_to_unicode()
BYTES = {char: byte for byte, char in SPELLING.items()}

LEGACY = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
WITH_RUNS = {
    "legacy Prepend": decoders.Sequence(LEGACY),
    "Gemma": decoders.Sequence(LEGACY[:3]),
    "Metaspace behind ByteFallback": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "two spaces cut off": decoders.Sequence([*LEGACY[:3], decoders.Strip(" ", 2, 0)]),
}
WITH_WORDS = {
    "Metaspace": decoders.Metaspace(),
    "Metaspace that prepends nothing": decoders.Metaspace(prepend_scheme="never"),
    "WordPiece": decoders.WordPiece(),
    "no decoder": None,
}
KNOWN_AT_THE_END = {"suffixes": decoders.BPEDecoder("▁")}


def of_words(decoder: decoders.Decoder | None) -> tokenizers.Tokenizer:
    """Byte tokens, words, special tokens in the text and outside it."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS, "<0x0a>"]
    vocab = {name: i for i, name in enumerate(names)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIALS])
    backend.add_tokens(["<think>"])
    if decoder is not None:
        backend.decoder = decoder
    return backend


def of_bytes() -> tokenizers.Tokenizer:
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=list(SPECIALS),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator([CHARS * 2, "日本日本 the the 😀😀"], trainer)
    backend.add_tokens(["é", "é ", "<think>"])
    return backend


def of_tiktoken() -> tokenizers.Tokenizer:
    """A tokenizer as made by `tiktoken_tokenizer.py`; some tokens begin or end inside a character."""
    parts = [*(bytes([byte]) for byte in range(256)), b"\xf0\x9f", b"\x98\x80", b" t", b"\x9d\xa4 the", b"he"]

    class Converter(TikTokenConverter):
        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return {part: i for i, part in enumerate(parts)}

    backend = Converter("", r"\s+|\S+").converted()
    backend.add_special_tokens(list(SPECIALS))
    return backend


BYTE_LEVELS = {"ByteLevel": of_bytes, "tiktoken": of_tiktoken}
TOKENIZERS = {
    **{kind: Tokenizer(make(), None, {}) for kind, make in BYTE_LEVELS.items()},
    **{
        kind: Tokenizer(of_words(decoder), None, {})
        for kind, decoder in (WITH_RUNS | WITH_WORDS | KNOWN_AT_THE_END).items()
    },
}
every_kind = pytest.mark.parametrize("kind", TOKENIZERS)
kinds_with_bytes = pytest.mark.parametrize("kind", [*BYTE_LEVELS, *WITH_RUNS])


def name_of(kind: str, token_id: int) -> str:
    return TOKENIZERS[kind].tokens([token_id])[0] or ""


def byte_ids(kind: str, data: bytes) -> list[int]:
    spelt = [SPELLING[byte] if kind in BYTE_LEVELS else f"<0x{byte:02X}>" for byte in data]
    found = (TOKENIZERS[kind]._backend.token_to_id(name) for name in spelt)
    return [token_id for token_id in found if token_id is not None]


def ids_of(kind: str, *parts: str | bytes) -> list[int]:
    """Return tokens by their names, and of bytes."""
    found: list[int] = []
    for part in parts:
        token_id = None if isinstance(part, bytes) else TOKENIZERS[kind]._backend.token_to_id(part)
        data = part.encode() if isinstance(part, str) else part
        found += byte_ids(kind, data) if token_id is None else [token_id]
    return found


def token_lists(kind: str, max_size: int) -> st.SearchStrategy[list[int]]:
    """Complete, cut and broken characters, among words, special tokens and invalid ids."""
    size = TOKENIZERS[kind].vocab_size
    chars = st.builds(
        lambda char, cut: byte_ids(kind, char.encode()[: -cut or None]) or [size - 1],
        st.sampled_from(CHARS),
        st.sampled_from((0, 0, 0, 1, 2)),
    )
    broken = st.sampled_from(BROKEN).map(lambda byte: byte_ids(kind, bytes([byte])))
    words = st.integers(256, size + 1).map(lambda token_id: [token_id])
    lists = st.lists(chars | broken | words, max_size=max_size)
    return lists.map(lambda parts: [token_id for part in parts for token_id in part])


@st.composite
def cut_into_blocks(draw: st.DrawFn, ids: Sequence[int]) -> list[list[int]]:
    ends = sorted(draw(st.sets(st.integers(0, len(ids)))) | {0, len(ids)})
    return [list(ids[begin:end]) for begin, end in pairwise(ends)]


def expected(kind: str, prompt: list[int], answer: list[int]) -> str:
    """Return the shown characters with their last byte in the answer."""

    def decode(ids: list[int]) -> str:
        return TOKENIZERS[kind].decode(ids, skip_special_tokens=False)

    text = decode([*prompt, *answer])
    if kind in BYTE_LEVELS:
        return text[num_chars_before(ids_to_bytes(kind, prompt), ids_to_bytes(kind, answer)) :]
    if kind in KNOWN_AT_THE_END:
        before = decode(prompt)
        return text[max(i for i in range(len(before) + 1) if text.startswith(before[:i])) :]
    run, following = run_of(kind, prompt[::-1])[::-1], run_of(kind, answer)
    if run and following:
        try:
            (run + following).decode()
        except UnicodeDecodeError:
            return text[len(decode(prompt[: -len(run)])) + len(run) :]
        num_open = len(run) - len(run.decode(errors="ignore").encode())
        prompt = prompt[: len(prompt) - num_open]
    before = decode(prompt)
    assert text.startswith(before)
    return text[len(before) :]


@kinds_with_bytes
@given(data=st.data())
def test_the_bytes_of_tokens_add_up_to_the_text(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = [i for i in data.draw(token_lists(kind, 12)) if tokenizer.tokens([i]) != [None]]
    reader = tokenizer.detokenizer(ids_of(kind, "the"), skip_special_tokens=False)
    text = reader.step(ids) + reader.flush()
    found = b"".join(tokenizer.token_bytes(i) or b"" for i in ids)
    if "\ufffd" not in text or kind in BYTE_LEVELS:
        # Metaspace makes a space of bytes that spell its mark.
        assert found.decode(errors="replace").replace("▁", " ") == text.replace("▁", " ")


@every_kind
def test_log_probabilities_show_the_bytes_of_a_partial_character(kind: str) -> None:
    ids = ids_of(kind, "日".encode()) if kind in (*BYTE_LEVELS, *WITH_RUNS) else ids_of(kind, "日本", "the")
    numbers = [TokenLogprobs(-1.0, 1, (token_id,), (-1.0,)) for token_id in ids]
    reported = OutputLogprobs(TOKENIZERS[kind], numbers, ids)
    shown = chat_logprobs(CompletionOutput(0, "", ids, None, None, reported), 1)["content"]
    assert [entry["bytes"] for entry in shown] == [entry["top_logprobs"][0]["bytes"] for entry in shown]
    completion = CompletionOutput(0, "", ids, None, None, reported)
    lists = completion_logprobs(completion, 1, 0)
    assert [[token] for token in lists["tokens"]] == list(map(list, lists["top_logprobs"]))
    if len(ids) == 3:
        assert lists["tokens"] == [f"bytes:\\x{byte:02x}" for byte in "日".encode()]
        assert lists["text_offset"] == [0, 1, 2]
    data = bytes(byte for entry in shown for byte in entry["bytes"])
    wanted = "日" if len(ids) == 3 else TOKENIZERS[kind].decode(ids).replace(" ", "")
    assert data.decode().replace(" ", "") == wanted


def run_of(kind: str, ids: list[int]) -> bytes:
    """Return the byte tokens at the beginning."""
    if kind not in WITH_RUNS:
        return b""
    names = takewhile(
        lambda name: name.startswith("<0x") and name != "<0xZZ>", (name_of(kind, i) for i in ids)
    )
    return bytes.fromhex("".join(name[3:5] for name in names))


def ids_to_bytes(kind: str, ids: Sequence[int]) -> bytes:
    """A ByteLevel vocabulary; a token with a character outside its alphabet is its own text."""
    names = [name_of(kind, token_id) for token_id in ids]
    return b"".join(
        bytes(BYTES[char] for char in name) if set(name) <= BYTES.keys() else name.encode() for name in names
    )


def num_chars_before(begin: bytes, rest: bytes) -> int:
    """Count the characters of the lossy text of both that end in the first."""
    count = at = 0
    data = begin + rest
    while at < len(data):
        try:
            valid, size_of_broken = data[at:].decode(), 0
        except UnicodeDecodeError as error:
            valid, size_of_broken = data[at : at + error.start].decode(), error.end - error.start
        sizes = [*(len(char.encode()) for char in valid), *([size_of_broken] if size_of_broken else ())]
        for size in sizes:
            at += size
            count += at <= len(begin)
    return count


def texts(
    kind: str, prompt: Sequence[int], blocks: Sequence[Sequence[int]], kept: Sequence[int], *, skips: bool
) -> list[str]:
    """Return each block's text, and the end."""
    detokenizer = TOKENIZERS[kind].detokenizer(prompt, skip_special_tokens=skips, kept_token_ids=kept)
    return [*(detokenizer.step(block) for block in blocks), detokenizer.flush()]


@every_kind
@settings(max_examples=40)
@given(data=st.data())
def test_the_text_is_what_decoding_everything_adds_to_the_prompt(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    prompt, answer = data.draw(token_lists(kind, 5)), data.draw(token_lists(kind, 8))
    skips = data.draw(st.booleans())
    kept = data.draw(st.sets(st.sampled_from(sorted(tokenizer.special_token_ids.values()))))
    hidden = set(tokenizer.special_token_ids.values()) - kept if skips else set()

    def is_shown(token_id: int) -> bool:
        return token_id not in hidden and tokenizer.tokens([token_id]) != [None]

    wanted = expected(kind, [*filter(is_shown, prompt)], [*filter(is_shown, answer)])
    blocks = data.draw(cut_into_blocks(answer))
    in_blocks = texts(kind, prompt, blocks, sorted(kept), skips=skips)
    one_by_one = texts(kind, prompt, [[token_id] for token_id in answer], sorted(kept), skips=skips)
    assert "".join(in_blocks) == "".join(one_by_one) == wanted
    assert "".join(texts(kind, prompt, [answer], sorted(kept), skips=skips)) == wanted
    for end in range(len(blocks)):  # the text so far depends on the tokens alone
        count = sum(map(len, blocks[: end + 1]))
        assert "".join(in_blocks[: end + 1]) == "".join(one_by_one[:count])


def test_a_run_that_begins_in_the_prompt_and_begins_the_text_loses_its_spaces() -> None:
    """As the library has it, unlike those of a later run."""
    kind = "Metaspace behind ByteFallback"
    for prompt, text in ((b"a", ""), ("the", " ")):
        blocks = [ids_of(kind, "▁".encode()), ids_of(kind, "▁the")]
        wanted = expected(kind, ids_of(kind, prompt), blocks[0] + blocks[1])
        assert "".join(texts(kind, ids_of(kind, prompt), blocks, (), skips=True)) == wanted == f"{text} the"


@kinds_with_bytes
@settings(max_examples=15)
@given(data=st.data())
def test_another_replica_continues_the_same_text(kind: str, data: st.DataObject) -> None:
    tokenizer, params = TOKENIZERS[kind], SamplingParams(stop=("e❤", "\n", "😀 "), max_tokens=None, seed=0)
    prompt, answer = data.draw(token_lists(kind, 4)), data.draw(token_lists(kind, 8))
    whole, num_tokens, stop, _ = completed(tokenizer, prompt, data.draw(cut_into_blocks(answer)), params)
    count = data.draw(st.integers(0, max(num_tokens - 1, 0)))
    text, _, _, given = completed(tokenizer, prompt, [answer[:count]], params, ends=False)
    resume_state = ResumeState(tuple(answer[:count]), len(given))
    assert resumed_text(tokenizer, prompt, params, resume_state) == given == text[: len(given)]
    rest = completed(tokenizer, prompt, data.draw(cut_into_blocks(answer[count:])), params, resume_state)
    assert rest[:3] == (whole, num_tokens, stop) and given + rest[3] == whole


def completed(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    blocks: Sequence[Sequence[int]],
    params: SamplingParams,
    resume_state: ResumeState = NOT_RESUMED,
    *,
    ends: bool = True,
) -> tuple[str, int, object, str]:
    """Return text, number of tokens and stop reason of a completion, and the text of its stream."""
    processor = OutputProcessor(tokenizer)
    tracker, _ = processor.add(
        "r", EncodedPrompt((tokenizer.vocab_size, *prompt)), params, resume_state=resume_state
    )
    given = ""
    for at, block in enumerate(blocks, start=1):
        reason = "length" if ends and at == len(blocks) else None
        fed = processor.feed(SequenceUpdate("r", tuple(block), reason, None, 0, 0, 0))
        given += fed[1].text if fed is not None else ""
    whole = tracker.complete_output().outputs[0]
    return whole.text, len(whole.token_ids), whole.stop_reason, given


@kinds_with_bytes
@settings(max_examples=15)
@given(data=st.data())
def test_a_stop_string_ends_the_text_at_the_same_token_for_any_blocks(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    prompt, answer = data.draw(token_lists(kind, 3)), data.draw(token_lists(kind, 10))
    stop = tuple(data.draw(st.lists(st.text(f"{CHARS}the ", min_size=1, max_size=2), min_size=1, max_size=3)))
    params = SamplingParams(stop=stop, max_tokens=None, seed=0, min_tokens=data.draw(st.integers(0, 3)))
    once = completed(tokenizer, prompt, [[token_id] for token_id in answer] or [[]], params)
    assert completed(tokenizer, prompt, data.draw(cut_into_blocks(answer)) or [[]], params) == once
    text, num_tokens, reason, given = once
    assert text == given
    if reason is not None:
        uncut, *_ = completed(
            tokenizer, prompt, [answer[:num_tokens]], SamplingParams(max_tokens=None, seed=0)
        )
        assert uncut.startswith(text + str(reason)), "what stopped it is in the text of the tokens that count"
    elif params.min_tokens == 0:
        assert not any(each in text for each in stop)


@kinds_with_bytes
def test_a_stop_string_of_byte_tokens_ends_the_text_with_its_last_byte(kind: str) -> None:
    answer = ids_of(kind, b"x", "\n", b"y")
    params = SamplingParams(stop=("\n",), max_tokens=None, seed=0)
    text, num_tokens, reason, _ = completed(TOKENIZERS[kind], ids_of(kind, b"a"), [answer], params)
    assert (text, num_tokens, reason) == ("x", 2, "\n")


def test_a_kept_stop_string_ends_the_text_and_one_before_min_tokens_does_not_count() -> None:
    kind, answer = "ByteLevel", ids_of("ByteLevel", *("one two three two"))
    params = SamplingParams(stop=("two",), max_tokens=None, seed=0)
    kept = replace(params, include_stop_str_in_output=True)
    assert completed(TOKENIZERS[kind], [], [answer], kept)[:3] == ("one two", len("one two"), "two")
    late = replace(params, min_tokens=len("one two "))
    assert completed(TOKENIZERS[kind], [], [answer], late)[:3] == ("one two three ", len(answer), "two")


def test_an_incomplete_character_is_the_same_complete_streamed_and_with_drafts(tmp_path: Path) -> None:
    pair = target, _ = make_text_pair(tmp_path)
    written = of_words(WITH_RUNS["Gemma"]).to_str().replace("<0xZZ>", "zz")  # llguidance cannot read it
    (target / "tokenizer.json").write_text(written)
    prompt = ids_of("Gemma", "日本", "😀")
    answer = ids_of("Gemma", "❤\ufe0f".encode()[:-1], "▁the", "日", b"\n")
    config = EngineConfig.from_dict(tiny_settings(pair, max_num_seqs=4, num_pages=64))
    executors: list[ScriptedExecutor] = []

    def make(config: EngineConfig) -> Executor:
        executors.append(ScriptedExecutor(config))
        return executors[0]

    with LiveServer(config, make=make) as server, http_client(server.url) as http:
        executors[0].script = answer
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": len(answer), "ignore_eos": True}
        for more in ({}, {"speculative": False}, {"logprobs": 1}):
            choice = http.post("/v1/completions", json=body | more).json()["choices"][0]
            assert choice["text"] == "\ufffd" * 5 + " the日\n"
            with http.stream("POST", "/v1/completions", json=body | more | {"stream": True}) as response:
                pieces = [choice for chunk in events(response) for choice in chunk["choices"]]
            assert "".join(piece["text"] for piece in pieces) == choice["text"]
        stopped = http.post("/v1/completions", json=body | {"stop": "日"}).json()["choices"][0]
        assert (stopped["text"], stopped["stop_reason"]) == ("\ufffd" * 5 + " the", "日")
        assert http.get("/health").status_code == 200
