"""A short, unbatched layer for multi-token prediction: the oracle of the tests.

Its block and final norm are a one-layer model of transformers; what comes before it is written out here. No
cache, one request. Positions are the published ones: the row of (token i + 1, state i) is at i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass
class MtpOracle:
    """The one-layer model, the target's embedding and head, and the layer's tensors by part.

    Attributes:
        stored_one: what a norm's weight of 1 is stored as: 0 where files hold w of 1 + w.
    """

    block: PreTrainedModel
    embedding: torch.Tensor
    head: torch.Tensor
    parts: dict[str, torch.Tensor]
    stored_one: float
    eps: float

    def chain(self, states: torch.Tensor, tokens: list[int], num: int, choose) -> tuple[list[int], list]:
        """Drafts after `tokens` (n + 1), given the target's normed states [n, H] of all but the last.

        Args:
            choose: (logits [V], absolute position) -> token.
        """
        assert len(states) == len(tokens) - 1
        ids, drafts, logits = list(tokens[1:]), [], []
        for _ in range(num):
            y = self.last_state(ids, states)
            logits.append((y @ self.head.T)[0])
            drafts.append(choose(logits[-1], len(tokens) + len(drafts)))
            states, ids = torch.cat((states, y)), [*ids, drafts[-1]]
        return drafts, logits

    def last_state(self, ids: list[int], states: torch.Tensor) -> torch.Tensor:
        """The layer's normed output [1, H] of the last row, of tokens and states side by side."""
        pair = self._norm(self.embedding[ids], "embed_norm"), self._norm(states, "hidden_norm")
        x = torch.cat(pair, dim=-1) @ self.parts["combine"].T
        return self.block.model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0, -1:]

    def _norm(self, x: torch.Tensor, part: str) -> torch.Tensor:
        weight = self.parts[part] + (1.0 - self.stored_one)
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.eps) * weight


@dataclass
class LayeredOracle:
    """Several layers, of which layer k makes draft k, as SGLang runs MiMo-V2's.

    All of them get the target's states; each further layer gets the tokens rotated by one more, with the last
    draft at the end.
    """

    layers: list[MtpOracle]

    def chain(self, states: torch.Tensor, tokens: list[int], num: int, choose) -> tuple[list[int], list]:
        assert len(states) == len(tokens) - 1
        ids, drafts, logits = list(tokens[1:]), [], []
        for layer in self.layers[:num]:
            logits.append((layer.last_state(ids, states) @ layer.head.T)[0])
            drafts.append(choose(logits[-1], len(tokens) + len(drafts)))
            ids = [*ids[1:], drafts[-1]]
        return drafts, logits


@torch.no_grad()
def chains(
    target, oracle: MtpOracle | LayeredOracle, tokens: list[int], anchors: list[int], num: int, choose
) -> dict:
    """Drafts and logits of a chain after each of these positions of a sequence, by position."""
    out = target.model(torch.tensor([tokens]), use_cache=False)
    states = out.last_hidden_state[0]
    return {n: oracle.chain(states[:n], tokens[: n + 1], num, choose) for n in anchors}
