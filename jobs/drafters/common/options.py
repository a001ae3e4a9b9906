"""Options of `manta drafter` commands; their flags are made from them. Imports neither torch nor Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from ....cluster.errors import ConfigError
from ....cluster.flag import Flag
from ...common.options import SHIPPED_PROMPTS, check_least


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptOptions:
    """Options of `manta drafter adapt`.

    Attributes:
        drafter: folder, GGUF file or hub id of a drafter.
        target: folder, GGUF file or hub id of the target.
        data: folder of --capture, or JSONL with `prompt` or `messages` in each line.
        output: new folder for the adapted drafter; written only if the drafter is better.
        minutes: time for generating answers (at most a quarter of it) and training, without the measurements.
        replay: general text against forgetting, in the format of --data.
        chat: answer texts of `prompt` as messages of a user, through the target's chat template, or complete
            them as they are. By default as messages if the target has a chat template; the shipped prompts
            are completed.
        min_gain: required relative gain of tokens per step on the new text.
        num_threads: threads of torch on a CPU.
    """

    drafter: Annotated[str, Flag(positional=True)]
    target: Annotated[str, Flag("-m")]
    data: Path
    output: Annotated[Path, Flag("-o")]
    minutes: float = 20.0
    replay: Path = SHIPPED_PROMPTS
    chat: Annotated[bool | None, Flag("--chat/--raw")] = None
    min_gain: float = 0.05
    num_threads: int | None = None

    def __post_init__(self) -> None:
        if self.minutes <= 0:
            raise ConfigError(f"minutes={self.minutes} must be more than 0.", param="minutes")
        if self.output.exists():
            raise ConfigError(
                f"output={str(self.output)!r} exists already: give a new folder.", param="output"
            )

    @property
    def work(self) -> Path:
        """Return the folder for intermediate files; it is private, since it contains users' text."""
        return self.output.with_name(f"{self.output.name}.work")

    @property
    def candidate(self) -> Path:
        """Return the folder of the trained drafter, before the gate."""
        return self.work / "training" / "drafter"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Options of `manta drafter train`.

    Attributes:
        target: folder, GGUF file or hub id of the target.
        folder: folder of the run; the drafter is written to drafter/ in it. The same folder resumes.
        data: JSON lines or Parquet with messages, prompt or text, or captured traffic; may be repeated.
        head: part or kind of drafter that is trained.
        initial: drafter to start from; by default layers of the target.
        steps: steps of the run; by default 6 epochs.
        hours: time for everything, in place of steps: at most a quarter for answers, the rest for training.
        layers: layers of a new drafter, by default 3; with --from, a larger number adds layers that start as
            identity.
        block_size: block size of a new drafter; by default 16, for targets below 1 B parameters 8.
        mask_token_id: mask token of a new drafter; by default one that occurs neither in text nor in chats.
        chat: answer texts of `prompt` as messages of a user, through the target's chat template, or complete
            them as they are. By default as messages if the target has a chat template.
        max_tokens: maximum tokens of an answer that the target generates.
        workers: number of GPUs (or cores) of a Ray cluster to train on; by default this process.
        num_threads: threads of torch on a CPU.
    """

    target: Annotated[str, Flag("-m")]
    folder: Annotated[Path, Flag("-o --output")]
    data: tuple[str, ...]
    head: Literal["dflash", "selector", "dflash2"] = "dflash"
    initial: Annotated[str | None, Flag("--from")] = None
    steps: int | None = None
    hours: float | None = None
    layers: int | None = None
    block_size: int | None = None
    mask_token_id: int | None = None
    chat: Annotated[bool | None, Flag("--chat/--raw")] = None
    max_tokens: int = 192
    workers: int | None = None
    num_threads: int | None = None


def parse_integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def parse_numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


# Settings of speculation that an evaluation determines.
_OWN_SETTINGS = {
    "model": "the drafter is the argument of the command",
    "adaptive": "acceptance is measured with whole blocks, the speed with adaptive draft lengths",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """Options of `manta drafter eval`.

    Attributes:
        drafter: folder, GGUF file or hub id of a drafter.
        target: folder, GGUF file or hub id of the target.
        suite: quick (the shipped prompts), chats (held-out chats of twelve categories, which come with the
            package), or a JSONL file.
        concurrency: concurrent requests, comma-separated; the speed is measured at each.
        temperatures: sampling temperatures, comma-separated; 0 is greedy.
        num_prompts: number of prompts, taken evenly from the suite; by default all, of quick 40.
        rounds: rounds over all prompts in which the speed is measured; 0 measures acceptance alone.
        max_tokens: maximum tokens of an answer.
        speculative_config: JSON: more settings of speculation, such as '{"tree_width": 3}' or
            '{"num_speculative_tokens": 5}'.
        output: folder for card.json, card.md and card.svg.
    """

    drafter: Annotated[str, Flag(positional=True)]
    target: Annotated[str, Flag("-m")]
    suite: str = "quick"
    concurrency: Annotated[tuple[int, ...], Flag(metavar="N,...", parser=parse_integers)] = (1, 8)
    temperatures: Annotated[
        tuple[float, ...], Flag("--temperature -t", metavar="T,...", parser=parse_numbers)
    ] = (0.0, 1.0)
    num_prompts: Annotated[int | None, Flag(least=1)] = None
    rounds: int = 3
    max_tokens: int = 128
    speculative_config: Annotated[Mapping[str, Any], Flag("-sc")] = field(default_factory=dict)  # Any: JSON
    output: Annotated[Path | None, Flag("-o")] = None

    def __post_init__(self) -> None:
        check_least(self, 1, "max_tokens", "concurrency")
        check_least(self, 0, "rounds", "temperatures")
        for name, why in _OWN_SETTINGS.items():
            if name in self.speculative_config:
                raise ConfigError(
                    f"speculative_config.{name} is not a setting of an evaluation: {why}. Remove it.",
                    param=f"speculative_config.{name}",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions:
    """Options of `manta drafter explain`.

    Attributes:
        drafter: folder, GGUF file or hub id of a drafter.
        target: folder, GGUF file or hub id of the target.
        data: JSONL with `prompt` or `messages` and sampling fields in each line, an OpenAI batch file, or a
            folder of --capture.
        card: card.json of `manta drafter eval`; by default that in the drafter's folder.
        num_prompts: number of prompts, taken evenly from the data.
        max_tokens: maximum tokens of an answer.
        temperature: sampling temperature of lines that name none; by default the model's.
    """

    drafter: Annotated[str, Flag(positional=True)]
    target: Annotated[str, Flag("-m")]
    data: Path
    card: Path | None = None
    num_prompts: Annotated[int, Flag(least=1)] = 64
    max_tokens: Annotated[int, Flag(least=1)] = 128
    temperature: Annotated[float | None, Flag("-t", least=0.0)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployOptions:
    """Options of `manta drafter deploy`.

    Attributes:
        drafter: folder, GGUF file or hub id of the drafter.
        app: name of the application in Ray Serve.
        deployment: name of the deployment of the model's replicas.
    """

    drafter: Annotated[str, Flag(positional=True)]
    app: str = "manta"
    deployment: str = "manta"
