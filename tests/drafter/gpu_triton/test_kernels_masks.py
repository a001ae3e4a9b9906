"""Grammar masks on the GPU path: the kernel equals the definition, and answers equal the CPU's.

`devices.py` selects the device.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from manta import LLM, SamplingParams, StructuredOutputsParams
from manta.drafter.grammars.token_bitmasks import RowMasks
from manta.drafter.step.gpu_triton.sampling.grammar_masks import DeviceMasks, force_end_tokens
from manta.drafter.step.gpu_triton.sampling.grammar_masks import mask_tokens as kernel
from manta.drafter.step.sampling.grammar_masks import mask_tokens
from support.checkpoints.text_pair import make_text_pair
from support.engines.devices import DEVICE
from support.engines.steps import short_warm_up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_are_applied_as_in_the_definition(dtype: torch.dtype) -> None:
    random = np.random.default_rng(3)
    vocab_size, num_words = 4099, 130  # a word more than the logits have columns
    bits_MW = random.integers(-(2**31), 2**31, (3, num_words), dtype=np.int64).astype(np.int32)
    bits_MW[1] = 0
    masks = RowMasks(np.array([0, 2, 3]), bits_MW, end_id=7)
    logits_NV = torch.from_numpy(random.normal(size=(5, vocab_size))).to(dtype)
    expected_NV = mask_tokens(logits_NV.clone(), masks)
    got_NV = logits_NV.to(DEVICE)
    on_device = DeviceMasks.of(masks, DEVICE)
    kernel(got_NV, on_device)
    ids_N, scores_N = got_NV.argmax(dim=-1), got_NV.float().amax(dim=-1)
    force_end_tokens(ids_N, scores_N, on_device)
    assert ids_N.tolist() == expected_NV.argmax(dim=-1).tolist() and ids_N[2] == 7
    is_other = torch.arange(5) != 2  # where nothing was left the definition puts a 0
    assert torch.equal(got_NV.cpu()[is_other], expected_NV[is_other])


def test_constrained_answers_equal_the_cpus(tmp_path: Path) -> None:
    target, drafter = make_text_pair(tmp_path)
    values = StructuredOutputsParams(json={"enum": [True, "of"]}, disable_any_whitespace=True)
    requested = [
        SamplingParams(seed=2, max_tokens=2),
        SamplingParams(temperature=0.7, top_k=20, seed=3, max_tokens=8, structured_outputs=values),
    ]

    def answers(backend: str, device: str, num_drafts: int | None) -> list[str]:
        spec = {"model": str(drafter), "num_speculative_tokens": num_drafts, "adaptive": False}
        with short_warm_up():
            llm = LLM(
                str(target),
                speculative_config=None if num_drafts is None else spec,
                attention_backend=backend,
                device=device,
                dtype="float32",
                num_threads=1,
                page_size=16,
                max_num_seqs=2,
                max_model_len=48,
            )
        with llm:
            return [a.outputs[0].text for a in llm.generate(["x", "So"], requested)]

    got = answers("triton", DEVICE.type, 3)
    assert got == answers("torch", "cpu", None) and got[1] in ("true", '"of"')
