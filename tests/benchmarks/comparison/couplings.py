"""`benchmarks couplings`: what equal noise costs in accepted drafts, on one text and the same logits.

A lossless scheme couples two samples, the target's x_t ~ p_t and the drafter's d_t ~ q_t, and accepts drafts
up to the first that differs. A text is sampled from the target once (transformers, float32), with the noise g
of `gumbel_noise.py`; at every position the drafter fills a block (`dflash_loop.py`). Given the text x, each
coupling accepts draft j with the probability below, so all of them walk over the same text, step by step:

    equal noise       1 if argmax(log q_j + g_j) = x_j
    one alternative   the same, and one token more if the second best is x_j at the first that differs
    best              min(1, q_j(x_j) / p_j(x_j)): sampled drafts and rejection (arXiv 2211.17192). Over x_j
                      that is sum_v min(p_j(v), q_j(v)), the most that a coupling of one position can have
    greedy drafts     1 if argmax q_j = x_j: greedy drafts and rejection, which accepts d_j with p_j(d_j)

Deterministic but for the draws of `best`, whose walks are repeated. With DFlash2's selector q_j is that after
x_(j-1), over all tokens; equal noise chooses among its candidates. Legend: K drafts of a block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from manta.actors.targets.loading.resolved_config import resolve_config
from manta.actors.tokenization.prompts import load_tokenizer
from manta.cluster.config import EngineConfig
from manta.cluster.errors import ConfigError
from manta.drafter.step.inputs.gumbel_noise import negative_gumbel, noise_keys
from manta.jobs.bench.common.engine_passes import (
    Figures,
    encode_prompts,
    read_prompts,
    record,
    say,
)
from manta.jobs.common.tables import print_table
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..options import CouplingOptions
from .contenders import TransformersTarget
from .dflash_loop import LoopDrafter

WALKS = 20  # over each text, by a coupling that draws
Acceptance = NDArray[np.float64]  # [positions, K], probabilities


@dataclass(frozen=True, slots=True)
class _Block:
    """Log probabilities of a block's positions, given the text before each.

    Attributes:
        p, q: of target and drafter, [K, V].
        noised: log q + g, [K, V]; a selector's candidates are chosen with this noise.
        x: the text, [K].
    """

    p: Tensor
    q: Tensor
    noised: Tensor
    x: Tensor


# The probability [K] that each draft is accepted.
COUPLINGS: dict[str, Callable[[_Block], Tensor]] = {
    "equal noise": lambda block: block.noised.argmax(1) == block.x,
    "best": lambda block: (_of(block.q, block.x) - _of(block.p, block.x)).exp().clamp(max=1),
    "greedy drafts": lambda block: block.q.argmax(1) == block.x,
}
EQUAL, ALTERNATIVE = "equal noise", "equal noise, one alternative"


@torch.inference_mode()
def run_couplings(config: EngineConfig, options: CouplingOptions) -> Figures:
    """Measure, print a table, write the figures if requested, and return them."""
    resolved = resolve_config(config)
    if resolved.drafter_folder is None:
        raise ConfigError("speculative_config is missing: give --spec-model.", param="speculative_config")
    target = TransformersTarget(resolved.target_folder, resolved.device).load("float32")
    drafter = LoopDrafter(resolved.drafter_folder, target)
    num_drafts = min(options.drafts or drafter.config.max_drafts, drafter.config.max_drafts)
    rows = read_prompts(options.prompts, options.num_prompts)
    prompts = [token_ids for _, token_ids in encode_prompts(rows, load_tokenizer(config))]
    points = []
    for temperature in options.temperatures:
        texts = []
        for i, prompt in enumerate(prompts):
            say(f"temperature {temperature:g}: text {i + 1} of {len(prompts)}")
            text = SampledText(target, drafter, prompt, options.max_tokens, temperature, seed=i)
            texts.append(text.acceptances(drafter, num_drafts))
        points.append({"temperature": temperature, "drafts": num_drafts, "tokens_per_step": _steps(texts)})
    names = list(points[0]["tokens_per_step"])
    table = [
        [f"{each['temperature']:g}", *(f"{each['tokens_per_step'][name]:.2f}" for name in names)]
        for each in points
    ]
    print_table(f"Tokens a step, {num_drafts} drafts", ["temperature", *names], table)
    return record(config, options, points)


class SampledText:
    """A text sampled from the target, with the logits and taps of all its positions."""

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: LoopDrafter,
        prompt: Sequence[int],
        max_tokens: int,
        temperature: float,
        seed: int,
    ) -> None:
        self.ids, self.num_prompt, self._temperature, self._seed = (
            list(prompt),
            len(prompt),
            temperature,
            seed,
        )
        cache, logits, taps = DynamicCache(), list[Tensor](), list[Tensor]()
        new = self.ids
        for _ in range(max_tokens):
            states = target(
                input_ids=torch.tensor([new]),
                past_key_values=cache,
                use_cache=True,
                output_hidden_states=True,
                logits_to_keep=1,
            )
            taps.append(drafter.taps(states.hidden_states))
            logits.append(torch.log_softmax(states.logits[0, -1] / temperature, dim=-1))
            new = [int((logits[-1] + self._noise(len(self.ids), 1, len(logits[-1]))[0]).argmax())]
            self.ids += new
        self._log_p = torch.stack(logits)  # [max_tokens, V], of the tokens after the prompt
        self._taps = torch.cat(taps, dim=1)  # of all positions but the last

    def _noise(self, position: int, count: int, vocab_size: int) -> Tensor:
        """Return g [count, V] at `position` and after it."""
        positions = np.arange(position, position + count)
        keys = noise_keys(np.full(count, self._seed), positions)
        return -negative_gumbel(torch.from_numpy(keys).unsqueeze(-1), vocab_size)

    def _log_q(self, logits: Tensor) -> Tensor:
        return torch.log_softmax(logits / self._temperature, dim=-1)

    def acceptances(self, drafter: LoopDrafter, num_drafts: int) -> dict[str, Acceptance]:
        """Return each coupling's acceptance of the blocks after every token of the answer but the last."""
        cache = DynamicCache()
        found: dict[str, list[Tensor]] = {name: [] for name in (*COUPLINGS, ALTERNATIVE)}
        written = 0
        for anchor in range(self.num_prompt, len(self.ids) - 1):
            taps, written = self._taps[:, written:anchor], anchor
            hidden = drafter.hidden(taps, self.ids[anchor], num_drafts, cache)
            count = min(num_drafts, len(self.ids) - 1 - anchor)
            begin, hidden = anchor + 1 - self.num_prompt, hidden[:count]
            g, x = (
                self._noise(anchor + 1, count, self._log_p.shape[1]),
                torch.tensor(self.ids[anchor : anchor + 1 + count]),
            )
            before, x = x[:-1], x[1:]
            log_q = self._log_q(drafter.logits_after(hidden, before))
            noised = g + self._log_q(drafter.logits_after(hidden, before, self._temperature * g))
            block = _Block(self._log_p[begin : begin + count], log_q, noised, x)
            for name, accepts in {**COUPLINGS, ALTERNATIVE: _is_second}.items():
                found[name].append(_padded(accepts(block), num_drafts))
        return {name: torch.stack(each).numpy() for name, each in found.items()}


