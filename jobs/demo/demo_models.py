"""Which models a demo shows, what it asks them, and over which rows it compares.

The published pair where the package index (or the hub) provides its target, else the small pair that ships.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...actors.checkpoints.checkpoint_paths import shipped
from ...actors.checkpoints.model_card import sample_prompt
from ...actors.checkpoints.model_download import get_model
from ...actors.checkpoints.published_models import find_model
from ...cluster.errors import UnreachableError
from ..common.options import SHIPPED_CHATS, SHIPPED_PAIR, SHIPPED_PROMPTS

Body = Mapping[str, Any]  # Any: JSON of a request

_PUBLISHED = "smollm2"
_RECIPE_CARD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "minutes": {"type": "integer", "minimum": 1, "maximum": 600},
        "ingredients": {
            "type": "array",
            "items": {"type": "string", "maxLength": 40},
            "minItems": 3,
            "maxItems": 6,
        },
    },
    "required": ["name", "minutes", "ingredients"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Question:
    """A chat request: what is printed of it, and its body without model and sampling parameters."""

    text: str
    body: Body

    @classmethod
    def of(cls, text: str, **fields: Any) -> Question:  # Any: JSON of a request
        return cls(text, {"messages": [{"role": "user", "content": text}], **fields})


QUESTIONS = (
    Question.of("Explain in three sentences why the sky is blue."),
    Question.of("List five tips for better sleep."),
    Question.of(
        "Give me a recipe for pancakes as JSON.",
        response_format={"type": "json_schema", "json_schema": {"name": "recipe", "schema": _RECIPE_CARD}},
    ),
)


@dataclass(frozen=True, slots=True)
class DemoPair:
    """The models of a demo.

    Attributes:
        target, drafter: names or folders of checkpoints.
        prompts: dataset for a batch job and the comparison, JSONL.
        questions: are asked over HTTP.
        num_drafts: in each step of the answers to them; None for whole blocks. More rows take longer
            where the target is large.
    """

    target: str
    drafter: str
    prompts: Path
    questions: tuple[Question, ...] = QUESTIONS
    num_drafts: int | None = None

    @classmethod
    def of(cls, target: Path, drafter: Path, prompts: Path) -> DemoPair:
        """Return a pair that is asked what the target's card gives as an example, else usual questions."""
        example = sample_prompt(target) if target.is_dir() else None
        return cls(
            str(target), str(drafter), prompts, QUESTIONS if example is None else (Question.of(example),)
        )


def small_pair() -> DemoPair:
    target, drafter = (shipped(Path(folder)) for folder in SHIPPED_PAIR)
    return DemoPair.of(target, drafter, shipped(SHIPPED_PROMPTS))


def published_pair() -> DemoPair:
    """Return the published pair, its target downloaded if it is not here. Raises UnreachableError."""
    model = find_model(_PUBLISHED)
    assert model.drafter is not None
    if not model.path.is_file():
        print(f"downloading {model.title} ({model.size_bytes / 1e6:.0f} MB, {model.licence})", flush=True)
        get_model(model)
    return DemoPair(model.name, model.drafter.name, shipped(SHIPPED_CHATS), num_drafts=3)


def usual_pair() -> DemoPair:
    """Return the published pair, or the small one, and say why."""
    try:
        return published_pair()
    except UnreachableError as error:
        print(f"{error.message}\nInstead this demo shows the small pair, which ships with Manta.", flush=True)
        return small_pair()
