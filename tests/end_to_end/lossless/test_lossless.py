"""Losslessness: outputs never depend on speculation. Token by token, over the grid of features.

In fp32, and in bf16 by the CPU's compiled pass, whose rows do not depend on the batch. The reference is plain
decoding of one request at a time; for greedy output in fp32 also transformers' own `generate`. Topologies of
several processes are in test_lossless_topologies.py.

Of the grid's cells (a pair of models, an engine, a number of drafts) a short form is run, in which every two
features meet somewhere, and all knobs in each cell; `make grid` runs all cells. Families
whose attention, pages and steps are others' (`TinyFamily.lean`) and most pairs in bf16 have one cell in the
short form, a batch of eight; those that are composed of others' parts have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations, count
from pathlib import Path

import pytest
import torch
from manta import LLM, SamplingParams
from manta.actors.targets.families import read_model
from manta.drafter.compute.cpu_numba.cpu_features import bf16_instructions
from support.checkpoints.drafters import eagle3_speculators, write_drafter
from support.checkpoints.families import FAMILIES, GPT_OSS_YARN
from support.checkpoints.mtp_targets import make_assistant, make_mtp_target
from support.checkpoints.tiny import make_tiny_drafter, make_tiny_target, transformers_model
from support.engines.random_policy import RandomPolicy
from support.oracles.fp8_kv_scales import publish_with_kv_scales
from support.oracles.quantized_checkpoints import FORMATS, publish
from support.oracles.sampling_cases import KNOBS, WHOLE, params_of, prompts, tokens_of

ENGINES = {
    "as shipped": {},
    "chunks of 16 rows": {"max_num_batched_tokens": 16},
    "whole prompts": {"enable_chunked_prefill": False},
    "forced preemption": {"enable_prefix_caching": False},
    "forced preemption with prefix cache": {},
    "planned ahead, forced preemption": {"async_scheduling": True},
}
ALONE = [name for name, family in FAMILIES.items() if WHOLE or not family.composed]
PAIRS = (*ALONE, "qwen3 in bf16", "llama in bf16", "mistral in bf16")
LEAN = {*(name for name, family in FAMILIES.items() if family.lean), "llama in bf16", "mistral in bf16"}
DFLASH2 = "qwen3 by DFlash2"  # a separate pair in few cells: it changes only the drafts
SELECTOR = "qwen3 in bf16 by a selector"  # likewise: no convolutions, so the compiled pass runs it
DSPARK = ("qwen3 by DSpark", "qwen3 in bf16 by DSpark", "gemma4 by DSpark")  # likewise: its anchors predict
EAGLE3 = ("qwen3 by EAGLE-3", "qwen3 in bf16 by EAGLE-3")  # likewise
MTP = ("qwen3_5 by MTP", "deepseek_v3 by MTP", "mimo_v2 by MTP")  # likewise
MTP_LAYERS = {"mimo_v2": 3}  # each makes one draft
EAGER = tuple(f"{pair} in eager" for pair in ("mimo_v2 by MTP", "gemma4 by DSpark"))  # likewise
PACKED_MTP = "qwen3_5 by MTP in bf16 with int8 weights"  # likewise, by packed products between loops
ASSISTANT = "gemma4 by its assistant"  # likewise
WINDOW = "qwen3 with a draft window"  # likewise
NGRAM = "qwen3 by n-grams"  # likewise
SUFFIX = ("qwen3 by suffixes", "qwen3 in bf16 by suffixes")  # likewise
MIXED = tuple(f"{pair} mixed with suffixes" for pair in ("qwen3", "qwen3 in bf16", MTP[0]))  # likewise
QUANTIZED = ("qwen3 in bf16 with int8 weights", "qwen3 in bf16 with int4 weights")  # likewise
# Likewise, experts too, by packed products between loops.
PACKED_EXPERTS = tuple(
    f"qwen3_moe in {how}"
    for how in ("bf16 with int8 weights", "bf16 with int4 weights", "bf16 published as ct_w4a16")
)
# Likewise, both models in a format: by the compiled pass, which keeps codes, and by PyTorch's operators.
PUBLISHED = tuple(f"qwen3{how} published as {name}" for how in (" in bf16", "") for name in FORMATS)
FP8_KV = tuple(f"{family} with FP8 K/V" for family in ("qwen3", "gpt_oss", "deepseek_v3"))  # likewise
SCALED_KV = "qwen3 published with scales of FP8 K/V"  # likewise
STATES = "qwen3_5"  # lean, but that steps run ahead of its states and prefixes need them
DRAFTS = (1, 3, 15)
SIZES = (1, 3)
# What eight sequences run out of while the longest fits, by the page groups of its pools.
FEW_PAGES = {
    "one group": {"num_pages": 44, "page_size": 4},
    "two groups": {"num_pages": 66, "page_size": 4},
    "three groups": {"num_pages": 96, "page_size": 4},  # of two K/V geometries: more layers of one
}


def _numbered(pairs: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Number lean pairs and the others, each from 0."""
    numbers = {True: count(), False: count()}
    for pair in pairs:
        yield next(numbers[pair in LEAN]), pair


