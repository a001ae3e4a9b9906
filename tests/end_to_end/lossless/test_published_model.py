"""A published model that no one here made: SmolLM2-135M-Instruct in Q4_1, from the Python package index.

`make real` compares all prompts and a second model (`trials/published_models.py`).
"""

from __future__ import annotations

import pytest
from manta.actors.checkpoints.model_download import get_model
from manta.actors.checkpoints.published_models import find_model
from manta.cluster.errors import UnreachableError
from trials.published_models import Model


@pytest.fixture(scope="module")
def smollm2() -> Model:
    try:
        return Model(get_model(find_model("smollm2")), share=30)
    except UnreachableError as error:
        pytest.skip(error.message)


def test_greedy_tokens_are_those_of_transformers(smollm2: Model) -> None:
    smollm2.compare_with_transformers(smollm2.prompts())
    assert smollm2.num_wrong == 0, smollm2.figures


def test_drafts_change_no_token(smollm2: Model) -> None:
    smollm2.compare_drafts(smollm2.prompts()[:1], dtypes=["auto"], kinds=["trees"])
    assert smollm2.num_wrong == 0, smollm2.figures