def _is_second(block: _Block) -> Tensor:
    return block.noised.topk(2, dim=1).indices[:, 1] == block.x


def _of(log: Tensor, tokens: Tensor) -> Tensor:
    return log.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _padded(accepted: Tensor, num_drafts: int) -> Tensor:
    row = torch.zeros(num_drafts, dtype=torch.float64)
    row[: len(accepted)] = accepted.double()
    return row


def _steps(texts: Sequence[dict[str, Acceptance]]) -> dict[str, float]:
    """Return the tokens per step of each coupling over all texts."""
    draws = np.random.default_rng(0)
    steps: dict[str, float] = {}
    for name in (*COUPLINGS, ALTERNATIVE):
        tokens = count = 0
        for text in texts:
            chain = text[EQUAL if name == ALTERNATIVE else name]
            second = text[ALTERNATIVE] if name == ALTERNATIVE else np.zeros_like(chain)
            for _ in range(WALKS if name == "best" else 1):
                tokens += len(chain)
                count += walk(chain > draws.random(chain.shape), second > 0)
        steps[name] = round(tokens / count, 3)
    return steps


def walk(accepted: NDArray[np.bool_], second: NDArray[np.bool_]) -> int:
    """Return the steps from the first anchor to the last token.

    Args:
        accepted, second: [positions, K], whether a block after that position has this token as its draft,
            and as its alternative.
    """
    at = steps = 0
    while at < len(accepted):
        drafts = int(accepted[at].argmin()) if not accepted[at].all() else accepted.shape[1]
        if drafts < accepted.shape[1] and second[at, drafts]:
            drafts += 1
        at, steps = at + drafts + 1, steps + 1
    return steps