def small_cells(pairs: Iterable[str] = PAIRS, *, whole: bool = WHOLE) -> Iterator[tuple[str, int, int]]:
    """(pair, drafts, batch size): in the short form every pair that is not lean has every draft length, sizes
    in turn.
    """
    for p, pair in _numbered(pairs):
        for d, drafts in enumerate(DRAFTS):
            for s, size in enumerate(SIZES):
                if whole or (pair not in LEAN and s == (p + d) % len(SIZES)):
                    yield pair, drafts, size


def cells(pairs: Iterable[str] = PAIRS, *, whole: bool = WHOLE) -> Iterator[tuple[str, str, int | None]]:
    """(pair, engine, drafts): in the short form every pair has every engine with drafts, and some without.

    A lean pair has one engine there, with a draft length that the other pairs may lack.
    """
    for p, pair in _numbered(pairs):
        for e, engine in enumerate(ENGINES):
            if not whole and pair in LEAN and e != p % len(ENGINES):
                continue
            if whole or (pair not in LEAN and (p + e) % 2 == 0):
                yield pair, engine, None
            turn = 2 - p // len(ENGINES) if pair in LEAN else p
            for d, drafts in enumerate(DRAFTS):
                if whole or d == (turn + e) % len(DRAFTS):
                    yield pair, engine, drafts


def dflash2_cells(*, whole: bool = WHOLE) -> Iterator[tuple[str, str, int]]:
    """(pair, engine, drafts)."""
    short = {
        (DFLASH2, "chunks of 16 rows", 3),
        (DFLASH2, "planned ahead, forced preemption", 15),
        (SELECTOR, "as shipped", 3),
        (SELECTOR, "planned ahead, forced preemption", 15),
        (DSPARK[0], "planned ahead, forced preemption", 15),
        (DSPARK[0], "forced preemption with prefix cache", 1),
        (DSPARK[1], "as shipped", 3),
        (DSPARK[2], "chunks of 16 rows", 15),
        (DSPARK[2], "planned ahead, forced preemption", 3),
        (EAGER[1], "forced preemption with prefix cache", 15),
    }
    for pair in (DFLASH2, SELECTOR, *DSPARK, EAGER[1]):
        for engine in ENGINES:
            for drafts in DRAFTS:
                if whole or (pair, engine, drafts) in short:
                    yield pair, engine, drafts


def eagle3_cells(*, whole: bool = WHOLE) -> Iterator[tuple[str, str, int]]:
    """(pair, engine, drafts)."""
    short = {(EAGLE3[0], "forced preemption with prefix cache", 3), (EAGLE3[1], "chunks of 16 rows", 1)}
    for pair in EAGLE3:
        for engine in ENGINES:
            for drafts in DRAFTS:
                if whole or (pair, engine, drafts) in short:
                    yield pair, engine, drafts


