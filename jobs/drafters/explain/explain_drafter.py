"""`manta drafter explain`: runs a pair on traffic, and on its card's prompts, and looks for causes.

    traffic (traffic.py) ─▶ whole blocks with labels (block_labels.py) ─▶ slices (acceptance_slices.py)
    the card's prompts   ─▶ is the pair the one of the card? if not, are other taps better?
                                                             ─▶ likely causes (low_acceptance.py)

Runs in this process and without Ray. `explanation.py` is the result and its text.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from ....actors.capture.records import is_captured
from ....actors.chat.chat_model import ChatModel
from ....actors.checkpoints.checkpoint_paths import has_tokenizer, resolve_checkpoint
from ....actors.system.wait_messages import say
from ....actors.targets.families import read_model
from ....actors.tokenization.generation_config import GenerationDefaults
from ....actors.tokenization.prompts import Chat
from ....actors.tokenization.tokenizer import Tokenizer
from ....cluster.config import EngineConfig, SpeculativeConfig
from ....cluster.errors import ConfigError, DatasetError
from ....cluster.records.acceptance_slices import (
    BlockGroup,
    Survival,
    expected_accepted,
    report_acceptance,
)
from ....cluster.records.confidence_intervals import RatioEstimate, ratio_of_sums
from ....cluster.records.low_acceptance import PairEvidence, TapTrial, likely_causes
from ....cluster.speculation.acceptance_length import survival_of_length
from ....drafter.card import card_lengths
from ....drafter.compute.checkpoint.hf_config import Json
from ....drafter.dflash.config import DrafterConfig
from ....drafter.dflash.target_features import usual_layer_ids
from ...common.generate import open_llm
from ..common.drafter_files import CARD_FILE, AnyConfig, DrafterFiles, is_dflash, open_drafter
from ..common.options import ExplainOptions
from ..evaluate.evaluate_drafter import OVERALL, engine_of, open_suite
from ..evaluate.evaluation_card import read_card
from .block_labels import measure_blocks
from .explanation import Explanation
from .traffic import TrafficReader, TrafficRow, open_traffic

_AT_ONCE = 8
_MAX_CONTROL = 40  # prompts of the card
_CARD_IS_BACK = 0.01  # no more taps are tried if acceptance is lower than on the card by this share at most


@dataclass(frozen=True, slots=True)
class CardCurves:
    """Survival curves of a card at its lowest temperature, by category; `figures` is None for a README.md."""

    by_category: Mapping[str, Survival]
    temperature: float
    figures: Mapping[str, Any] | None  # Any: JSON

    def of(self, category: str | None) -> Survival:
        return self.by_category.get(category or OVERALL, self.by_category[OVERALL])


def explain_drafter(options: ExplainOptions) -> Explanation:
    """Raises DatasetError if the traffic has no verified blocks."""
    if not is_captured(options.data):
        open_traffic(options.data)  # a wrong name is refused before the models are loaded
    if options.card is not None:
        read_card(options.card)
    files = open_drafter(options.drafter)
    figures = _card_figures(files, options.card)
    target_folder = resolve_checkpoint(options.target, field="target")
    config = _fixed_lengths(options.drafter, options.target)
    with open_llm(config) as llm:
        say("the traffic, whole blocks")
        chat, generation = ChatModel.of(llm.tokenizer), GenerationDefaults.load(target_folder)
        reader = TrafficReader(llm.tokenizer, chat, generation, options.temperature, options.max_tokens)
        rows = reader.read(options.data, options.num_prompts)
        groups = [group for found in measure_blocks(llm, chat, rows).values() for group in found]
        card = _curves_of(figures, files, llm.info.num_speculative_tokens)
        control_rows, note = _control_rows(card, reader)
        control = measure_blocks(llm, chat, control_rows) if control_rows else {}
    others = [group for found in control.values() for group in found]
    report = report_acceptance(groups, None if card is None else card.of(OVERALL), others)
    if report is None:
        raise DatasetError(
            f"data: no draft was verified for {options.data}: answers are too short.", param="data"
        )
    spec = read_model(target_folder)
    known = files.raw.get("max_position_embeddings")
    texts, chats = (
        None if card is None else _relative(card, [row for row in control_rows if row.kind == kind], control)
        for kind in ("text", "chat")
    )
    evidence = PairEvidence(
        texts=texts,
        chats=chats,
        quantization="" if spec.quantization is None else str(spec.quantization),
        max_trained_context=known if isinstance(known, int) else None,
        other_template=_has_other_template(files.folder, target_folder),
    )
    if evidence.pair_is_low and is_dflash(files):
        assert card is not None, "the control needs a card"
        kind = "chat" if evidence.texts is None else "text"
        judged = [row for row in control_rows if row.kind == kind]
        evidence = replace(evidence, taps=_best_taps(config, files, spec.num_layers, card, judged, control))
    return Explanation(
        options.drafter, options.target, report, likely_causes(report, evidence), evidence, note
    )


def _fixed_lengths(drafter: str, target: str) -> EngineConfig:
    config = engine_of(drafter, target)
    spec = replace(_spec(config), adaptive=False)
    return replace(config, speculative_config=spec, max_num_seqs=_AT_ONCE)


def _card_figures(files: DrafterFiles[AnyConfig], given: Path | None) -> Mapping[str, Any] | None:
    """Return the given card.json, or that in the drafter's folder; None without either."""
    path = given or files.folder / CARD_FILE
    if given is None and not path.is_file():
        return None
    figures = read_card(path)
    if settings := figures["options"].get("speculative_config"):
        raise ConfigError(
            f"card={str(path)!r} was measured with speculative_config {settings}, and traffic is run without "
            "it. Give a card that was made without --speculative-config.",
            param="card",
        )
    return figures


