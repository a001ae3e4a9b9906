"""Makes the prompts: templates filled with topics, split into training and held-out prompts by topic.

A topic (a word, a function, a task, a schema) is held out by the hash of its name, on every machine alike. A
prompt has held-out topics only, or none. Some prompts quote an answer of the target or continue a dialog with
it: `plan_follow_ups` plans them, `follow_up` makes them from the answer. Called by `__main__.py`.
"""

import gzip
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import yaml

from ..chat_samples import Function, Message
from .mistakes import with_mistakes, with_wrong_operator
from .sources import Sentence, Texts

HELD_OUT_PER_CATEGORY = 20
DIALOG = "dialog"
_HELD_OUT_SHARE = 6  # one topic of six
_HELD_OUT_OPENINGS = 24  # held-out prompts of a category, more than are kept, for follow-ups
_FIRST_FOLLOW_UP = 100  # number of the first template of follow-ups within a category
_SYSTEM_SHARE = 0.12
_MAX_PROMPT_CHARS = 1600
_QUESTIONS = ("trivia", "science", "computers")  # subjects of chats that are questions about facts
_FIELD = re.compile(r"\{([a-z]+(?:_[a-z]+)?)(_\d)?(?:\.([a-z]+))?\}")  # {list}, {list_2}, {list.attribute}
_SETTINGS = yaml.safe_load(Path(__file__).with_name("templates.yaml").read_text(encoding="utf-8"))
SIZES: Mapping[str, int] = _SETTINGS["sizes"]


