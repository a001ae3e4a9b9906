"""The losslessness grid: pairs of models, engines, and drafts; a cell is one of each.

`PAIRS` has a row per pair, with its cells in the short form. `cells(whole=True)` are those of `make grid`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from manta import LLM
from manta.actors.targets.families import read_model

from support.checkpoints.drafters import eagle3_speculators, write_drafter
from support.checkpoints.families import FAMILIES, GPT_OSS_YARN
from support.checkpoints.mtp_targets import make_assistant, make_mtp_target
from support.checkpoints.tiny import make_tiny_drafter, make_tiny_target
from support.oracles.fp8_kv_scales import publish_with_kv_scales
from support.oracles.quantized_checkpoints import FORMATS, publish
from support.oracles.sampling_cases import WHOLE, params_of, prompts, tokens_of

ENGINES: dict[str, dict[str, object]] = {
    "as shipped": {},
    "chunks of 16 rows": {"max_num_batched_tokens": 16},
    "whole prompts": {"enable_chunked_prefill": False},
    "forced preemption": {"enable_prefix_caching": False},
    "forced preemption with prefix cache": {},
    "planned ahead, forced preemption": {"async_scheduling": True},
}


class Tree(NamedTuple):
    """The width and the number of nodes of draft trees."""

    width: int
    size: int


Drafts = int | Tree | None  # the length of chains, trees, or plain decoding
LENGTHS = (1, 3, 15)
TREES = (Tree(2, 15), Tree(4, 31))
SHIPPED, CHUNKS, _, PREEMPTED, CACHED, AHEAD = ENGINES
FP32: dict[str, object] = {"dtype": "float32", "num_threads": 1}
EAGER: dict[str, object] = {**FP32, "attention_backend": "torch"}
COMPILED: dict[str, object] = {"dtype": "bfloat16", "attention_backend": "compiled", "num_threads": 2}
BF16: dict[str, object] = {"dtype": "bfloat16", "num_threads": 1}
# What eight sequences run out of while the longest fits, by the page groups of the pools.
_FEW_PAGES = {1: 44, 2: 66, 3: 96}  # pages of 4 tokens; 3 groups: of two K/V geometries, more layers of one
_FEW_PAGES_FOR_TREES = 110


@dataclass(frozen=True)
class PairSpec:
    """How a pair is made, run, and tested.

    Attributes:
        family: of `FAMILIES`.
        how: settings of its engines.
        heads: arguments of `make_tiny_drafter` that are true.
        method: of its drafts: with "mtp" layers of the target draft, or an assistant.
        spec: further keys of its speculative config.
        published: the format in which its models are written, and whether the drafter is, too.
        target: changes of the target's configuration.
        num_mtp_layers: of the target; each makes one draft.
        lengths: numbers of drafts in the whole form.
        has_trees: whether it has cells with trees in the whole form.
        short: cells in the short form.
    """

    family: str
    how: Mapping[str, object] = field(default_factory=lambda: FP32)
    heads: tuple[str, ...] = ()
    method: str = "dflash"
    spec: Mapping[str, object] = field(default_factory=dict)
    published: tuple[str, bool] | None = None
    target: Mapping[str, object] = field(default_factory=dict)
    num_mtp_layers: int = 0
    lengths: tuple[int, ...] = LENGTHS
    has_trees: bool = False
    short: Sequence[tuple[str, Drafts]] = ()

    @property
    def is_compiled(self) -> bool:
        """Whether the CPU's compiled pass runs it, which takes sizes that are multiples of 32."""
        return self.how.get("attention_backend") == "compiled"

    @property
    def in_bf16(self) -> bool:
        return self.how["dtype"] == "bfloat16"