def mtp_and_window_cells(*, whole: bool = WHOLE) -> Iterator[tuple[str, str, int]]:
    """(pair, engine, drafts)."""
    short = {
        (MTP[0], "planned ahead, forced preemption", 3),
        (MTP[1], "forced preemption with prefix cache", 3),
        (MTP[2], "planned ahead, forced preemption", 3),
        (MTP[2], "chunks of 16 rows", 1),
        (EAGER[0], "forced preemption with prefix cache", 3),
        (PACKED_MTP, "chunks of 16 rows", 3),
        (WINDOW, "planned ahead, forced preemption", 15),
        (ASSISTANT, "chunks of 16 rows", 3),
        (ASSISTANT, "forced preemption with prefix cache", 3),
    }
    for pair in (*MTP, EAGER[0], PACKED_MTP, WINDOW, ASSISTANT):
        most = MTP_LAYERS.get(pair.partition(" ")[0], max(DRAFTS))
        for engine in ENGINES:
            for drafts in DRAFTS:
                if (whole and drafts <= most) or (pair, engine, drafts) in short:
                    yield pair, engine, drafts


def ngram_cells(*, whole: bool = WHOLE) -> Iterator[tuple[str, str, int]]:
    """(pair, engine, drafts)."""
    for engine in ENGINES:
        for drafts in DRAFTS:
            if whole or (engine, drafts) == ("planned ahead, forced preemption", 3):
                yield NGRAM, engine, drafts


def suffix_cells(*, whole: bool = WHOLE) -> Iterator[tuple[str, str, int]]:
    """(pair, engine, drafts)."""
    short = {
        (SUFFIX[0], "forced preemption with prefix cache", 15),
        (SUFFIX[1], "planned ahead, forced preemption", 3),
        (MIXED[0], "planned ahead, forced preemption", 15),
        (MIXED[0], "forced preemption with prefix cache", 3),
        (MIXED[1], "as shipped", 15),
        (MIXED[2], "forced preemption with prefix cache", 3),
    }
    for pair in (*SUFFIX, *MIXED):
        for engine in ENGINES:
            for drafts in DRAFTS:
                if whole or (pair, engine, drafts) in short:
                    yield pair, engine, drafts


def quantized_cells(*, whole: bool = WHOLE) -> Iterator[tuple[str, str, int]]:
    """(pair, engine, drafts); each engine has one draft length with a published format."""
    short = {
        (QUANTIZED[0], "forced preemption with prefix cache", 15),
        (QUANTIZED[1], "chunks of 16 rows", 3),
        (QUANTIZED[1], "planned ahead, forced preemption", 15),
        (PACKED_EXPERTS[1], "chunks of 16 rows", 3),
        (PACKED_EXPERTS[2], "forced preemption with prefix cache", 3),
        ("qwen3 in bf16 published as ct_w4a16", "forced preemption with prefix cache", 15),
        ("qwen3 in bf16 published as modelopt_nvfp4", "as shipped", 3),
    }
    for p, pair in enumerate((*QUANTIZED, *PACKED_EXPERTS, *PUBLISHED)):
        for e, engine in enumerate(ENGINES):
            for d, drafts in enumerate(DRAFTS):
                is_next = pair in QUANTIZED or d == (p + e) % len(DRAFTS)
                if (whole and is_next) or (pair, engine, drafts) in short:
                    yield pair, engine, drafts


def fp8_kv_cells(*, whole: bool = WHOLE) -> Iterator[tuple[str, str, int]]:
    """(pair, engine, drafts)."""
    short = {
        (FP8_KV[0], "planned ahead, forced preemption", 15),
        (FP8_KV[1], "chunks of 16 rows", 3),
        (FP8_KV[2], "forced preemption with prefix cache", 3),
        (SCALED_KV, "forced preemption with prefix cache", 15),
    }
    for pair in (*FP8_KV, SCALED_KV):
        for engine in ENGINES:
            for drafts in DRAFTS:
                if whole or (pair, engine, drafts) in short:
                    yield pair, engine, drafts


