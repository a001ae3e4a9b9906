"""What `manta drafter adapt` and `train` can be asked for. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from ...cluster.errors import ConfigError
from ...cluster.flag import Flag


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptOptions:
    """What is adapted, to which text.

    Attributes:
        drafter: folder or hub id of a drafter.
        target: folder or hub id of the target.
        data: the folder of --capture, or JSONL with `prompt` or `messages` a line.
        output: folder of the adapted drafter; made if the drafter is better, and never written over.
        minutes: time for answers and training; measuring comes on top.
        replay: general text that the drafter must not forget, in the form of --data.
        min_gain: tokens per step that the drafter must gain on the new text, as a share.
        num_threads: threads of torch on a CPU.
    """

    drafter: Annotated[str, Flag(positional=True)]
    target: Annotated[str, Flag("-m")]
    data: Path
    output: Annotated[Path, Flag("-o")]
    minutes: float = 20.0
    replay: Path = Path("models/prompts.jsonl")
    min_gain: float = 0.05
    num_threads: int | None = None

    def __post_init__(self) -> None:
        if self.minutes <= 0:
            raise ConfigError(f"minutes={self.minutes} must be more than 0.", param="minutes")
        if self.output.exists():
            raise ConfigError(
                f"output={str(self.output)!r} is there already: name a new folder.", param="output"
            )

    @property
    def work(self) -> Path:
        """Private: text of users is in it."""
        return self.output.with_name(f"{self.output.name}.work")

    @property
    def candidate(self) -> Path:
        """The drafter that is judged."""
        return self.work / "training" / "drafter"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What is trained, on which data.

    Attributes:
        target: folder or hub id of the target.
        folder: folder of the run, which gets drafter/; the same one resumes.
        data: JSON lines or Parquet with messages, prompt or text, or captured traffic; may be repeated; by
            default prompts cut out of Python's standard library.
        head: what is trained.
        initial: drafter to begin with; by default layers of the target.
        steps: steps of the run; by default 6 epochs.
        hours: time for training, in place of steps.
        layers: layers of a new drafter, by default 3; with --from, more than it has: silent at first.
        block_size: block size of a new drafter; by default 16.
        mask_token_id: mask token of a new drafter; by default one that no text has.
        max_tokens: tokens of an answer that the target is asked for.
        workers: train on this many GPUs (or cores) of a Ray cluster.
        num_threads: threads of torch on a CPU.
    """

    target: Annotated[str, Flag("-m")]
    folder: Annotated[Path, Flag("-o --output")]
    data: tuple[str, ...] = ()
    head: Literal["dflash", "selector", "dflash2", "eagle3"] = "dflash"
    initial: Annotated[str | None, Flag("--from")] = None
    steps: int | None = None
    hours: float | None = None
    layers: int | None = None
    block_size: int | None = None
    mask_token_id: int | None = None
    max_tokens: int = 192
    workers: int | None = None
    num_threads: int | None = None
