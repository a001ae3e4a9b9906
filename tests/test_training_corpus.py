"""The corpus, its split, the chats and prompts cut from it, and the tokenizer files."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from manta.jobs.training.chat import chat_samples
from manta.jobs.training.corpus import SourceFile, is_held_out, library_files
from manta.jobs.training.cuts import CATEGORIES, cuts
from manta.jobs.training.prompts import MAX_PROMPT_TOKENS, MIN_PROMPT_TOKENS, read_prompts
from manta.jobs.training.tokenizer import CHAT_TEMPLATE, render_chat
from manta.jobs.training.tokens import TokenStore, WindowReader, encode_documents
from minijinja import Environment

MODELS = Path(__file__).parents[1] / "models"

SOURCE = '''"""Module."""

# One line of prose,
# a second,
# and a third.
NAMES = ["a", "b", "c", "d", "e", "f"]


def area(width, height):
    """Return the area of a rectangle with these sides, no more."""
    return width * height
'''


@pytest.fixture(scope="module")
def files() -> list[SourceFile]:
    return library_files()


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))


def test_the_corpus_leaves_out_tests_and_generated_tables(files: list[SourceFile]):
    paths = [file.path for file in files]
    assert len(paths) == len(set(paths)) > 300
    assert not [path for path in paths if path.startswith(("test/", "idlelib/", "site-packages/"))]
    assert "encodings/cp850.py" not in paths


def test_the_split_depends_on_the_path_alone_and_holds_out_a_small_part(files: list[SourceFile]):
    held_out = [file for file in files if file.is_held_out]
    assert 0.02 < len(held_out) / len(files) < 0.2
    # Moving a file between the sides would silently spoil every reported figure.
    assert is_held_out("textwrap.py") and is_held_out("enum.py")
    assert not is_held_out("argparse.py")


def test_every_category_of_cut_is_found_where_its_text_begins():
    found = {cut.category: SOURCE[: cut.offset] for cut in cuts(SourceFile("m.py", SOURCE))}
    assert found["docstring"].endswith('height):\n    """')
    assert found["function_body"].endswith('no more."""')
    assert found["data_literal"].endswith('["a", "b", "c"')
    assert found["prose_comment"].endswith("One line of prose,")


def test_chats_ask_with_the_source_and_answer_in_its_own_words():
    exchanges = list(chat_samples(SourceFile("shapes.py", SOURCE)))
    assert len(exchanges) == 2
    for question, answer in exchanges:
        assert (question["role"], answer["role"]) == ("user", "assistant")
        assert "area" in question["content"]
        assert "rectangle" in answer["content"]


def test_prompts_come_from_held_out_files_only_in_every_category(tokenizer):
    prompts = read_prompts(MODELS / "prompts.jsonl")
    assert len(prompts) >= 200
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    counts = Counter(prompt.category for prompt in prompts)
    assert set(counts) == set(CATEGORIES)
    assert min(counts.values()) >= 30
    for prompt in prompts:
        assert is_held_out(prompt.id.rsplit(":", 1)[0])
        num_tokens = len(tokenizer.encode(prompt.text, add_special_tokens=False).ids)
        assert MIN_PROMPT_TOKENS <= num_tokens <= MAX_PROMPT_TOKENS


def test_the_chat_template_renders_the_same_everywhere():
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": "What does `abs` do?"}]
    expected = "<|im_start|>user\nWhat does `abs` do?<|im_end|>\n<|im_start|>assistant\n"
    assert render_chat(messages, add_generation_prompt=True) == expected
    rendered = Environment().render_str(CHAT_TEMPLATE, messages=messages, add_generation_prompt=True)
    assert rendered == expected
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == expected


def test_the_tokenizer_has_4096_tokens_and_loses_no_byte(tokenizer):
    assert tokenizer.get_vocab_size() == 4096
    text = "def f(x):\n\treturn 'gr\u00fc\u00dfe \U0001f600 12345'  # \x00\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    generation = json.loads((MODELS / "target" / "generation_config.json").read_text())
    names = [tokenizer.id_to_token(i) for i in generation["eos_token_id"]]
    assert names == ["<|endoftext|>", "<|im_end|>"]


def test_a_moved_reader_reads_on_as_the_first_one_would(tokenizer):
    store = encode_documents(tokenizer, [SOURCE * n for n in range(1, 8)])
    reader = WindowReader(store)
    for _ in range(3):
        reader.next_batch(2, 64)
    other = WindowReader(store)
    other.seek(reader.position)
    assert (other.next_batch(2, 64) == reader.next_batch(2, 64)).all()


def test_a_stored_corpus_is_read_back_whole(tmp_path: Path, tokenizer):
    store = encode_documents(tokenizer, [SOURCE, SOURCE * 200])
    store.save(tmp_path / "corpus.npz")
    loaded = TokenStore.load(tmp_path / "corpus.npz")
    assert (loaded.ids == store.ids).all() and (loaded.bounds == store.bounds).all()
    assert len(loaded.shuffled(0)) == len(store.ids)
    assert loaded.num_pieces > 2