def state_cells(*, whole: bool = WHOLE) -> Iterator[tuple[str, str, int]]:
    """(pair, engine, drafts) that `cells` lacks."""
    if not whole:
        yield STATES, "planned ahead, forced preemption", 15


@dataclass(frozen=True)
class Pair:
    """A target and its drafter, their backend, and page settings that are too small."""

    target: Path
    drafter: Path
    how: dict[str, object]
    few_pages: dict[str, object]
    method: str = "dflash"
    is_assistant: bool = False
    mixed: bool = False
    is_lean: bool = False
    draft_weights: str | None = None
    draft_window: int | None = None

    @property
    def target_key(self) -> tuple[Path, object]:
        """What determines the target's tokens."""
        return self.target, (self.how.get("quantization"), self.how.get("kv_cache_dtype"))

    def open(
        self,
        *,
        speculate: bool,
        num_speculative_tokens: int | None = None,
        adaptive: bool = False,
        **settings: object,
    ) -> LLM:
        drafts = {"num_speculative_tokens": num_speculative_tokens, "adaptive": adaptive}
        has_none = self.method in ("ngram", "suffix") or (self.method == "mtp" and not self.is_assistant)
        model = {} if has_none else {"model": str(self.drafter)}
        if self.method == "suffix" or self.mixed:  # few, so that answers are dropped
            model |= {"suffix_drafts": self.mixed, "suffix_decoding_max_cached_requests": 4}
        if self.draft_weights is not None:
            model |= {"quantization": self.draft_weights}
        if self.draft_window is not None:
            model |= {"draft_window": self.draft_window}
        spec = {"method": self.method, **model, **drafts}  # all in every step: they put most to the test
        return LLM(
            str(self.target),
            speculative_config=spec if speculate else None,
            skip_tokenizer_init=True,
            **{"max_num_seqs": 8, "max_model_len": 256, **self.how, **settings},
        )


FP32 = {"dtype": "float32", "num_threads": 1}
BF16 = {"dtype": "bfloat16", "attention_backend": "compiled", "num_threads": 2}


