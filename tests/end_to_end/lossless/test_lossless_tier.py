"""Pages of a tier change no token, and drafts after a read are accepted as after a hit in the cache.

Over the grid's pairs; two engines one after another share a folder, the first of them short of pages.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from manta import LLM
from manta.actors.targets.loading.memory_budget import page_bytes, state_bytes
from manta.actors.targets.loading.resolved_config import resolve_config
from manta.cluster.errors import ConfigError
from support.oracles.lossless_grid import Drafts, Pair, Reference, Tree
from support.oracles.sampling_cases import KNOBS, WHOLE, params_of, prompts, tokens_of

CELLS: list[tuple[str, Drafts]] = [
    ("qwen3", 15),
    ("qwen3", Tree(2, 15)),
    ("qwen3 in bf16", 15),
    ("gemma3", 15),
    ("deepseek_v3", 15),
    ("qwen3 by EAGLE-3", 3),
    ("gemma4 by its assistant", 3),
    ("qwen3 with FP8 K/V", 15),
    ("qwen3_5", 15),
    ("qwen3_5 by MTP", 3),
]
MORE: list[tuple[str, Drafts]] = [
    ("qwen3", None),
    ("gemma3 in bf16", 3),
    ("gemma4", 3),
    ("gpt_oss", 3),
    ("qwen3 by DFlash2", 15),
    ("deepseek_v3 by MTP", 3),
    ("qwen3 mixed with suffixes", 15),
    ("qwen3 with a draft window", 15),
]


@pytest.mark.parametrize(("pair", "drafts"), [*CELLS, *MORE] if WHOLE else CELLS, indirect=["pair"], ids=str)
def test_no_token_changes_with_pages_from_files(
    pair: Pair, reference: Reference, drafts: Drafts, tmp_path: Path
) -> None:
    tier = tmp_path / "tier"
    names = tuple(KNOBS) if WHOLE else ("plain", "rules")
    requested = [(name, i) for name in names for i in range(8)]
    expected = reference.of(requested)
    sizes: dict[str, object] = {} if pair.spec.is_compiled else {"page_size": 4}  # of `few_pages`
    for few_pages in (True, False):
        with pair.open(drafts, few_pages=few_pages, kv_tier_path=str(tier), **sizes) as llm:
            params = [params_of(name, 8)[i] for name, i in requested]
            assert tokens_of(llm, [prompts(8)[i] for _, i in requested], params) == expected
            stats = llm.stats()
    assert (stats.num_accepted_tokens > 0) == (drafts is not None)
    has_states = pair.spec.family == "qwen3_5"  # tested with enough of them below
    assert stats.tier_hits > 0 or pair.slides or has_states, "what left the windows may be lost"


@pytest.mark.parametrize(
    ("pair", "drafts"),
    [
        ("qwen3", 15),
        ("qwen3 in bf16", 15),
        ("gemma3", 15),
        ("deepseek_v3", 15),
        ("qwen3 by EAGLE-3", 3),
        ("gemma4 by its assistant", 3),
        ("deepseek_v3 by MTP", 3),
        ("qwen3_5", 15),
        ("qwen3_5 by MTP", 3),
    ],
    indirect=["pair"],
    ids=str,
)
@pytest.mark.parametrize("max_drafts", [None, 0], ids=["saved with drafts", "saved without drafts"])
def test_the_drafters_context_is_read_with_the_pages(
    pair: Pair, drafts: int, max_drafts: int | None, tmp_path: Path
) -> None:
    """Also that of rows whose context was not written yet, because no request drafted."""
    shared, tails = prompts(8)[7], ([5, 6], [9], [], [5, 6, 7, 8, 9])
    batch = [{"prompt_token_ids": shared + tail} for tail in tails]
    params = params_of("plain", len(batch))
    sizes = {"max_num_seqs": 1, "num_states": 16}
    kept = {"kv_tier_path": str(tmp_path / "tier"), **sizes}
    with pair.open(drafts, **sizes) as llm:
        cold = llm.generate(batch, params)
    with pair.open(drafts, **kept) as llm:
        _check_that_all_is_kept(llm)
        llm.generate(batch, params, max_draft_tokens=max_drafts)
        assert llm.stats().tier_hits == 0
    with pair.open(drafts, **kept) as llm:
        warm = llm.generate(batch, params)
        assert llm.stats().tier_hits > 0
    assert [o.outputs[0].token_ids for o in warm] == [o.outputs[0].token_ids for o in cold]
    assert all(o.metrics.num_cached_tokens > 0 for o in warm)
    assert [o.metrics.acceptance_histogram for o in warm] == [o.metrics.acceptance_histogram for o in cold]


def _check_that_all_is_kept(llm: LLM) -> None:
    """A page of the tier has all the bytes that the memory's budget counts for one, and so has a state."""
    resolved = resolve_config(llm.config)
    of_pools, of_state = page_bytes(resolved), state_bytes(resolved)
    kept = [of_pools[group.pool] for group in resolved.pages.groups]
    assert llm.info.kv_tier is not None
    assert llm.info.kv_tier.page_bytes == (*kept, *([of_state + 8] if of_state else []))