def _curves_of(
    figures: Mapping[str, Any] | None, files: DrafterFiles[AnyConfig], num_drafts: int
) -> CardCurves | None:
    """Return the curves of card.json, or of the lengths in README.md; None without either."""
    if figures is not None:
        at = min(figures["acceptance"], key=lambda each: each["temperature"])
        curves = {
            name: tuple(accumulate((share["value"] for share in found["by_position"]), min))
            for name, found in at["categories"].items()
        }
        return CardCurves(curves, at["temperature"], figures)
    if lengths := card_lengths(files.folder):
        return CardCurves({OVERALL: survival_of_length(max(lengths), num_drafts)}, 0.0, None)
    return None


def _control_rows(card: CardCurves | None, reader: TrafficReader) -> tuple[list[TrafficRow], str]:
    """Return the card's prompts, and why there are none."""
    if card is None:
        return [], (
            "There is no card: the better half of the requests is the reference, and whether the pair "
            "itself fits cannot be judged. Make a card with `manta drafter eval -o`."
        )
    if card.figures is None:
        return [], (
            "The card in README.md has no prompts, so whether the pair itself fits cannot be judged. Make "
            "card.json with `manta drafter eval -o`."
        )
    said, num_prompts = card.figures["options"], min(card.figures["suite"]["prompts"], _MAX_CONTROL)
    try:
        suite = open_suite(said["prompts"], num_prompts)
    except DatasetError as error:
        return [], f"The card's prompts cannot be read, so the pair itself is not judged: {error.message}"
    row_schema, rows = reader.row_schema(), list[TrafficRow]()
    for row in suite.rows:
        is_chat = isinstance(row.prompt, Chat)
        prompt = {"messages": list(row.prompt.messages)} if is_chat else {"prompt": row.prompt}
        fields = {"temperature": card.temperature, "max_tokens": said["max_tokens"]}
        rows.append(reader.row({"id": row.name, "category": row.category, **prompt, **fields}, row_schema))
    return rows, ""


