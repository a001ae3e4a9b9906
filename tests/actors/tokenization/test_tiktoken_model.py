"""Kimi's tokenizers: the conversion of `tiktoken.model` equals the package `tiktoken`.

The vocabulary is synthetic: all bytes, and merges learned from the texts below. The pattern, the reserved
tokens and the names of the files are those of moonshotai's repositories.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tokenizers
from huggingface_hub.utils import filter_repo_objects
from hypothesis import given, settings
from hypothesis import strategies as st
from manta import LLM, SamplingParams, StructuredOutputsParams
from manta.actors.checkpoints.checkpoint_paths import _HUB_FILES
from manta.actors.targets.loading.resolved_config import resolve_config
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.cluster.config import EngineConfig
from manta.cluster.errors import CheckpointError
from manta.jobs.drafters.common.drafter_files import SMALL_FILES
from support.checkpoints.tiny import make_tiny_target

# As moonshotai's tokenization_kimi.py has it; that it cannot be run is part of the test.
CODE = '''
import not_to_be_imported
from transformers.tokenization_utils import PreTrainedTokenizer

raise RuntimeError("this code was run")


class TikTokenTokenizer(PreTrainedTokenizer):
    num_reserved_special_tokens = 256

    pat_str = "|".join(
        [
            r"""[\\p{Han}]+""",
            r"""[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
            r"""[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
            r"""\\p{N}{1,3}""",
            r""" ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*""",
            r"""\\s*[\\r\\n]+""",
            r"""\\s+(?!\\S)""",
            r"""\\s+""",
        ]
    )
'''
PATTERN = "|".join(re.findall('r"""(.*?)"""', CODE))

TEXTS = {
    "English": "The quick brown fox jumps over the lazy dog; it's HERS, they'll say, and WE'VE seen nothing.",
    "code": 'def f(x: int) -> str:\n    if x >= 10_000:\r\n\t\treturn f"{x!r}"  # camelCase, HTTP2\n\n\n',
    "Han": "你好\uff0c世界。中文English混合的句子2024年11月,漢字とカナ。",
    "Japanese and Korean": "東京タワーは高いです。ひらがな々〆 한국어 문장입니다.",
    "Cyrillic and Greek": "Съешь же ещё этих мягких булок. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "Arabic, Hebrew, Hindi, Thai": "مرحبا بالعالم שלום עולם नमस्ते दुनिया สวัสดีชาวโลก",
    "digits": "0 12 123 1234 12345 3.14159 ٣٤٥٦ ⅧⅨ ①②③ 10²⁵ 一二三",
    "whitespace": "a  b   c\t\td \n e\n\n\n   f      \u3000 g\u00a0\u2003h\r\n\r\n  i   ",
    "emojis": "😀😃 👩‍👩‍👧‍👦 🇫🇷🇯🇵 ❤️ 👍🏽 ok👌!!! ~~~ ===>>> ????",
    "marks and case": "Ǆungla ǅ naïve e\u0301cole İstanbul straße CAN\u2019T I\u017f'\u017f we'LL Wir'd'd 'S",
    "almost a mark": "<|im_end <|im_ end|> [EOS <|reserved_token_1|>",
}
NUM_MERGES = 600
WHOLE = ("1234", " we'LL", "   f", "!!!\n", "\n\n\n")  # pieces to the pattern, or to one that is nearly it
NAMES = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 6: "<think>", 7: "</think>", 17: "[PAD]"}
SHOWN = {"<think>", "</think>"}


def learn_ranks() -> dict[bytes, int]:
    """Return all bytes, then the most frequent remaining pairs, one by one, and `WHOLE`.

    Pairs may lie across two pieces of the pattern, so that a text which is split elsewhere shows.
    """
    ranks = {bytes([byte]): byte for byte in range(256)}
    pieces = [[bytes([byte]) for byte in (text * 2).encode()] for text in TEXTS.values()]
    for _ in range(NUM_MERGES):
        pairs = Counter(pair for piece in pieces for pair in pairwise(piece))
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))
        ranks.setdefault(left + right, len(ranks))
        pieces = [merged(piece, left, right) for piece in pieces]
    for text in WHOLE:
        ranks.setdefault(text.encode(), len(ranks))
    return ranks


def merged(piece: list[bytes], left: bytes, right: bytes) -> list[bytes]:
    whole: list[bytes] = []
    for part in piece:
        if whole and whole[-1] == left and part == right:
            whole[-1] += part
        else:
            whole.append(part)
    return whole


RANKS = learn_ranks()
FIRST_ADDED = len(RANKS)


def settings_of(**changes: Any) -> dict[str, Any]:
    """tokenizer_config.json, with its names as far after the ranks as in Kimi's own."""
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    added = {
        str(FIRST_ADDED + i): {"content": name, "special": name not in SHOWN, **flags}
        for i, name in NAMES.items()
    }
    return {
        "added_tokens_decoder": added,
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "tokenizer_class": "TikTokenTokenizer",
        **changes,
    }


def write_kimi(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in RANKS.items()]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_of(**changes)))
    (folder / "tokenization_kimi.py").write_text(CODE)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% endfor %}<think>"
    )
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kimi(tmp_path_factory.mktemp("kimi"))