@pytest.mark.parametrize("pair", ["qwen3", "qwen3 in bf16", "gemma3"], indirect=True)
@pytest.mark.parametrize("has_files", [False, True])
def test_no_token_changes_with_pages_from_host_memory(
    pair: Pair, reference: Reference, has_files: bool, tmp_path: Path
) -> None:
    """Within one engine that is short of pages; with files, the memory holds a part of what they do."""
    requested = [("plain", i) for i in range(8)]
    sizes: dict[str, object] = {} if pair.spec.is_compiled else {"page_size": 4}
    sizes["kv_tier_host_bytes"] = 2**19 if has_files else 2**26
    if has_files:
        sizes["kv_tier_path"] = str(tmp_path / "tier")
    with pair.open(15, few_pages=True, **sizes) as llm:
        for _ in range(2):
            got = tokens_of(llm, [prompts(8)[i] for _, i in requested], params_of("plain", 8))
            assert got == reference.of(requested)
            llm._engine.save_pages()
            llm._engine.reset_prefix_cache()
        assert llm.stats().tier_hits > 0
        assert [each.name for each in threading.enumerate()].count("manta-pages") == 1
    assert "manta-pages" not in [each.name for each in threading.enumerate()]


def _damage(tier: Path) -> None:
    """Damage every other page, each in another way."""
    for number, file in enumerate(sorted(tier.rglob("*-*"))):
        content = file.read_bytes()
        ways = (content, content[:-9], content, content[:40] + bytes(len(content) - 40))
        file.write_bytes(ways[number % 4])


@pytest.mark.parametrize("pair", ["qwen3"], indirect=True)
def test_damaged_pages_and_those_of_other_settings_are_computed(
    pair: Pair, reference: Reference, tmp_path: Path
) -> None:
    tier = tmp_path / "tier"
    requested = [("plain", i) for i in range(8)]
    for damages, settings in ((False, {}), (True, {}), (False, {"page_size": 8}), (False, {})):
        if damages:
            _damage(tier)
        with pair.open(15, kv_tier_path=str(tier), **settings) as llm:
            params = [params_of(name, 8)[i] for name, i in requested]
            got = tokens_of(llm, [prompts(8)[i] for _, i in requested], params)
            hits = llm.stats().tier_hits
        assert got == reference.of(requested)
        if settings:
            assert hits == 0, "pages of another size are no hits"
    assert hits > 0


@pytest.mark.parametrize(
    ("pair", "settings", "reason"),
    [
        (
            "qwen3",
            {"enable_prefix_caching": False},
            "kv_tier_path is not supported without enable_prefix_caching",
        ),
        ("qwen3", {"kv_tier_host_bytes": 64}, "kv_tier_host_bytes=64 holds no page .*Raise it"),
        ("qwen3", {"kv_tier_host_bytes": 2**60}, "kv_tier_host_bytes=.* exceeds the .*Lower it"),
    ],
    indirect=["pair"],
)
def test_settings_without_a_tier_are_refused(
    pair: Pair, settings: dict[str, object], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        pair.open(None, kv_tier_path=str(tmp_path / "tier"), **settings)
    assert not list(tmp_path.glob("tier/*"))


@pytest.mark.parametrize("pair", ["qwen3"], indirect=True)
def test_llm_keeps_pages_only_if_it_is_told_to(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANTA_CACHE_DIR", str(tmp_path))
    batch = [{"prompt_token_ids": prompts(8)[7]}]
    with pair.open(15) as llm:
        assert llm.info.kv_tier is None
        computed = llm.generate(batch, params_of("greedy", 1))
    for has_read in (False, True):
        with pair.open(15, kv_tier_path="auto") as llm:
            (output,) = llm.generate(batch, params_of("greedy", 1))
            assert (llm.stats().tier_hits > 0) == has_read
        assert output.outputs[0].token_ids == computed[0].outputs[0].token_ids
        assert any((tmp_path / "kv").rglob("0-*"))
    (tmp_path / "kv").chmod(0o755)
    with pair.open(15, kv_tier_path="auto") as llm:
        assert llm.info.kv_tier is None