def _relative(
    card: CardCurves, rows: Sequence[TrafficRow], control: Mapping[str, Sequence[BlockGroup]]
) -> RatioEstimate | None:
    """Return the accepted drafts of these prompts relative to the card's curves of their categories."""
    accepted = [sum(group.num_accepted for group in control[row.name]) for row in rows]
    expected = [
        sum(expected_accepted(group, card.of(row.category)) for group in control[row.name]) for row in rows
    ]
    return ratio_of_sums(accepted, expected, minimum=0.0)


def _has_other_template(drafter: Path, target: Path) -> bool:
    if not has_tokenizer(drafter) or not has_tokenizer(target):
        return False
    templates = [Tokenizer.load(folder).template for folder in (drafter, target)]
    sources = [None if each is None else each.source for each in templates]
    return None not in sources and sources[0] != sources[1]


def _best_taps(
    config: EngineConfig,
    files: DrafterFiles[DrafterConfig],
    num_layers: int,
    card: CardCurves,
    rows: Sequence[TrafficRow],
    control: Mapping[str, Sequence[BlockGroup]],
) -> TapTrial | None:
    """Run these prompts of the card with other taps: ascending, shifted by one, and the usual ones."""
    best: TapTrial | None = None
    for layer_ids in _other_taps(files, num_layers):
        say(f"the card's prompts with taps {list(layer_ids)}")
        with _drafter_with_taps(files, layer_ids) as folder:
            spec = replace(_spec(config), model=str(folder))
            with open_llm(replace(config, speculative_config=spec)) as llm:
                found = measure_blocks(llm, ChatModel.of(llm.tokenizer), rows)
        relative = _relative(card, rows, found)
        blocks = ratio_of_sums(
            *([sum(group.num_blocks for group in run[row.name]) for row in rows] for run in (found, control)),
            minimum=0.0,
        )
        if relative is None or blocks is None:
            continue
        if best is None or relative.value > best.relative.value:
            best = TapTrial(layer_ids, relative, blocks)
        if best is not None and best.relative.value >= 1.0 - _CARD_IS_BACK:
            break
    return best


def _other_taps(files: DrafterFiles[DrafterConfig], num_layers: int) -> list[tuple[int, ...]]:
    """Return taps to try: ascending, one lower, one higher (as the other format counts), the usual ones."""
    ids = files.config.target_layer_ids
    ascending = tuple(sorted(ids))
    tried = [
        ascending,
        tuple(each - 1 for each in ascending),
        tuple(each + 1 for each in ascending),
        usual_layer_ids(num_layers, len(ids)),
    ]
    return [
        each
        for each in dict.fromkeys(tried)
        if each != ids and len(each) == len(ids) and min(each) >= 0 and max(each) < num_layers
    ]


@contextmanager
def _drafter_with_taps(files: DrafterFiles[DrafterConfig], layer_ids: Sequence[int]) -> Iterator[Path]:
    """Yield a folder with the drafter, its weights as links, and other taps."""
    with tempfile.TemporaryDirectory(prefix="manta-taps-") as name:
        folder = Path(name)
        for file in files.folder.iterdir():
            (folder / file.name).symlink_to(file.resolve())
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(_with_taps(files, layer_ids)))
        yield folder


def _with_taps(files: DrafterFiles[DrafterConfig], layer_ids: Sequence[int]) -> Json:
    """Return config.json with other taps, as its format counts them."""
    if files.config.layout == "speculators":
        return {**files.raw, "aux_hidden_state_layer_ids": [each + 1 for each in layer_ids]}
    inner = files.raw.get("dflash_config")
    if isinstance(inner, dict) and "target_layer_ids" in inner:
        return {**files.raw, "dflash_config": {**inner, "target_layer_ids": list(layer_ids)}}
    return {**files.raw, "target_layer_ids": list(layer_ids)}


def _spec(config: EngineConfig) -> SpeculativeConfig:
    assert config.speculative_config is not None, "engine_of sets a speculative config"
    return config.speculative_config
