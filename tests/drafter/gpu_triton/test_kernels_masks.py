"""Grammar masks on the GPU path: the kernel equals the definition, and answers equal the CPU's.

`devices.py` selects the device.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from manta.actors.targets.runners.cuda_graphs import PassKind, StepGraphs
from manta.actors.targets.runners.step_passes import TargetPass
from manta.drafter.grammars.token_bitmasks import RowMasks
from manta.drafter.step.gpu_triton.sampling.grammar_masks import DeviceMasks, force_end_tokens
from manta.drafter.step.gpu_triton.sampling.grammar_masks import mask_tokens as kernel
from manta.drafter.step.sampling.grammar_masks import mask_tokens
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
    got_NV = logits_NV.to(DEVICE, copy=True)
    on_device = DeviceMasks.build(9, num_words, 7, DEVICE).of_rows(5)
    on_device.write(masks)
    kernel(got_NV, on_device)
    ids_N, scores_N = got_NV.argmax(dim=-1), got_NV.float().amax(dim=-1)
    force_end_tokens(ids_N, scores_N, on_device)
    assert ids_N.tolist() == expected_NV.argmax(dim=-1).tolist() and ids_N[2] == 7
    is_other = torch.arange(5) != 2  # where nothing was left the definition puts a 0
    assert torch.equal(got_NV.cpu()[is_other], expected_NV[is_other])
    on_device.clear()
    kernel(free_NV := logits_NV.to(DEVICE, copy=True), on_device)
    assert torch.equal(free_NV.cpu(), logits_NV), "a step without masks finds none of the last step's"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tree", [{"tree_width": 2, "tree_size": 6}, {}], ids=["trees", "chains"])
def test_constrained_answers_equal_the_cpus_and_keep_to_the_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree: dict[str, int]
) -> None:
    pytest.importorskip("fastapi", reason="LLM reads chats by the HTTP protocol's models")
    from manta import LLM, SamplingParams, StructuredOutputsParams
    from support.checkpoints.text_pair import make_text_pair

    target, drafter = make_text_pair(tmp_path)
    values = StructuredOutputsParams(json={"enum": [True, "of"]}, disable_any_whitespace=True)
    requested = [
        SamplingParams(seed=2, max_tokens=2),
        SamplingParams(temperature=0.7, top_k=20, seed=3, max_tokens=8, structured_outputs=values),
    ]

    replayed: dict[PassKind, int] = {}
    replay = StepGraphs.replay

    def watched(graphs: StepGraphs, kind: PassKind) -> None:
        replay(graphs, kind)
        replayed[kind] = replayed.get(kind, 0) + 1

    monkeypatch.setattr(StepGraphs, "replay", watched)
    launched: list[TargetPass] = []
    run = TargetPass.run
    monkeypatch.setattr(TargetPass, "run", lambda each: (launched.append(each), run(each))[1])

    def answers(backend: str, device: str, num_drafts: int | None) -> list[str]:
        spec = {"model": str(drafter), "num_speculative_tokens": num_drafts, "adaptive": False, **tree}
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
    decoding = [each for each in launched if each._requests.sampled_X is None]
    assert len(set(map(id, decoding))) <= len(replayed), "each kind has one pass, over the same memory"
    targets = sum(count for kind, count in replayed.items() if not kind.drafts)
    assert len(decoding) == targets, "every decoding pass is a graph's, also where a request has a grammar"
    assert any(kind.filters for kind in replayed)
    assert got == answers("torch", "cpu", None) and got[1] in ("true", '"of"')
