"""A window for the drafter's context: equal to a file's own, chosen by cost, and refused where it cannot be.

test_lossless.py has a cell of the grid.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from manta import LLM
from manta.actors.targets.loading.draft_window import find_window
from manta.actors.targets.loading.resolved_config import ResolvedConfig, resolve_config
from manta.cluster.config import EngineConfig, SpeculativeConfig
from manta.drafter.drafter_spec import DraftLayer
from support.checkpoints.drafters import EAGLE3, write_drafter
from support.checkpoints.mtp_targets import make_mtp_target
from support.checkpoints.tiny import changed, make_tiny_drafter, make_tiny_target
from support.engines.steps import settings
from support.oracles.recorded_chains import assert_prefix_hits_keep_chains
from support.oracles.sampling_cases import params_of, prompts

WINDOW = 24


def resolve(target: Path, **spec: object) -> ResolvedConfig:
    return resolve_config(settings(target, speculative_config={"adaptive": False, **spec}))


def test_a_window_drafts_as_a_files_own(tiny_qwen3: Path, tmp_path: Path) -> None:
    drafter = make_tiny_drafter(tmp_path / "full")
    slides = {"layer_types": ["sliding_attention"] * 2, "sliding_window": WINDOW, "is_causal": False}
    own = changed(drafter, tmp_path / "own", **slides)
    specs = ({"model": str(drafter), "draft_window": WINDOW}, {"model": str(own)}, {"model": str(drafter)})
    found = []
    for spec in specs:
        how = {"dtype": "float32", "num_threads": 1, "max_model_len": 256, "skip_tokenizer_init": True}
        with LLM(str(tiny_qwen3), speculative_config={**spec, "adaptive": False}, **how) as llm:
            batch = [{"prompt_token_ids": prompt} for prompt in prompts(8)[4:]]
            answers = llm.generate(batch, params_of("plain", 4))
        found.append([(o.outputs[0].token_ids, o.metrics.acceptance_histogram) for o in answers])
    assert found[0] == found[1]
    assert [tokens for tokens, _ in found[0]] == [tokens for tokens, _ in found[2]]
    assert found[0] != found[2], "a drafter that sees less drafts otherwise"


def test_every_kind_of_drafter_takes_a_window_and_a_smaller_one_of_its_own_stays(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    sliding = make_tiny_drafter(tmp_path / "dflash", sliding_window=20)
    found = resolve(tiny_qwen3, model=str(sliding), draft_window=WINDOW)
    assert found.drafter is not None
    assert [layer.window for layer in found.drafter.layers] == [20, WINDOW] and found.draft_window == WINDOW
    eagle3 = write_drafter(tmp_path / "eagle3", EAGLE3["speculators"])
    for target, spec in (
        (tiny_qwen3, {"method": "eagle3", "model": str(eagle3)}),
        (make_mtp_target(tmp_path / "mtp", "glm4_moe"), {"method": "mtp"}),
    ):
        chain = resolve(target, **spec, draft_window=WINDOW).drafter
        assert chain is not None and chain.layers == (DraftLayer(causal=True, window=WINDOW),)
        assert resolve(target, **spec).draft_window is None, "contexts are short"


def test_a_prefix_hit_keeps_what_a_windows_rows_see(tmp_path: Path) -> None:
    """Also the feature of the position before the first row, in pages of another group than the target's."""
    target = make_mtp_target(tmp_path, "qwen3_5_moe")
    spec = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False, "draft_window": 10}
    assert_prefix_hits_keep_chains(settings(target, speculative_config=spec, page_size=8))


def test_the_cost_chooses_a_window_where_a_target_reads_little(tmp_path: Path) -> None:
    """With experts, of which a row reads few, the drafter's share of a step grows with the context."""
    few, many = (
        make_tiny_target(tmp_path / str(chosen), "qwen3_moe", num_experts_per_tok=chosen) for chosen in (1, 8)
    )
    drafter = make_tiny_drafter(tmp_path / "drafter")
    spec = SpeculativeConfig(model=str(drafter))
    windows = []
    for target in (few, many):
        config = EngineConfig(model=str(target), speculative_config=spec, max_model_len=512)
        found = resolve_config(replace(config, skip_tokenizer_init=True, dtype="float32"))
        assert found.drafter is not None
        windows.append(find_window(spec, found.target, found.drafter, 2**20, 1))
        assert find_window(spec, found.target, found.drafter, 4096, 1) is None, "short contexts are whole"
        none = replace(spec, draft_window=0)
        assert find_window(none, found.target, found.drafter, 2**20, 1) is None
        chains = find_window(spec, found.target, found.drafter, 2**20, 5)
        assert chains is None or windows[-1] is None or chains <= windows[-1]
    assert windows[0] == 4096, "never less than drafters are trained for"
    assert windows[1] is not None and windows[0] <= windows[1]
