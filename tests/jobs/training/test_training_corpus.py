"""The corpus, its split, and the places where chats and prompts are cut from it."""

import pytest
from manta.models.recipe.chat_samples import chat_samples
from manta.models.recipe.corpus import CorpusFile, is_held_out, library_files
from manta.models.recipe.prompt_cuts import cuts

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
def files() -> list[CorpusFile]:
    return library_files()


def test_the_corpus_omits_tests_and_generated_tables(files: list[CorpusFile]):
    paths = [file.path for file in files]
    assert len(paths) == len(set(paths)) > 300
    assert not [path for path in paths if path.startswith(("test/", "idlelib/", "site-packages/"))]
    assert "encodings/cp850.py" not in paths


def test_the_split_depends_on_the_path_and_holds_out_a_small_part(files: list[CorpusFile]):
    held_out = [file for file in files if file.is_held_out]
    assert 0.02 < len(held_out) / len(files) < 0.2
    # Moving a file between the sides would silently spoil every reported figure.
    assert is_held_out("textwrap.py") and is_held_out("enum.py")
    assert not is_held_out("argparse.py")


def test_every_category_of_prompt_is_found_where_its_text_begins():
    found = {cut.category: SOURCE[: cut.offset] for cut in cuts(CorpusFile("m.py", SOURCE))}
    assert found["docstring"].endswith('height):\n    """')
    assert found["function_body"].endswith('no more."""')
    assert found["data_literal"].endswith('["a", "b", "c"')
    assert found["prose_comment"].endswith("One line of prose,")


def test_chats_ask_from_the_source_and_answer_with_it():
    exchanges = list(chat_samples(CorpusFile("shapes.py", SOURCE)))
    assert len(exchanges) == 2
    for question, answer in exchanges:
        assert (question["role"], answer["role"]) == ("user", "assistant")
        assert "area" in question["content"]
        assert "rectangle" in answer["content"]
