"""A tokenizer whose steps multiply a text is refused before any text reaches it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manta.actors.tokenization.text_growth import MAX_GROWTH, check_growth
from manta.actors.tokenization.tokenizer import Tokenizer
from manta.cluster.errors import CheckpointError
from tokenizers import Regex, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

Normalizer = Any  # of the tokenizers package
PATH = Path("tokenizer.json")


def doubling(kind: Any, count: int) -> list[Any]:
    return [kind.Replace("a", "aa") for _ in range(count)]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("normalizer", normalizers.Sequence(doubling(normalizers, 40))),
        ("normalizer", normalizers.Sequence([normalizers.Sequence(doubling(normalizers, 7))])),
        ("normalizer", normalizers.Replace(Regex("(?=a)"), "b" * 100)),
        ("normalizer", normalizers.Prepend("b" * 100)),
        ("decoder", decoders.Sequence(doubling(decoders, 40))),
    ],
)
def test_steps_that_multiply_a_text_are_refused_at_load(
    name: str, step: Normalizer, folder: Path, tmp_path: Path
) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    setattr(backend, name, step)
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=f"the {name} in .* times as long; at most 64"):
        Tokenizer.load(tmp_path)


TEXT = st.text("ab ", max_size=3)
STEPS = st.one_of(
    st.builds(normalizers.Replace, st.text("ab ", min_size=1, max_size=3), TEXT),
    st.builds(lambda p, t: normalizers.Replace(Regex(p), t), st.sampled_from(["[ab]", " +", "a|b "]), TEXT),
    st.builds(normalizers.Prepend, TEXT.filter(len)),
)


@given(st.lists(STEPS, max_size=4), TEXT.filter(len))
def test_an_accepted_tokenizer_makes_no_text_longer_than_the_bound(
    steps: list[Normalizer], text: str
) -> None:
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.Sequence(steps)
    longer = len(backend.normalizer.normalize_str(text)) > MAX_GROWTH * (len(text) + 1)
    try:
        check_growth(backend, PATH)
    except CheckpointError:
        return
    assert not longer