@pytest.fixture(scope="module")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Of every family, once; where layers of the target slide, the drafter's first one does, too.

    A DFlash2 drafter drafts for the target of another pair, of which the references are known.
    """

    @cache
    def make(name: str) -> Pair:
        family, _, in_bf16 = name.partition(" ")
        folder = tmp_path_factory.mktemp(family)
        if name == DFLASH2:
            drafter = make_tiny_drafter(folder / "drafter", sliding_window=20, second=True)
            return Pair(make(family).target, drafter, FP32, FEW_PAGES["two groups"])
        if name == SELECTOR:
            drafter = make_tiny_drafter(folder / "drafter", head_dim=32, selector=True)
            return replace(make(name.removesuffix(" by a selector")), drafter=drafter)
        if name in EAGER:
            pair = make(name.removesuffix(" in eager"))
            return replace(pair, how={**pair.how, "attention_backend": "torch"})
        if name in DSPARK:
            pair = make(name.removesuffix(" by DSpark"))
            spec = read_model(pair.target)
            drafter = make_tiny_drafter(
                folder / "drafter",
                hidden_size=spec.hidden_size,
                head_dim=32 if "bf16" in name else 16,
                sliding_window=20 if any(spec.windows) else None,
                dspark=True,
            )
            return replace(pair, drafter=drafter)
        if name == WINDOW:  # its pages are a group of their own
            return replace(make(family), draft_window=20, few_pages=FEW_PAGES["two groups"])
        if name == ASSISTANT:
            pair = make(family)
            drafter = make_assistant(folder / "drafter", pair.target)
            return replace(pair, drafter=drafter, method="mtp", is_assistant=True)
        if name in MTP:
            return replace(make(family), method="mtp")
        if name == PACKED_MTP:
            how = {"dtype": "bfloat16", "quantization": "int8", "num_threads": 1}
            return replace(make(MTP[0]), how=how)
        if name == NGRAM:
            return replace(make(family), method="ngram")
        if name in SUFFIX:
            return replace(make(name.removesuffix(" by suffixes")), method="suffix")
        if name in FP8_KV:
            pair = make(family)
            return replace(pair, how={**pair.how, "kv_cache_dtype": "fp8"})
        if name == SCALED_KV:
            pair = make("qwen3 with FP8 K/V")
            return replace(pair, target=publish_with_kv_scales(pair.target, folder / "scaled")[0])
        if name in MIXED:
            return replace(make(name.removesuffix(" mixed with suffixes")), mixed=True)
        if name in PUBLISHED:
            base, form = name.split(" published as ")
            pair = make(base)
            target, drafter = (
                publish(saved, folder / saved.name, form)[0] for saved in (pair.target, pair.drafter)
            )
            how = pair.how if in_bf16 else {**pair.how, "attention_backend": "torch"}
            return replace(pair, target=target, drafter=drafter, how=how)
        if name in PACKED_EXPERTS:
            target = make_tiny_target(folder / "target", family, seed=5, moe_intermediate_size=64)
            how: dict[str, object] = {"dtype": "bfloat16", "num_threads": 1}
            if "published" in name:
                target = publish(target, folder, name.split()[-1])[0]
            else:
                how |= {"quantization": name.split()[-2]}
            return replace(make(family), target=target, how=how)
        if name in QUANTIZED:
            pair, kind = make("qwen3 in bf16"), name.split()[-2]
            return replace(pair, how={**pair.how, "quantization": kind}, draft_weights=kind)
        if name in EAGLE3:
            pair = make(name.removesuffix(" by EAGLE-3"))
            layer = {"head_dim": 32} if "bf16" in name else {}
            drafter = write_drafter(folder / "drafter", eagle3_speculators(layer=layer))
            return replace(pair, drafter=drafter, method="eagle3")
        # The compiled pass wants sizes that are multiples of 32.
        make_target, sizes = make_tiny_target, {"head_dim": 32} if in_bf16 else {}
        if f"{family} by MTP" in MTP:
            make_target = partial(make_mtp_target, num_mtp_layers=MTP_LAYERS.get(family, 1))
        target = make_target(folder / "target", family, seed=5, **sizes)
        spec = read_model(target)
        drafter_window = 20 if any(spec.windows) else None
        drafter = make_tiny_drafter(
            folder / "drafter",
            hidden_size=spec.hidden_size,
            head_dim=32 if in_bf16 else 16,
            sliding_window=drafter_window,
            rope_scaling=GPT_OSS_YARN if family == "gpt_oss" else None,  # its drafters turn as it does
        )
        if in_bf16:  # pages of 16 tokens, too
            few = 10 if WHOLE else 9
            few_pages = {"num_pages": few if drafter_window is None else 22}
            return Pair(target, drafter, BF16, few_pages, is_lean=name in LEAN)
        geometries = {(mixer.num_kv_heads, mixer.head_dim) for mixer in spec.attentions}
        groups = "two groups" if len(geometries) == 1 else "three groups"
        few = FEW_PAGES["one group" if drafter_window is None else groups]
        few = few if spec.states is None else {**few, "num_states": 10}
        return Pair(target, drafter, FP32, few, is_lean=name in LEAN)

    return make


WHOLE_PAIRS = [pair for pair in PAIRS if WHOLE or pair not in LEAN]


@pytest.fixture(params=WHOLE_PAIRS)
def pair(request: pytest.FixtureRequest, make_pair: Callable[[str], Pair]) -> Pair:
    if "bf16" in request.param and bf16_instructions() is None:
        pytest.skip("this CPU has no products of bf16")
    return make_pair(request.param)


class Reference:
    """Plain decoding, one request at a time, no prefix cache; each computed once, on demand."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._known: dict[tuple[str, int], list[int]] = {}

    def of(self, requested: Iterable[tuple[str, int]]) -> list[list[int]]:
        """Tokens of these (setting, prompt)."""
        requested = list(requested)
        unknown = [each for each in requested if each not in self._known]
        if unknown:
            with self._pair.open(speculate=False, enable_prefix_caching=False) as llm:
                for name, i in unknown:
                    (self._known[name, i],) = tokens_of(llm, [prompts(8)[i]], [params_of(name, 8)[i]])
        return [self._known[each] for each in requested]

    def first(self, name: str, count: int) -> list[list[int]]:
        """Tokens of a setting and the first prompts."""
        return self.of((name, i) for i in range(count))


