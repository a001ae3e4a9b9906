"""Pairs and traffic with few accepted drafts, for one known reason each: the shipped pair with one change."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from manta.cluster.config import EngineConfig
from manta.jobs.drafters.evaluate.evaluate_drafter import engine_of, measure_suite, open_suite, suite_requests
from safetensors.torch import load_file, save_file

from support.checkpoints.broken_pairs import Tensors, config, copied, dflash, edit, target
from support.oracles.quantized_checkpoints import FORMATS, GROUP, is_linear, pack_bits
from support.paths import MODELS

MAX_TOKENS = 32
Row = dict[str, Any]  # Any: JSON
_THINKING = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor -%}"
    "{{ '<|im_start|>assistant\n' }}{%- if enable_thinking -%}{{ '<think>\n' }}{%- endif -%}"
)
OTHER_TEMPLATE = "{%- for m in messages -%}[INST] {{ m.content }} [/INST]{%- endfor -%}"
_GERMAN = (
    "Die Stadt liegt am Fluss und hat viele alte Häuser, die im Krieg nicht zerstört wurden und",
    "Gestern war das Wetter schön und wir sind mit dem Zug in die Berge gefahren, aber heute",
    "Ich möchte am Abend ins Kino gehen, weil der neue Film von einer langen Reise durch",
    "Wenn man das Brot zu lange backt, wird die Kruste hart und das Innere ist nicht mehr",
    "Der alte Mann saß auf der Bank vor dem Haus und erzählte den Kindern von der Zeit, als",
    "Im Winter sind die Tage kurz und die Nächte lang, und das Vieh steht im Stall, bis der",
)


def some_rows(category: str, count: int, *, first: int = 0) -> list[Row]:
    """Return some of the shipped prompts of a category, as rows of a JSONL file."""
    rows = [json.loads(line) for line in (MODELS / "prompts.jsonl").read_text().splitlines()]
    return [row for row in rows if row["category"] == category][first : first + count]


def write_rows(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_card(folder: Path) -> Path:
    """Measure the shipped pair on a few texts and chats, and write its card.json."""
    suite_file = write_rows(folder / "suite.jsonl", some_rows("docstring", 24) + some_rows("chat", 16))
    engine: EngineConfig = engine_of(str(MODELS / "drafter"), str(MODELS / "target"))
    suite = open_suite(str(suite_file))
    requests = suite_requests(engine, suite, (0.0,), MAX_TOKENS)
    _, acceptance = measure_suite(engine, requests, len(suite.rows))
    figures = {
        "acceptance": acceptance,
        "options": {"prompts": str(suite_file), "max_tokens": MAX_TOKENS},
        "suite": {"prompts": len(suite.rows)},
    }
    path = folder / "card.json"
    path.write_text(json.dumps(figures))
    return path


@dataclass(frozen=True)
class Seed:
    """A reason for low acceptance, the change of the pair, and the traffic that shows it."""

    cause: str
    rows: Callable[[], list[Row]]
    change: Callable[[Path], None] = lambda pair: None

    def make(self, folder: Path) -> tuple[Path, Path, Path]:
        """Return the drafter, the target and the traffic."""
        pair = copied(folder / "pair")
        self.change(pair)
        return pair / "drafter", pair / "target", write_rows(folder / "traffic.jsonl", self.rows())


def usual_rows() -> list[Row]:
    rows = some_rows("docstring", 12, first=24) + some_rows("chat", 12, first=16)
    return [{**row, "temperature": 0} for row in rows]


def target_tensors(change: Callable[[Tensors], Tensors]) -> Callable[[Path], None]:
    def apply(pair: Path) -> None:
        changed = change(load_file(pair / "target/model.safetensors"))
        (pair / "target/model.safetensors").unlink()
        save_file(changed, pair / "target/model.safetensors", metadata={"format": "pt"})

    return apply


def moved(size: float) -> Callable[[Tensors], Tensors]:
    """Add noise to all matrices: another fine-tune, whose hidden states the drafter does not know."""

    def change(tensors: Tensors) -> Tensors:
        draws = torch.Generator().manual_seed(0)
        return {
            name: (each + size * each.float().std() * torch.randn(each.shape, generator=draws)).to(each.dtype)
            if is_linear(name, each)
            else each
            for name, each in tensors.items()
        }

    return change


def quantized(levels: float) -> Callable[[Path], None]:
    """Store the target's matrices as compressed-tensors' INT4, with codes from -levels to levels."""

    def change(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, each in tensors.items():
            if not is_linear(name, each):
                found[name] = each
                continue
            rows, columns = each.shape
            groups = each.float().reshape(rows, columns // GROUP, GROUP)
            scales = (groups.abs().amax(-1, keepdim=True) / levels).bfloat16()
            codes = (groups / scales.float()).round().clamp(-8, 7).reshape(rows, columns) + 8
            module = name.removesuffix(".weight")
            found |= {
                f"{module}.weight_packed": pack_bits(codes.int().numpy(), 4),
                f"{module}.weight_scale": scales[..., 0].contiguous(),
                f"{module}.weight_shape": torch.tensor([rows, columns]),
            }
        return found

    def apply(pair: Path) -> None:
        target(quantization_config=FORMATS["ct_w4a16"].config)(pair)
        target_tensors(change)(pair)

    return apply


def with_template(template: str) -> Callable[[Path], None]:
    return edit("target/tokenizer_config.json", lambda raw: raw.update(chat_template=template))


def with_long_context(pair: Path) -> None:
    """Allow four times the positions that the target was trained with, and more than the drafter's."""
    target(max_position_embeddings=4096)(pair)
    config(max_position_embeddings=4096)(pair)


def long_rows(num_tokens: int) -> list[Row]:
    """Return code of about so many tokens (3.3 characters each), and some short prompts."""
    text = "\n".join(row["prompt"] for row in some_rows("docstring", 48) + some_rows("function_body", 48))
    size = round(3.3 * num_tokens)
    starts = range(0, 40_000, 5000)
    long = [{"id": f"long-{at}", "prompt": text[at : at + size], "temperature": 0} for at in starts]
    return usual_rows() + long


def thinking_rows() -> list[Row]:
    """Return chats with thinking, then without it, so that those with thinking are not the cache hits."""
    return [
        {
            **row,
            "id": f"{row['id']}-{on}",
            "temperature": 0,
            "ignore_eos": True,
            "chat_template_kwargs": {"enable_thinking": on},
        }
        for on in (True, False)
        for row in some_rows("chat", 32, first=16)
    ]


def hot_rows(temperature: float) -> list[Row]:
    return [{**row, "temperature": temperature} for row in usual_rows()]


def german_rows() -> list[Row]:
    rows = [{"id": f"de-{i}", "prompt": text, "temperature": 0} for i, text in enumerate(_GERMAN)]
    return usual_rows() + rows


SEEDS = [
    Seed("wrong taps", usual_rows, dflash(target_layer_ids=[17, 16, 15, 14, 13])),
    Seed("other fine-tune", usual_rows, target_tensors(moved(0.6))),
    Seed("chat template", usual_rows, with_template(OTHER_TEMPLATE)),
    Seed("quantized target", usual_rows, quantized(1.5)),
    Seed("thinking", thinking_rows, with_template(_THINKING)),
    Seed("long context", lambda: long_rows(2200), with_long_context),
    Seed("temperature", lambda: hot_rows(1.5)),
    Seed("language", german_rows),
]
