"""The prompts for a drafter of a published model: their split by topic, their rows, and loops in answers."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from manta.jobs.drafters.evaluate.evaluate_drafter import open_suite
from manta.jobs.drafters.train.train_data import AnswerSettings, gather
from manta.models.recipe.chat_samples import documented_functions
from manta.models.recipe.corpus import library_files
from manta.models.recipe.published import answers, prompts
from manta.models.recipe.published.mistakes import with_mistakes, with_wrong_operator
from manta.models.recipe.published.sources import Chat, Sentence, Texts, Word
from support.paths import MODELS

HELD_OUT = MODELS / "chats.jsonl"


@pytest.fixture(scope="module")
def texts() -> Texts:
    """Texts like those of the packages: functions of the standard library, everything else by number."""
    functions = [
        function
        for file in library_files()
        if file.path in ("statistics.py", "textwrap.py", "shutil.py", "calendar.py", "random.py", "heapq.py")
        for function in documented_functions(file)
    ]
    kinds = ("being", "thing", "idea")
    return Texts(
        words=[Word(f"word {n}", f"the meaning of {n}", kinds[n % 3]) for n in range(300)],
        sentences=[Sentence(f"lemma {n}", f"The old house number {n} was sold.") for n in range(300)],
        functions=functions,
        chats=[
            Chat(subject, f"What is {subject} {n} about?") for subject in ("trivia", "ai") for n in range(60)
        ],
    )


@pytest.fixture(scope="module")
def made(texts: Texts) -> dict[bool, list[prompts.Prompt]]:
    return {held_out: all_prompts(texts, held_out=held_out) for held_out in (False, True)}


def all_prompts(texts: Texts, *, held_out: bool) -> list[prompts.Prompt]:
    maker = prompts.PromptMaker(texts, held_out=held_out)
    first = maker.prompts()
    planned = maker.plan_follow_ups(first)
    return first + [prompts.follow_up(each, "The answer of the target.") for each in planned]


def topics(of: list[prompts.Prompt]) -> set[str]:
    return {topic for prompt in of for topic in prompt.topics}


def test_the_same_texts_make_the_same_prompts(texts: Texts, made: dict[bool, list[prompts.Prompt]]):
    assert all_prompts(texts, held_out=True) == made[True]


def test_no_topic_of_a_held_out_prompt_is_in_a_training_prompt(made: dict[bool, list[prompts.Prompt]]):
    train, held_out = made[False], made[True]
    assert not topics(train) & topics(held_out)
    assert all(prompt.topics for prompt in train + held_out)
    lists = {topic.partition(":")[0] for topic in topics(train)}
    assert lists == {topic.partition(":")[0] for topic in topics(held_out)}, "every list has held-out topics"


def test_prompts_are_distinct_and_have_no_field_left(made: dict[bool, list[prompts.Prompt]]):
    for side in made.values():
        assert len({prompt.id for prompt in side}) == len(side)
        texts = " ".join(message["content"] for prompt in side for message in prompt.messages)
        assert not re.search(r"\{(answer|few|name|lang|number|word|sentence|function|record)", texts)


def test_the_committed_held_out_prompts_are_spread_evenly_and_readable_as_a_suite():
    rows = prompts.read_prompts(HELD_OUT)
    assert Counter(prompt.category for prompt in rows) == dict.fromkeys(prompts.SIZES, 20)
    assert {row.category for row in open_suite(str(HELD_OUT)).rows} == set(prompts.SIZES)
    dialogs = [prompt for prompt in rows if prompt.category == prompts.DIALOG]
    for prompt in dialogs:
        roles = [message["role"] for message in prompt.messages if message["role"] != "system"]
        assert roles == ["user", "assistant", "user"]


def test_files_of_prompts_read_back_and_equal_prompts_give_equal_bytes(
    tmp_path: Path, made: dict[bool, list[prompts.Prompt]]
):
    for name in ("a.jsonl", "a.jsonl.gz"):
        prompts.write_prompts(made[True], tmp_path / name)
        first = (tmp_path / name).read_bytes()
        assert prompts.read_prompts(tmp_path / name) == made[True]
        prompts.write_prompts(made[True], tmp_path / name)
        assert (tmp_path / name).read_bytes() == first


def test_a_looping_answer_keeps_four_repetitions_in_the_training_data(tmp_path: Path):
    phrase, opening = list(range(100, 110)), [1, 2, 3]
    rows = {"loops": opening + phrase * 9, "ends": opening + phrase * 4}
    parts = "".join(
        json.dumps(vars(answers.Answer(name, "story", 0.0, 1, "length", [7, 8], ids))) + "\n"
        for name, ids in rows.items()
    )
    (tmp_path / "part-00000.jsonl").write_text(parts)
    counts = answers.write_training_data(answers.read_answers(tmp_path), tmp_path / "train.jsonl")
    assert counts == {"story, 0.0": (2, 1, 86)}
    settings = AnswerSettings("", None, max_tokens=16, longest=256)
    data = gather([str(tmp_path / "train.jsonl")], settings, tmp_path, lambda line: None)
    assert data.first.tolist() == [2, 2]
    assert data.ids[data.bounds[0] : data.bounds[1]].tolist() == [7, 8, *opening, *phrase * 4]
    assert data.ids[data.bounds[1] :].tolist() == [7, 8, *rows["ends"]]


def test_a_second_run_answers_only_what_has_no_answer(
    tmp_path: Path, made: dict[bool, list[prompts.Prompt]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(answers, "MAX_ANSWER_TOKENS", 24)
    first, second = made[True][:2]
    for requests in ([(first, 0.0)], [(first, 0.0), (first, 0.7), (second, 0.7)]):
        with answers.AnswerWriter(str(MODELS / "target"), tmp_path, lambda line: None) as writer:
            writer.answer(requests)
    found = list(answers.read_answers(tmp_path))
    assert [answer.key for answer in found] == [(first.id, 0.0), (first.id, 0.7), (second.id, 0.7)]
    assert found[0].prompt_token_ids == found[1].prompt_token_ids
    assert all(1 < len(answer.token_ids) <= 24 for answer in found)


def test_an_answer_that_was_cut_is_quoted_up_to_a_sentence_with_its_code_block_closed():
    assert answers.quotable("One. Two. Thr", "length") == "One. Two."
    assert answers.quotable("All of it", "stop") == "All of it"
    assert answers.quotable("Code:\n```python\nx = 1\ny =", "length") == "Code:\n```python\nx = 1\n```"


def test_answers_that_say_nothing_or_repeat_their_words_are_not_quoted():
    assert not answers.is_worth_quoting("What can I do?")
    assert not answers.is_worth_quoting(" ".join(f"{n}. Methane:" for n in range(40)))
    assert answers.is_worth_quoting(
        "A kite flies since the wind pushes against it and the string holds it back."
    )


def test_mistakes_change_sentences_and_code_but_no_signature():
    assert with_mistakes("The dogs are in their house.") != "The dogs are in their house."
    code = "def f(a=1 + 1):\n    return a + 1"
    broken = with_wrong_operator(code)
    assert broken and broken != code and broken.startswith("def f(a=1 + 1):\n")
    assert with_wrong_operator("def f():\n    pass") is None