@pytest.fixture(scope="module")
def references() -> dict[tuple[Path, object], Reference]:
    """References by what determines the target's tokens."""
    return {}


@pytest.fixture
def reference(pair: Pair, references: dict[tuple[Path, object], Reference]) -> Reference:
    return references.setdefault(pair.target_key, Reference(pair))


@pytest.mark.parametrize("pair", PAIRS, indirect=True)
def test_greedy_equals_transformers_generate(pair: Pair, reference: Reference) -> None:
    if pair.how is not FP32:
        pytest.skip("other sums round otherwise: in bf16 near-ties fall otherwise")
    model = transformers_model(pair.target)
    chosen = range(0, 8, 1 if WHOLE else 4 if pair.is_lean else 2)
    for i, ours in zip(chosen, reference.of(("greedy", i) for i in chosen), strict=True):
        prompt, params = prompts(8)[i], params_of("greedy", 8)[i]
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=params.max_tokens
        )
        assert out[0, len(prompt) :].tolist() == ours


@pytest.mark.parametrize("few", [small_cells, cells])
def test_the_short_grid_contains_every_pair_of_features(
    few: Callable[..., Iterator[tuple[object, ...]]],
) -> None:
    def meetings(*, whole: bool) -> set[tuple[tuple[int, object], ...]]:
        met = {two for cell in few(whole=whole) for two in combinations(enumerate(cell), 2)}
        return {two for two in met if two[0][1] not in LEAN}

    assert meetings(whole=False) == meetings(whole=True)


@pytest.mark.parametrize(("pair", "drafts", "size"), list(small_cells()), indirect=["pair"])
def test_speculation_changes_no_token_in_small_batches(
    pair: Pair, reference: Reference, drafts: int, size: int
) -> None:
    expected = {name: reference.first(name, size) for name in KNOBS}
    with pair.open(speculate=True, num_speculative_tokens=drafts) as llm:
        for name in KNOBS:
            got = tokens_of(llm, prompts(8)[:size], params_of(name, 8)[:size])
            assert got == expected[name], name
        assert llm.stats().num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("pair", "engine", "drafts"),
    [
        *(
            *cells(),
            *dflash2_cells(),
            *eagle3_cells(),
            *mtp_and_window_cells(),
            *ngram_cells(),
            *suffix_cells(),
        ),
        *(*quantized_cells(), *fp8_kv_cells(), *state_cells()),
    ],
    indirect=["pair"],
)
def test_no_token_changes_in_batches_of_eight_with_every_setting(
    pair: Pair, reference: Reference, engine: str, drafts: int | None
) -> None:
    """All prompts and all knobs, eight running at a time: neighbours differ in length, age and knobs.

    In the whole grid every prompt meets half of the knobs, the next prompt the other half; as shipped, all.
    In the short form it meets a quarter where there are enough pages, with another engine another quarter,
    and a third where there are not.
    """
    every = 4 if not WHOLE else 1 if engine == "as shipped" else 2
    shift = 0 if WHOLE or pair.is_lean else 2 * (list(ENGINES).index(engine) % 2)
    if "preemption" in engine and not pair.is_lean:
        every = 3  # a few requests would fit
    requested = [
        (name, i) for number, name in enumerate(KNOBS) for i in range(8) if (i + number + shift) % every == 0
    ]
    how = {"speculate": drafts is not None, "num_speculative_tokens": drafts, **ENGINES[engine]}
    short = "preemption" in engine
    with pair.open(**how, **(pair.few_pages if short else {})) as llm:
        params = [params_of(name, 8)[i] for name, i in requested]
        got = tokens_of(llm, [prompts(8)[i] for _, i in requested], params)
        stats = llm.stats()
    expected = reference.of(requested)
    wrong = [which for which, ours, right in zip(requested, got, expected, strict=True) if ours != right]
    assert not wrong, "these (knob, prompt) differ"
    assert (stats.num_accepted_tokens > 0) == (drafts is not None), (
        "drafts that are never accepted prove little"
    )
    if not short:
        assert stats.preemptions == 0
    elif all(window is None for window in read_model(pair.target).windows):
        assert stats.preemptions > 0  # sliding layers hold little: sequences rarely grow


