"""An executor with scripted results: real steps, of whose tokens only the number counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from manta.actors.engine.uniproc_executor import make_executor
from manta.cluster.config import EngineConfig
from manta.cluster.step.scheduler_output import SchedulerOutput, StepResult

from support.engines.passing_executor import PassingExecutor


class ScriptedExecutor(PassingExecutor):
    """Runs one request at a time.

    Attributes:
        script: token ids of the next answer, including its end token; empty: the model's own tokens.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(make_executor(config))
        self.script: Sequence[int] = ()
        self._plans: deque[SchedulerOutput] = deque()
        self._said: dict[int, int] = {}  # tokens per slot
        self._prompts: dict[str, int] = {}  # tokens per request; one entering again has more

    def submit(self, plan: SchedulerOutput) -> None:
        self._plans.append(plan)
        super().submit(plan)

    def collect(self) -> StepResult:
        plan, result = self._plans.popleft(), super().collect()
        if not self.script:
            return result
        for admitted in plan.admitted:
            known = len(admitted.token_ids)
            self._said[admitted.slot] = known - self._prompts.setdefault(admitted.request_id, known)
        token_ids = result.token_ids.copy()
        for row, slot in enumerate(plan.slots.tolist()):
            begin = self._said[slot]
            count = int(result.num_tokens[row])
            words = [*self.script[begin : begin + count]]
            token_ids[row, :count] = [*words, *[self.script[-1]] * (count - len(words))]
            self._said[slot] = begin + count
        return replace(result, token_ids=token_ids)
