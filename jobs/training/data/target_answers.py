"""Generates a drafter's training data with the target, through this engine.

Continuations are stored in shards as they are finished, so that a restarted run repeats only the current
shard.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from ....actors.llm import LLM
from ....cluster.request.request import SamplingParams
from ..loop.lr_schedule import TimeBudget
from ..loop.training_loop import Report
from .continuations import ContinuationRequest, Continuations, Generate

QUESTIONS_PER_SHARD = 512
MAX_NEW_TOKENS = 192
NUM_RUNNING = 64  # concurrent continuations


def write_continuations(
    target_dir: str | Path,
    asked: Sequence[ContinuationRequest],
    folder: Path,
    budget_s: float,
    report: Report,
    keep: Callable[[Sequence[int]], list[int]] = list,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> Continuations:
    """Generate continuations in shards until all prompts are done or the time is over.

    `folder` gets the shards; `keep` selects the part of an answer to train on.
    """
    used = folder / "used_s"  # seconds spent by earlier processes of this run
    budget = TimeBudget(budget_s, float(used.read_text()) if used.exists() else 0.0)
    shards: list[Continuations] = []
    with LLM(str(target_dir), max_num_seqs=NUM_RUNNING) as llm:
        generate = generator(llm, max_new_tokens)
        for start in range(0, len(asked), QUESTIONS_PER_SHARD):
            path = folder / f"{start:06}.npz"
            if not path.exists():
                if shards and budget.progress >= 1.0:
                    break
                part = asked[start : start + QUESTIONS_PER_SHARD]
                Continuations.of(part, [keep(answer) for answer in generate(part)]).save(path)
                used.write_text(f"{budget.used_s:.1f}")
            shards.append(Continuations.load(path))
            report(f"{folder.name}: {start + len(shards[-1])} of {len(asked)}")
    return Continuations.join(shards)


def generator(llm: LLM, max_new_tokens: int) -> Generate:
    def generate(asked: Sequence[ContinuationRequest]) -> list[list[int]]:
        params = [
            SamplingParams(
                temperature=q.temperature, seed=q.seed, max_tokens=max_new_tokens, detokenize=False
            )
            for q in asked
        ]
        outputs = llm.generate([list(q.prompt_ids) for q in asked], params)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate
