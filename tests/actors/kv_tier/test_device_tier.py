"""Device-driven steps with a tier below the pages (device: see `devices.py`): tokens and drafts are the same.

Steps run ahead while pages move. What only a GPU has (streams, pinned memory): the rehearsal of the GPU path.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from manta.actors.llm import LLM
from support.checkpoints.tiny import TINY_VOCAB
from support.engines.device_engines import opened
from support.oracles.sampling_cases import KNOBS

PROMPT = [*(7 * i % (TINY_VOCAB - 1) for i in range(34)), 5, 6]  # two pages and a part


def answer(llm: LLM) -> tuple[list[int], list[int], int]:
    """Return tokens, accepted drafts and cached tokens."""
    (found,) = llm.generate([{"prompt_token_ids": PROMPT}], replace(KNOBS["plain"], seed=1, max_tokens=5))
    metrics = found.metrics
    return found.outputs[0].token_ids, metrics.acceptance_histogram, metrics.num_cached_tokens


def test_pages_from_host_memory_and_files_change_neither_tokens_nor_drafts(
    tiny_qwen3: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    tier = {"kv_tier_path": str(tmp_path / "tier"), "kv_tier_host_bytes": 2**24}
    how = {"max_num_seqs": 1, "async_scheduling": True, **tier}
    with opened(tiny_qwen3, tiny_drafter, "triton", **how) as llm:
        *cold, none = answer(llm)
        llm._engine.save_pages()
        llm._engine.reset_prefix_cache()
        for file in (tmp_path / "tier").glob("*/*/*"):
            file.rename(file.with_name(f"aside-{file.name}"))
        assert answer(llm) == (*cold, 32) and llm.stats().tier_hits == 32
    for file in (tmp_path / "tier").glob("*/*/aside-*"):
        file.rename(file.with_name(file.name.removeprefix("aside-")))
    with opened(tiny_qwen3, tiny_drafter, "triton", **how) as llm:
        assert answer(llm) == (*cold, 32) and llm.stats().tier_hits == 32
        assert llm.stats().num_accepted_tokens > 0
    assert none == 0