def make_oracle() -> tiktoken.Encoding:
    """Build the tokenizer as tokenization_kimi.py does, with fewer reserved tokens."""
    special = {NAMES.get(i, f"<|reserved_token_{FIRST_ADDED + i}|>"): FIRST_ADDED + i for i in range(18)}
    return tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=RANKS, special_tokens=special)


ORACLE = make_oracle()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.mark.parametrize("name", TEXTS)
def test_texts_of_many_scripts_have_tiktokens_tokens(tokenizer: Tokenizer, name: str) -> None:
    for text in (TEXTS[name], TEXTS[name].upper(), TEXTS[name][::-1], TEXTS[name].replace(" ", "\n  ")):
        ids = ORACLE.encode_ordinary(text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    assert len(ORACLE.encode_ordinary(TEXTS[name])) < len(TEXTS[name].encode()), "merges took part"


ENGLISH = ["'s", "'LL", "'\u017f", "Aa", "BC", "9", "éé"]
FRAGMENTS = st.sampled_from([*ENGLISH, " ", "  ", "\n", "!!!\n", "\r\n", "\t", "中", "文字", "ー"])
# Characters that have no meaning yet may have one to a newer library.
ANY = st.characters(exclude_categories=["Cs", "Cn"])
MIXED = st.lists(FRAGMENTS | ANY | st.sampled_from(list(TEXTS.values()))).map("".join)


@settings(max_examples=300, deadline=None)
@given(text=MIXED)
def test_any_text_has_tiktokens_tokens(tokenizer: Tokenizer, text: str) -> None:
    ids = ORACLE.encode_ordinary(text)
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text


def test_added_tokens_keep_their_ids_and_unnamed_ones_are_reserved(tokenizer: Tokenizer) -> None:
    reserved = f"<|reserved_token_{FIRST_ADDED + 5}|>"
    text = f"[BOS]<think>hm</think>好<|im_end|>{reserved}[PAD][EOS]"
    ids = ORACLE.encode(text, allowed_special="all")
    assert tokenizer.encode(text) == ids
    assert ids[0] == FIRST_ADDED and ids[-3:] == [FIRST_ADDED + 5, FIRST_ADDED + 17, FIRST_ADDED + 1]
    assert tokenizer.vocab_size == FIRST_ADDED + 18
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    # Tokens that tokenizer_config.json calls special, and unnamed ones, are removed.
    assert tokenizer.decode(ids) == "<think>hm</think>好"
    assert set(tokenizer.special_token_ids) & set(NAMES.values()) == set(NAMES.values()) - SHOWN


def test_a_conversation_is_rendered_by_the_folders_template(tokenizer: Tokenizer) -> None:
    text = tokenizer.apply_chat_template([{"role": "user", "content": "你好"}])
    assert text == "<|im_user|>你好<|im_end|><think>"
    assert tokenizer.encode(text)[-2:] == [FIRST_ADDED + 2, FIRST_ADDED + 6]


def test_the_converted_tokenizer_can_be_saved_and_has_a_token_bound(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    saved = Tokenizer.load(tmp_path)
    for text in TEXTS.values():
        assert saved.encode(text) == tokenizer.encode(text)
        assert tokenizer.coverage is not None
        assert tokenizer.coverage.min_tokens(text) <= len(tokenizer.encode(text))


@pytest.mark.slow  # its loops are compiled for it
def test_a_target_with_a_converted_tokenizer_answers_under_a_grammar(tmp_path: Path) -> None:
    target = write_kimi(make_tiny_target(tmp_path, "deepseek_v3", vocab_size=FIRST_ADDED + 18))
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": FIRST_ADDED + 1}))
    held = StructuredOutputsParams(regex="(你好|世界){3,6}!")
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40, structured_outputs=held)
    with LLM(str(target), dtype="float32", num_threads=1, max_model_len=128, max_num_seqs=2) as llm:
        (answer,) = llm.chat([{"role": "user", "content": TEXTS["Han"]}], params)
    assert answer.prompt_token_ids[-1] == FIRST_ADDED + 6
    assert re.fullmatch("(你好|世界){3,6}!", answer.outputs[0].text)


def test_a_tokenizer_with_too_many_tokens_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    target = make_tiny_target(tmp_path, "deepseek_v3", vocab_size=FIRST_ADDED + 17)
    config = EngineConfig(model=str(write_kimi(target)), dtype="float32", max_model_len=64)
    with pytest.raises(CheckpointError, match=f"token ids up to {FIRST_ADDED + 17}, but.*{FIRST_ADDED + 17}"):
        resolve_config(config)


def test_the_publishers_code_is_downloaded_from_the_hub_and_found_by_name() -> None:
    names = ["tiktoken.model", "tokenization_kimi.py", "modeling_deepseek.py", "tokenizer_config.json"]
    for patterns in (_HUB_FILES, SMALL_FILES):
        assert list(filter_repo_objects(names, allow_patterns=patterns)) == [names[0], names[1], names[3]]


def rewritten(folder: Path, tmp_path: Path, name: str, content: str | dict[str, Any] | None) -> Path:
    """Copy a folder, with another text of one file, other settings, or without the file."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    if content is None:
        (copy / name).unlink()
    else:
        text = content if isinstance(content, str) else json.dumps(settings_of(**content))
        (copy / name).write_text(text)
    return copy


LINES = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in RANKS.items()]
OTHER = CODE.replace("1,3", "1,4")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenization_kimi.py", None, "has no tokenization_kimi.py.*never run"),
        ("tokenization_kimi.py", OTHER, "another `pat_str` than Kimi's"),
        ("tokenization_kimi.py", "pat_str = unknown()", "another `pat_str` than Kimi's"),
        ("tokenization_kimi.py", "pat_str = (", "tokenization_kimi.py cannot be read"),
        ("tokenizer_config.json", None, "tokenizer_config.json is missing, or names no code"),
        ("tokenizer_config.json", "{}", "names no code in auto_map.AutoTokenizer"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": "../x.Y"}}, "names no code"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}, "token id"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"7": {"content": "<a>"}}}, "7 is '<a>'"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"999": {}}}, "by id, a token's `content`"),
        ("tiktoken.model", "not base64!", "tiktoken.model cannot be read"),
        ("tiktoken.model", "\n".join(LINES[1:]), "must be 0 to"),
        ("tiktoken.model", "\n".join([*LINES, LINES[-1]]), "must be 0 to"),
        ("tiktoken.model", "", "some byte is no token"),
    ],
)
def test_unexpected_publisher_files_are_refused_with_a_sentence(
    folder: Path, tmp_path: Path, name: str, content: str | dict[str, Any] | None, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        Tokenizer.load(rewritten(folder, tmp_path, name, content))
    assert "tokenizer" in caught.value.message


def test_a_tokenizer_json_takes_precedence(folder: Path, tmp_path: Path) -> None:
    one = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    copy = rewritten(folder, tmp_path, "tokenizer.json", one.to_str())
    assert Tokenizer.load(copy).vocab_size == 1
