"""Labels of generated text: language, code or prose, thinking."""

from __future__ import annotations

import pytest
from manta.jobs.drafters.explain.block_labels import content_of, is_thinking, language_of


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("The city lies by the river and has many old houses, which were built in the war.", "english"),
        ("Die Stadt liegt am Fluss und hat viele alte Häuser, die im Krieg gebaut wurden.", "german"),
        ("La ville se trouve au bord de la rivière et les maisons sont pour la plupart vieilles.", "french"),
        (
            "La ciudad está junto al río y tiene muchas casas antiguas que se construyeron en la guerra.",
            "spanish",
        ),
        ("Москва является столицей России и крупнейшим городом страны", "cyrillic"),
        ("今天天气很好,我们去公园散步,然后回家吃饭,晚上看电影。", "chinese"),
        ("今日は天気がいいので、公園に行って友達と遊びました。", "japanese"),
        ("qwertz asdfgh yxcvbn poiuz lkjhg mnbvc", "latin"),
        ("12345 + 67", None),
    ],
)
def test_languages_are_told_by_script_and_common_words(text: str, language: str | None) -> None:
    assert language_of(text) == language


def test_code_is_told_by_fences_and_symbols() -> None:
    assert content_of("def f(x):\n    return [y for y in x if y == 3]\n") == "code"
    assert content_of("This is a sentence, and (perhaps) nothing else.") == "prose"
    assert content_of("Here is a poem:\n```\nroses are red") == "code"
    assert content_of("Here is a poem:\n```\nroses are red\n```\nand that was the end of it") == "prose"


def test_reasoning_is_between_its_marks() -> None:
    def within(before: str, opened: bool = False) -> bool:
        return is_thinking(before, "<think>", "</think>", opened=opened)

    assert within("<think>hm") and not within("<think>hm</think>4") and not within("4")
    assert within("hm", opened=True) and not within("hm</think>4", opened=True)
