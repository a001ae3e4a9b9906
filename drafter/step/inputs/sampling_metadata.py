"""Sampling parameters and noise keys of a step's sampled rows, made on the host.

The twin of `step/gpu_triton/sampling/sampling_metadata.py`, which keeps them per request slot. Made by
`drafter/step/request_states.py`, read by `drafter/step/sampling/sampler.py`.

Legend: N rows to sample, M rows with temperature > 0, F forbidden (row, token) pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...grammars.token_bitmasks import RowMasks
from .gumbel_noise import noise_keys
from .logits_processors import RuledRows


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """Parameters to sample one token for each of N rows; by default all take the likeliest token.

    Attributes:
        num_rows: N.
        noisy_M: rows with temperature > 0 that keep more than one token; None if there are none.
        temperature_M1, top_k_M, top_p_M1, min_p_M1: of these rows; the last three are None if no row needs
            them, and neutral (0, 1, 0) for rows that do not.
        key_2M1: two 32-bit noise keys per row, int64.
        forbidden_F: rows and token ids that must not be sampled (int64 [2, F]); None if there are none.
        max_top_k: the largest top-k in use.
        ruled: rows of requests that have logits rules.
        masks: token masks of requests that have grammars; None if there are none.
    """

    num_rows: int
    noisy_M: Tensor | None = None
    temperature_M1: Tensor | None = None
    top_k_M: Tensor | None = None
    top_p_M1: Tensor | None = None
    min_p_M1: Tensor | None = None
    key_2M1: Tensor | None = None
    forbidden_F: Tensor | None = None
    max_top_k: int = 0
    ruled: tuple[RuledRows, ...] = ()
    masks: RowMasks | None = None

    @property
    def narrows(self) -> bool:
        """Return whether the distribution of any noisy row is filtered."""
        return not (self.min_p_M1 is None and self.top_k_M is None and self.top_p_M1 is None)

    @classmethod
    def build(
        cls,
        *,
        temperature: NDArray[np.float32],
        top_k: NDArray[np.int64],
        top_p: NDArray[np.float32],
        min_p: NDArray[np.float32],
        seed: NDArray[np.int64],
        position: NDArray[np.int64],
        forbidden_F: Tensor | None = None,
        device: torch.device | str = "cpu",
        ruled: tuple[RuledRows, ...] = (),
    ) -> SamplingMetadata:
        """Build from host arrays [N], one entry per row.

        Args:
            top_k: 0 or less keeps all.
            position: absolute position of the token to sample (that of the row + 1).
            forbidden_F: [2, F] rows and token ids, on the device.
            ruled: result of `RuleStates.rows`.
        """

        def put(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device)

        noisy = np.flatnonzero((temperature > 0) & (top_k != 1))
        if noisy.size == 0:
            return cls(len(temperature), forbidden_F=forbidden_F, ruled=ruled)
        top_k, top_p, min_p = top_k[noisy], top_p[noisy], min_p[noisy]
        limits_k = top_k > 0
        return cls(
            num_rows=len(temperature),
            noisy_M=put(noisy),
            temperature_M1=put(temperature[noisy, None]),
            top_k_M=put(np.where(limits_k, top_k, 0)) if limits_k.any() else None,
            top_p_M1=put(top_p[:, None]) if (top_p < 1).any() else None,
            min_p_M1=put(min_p[:, None]) if (min_p > 0).any() else None,
            key_2M1=put(noise_keys(seed[noisy], position[noisy])[:, :, None]),
            forbidden_F=forbidden_F,
            max_top_k=int(top_k.max(initial=0)),
            ruled=ruled,
        )