def _families() -> Iterator[tuple[str, PairSpec]]:
    """Yield one pair per family; in the short form each but the first has one cell, in turns of engines."""
    for number, (name, family) in enumerate(FAMILIES.items()):
        turn = (list(ENGINES)[number % len(ENGINES)], LENGTHS[(number + number // len(ENGINES)) % 3])
        yield name, PairSpec(name, short=() if family.composed else [turn])


def _every_engine(turn: int) -> list[tuple[str, Drafts]]:
    """Return cells with every engine, half of them also without drafts, and with every length."""
    drafted = [(engine, LENGTHS[(place + turn) % len(LENGTHS)]) for place, engine in enumerate(ENGINES)]
    return [*drafted, *((engine, None) for engine in list(ENGINES)[turn::2])]


_MTP = PairSpec("qwen3_5", method="mtp", num_mtp_layers=1)
_SUFFIX = {"suffix_decoding_max_cached_requests": 4}  # few, so that answers are dropped
_MIXED = {"suffix_drafts": True, **_SUFFIX}
_SMALL_EXPERTS = {"moe_intermediate_size": 64}

PAIRS: dict[str, PairSpec] = {
    **dict(_families()),
    "qwen3": PairSpec(
        "qwen3", has_trees=True, short=[*_every_engine(0), (SHIPPED, TREES[1]), (AHEAD, TREES[0])]
    ),
    "qwen3 in bf16": PairSpec("qwen3", COMPILED, short=_every_engine(1)),
    "llama in bf16": PairSpec("llama", COMPILED, short=[(AHEAD, 3)]),
    "mistral in bf16": PairSpec("mistral", COMPILED, short=[(SHIPPED, 15)]),
    "gemma3 in bf16": PairSpec(
        "gemma3",
        COMPILED,
        target={"hidden_size": 64},
        has_trees=True,
        short=[(AHEAD, 15), (CHUNKS, TREES[0])],
    ),
    "qwen3 by DFlash2": PairSpec("qwen3", heads=("second",), short=[(CHUNKS, 3), (AHEAD, 15)]),
    "qwen3 by a selector": PairSpec(
        "qwen3", EAGER, heads=("selector",), has_trees=True, short=[(CHUNKS, TREES[0])]
    ),
    # No convolutions, so the compiled pass runs it.
    "qwen3 in bf16 by a selector": PairSpec(
        "qwen3",
        COMPILED,
        heads=("selector",),
        has_trees=True,
        short=[(AHEAD, 15), (PREEMPTED, TREES[1]), (SHIPPED, TREES[0])],
    ),
    "qwen3 by DSpark": PairSpec(
        "qwen3", heads=("dspark",), has_trees=True, short=[(CACHED, 1), (AHEAD, 15), (AHEAD, TREES[1])]
    ),
    "qwen3 in bf16 by DSpark": PairSpec("qwen3", COMPILED, heads=("dspark",), short=[(SHIPPED, 3)]),
    "gemma4 by DSpark": PairSpec("gemma4", heads=("dspark",), short=[(AHEAD, 3)]),
    "gemma4 by DSpark in eager": PairSpec("gemma4", EAGER, heads=("dspark",), short=[(CACHED, 15)]),
    "qwen3 by EAGLE-3": PairSpec("qwen3", method="eagle3", short=[(CACHED, 3)]),
    "qwen3 in bf16 by EAGLE-3": PairSpec("qwen3", COMPILED, method="eagle3", short=[(CHUNKS, 1)]),
    "qwen3_5 by MTP": replace(_MTP, short=[(AHEAD, 3)]),
    "deepseek_v3 by MTP": replace(_MTP, family="deepseek_v3", short=[(CACHED, 3)]),
    "mimo_v2 by MTP": replace(
        _MTP, family="mimo_v2", num_mtp_layers=3, lengths=(1, 3), short=[(AHEAD, 3), (CHUNKS, 1)]
    ),
    "mimo_v2 by MTP in eager": replace(
        _MTP, family="mimo_v2", how=EAGER, num_mtp_layers=3, lengths=(1, 3), short=[(CACHED, 3)]
    ),
    # Packed products between loops.
    "qwen3_5 by MTP in bf16 with int8 weights": replace(
        _MTP, how={**BF16, "quantization": "int8"}, short=[(CHUNKS, 3)]
    ),
    "gemma4 by its assistant": PairSpec("gemma4", method="assistant", short=[(CHUNKS, 3), (CACHED, 3)]),
    "qwen3 with a draft window": PairSpec("qwen3", spec={"draft_window": 20}, short=[(AHEAD, 15)]),
    "qwen3 by n-grams": PairSpec("qwen3", method="ngram", short=[(AHEAD, 3)]),
    "qwen3 by suffixes": PairSpec("qwen3", method="suffix", spec=_SUFFIX, short=[(CACHED, 15)]),
    "qwen3 in bf16 by suffixes": PairSpec(
        "qwen3", COMPILED, method="suffix", spec=_SUFFIX, short=[(AHEAD, 3)]
    ),
    "qwen3 mixed with suffixes": PairSpec(
        "qwen3", spec=_MIXED, has_trees=True, short=[(AHEAD, 15), (CACHED, 3), (SHIPPED, TREES[0])]
    ),
    "qwen3 in bf16 mixed with suffixes": PairSpec("qwen3", COMPILED, spec=_MIXED, short=[(SHIPPED, 15)]),
    "qwen3 in bf16 by a selector mixed with suffixes": PairSpec(
        "qwen3", COMPILED, heads=("selector",), spec=_MIXED, has_trees=True, short=[(SHIPPED, TREES[1])]
    ),
    "qwen3_5 by MTP mixed with suffixes": replace(_MTP, spec=_MIXED, short=[(CACHED, 3)]),
    "qwen3 in bf16 with int8 weights": PairSpec(
        "qwen3", {**COMPILED, "quantization": "int8"}, spec={"quantization": "int8"}, short=[(CACHED, 15)]
    ),
    "qwen3 in bf16 with int4 weights": PairSpec(
        "qwen3",
        {**COMPILED, "quantization": "int4"},
        spec={"quantization": "int4"},
        short=[(CHUNKS, 3), (AHEAD, 15)],
    ),
    # Experts by packed products between loops.
    "qwen3_moe in bf16 with int8 weights": PairSpec(
        "qwen3_moe", {**BF16, "quantization": "int8"}, target=_SMALL_EXPERTS, lengths=(3,)
    ),
    "qwen3_moe in bf16 with int4 weights": PairSpec(
        "qwen3_moe",
        {**BF16, "quantization": "int4"},
        target=_SMALL_EXPERTS,
        lengths=(3,),
        short=[(CHUNKS, 3)],
    ),
    "qwen3_moe in bf16 published as ct_w4a16": PairSpec(
        "qwen3_moe",
        BF16,
        target=_SMALL_EXPERTS,
        published=("ct_w4a16", False),
        lengths=(3,),
        short=[(CACHED, 3)],
    ),
    # Both models in a format: by the compiled pass, which keeps codes, and by PyTorch's operators.
    **{
        f"qwen3 in bf16 published as {name}": PairSpec(
            "qwen3",
            COMPILED,
            published=(name, True),
            lengths=(LENGTHS[place % 3],),
            short={"ct_w4a16": [(CACHED, 15)], "modelopt_nvfp4": [(SHIPPED, 3)]}.get(name, []),
        )
        for place, name in enumerate(FORMATS)
    },
    **{
        f"qwen3 published as {name}": PairSpec(
            "qwen3", EAGER, published=(name, True), lengths=(LENGTHS[place % 3],)
        )
        for place, name in enumerate(FORMATS)
    },
    "qwen3 with FP8 K/V": PairSpec("qwen3", {**FP32, "kv_cache_dtype": "fp8"}, short=[(AHEAD, 15)]),
    "gpt_oss with FP8 K/V": PairSpec("gpt_oss", {**FP32, "kv_cache_dtype": "fp8"}, short=[(CHUNKS, 3)]),
    "deepseek_v3 with FP8 K/V": PairSpec(
        "deepseek_v3", {**FP32, "kv_cache_dtype": "fp8"}, short=[(CACHED, 3)]
    ),
    "qwen3 published with scales of FP8 K/V": PairSpec(
        "qwen3",
        {**EAGER, "kv_cache_dtype": "fp8"},
        published=("scales", False),
        has_trees=True,
        short=[(CACHED, 15), (CHUNKS, TREES[0])],
    ),
}
# Steps run ahead of its recurrent states, and prefixes need them.
PAIRS["qwen3_5"] = replace(PAIRS["qwen3_5"], short=[*PAIRS["qwen3_5"].short, (AHEAD, 15)])
# Trees over sliding layers and latent pages.
PAIRS["gemma3"] = replace(PAIRS["gemma3"], has_trees=True, short=[*PAIRS["gemma3"].short, (AHEAD, TREES[0])])
PAIRS["deepseek_v3"] = replace(
    PAIRS["deepseek_v3"], has_trees=True, short=[*PAIRS["deepseek_v3"].short, (SHIPPED, TREES[0])]
)
PAIRS["deepseek_v3 mixed with suffixes"] = PairSpec(
    "deepseek_v3", spec=_MIXED, has_trees=True, short=[(CHUNKS, TREES[1])]
)


def cells(*, whole: bool = WHOLE) -> list[tuple[str, str, Drafts]]:
    """Return (pair, engine, drafts) of a form of the grid."""
    if not whole:
        return [(name, *cell) for name, pair in PAIRS.items() for cell in pair.short]
    return [
        (name, engine, drafts)
        for name, pair in PAIRS.items()
        for engine in ENGINES
        for drafts in (None, *pair.lengths, *(TREES if pair.has_trees else ()))
    ]


@dataclass(frozen=True)
class Pair:
    """A target and its drafter on disk, and how they are run."""

    spec: PairSpec
    target: Path
    drafter: Path | None

    @property
    def target_key(self) -> tuple[Path, object, object]:
        """What determines the target's tokens."""
        return self.target, self.spec.how.get("quantization"), self.spec.how.get("kv_cache_dtype")

    @cached_property
    def slides(self) -> bool:
        """Whether layers of the target have windows."""
        return any(window is not None for window in read_model(self.target).windows)

    def open(
        self, drafts: Drafts, *, adaptive: bool = False, few_pages: bool = False, **settings: Any
    ) -> LLM:
        """Open an engine. `few_pages`: so few that eight requests preempt one another."""
        if few_pages:
            settings |= self._few_pages(drafts)
        defaults = {"max_num_seqs": 8, "max_model_len": 256, "skip_tokenizer_init": True}
        config = None if drafts is None else self._speculative_config(drafts, adaptive=adaptive)
        return LLM(str(self.target), speculative_config=config, **{**defaults, **self.spec.how, **settings})

    def _speculative_config(self, drafts: Drafts, *, adaptive: bool) -> dict[str, object]:
        method = "mtp" if self.spec.method == "assistant" else self.spec.method
        model = {} if self.drafter is None else {"model": str(self.drafter)}
        if isinstance(drafts, Tree):
            number: dict[str, object] = {"tree_width": drafts.width, "tree_size": drafts.size}
        else:
            number = {"num_speculative_tokens": drafts}
        # Not adaptive: all drafts in every step put most to the test.
        return {"method": method, **model, **self.spec.spec, **number, "adaptive": adaptive}

    def _few_pages(self, drafts: Drafts) -> dict[str, object]:
        if self.spec.is_compiled:  # pages of 16 tokens
            return {"num_pages": 22 if self.slides else 11 if isinstance(drafts, Tree) else 9 + WHOLE}
        model = read_model(self.target)
        states = {} if model.states is None else {"num_states": 10}
        if isinstance(drafts, Tree):
            return {"num_pages": _FEW_PAGES_FOR_TREES, "page_size": 4, **states}
        geometries = {(mixer.num_kv_heads, mixer.head_dim) for mixer in model.attentions}
        windows = self.slides or "draft_window" in self.spec.spec or "second" in self.spec.heads
        groups = (2 if len(geometries) == 1 else 3) if windows else 1
        return {"num_pages": _FEW_PAGES[groups], "page_size": 4, **states}


class Reference:
    """Plain decoding, one request at a time, no prefix cache; each computed once, on demand."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._known: dict[tuple[str, int], list[int]] = {}

    def of(self, requested: Iterable[tuple[str, int]]) -> list[list[int]]:
        """Return the tokens of these (setting, prompt)."""
        requested = list(requested)
        unknown = [each for each in requested if each not in self._known]
        if unknown:
            with self._pair.open(None, enable_prefix_caching=False) as llm:
                for name, i in unknown:
                    (self._known[name, i],) = tokens_of(llm, [prompts(8)[i]], [params_of(name, 8)[i]])
        return [self._known[each] for each in requested]

    def first(self, name: str, count: int) -> list[list[int]]:
        """Return the tokens of a setting and the first prompts."""
        return self.of((name, i) for i in range(count))


class PairMaker:
    """Makes pairs on demand, each model once: pairs with equal targets have one folder."""

    def __init__(self, make_folder: Callable[[str], Path]) -> None:
        self._make_folder = make_folder
        self._pairs: dict[str, Pair] = {}
        self._targets: dict[str, Path] = {}

    def make(self, name: str) -> Pair:
        if name not in self._pairs:
            spec = PAIRS[name]
            target = self._target(spec)
            drafter = self._drafter(spec, target)
            if spec.published is not None and spec.published[1] and drafter is not None:
                drafter = publish(drafter, self._make_folder("published"), spec.published[0])[0]
            self._pairs[name] = Pair(spec, target, drafter)
        return self._pairs[name]

    def _target(self, spec: PairSpec) -> Path:
        key = repr((spec.family, spec.target, spec.num_mtp_layers, spec.is_compiled, spec.published))
        if key not in self._targets:
            self._targets[key] = self._made_target(spec)
        return self._targets[key]

    def _made_target(self, spec: PairSpec) -> Path:
        if spec.published is not None:
            plain = self._target(replace(spec, published=None))
            folder = self._make_folder("published")
            if spec.published[0] == "scales":
                return publish_with_kv_scales(plain, folder)[0]
            return publish(plain, folder, spec.published[0])[0]
        folder = self._make_folder(spec.family) / "target"
        changes = {**spec.target, **({"head_dim": 32} if spec.is_compiled else {})}
        if spec.num_mtp_layers:
            return make_mtp_target(folder, spec.family, seed=5, num_mtp_layers=spec.num_mtp_layers, **changes)
        return make_tiny_target(folder, spec.family, seed=5, **changes)

    def _drafter(self, spec: PairSpec, target: Path) -> Path | None:
        """Where layers of the target slide, the drafter's first one does, too."""
        if spec.method in ("ngram", "suffix", "mtp"):
            return None
        folder, model = self._make_folder("drafter"), read_model(target)
        if spec.method == "assistant":
            return make_assistant(folder, target)
        if spec.method == "eagle3":
            layer = {"head_dim": 32} if spec.is_compiled else None
            return write_drafter(folder, eagle3_speculators(layer=layer))
        slides = any(model.windows) or "second" in spec.heads
        return make_tiny_drafter(
            folder,
            hidden_size=model.hidden_size,
            head_dim=32 if spec.is_compiled else 16,
            sliding_window=20 if slides else None,
            rope_scaling=GPT_OSS_YARN if spec.family == "gpt_oss" else None,  # its drafters turn as it does
            **dict.fromkeys(spec.heads, True),
        )