@dataclass(frozen=True)
class Prompt:
    """A row of the files. `template` is the number of the template within its category.

    Attributes:
        topics: what is held out or not, as "kind: name".
        messages: in OpenAI's format, without the answer.
    """

    id: str
    category: str
    template: int
    topics: tuple[str, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class FollowUp:
    """A prompt to be made from the target's answer to `opening`."""

    id: str
    category: str
    template: int
    text: str
    opening: Prompt
    topics: tuple[str, ...]


@dataclass(frozen=True)
class _Entry:
    """An entry of a list: its text, further attributes, and its topic if it can be held out."""

    topic: str
    text: str
    attributes: Mapping[str, str]


class PromptMaker:
    """Makes prompts from the topics of one side. The same seed and sources give the same prompts."""

    def __init__(self, texts: Texts, *, held_out: bool, seed: int = 0) -> None:
        self._random = Random(f"{seed} {held_out}")
        self._side = "held_out" if held_out else "train"
        self._free = {
            name: [_Entry("", str(text), {}) for text in of] for name, of in _SETTINGS["free"].items()
        }
        lists = _topic_lists(texts)
        topics = held_out_topics(entry.topic for entries in lists.values() for entry in entries)
        self._topics = {
            name: [entry for entry in entries if (entry.topic in topics) == held_out]
            for name, entries in lists.items()
        }

    def prompts(self) -> list[Prompt]:
        """Return the prompts of one turn that quote no answer, by category."""
        is_held_out = self._side == "held_out"
        found: dict[str, Prompt] = {}  # by what is asked, so that none is asked twice
        for category, templates in _SETTINGS["templates"].items():
            size = _HELD_OUT_OPENINGS if is_held_out else SIZES[category] - _num_about_answers(category)
            number, wanted = 0, len(found) + size
            order = self._random.sample(range(len(templates)), len(templates))
            while len(found) < wanted and number < 4 * size:
                template = order[number % len(order)]
                number += 1
                text, topics = self.fill(templates[template])
                if len(text) <= _MAX_PROMPT_CHARS and topics:
                    row_id = f"{self._side}-{category}-{number:05}"
                    found.setdefault(text, Prompt(row_id, category, template, topics, self._messages(text)))
        return list(found.values())

    def plan_follow_ups(self, prompts: Sequence[Prompt]) -> list[FollowUp]:
        """Plan prompts about answers and second turns; no prompt opens two."""
        left: dict[str, list[Prompt]] = {category: [] for category in SIZES}
        for prompt in self._random.sample(prompts, len(prompts)):
            left[prompt.category].append(prompt)
        planned: list[FollowUp] = []
        kinds = [
            *((category, of["of"], of["templates"]) for category, of in _SETTINGS["about_answers"].items()),
            *((DIALOG, [category], texts) for category, texts in _SETTINGS["follow_ups"].items()),
        ]
        for category, openings, templates in kinds:
            for number in range(self._num_follow_ups(category)):
                candidates = left[openings[number % len(openings)]]
                if candidates:
                    template, opening = number % len(templates), candidates.pop()
                    text, topics = self.fill(templates[template])
                    row_id = f"{self._side}-{category}-about-{opening.id.partition('-')[2]}"
                    topics = (*opening.topics, *topics)
                    planned.append(
                        FollowUp(row_id, category, _FIRST_FOLLOW_UP + template, text, opening, topics)
                    )
        return planned

    def fill(self, template: str) -> tuple[str, tuple[str, ...]]:
        """Return the template with drawn entries, and the topics of these."""
        drawn: dict[str, _Entry] = {}
        fields = [match.groups() for match in _FIELD.finditer(template)]

        def value(match: re.Match[str]) -> str:
            name, number, attribute = match.groups()
            if name not in self._free and name not in self._topics:
                return match[0]  # {answer}
            key = f"{name}{number or ''}"
            if key not in drawn:
                attributes = {each for *of, each in fields if of == [name, number] and each}
                drawn[key] = self._draw(name, attributes, {entry.text for entry in drawn.values()})
            entry = drawn[key]
            if attribute:
                return entry.attributes[attribute]
            return _FIELD.sub(value, entry.text) if name in _SETTINGS["topics"] else entry.text

        text = _FIELD.sub(value, template).strip()
        return text[0].upper() + text[1:], tuple(sorted({e.topic for e in drawn.values() if e.topic}))

    def _draw(self, name: str, attributes: set[str], unwanted: set[str]) -> _Entry:
        entries = self._free.get(name) or self._topics[name]
        while True:
            entry = self._random.choice(entries)
            if entry.text not in unwanted and attributes <= entry.attributes.keys():
                return entry

    def _messages(self, text: str) -> tuple[Message, ...]:
        system = ()
        if self._random.random() < _SYSTEM_SHARE:
            system = ({"role": "system", "content": self._random.choice(self._free["system"]).text},)
        return (*system, {"role": "user", "content": text})

    def _num_follow_ups(self, category: str) -> int:
        if self._side == "held_out":
            return (
                8 if category == DIALOG else 16
            )  # more than are kept, since answers that loop are not quoted
        if category == DIALOG:
            return SIZES[DIALOG] // len(_SETTINGS["follow_ups"])
        return _num_about_answers(category)


def follow_up(planned: FollowUp, answer: str) -> Prompt:
    """Return the prompt that quotes the answer, or has it as its second message."""
    if planned.category == DIALOG:
        turns = ({"role": "assistant", "content": answer}, {"role": "user", "content": planned.text})
        messages = (*planned.opening.messages, *turns)
    else:
        messages = ({"role": "user", "content": planned.text.replace("{answer}", answer)},)
    return Prompt(planned.id, planned.category, planned.template, planned.topics, messages)


def held_out_topics(topics: Iterable[str]) -> set[str]:
    """Return the topics that are never trained on: one in six of each kind, those of the smallest hashes."""
    of_kind: dict[str, set[str]] = defaultdict(set)
    for topic in topics:
        of_kind[topic.partition(":")[0]].add(topic)
    held_out: set[str] = set()
    for kind in of_kind.values():
        ranked = sorted(kind, key=lambda topic: hashlib.sha256(topic.encode()).digest())
        held_out.update(ranked[: -(-len(ranked) // _HELD_OUT_SHARE)])
    return held_out


def select_held_out(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Return the same number of each category; where there are follow-ups, these are up to half of it."""
    of_category: dict[str, list[Prompt]] = {category: [] for category in SIZES}
    for prompt in prompts:
        of_category[prompt.category].append(prompt)
    selected: list[Prompt] = []
    for found in of_category.values():
        first = [prompt for prompt in found if prompt.template < _FIRST_FOLLOW_UP]
        later = [prompt for prompt in found if prompt.template >= _FIRST_FOLLOW_UP]
        num_later = min(len(later), HELD_OUT_PER_CATEGORY // 2) if first else HELD_OUT_PER_CATEGORY
        selected += _spread(later, num_later) + _spread(first, HELD_OUT_PER_CATEGORY - num_later)
    return selected


def _spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return `count` prompts at equal distances."""
    assert len(prompts) >= count, "too few held-out prompts"
    return [prompts[index * len(prompts) // count] for index in range(count)]


def write_prompts(prompts: Iterable[Prompt], path: Path) -> None:
    """Write JSON lines, compressed if the path ends in .gz; the same prompts give the same bytes."""
    text = "".join(json.dumps(asdict(prompt), ensure_ascii=False) + "\n" for prompt in prompts)
    content = text.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def read_prompts(path: Path) -> list[Prompt]:
    content = path.read_bytes()
    lines = (gzip.decompress(content) if path.suffix == ".gz" else content).decode().splitlines()
    return [
        Prompt(row["id"], row["category"], row["template"], tuple(row["topics"]), tuple(row["messages"]))
        for row in map(json.loads, lines)
    ]


def _num_about_answers(category: str) -> int:
    """Return how many training prompts of a category are about an answer of the target."""
    return SIZES[category] // 3 if category in _SETTINGS["about_answers"] else 0


def _topic_lists(texts: Texts) -> dict[str, list[_Entry]]:
    lists = {
        name: [_Entry(f"{name}: {text}", text, {}) for text in entries]
        for name, entries in _SETTINGS["topics"].items()
    }
    words = [(_Entry(f"word: {w.name}", w.name, {"gloss": w.gloss}), w.kind) for w in texts.words]
    lists["word"] = [entry for entry, _ in words]
    for kind in ("being", "thing", "idea"):
        lists[kind] = [entry for entry, of in words if of == kind]
    lists["sentence"] = [_sentence(each) for each in texts.sentences]
    lists["function"] = [_function(each) for each in texts.functions]
    lists["record"] = [_record(name, fields) for name, fields in _SETTINGS["records"].items()]
    for name, has_answer in (("question", True), ("talk", False)):
        of = [
            chat for chat in texts.chats if (chat.subject in ("trivia", "science", "computers")) == has_answer
        ]
        lists[name] = [_Entry(f"{name}: {chat.text}", chat.text, {}) for chat in of]
    return lists


def _sentence(sentence: Sentence) -> _Entry:
    broken = with_mistakes(sentence.text)
    attributes = {"broken": broken, "lower": sentence.text[0].lower() + sentence.text[1:]}
    return _Entry(f"sentence: {sentence.about}", sentence.text, attributes)


def _function(function: Function) -> _Entry:
    broken = with_wrong_operator(function.undocumented)
    docstring = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", function.docstring)  # without Sphinx's roles
    attributes = {
        "name": function.name.rpartition(".")[2],
        "code": function.undocumented,
        "header": function.header,
        "docstring": docstring,
        "summary": " ".join(docstring.split("\n\n")[0].split()),
        **({"broken": broken} if broken else {}),
    }
    return _Entry(f"function: {function.name}", function.name, attributes)


def _record(name: str, fields: Mapping[str, str]) -> _Entry:
    properties = {
        key: {"type": kind, "items": {"type": "string"}} if kind == "array" else {"type": kind}
        for key, kind in fields.items()
    }
    schema = {"type": "object", "properties": properties, "required": list(fields)}
    attributes = {
        "one": f"{'an' if name[0] in 'aeiou' else 'a'} {name}",
        "keys": ", ".join(fields),
        "columns": ", ".join(fields),
        "table": name.replace(" ", "_"),
        "schema": json.dumps(schema),
    }
    return _Entry(f"record: {name}", name, attributes)
