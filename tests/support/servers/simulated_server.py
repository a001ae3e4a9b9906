"""An engine that computes nothing behind the real HTTP server: large loads, and a learning policy.

Its texts are noise and its seconds are reported, not spent; all counting and deciding is the product's.
"""

from __future__ import annotations

from manta.cluster.config import EngineConfig
from manta.cluster.simulation.simulated_executor import LinearCost, SimulatedExecutor

from support.checkpoints.text_pair import VOCAB
from support.engines.cluster_checker import make_info

# Survival of drafts, and seconds by which speculation pays.
SURVIVAL = (0.85, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
COST = LinearCost(verify_floor_s=4e-3, verify_row_s=1e-4, draft_floor_s=1e-3, draft_row_s=2e-5)


def simulated(config: EngineConfig) -> SimulatedExecutor:
    """Make an engine for `LiveServer(make=...)`; its steps take seconds of a virtual clock."""
    sizes = {
        "num_pages": (config.num_pages or 64,),
        "page_size": 16,
        "max_model_len": 256,
        "vocab_size": VOCAB,
    }
    info = make_info(**sizes, eos_token_ids=(), num_speculative_tokens=len(SURVIVAL))
    return SimulatedExecutor(info, SURVIVAL, COST)