@pytest.mark.parametrize("pair", PAIRS if WHOLE else ["qwen3"], indirect=True)
@pytest.mark.parametrize("engine", ENGINES if WHOLE else ["planned ahead, forced preemption"])
def test_no_token_changes_with_random_drafts_and_trimming(
    pair: Pair, reference: Reference, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight at once, every setting, log probabilities among them."""
    monkeypatch.setattr("manta.cluster.scheduler.step_controller.DraftLengthPolicy", RandomPolicy)
    requested = [(name, i) for number, name in enumerate(KNOBS) for i in range(number % 2, 8, 2)]
    few = pair.few_pages if "preemption" in engine else {}
    with pair.open(speculate=True, adaptive=True, **ENGINES[engine], **few) as llm:
        got = tokens_of(
            llm, [prompts(8)[i] for _, i in requested], [params_of(name, 8)[i] for name, i in requested]
        )
        assert 0 < llm.stats().num_accepted_tokens < llm.stats().num_draft_tokens
    assert got == reference.of(requested)


def test_limits_on_drafts_top_k_of_one_and_seeds_give_the_tokens_that_they_say(
    pair: Pair, reference: Reference
) -> None:
    """In one engine: top-k of 1 is greedy at any temperature, and a seed determines the output."""
    batch = [{"prompt_token_ids": prompt} for prompt in prompts(3)]
    with pair.open(speculate=True) as llm:
        for bound in (1, 4):
            for name in ("greedy", "plain"):
                got = llm.generate(batch, params_of(name, 3), max_draft_tokens=bound, trace=True)
                assert [output.outputs[0].token_ids for output in got] == reference.first(name, 3), name
                steps = [step for output in got for step in output.metrics.trace or ()]
                assert max(step.num_drafted for step in steps) == bound
        assert llm.stats().num_accepted_tokens > 0
        params = [replace(p, temperature=1.0, top_k=1) for p in params_of("greedy", 8)]
        assert tokens_of(llm, prompts(8), params) == reference.first("greedy", 8)
        seeded = [SamplingParams(seed=s, max_tokens=32, ignore_eos=True) for s in (1, 1, 2)]
        same, again, other = tokens_of(llm, [prompts(8)[3]] * 3, seeded)
        assert same == again != other


@pytest.mark.parametrize("pair", dict.fromkeys((*WHOLE_PAIRS, "gemma3", STATES)), indirect=True)
def test_prefix_hits_change_no_token_and_keep_the_drafters_context(pair: Pair) -> None:
    shared = prompts(8)[7]
    batch = [shared + tail for tail in ([5, 6], [9], [], [5, 6, 7, 8, 9])]
    params = params_of("plain", len(batch))
    with pair.open(speculate=False, enable_prefix_caching=False) as plain:
        expected = tokens_of(plain, batch, params)
    with pair.open(speculate=True) as llm:
        cold = llm.generate([{"prompt_token_ids": p} for p in batch], params)
        warm = llm.generate([{"prompt_token_ids": p} for p in batch], params)
    assert [o.outputs[0].token_ids for o in cold] == expected
    assert [o.outputs[0].token_ids for o in warm] == expected
    assert all(o.metrics.num_cached_tokens > 0 for o in warm)
    # The drafter sees the same context after a hit, so it must propose, and win, exactly as before.
    assert [o.metrics.acceptance_histogram for o in warm] == [o.metrics.acceptance_histogram for o in cold]
