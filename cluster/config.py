"""Engine settings: read once, frozen, passed down.

One dataclass for the engine and one for speculation, with vLLM's names where vLLM has the setting. An unknown
key is an error that proposes the nearest known one. Values that can be derived are not settings. Flags are
generated from the fields (`jobs/common/engine_flags.py`): `--help` shows the first sentence of a field's
entry in `Attributes:`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeVar, cast, get_args

from .errors import ConfigError, did_you_mean
from .flag import NO_FLAG, FilePath, Flag, Size, folder_or
from .vllm_settings import accept, accept_speculation

DType = Literal["auto", "float32", "bfloat16", "float16"]
DeviceKind = Literal["auto", "cpu", "cuda"]
Policy = Literal["fcfs", "priority"]
AttentionBackend = Literal["auto", "torch", "compiled", "triton", "flash_attn"]
DrafterPlacement = Literal["colocated", "split", "shared"]
DraftMethod = Literal["dflash", "eagle3", "mtp", "ngram", "suffix"]
LoadFormat = Literal["auto", "dummy"]
Quantization = Literal["fp8", "int8", "int4"]  # at load
# With the names of formats in which checkpoints are stored, as vLLM's flag has them.
AnyQuantization = Literal[
    "fp8", "int8", "int4", "awq", "gptq", "compressed-tensors", "modelopt", "auto-round", "mxfp4", "gguf"
]
KVCacheDType = Literal["auto", "fp8", "fp8_e4m3"]

T = TypeVar("T")
MAX_TREE_SIZE = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Settings of speculative decoding.

    Attributes:
        model: folder, GGUF file or hub id of the drafter checkpoint: DFlash's in z-lab's or Speculators'
            format, EAGLE-3's in Speculators' or SGLang's; with "mtp" an assistant of Gemma 4. None with
            "ngram", "suffix" and other targets' "mtp", which need none.
        method: "dflash" drafts a block in one pass; "eagle3" a chain with a pass per token, and so does "mtp"
            with the layer for multi-token prediction of the target's checkpoint (Qwen3.5, Qwen3-Next,
            DeepSeek-V3, GLM-4.5, MiMo-V2) or with Gemma 4's assistant (`model`); "suffix" and "ngram" copy
            what followed the same tokens earlier in the sequence, without a pass. "suffix" takes the longest
            match and verifies drafts by their chance; on a GPU its steps do not run ahead, as those of
            "ngram" do.
        num_speculative_tokens: drafts per step. With "dflash" at most block size - 1, which is the default
            (SGLang counts one more); by default 5 with "eagle3", 3 with "mtp", 8 with "ngram" and 16 with
            "suffix".
        tree_width: most alternatives for a draft that are verified in one step, as branches of a tree
            (SGLang's speculative_eagle_topk); 1 verifies chains. With "dflash". Targets with recurrent states
            keep chains.
        tree_size: most drafts of a request's tree (SGLang's speculative_num_draft_tokens, less one), of which
            at most `num_speculative_tokens`, the default, are accepted.
        placement: "colocated" runs the drafter in the target's processes; "split" in an actor of its own,
            so that its death only costs drafts; "shared" in one actor for all engines on the node with the
            same target, drafter and dtype. A shared drafter serves the engines in turn and exits when no
            engine uses it.
        adaptive: draft fewer tokens, or none, where that is measured to be faster; False drafts
            `num_speculative_tokens` in every step.
        revision: branch, tag or commit of the drafter on the hub.
        hf_overrides: other values for keys of the drafter's config.json.
        input_embedding_scale: factor of the embedding rows that the drafter reads. None: the value in its
            config.json, or else the target's own scale. A wrong value costs acceptance, but changes no token.
        draft_window: tokens of context that the drafter's attention reads; 0: all. By default all, unless
            reading them would take over 5 % of what the target reads for a row: beyond 4096 tokens, next to
            targets that read little. Costs acceptance if the drafter uses what is further back, saves time
            and K/V pages, and changes no token.
        quantization: quantization of the drafter's weights, never inherited from the engine's; values as
            there. It changes no token.
        prompt_lookup_max: with "ngram", the longest n-gram that is looked up; by default 4.
        prompt_lookup_min: with "ngram", the shortest n-gram that is looked up; by default 2. Shorter ones
            match more often and are right less often.
        suffix_drafts: with a model or "mtp", also draft by "suffix" in each step, and verify for each request
            the drafts that are expected to be accepted most, or both as branches of its tree (`tree_width`).
            With a colocated drafter; on a GPU steps then do not run ahead.
        suffix_decoding_max_cached_requests: answers of earlier requests that suffix drafts are copied from,
            in addition to the request's own tokens; 0 for none. Shared between requests with the same
            `cache_salt`, as prefixes are. Costs about 0.6 KB of memory per token.
    """

    model: str | None = None
    method: DraftMethod = "dflash"
    num_speculative_tokens: int | None = None
    tree_width: int = 1
    tree_size: int | None = None
    placement: DrafterPlacement = "colocated"
    adaptive: bool = True
    revision: str | None = None
    hf_overrides: Mapping[str, Any] | None = None  # Any: JSON
    input_embedding_scale: float | None = None
    draft_window: int | None = None
    quantization: AnyQuantization | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    suffix_drafts: bool = False
    suffix_decoding_max_cached_requests: int = 0

    def __post_init__(self) -> None:
        _is_mapping("speculative_config.hf_overrides", self.hf_overrides, "{block_size: 8}")
        one_of("speculative_config.method", self.method, get_args(DraftMethod))
        one_of("speculative_config.placement", self.placement, get_args(DrafterPlacement))
        one_of("speculative_config.quantization", self.quantization, (None, *get_args(AnyQuantization)))
        _positive_integer("speculative_config.num_speculative_tokens", self.num_speculative_tokens)
        _positive_integer("speculative_config.tree_width", self.tree_width)
        _positive_integer("speculative_config.tree_size", self.tree_size)
        _positive("speculative_config.input_embedding_scale", self.input_embedding_scale)
        for name in ("prompt_lookup_max", "prompt_lookup_min"):
            _positive_integer(f"speculative_config.{name}", getattr(self, name))
        for name in ("suffix_decoding_max_cached_requests", "draft_window"):
            if (value := getattr(self, name)) is not None:
                _integer_from(0, f"speculative_config.{name}", value)
        self._check_method()

    def _check_tree(self) -> None:
        if self.tree_size is not None and not (self.tree_width > 1 and self.tree_size <= MAX_TREE_SIZE):
            raise ConfigError(
                f"speculative_config.tree_size={self.tree_size} needs a tree_width of at least 2, and is at "
                f"most {MAX_TREE_SIZE}. Set both, or remove it.",
                param="speculative_config.tree_size",
            )

    def longest_path(self, num_drafts: int) -> int:
        """Return so many drafts, or as many as a tree has nodes if these are fewer."""
        return num_drafts if self.tree_size is None else min(num_drafts, self.tree_size)

    @property
    def has_model(self) -> bool:
        """Whether the method drafts with a model of its own."""
        return self.method in ("dflash", "eagle3") or self.model is not None

    @property
    def copies_suffixes(self) -> bool:
        """Whether drafts are made by suffix decoding, alone or besides a model's."""
        return self.method == "suffix" or self.suffix_drafts

    @property
    def drafter(self) -> str:
        return self.model or self.method

    @property
    def lookup_lengths(self) -> tuple[int, int]:
        minimum, maximum = self.prompt_lookup_min, self.prompt_lookup_max
        if maximum is None:
            maximum = max(_LOOKUP_MAX, minimum or 0)
        return (min(_LOOKUP_MIN, maximum) if minimum is None else minimum), maximum

    def _check_method(self) -> None:
        """Raise ConfigError if a setting does not apply to this method, or is missing for it."""
        minimum, maximum = self.lookup_lengths
        if minimum > maximum:
            raise ConfigError(
                f"speculative_config.prompt_lookup_min={minimum} is more than prompt_lookup_max={maximum}. "
                f"Set it to at most {maximum}.",
                param="speculative_config.prompt_lookup_min",
            )
        if self.has_model and self.model is None:
            raise ConfigError(
                f'speculative_config.model is missing: method="{self.method}" drafts with a model. Give its '
                'folder, GGUF file or hub id, or set method="suffix", which needs none.',
                param="speculative_config.model",
            )
        is_assistant = self.method == "mtp" and self.model is not None
        for name in _NOT_WITH["eagle3" if is_assistant else self.method]:
            if (value := getattr(self, name)) not in (None, False, 0, _DEFAULTS.get(name)):
                raise ConfigError(
                    f'speculative_config.{name}={value!r} is not supported with method="{self.method}". '
                    "Remove it, or choose another method.",
                    param=f"speculative_config.{name}",
                )
        if self.suffix_drafts and self.placement != "colocated":
            raise ConfigError(
                f'speculative_config.suffix_drafts is not supported with placement="{self.placement}". Set '
                'placement="colocated", or remove suffix_drafts.',
                param="speculative_config.suffix_drafts",
            )
        self._check_tree()
        if self.suffix_decoding_max_cached_requests and not self.copies_suffixes:
            raise ConfigError(
                "speculative_config.suffix_decoding_max_cached_requests has no use without suffix decoding. "
                'Set method="suffix" or suffix_drafts, or remove it.',
                param="speculative_config.suffix_decoding_max_cached_requests",
            )


# Defaults of `prompt_lookup_min` and `prompt_lookup_max`.
_LOOKUP_MIN, _LOOKUP_MAX = 2, 4
_LOOKUP = ("prompt_lookup_max", "prompt_lookup_min")
_DEFAULTS = {"placement": "colocated", "tree_width": 1}
_TREES = ("tree_width", "tree_size")
_OF_MODELS = ("model", "placement", "revision", "hf_overrides", "input_embedding_scale", "quantization")
# Settings that do not apply to a method; those of `_DEFAULTS` may only have their defaults there.
_NOT_WITH: Mapping[DraftMethod, tuple[str, ...]] = {
    "dflash": _LOOKUP,
    "eagle3": (*_LOOKUP, *_TREES, "placement", "input_embedding_scale"),
    "mtp": (*_OF_MODELS, *_LOOKUP, *_TREES),
    "ngram": (*_OF_MODELS, *_TREES, "draft_window", "suffix_drafts"),
    "suffix": (*_OF_MODELS, *_LOOKUP, *_TREES, "draft_window", "suffix_drafts"),
}


StructuredOutputsBackend = Literal["auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer"]
# Keys of vLLM's `structured_outputs_config` that have no effect while they are not set.
_ELSEWHERE = {
    "reasoning_parser": "give reasoning_parser as a setting of its own.",
    "reasoning_parser_plugin": "reasoning is read by the formats of reasoning_parser. Leave it out.",
    "enable_in_reasoning": "reasoning is never constrained. Leave it out.",
    "disable_fallback": "there is one backend, and nothing to fall back to. Leave it out.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsConfig:
    """How answers are constrained, with vLLM's names.

    Attributes:
        backend: one of vLLM's; all mean llguidance, which is the only one here.
        disable_any_whitespace: JSON of schemas is compact, whatever a request says.
        disable_additional_properties: objects whose schemas name properties, and do not mention others, have
            no others.
    """

    backend: StructuredOutputsBackend = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False

    def __post_init__(self) -> None:
        one_of("structured_outputs_config.backend", self.backend, get_args(StructuredOutputsBackend))
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            one_of(f"structured_outputs_config.{name}", getattr(self, name), (True, False))

    @classmethod
    def of(cls, settings: Mapping[str, Any] | None) -> StructuredOutputsConfig:  # Any: JSON
        """Raises ConfigError for an unknown key, and for one of vLLM's that would have an effect there."""
        known = dict(settings or {})
        for name, remedy in _ELSEWHERE.items():
            if known.pop(name, None):
                field = f"structured_outputs_config.{name}"
                raise ConfigError(f"{field} is not supported: {remedy}", param=field)
        return from_mapping(cls, known, "structured_outputs_config.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine: a target, optionally a drafter, and how they run.

    Attributes:
        model: target checkpoint: folder, GGUF file, Hugging Face id, or a name in `manta models list`.
        revision: branch, tag or commit of the target on the hub, which also applies to the tokenizer; the
            newest by default.
        download_dir: folder for snapshots from the hub; the hub's own cache (HF_HOME) by default.
        tokenizer: folder, GGUF file or Hugging Face id of the tokenizer; the target's by default.
        chat_template: file with a Jinja template that replaces the tokenizer's own.
        default_chat_template_kwargs: variables for the chat template that a request does not set:
            '{"enable_thinking": false}'.
        structured_outputs_config: how answers are constrained, as vLLM's: '{"disable_any_whitespace": true}'
            makes JSON compact, "disable_additional_properties" closes objects that name their properties.
        trust_request_chat_template: accept chat templates in requests; they are code, and can use up memory.
            The number of steps of a template is bounded, its memory is not.
        split_special_tokens: encode special tokens that messages contain as text, so that no user can forge a
            role. This covers messages, tools and documents: only the chat template's special tokens are
            control tokens. Prompts that are not conversations are unchanged. Costs a second tokenizer in
            memory.
        skip_tokenizer_init: work with token ids only, without text input or output.
        load_format: "auto" reads the checkpoints' weights; "dummy" makes random weights of the right shapes
            instead. Dummy weights of target and drafter are created on their device, and are the same on all
            ranks and in every start. The output is noise: for trying shapes, memory and speed.
        hf_overrides: other values for keys of the target's config.json: '{"num_hidden_layers": 4}'. Objects
            are merged, anything else is replaced. A smaller num_hidden_layers keeps the first entries of
            per-layer lists.
        speculative_config: how tokens are proposed; None decodes plainly.
        dtype: data type of weights, activations and, without `kv_cache_dtype`, K/V. "auto" takes the
            checkpoint's on a GPU; on a CPU bfloat16 where that is native and exact (a row's bits do not
            depend on its batch), else float32.
        device: where the models run. "auto" takes CUDA if there is a device.
        attention_backend: kernels of a step; "auto" takes triton on a GPU where it is installed (flash_attn
            if that package supports model and page_size; not with batch_invariant), compiled on a CPU where
            it runs, else torch. "triton" runs fused kernels and CUDA graphs; "flash_attn" the same with that
            package's kernel for prompts (version 2 needs a page_size of 256); "compiled" a whole pass in one
            call, in bfloat16 on a CPU with instructions for it; "torch" PyTorch's own kernels, driven from
            the host.
        quantization: quantizes the target's weights at load, or names the format in which its checkpoint is
            stored; outputs are the quantized target's, with and without drafts. "fp8", on GPUs: e4m3 with a
            scale per row, half of the bytes of bf16. "int8" and "int4", on GPUs, and on CPUs in bfloat16:
            integers with a scale per 32 inputs, 8.25 and 4.5 bits per weight (int4 on CPUs with an offset,
            too: 5); not for checkpoints that are quantized already. Embedding, routers, experts and, but for
            integers on CPUs (8 bits), the head are not quantized. The name of a published format (awq, gptq,
            compressed-tensors, modelopt, fp8, ...) needs a checkpoint that is stored so, and changes nothing:
            how it is stored is read from the checkpoint.
        kv_cache_dtype: data type of stored K/V, of the drafter's as well: "auto" is `dtype`; "fp8" (or
            "fp8_e4m3") rounds them to e4m3, by the scales of the target's checkpoint if it has any: the same
            memory holds twice the tokens and attention reads half the bytes. Outputs are those of the target
            with such K/V, with drafts or without. Not with the kernels "compiled" and "flash_attn".
        batch_invariant: give a row the same bits in any batch; refused where that is impossible. Speculation
            and other requests then change no token in half precision either. Checked at start. On a GPU a
            product reads its weights once per 64 rows, for prompts as well.
        tensor_parallel_size: ranks over which the target is sharded; more than 1 runs under Ray.
        max_model_len: longest sequence in tokens; the checkpoint's limit by default. Bounds the size of page
            tables.
        max_num_seqs: most requests that run at once. Each costs a slot of device memory.
        max_num_batched_tokens: most rows in one step; by default 8,192 on an H100 or newer with at least 70
            GiB, else 2,048. Bounds activation memory and a step's duration.
        enable_chunked_prefill: split long prompts over steps. False computes a prompt in a single step (it
            must fit the token budget).
        enable_prefix_caching: reuse the pages of earlier requests for prompts with the same beginning.
        kv_tier_path: folder for K/V pages that leave memory, of the drafter's context as well. Prompts that
            begin alike are then read instead of computed, also after a restart and by other servers of this
            user; outputs are the same. "auto", the default of `manta serve`: on a CPU `kv` in Manta's cache
            folder, where possible; "none": no files. They are users' text in another form, closed to other
            users. `manta kv-tier clear` deletes them.
        kv_tier_bytes: largest size of that folder, of all models together; with "auto" at most 5 % of the
            free disk.
        kv_tier_host_bytes: host memory of each rank for such pages, above the folder or alone; none by
            default. Taken at the start, pinned for a GPU.
        page_size: tokens per K/V page; by default 64 on a GPU (256 with flash_attn) and 16 on a CPU. Larger
            pages are read faster, waste more at the ends of sequences, and are shared by fewer prompts.
        kv_cache_memory_bytes: memory of a rank's K/V pools and recurrent states together; derived by default.
        gpu_memory_utilization: share of a GPU's memory that the engine may use.
        num_pages: number of K/V pages in each pool; overrides what memory allows. For tests and fair
            comparisons.
        num_states: number of recurrent states, for targets with such layers. Each running request uses one,
            the others hold prefixes; by default two for each of max_num_seqs, within half of the memory.
        scheduling_policy: which request runs first: "fcfs", or "priority" (Request.priority, lower first).
        async_scheduling: plan the next step while one is computed; by default on a GPU and with workers in
            processes of their own (a server's, tensor parallelism), which would otherwise idle during host
            work. A sequence that ends costs one more step.
        max_num_queued_reqs: refuse requests beyond this many waiting ones, with a retryable error; no limit
            by default. A request that arrives between two steps and will find a free slot does not count.
        num_threads: threads of each CPU worker; by default an even share of the cores.
        seed: makes requests without a seed reproducible; by default their seeds are random.
    """

    model: Annotated[str, Flag("-m")]
    revision: str | None = None
    download_dir: str | None = None
    tokenizer: str | None = None
    chat_template: FilePath | None = None
    default_chat_template_kwargs: Mapping[str, Any] | None = None
    structured_outputs_config: Mapping[str, Any] | None = None
    trust_request_chat_template: bool = False
    split_special_tokens: bool = False
    skip_tokenizer_init: Annotated[bool, NO_FLAG] = False
    load_format: LoadFormat = "auto"
    hf_overrides: Mapping[str, Any] | None = None  # Any: JSON
    speculative_config: Annotated[SpeculativeConfig | None, NO_FLAG] = (
        None  # its flags: `jobs/common/engine_flags.py`
    )
    dtype: DType = "auto"
    device: DeviceKind = "auto"
    attention_backend: AttentionBackend = "auto"
    quantization: AnyQuantization | None = None
    kv_cache_dtype: KVCacheDType = "auto"
    batch_invariant: bool = False
    tensor_parallel_size: Annotated[int, Flag("-tp")] = 1
    max_model_len: Size | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: Size | None = None
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    kv_tier_path: Annotated[str | None, folder_or("auto", "none")] = None
    kv_tier_bytes: Size = 4 * 2**30
    kv_tier_host_bytes: Size | None = None
    page_size: Annotated[int | None, Flag("--block-size --page-size")] = None
    kv_cache_memory_bytes: Size | None = None
    gpu_memory_utilization: float = 0.9
    num_pages: Annotated[int | None, Flag("--num-gpu-blocks-override --num-pages")] = None
    num_states: int | None = None
    scheduling_policy: Policy = "fcfs"
    async_scheduling: bool | None = None
    max_num_queued_reqs: int | None = None
    num_threads: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.kv_tier_path in ("none", ""):
            object.__setattr__(self, "kv_tier_path", None)
        one_of("dtype", self.dtype, get_args(DType))
        one_of("device", self.device, get_args(DeviceKind))
        one_of("attention_backend", self.attention_backend, get_args(AttentionBackend))
        one_of("scheduling_policy", self.scheduling_policy, get_args(Policy))
        one_of("load_format", self.load_format, get_args(LoadFormat))
        one_of("quantization", self.quantization, (None, *get_args(AnyQuantization)))
        one_of("kv_cache_dtype", self.kv_cache_dtype, get_args(KVCacheDType))
        for name in (
            "tensor_parallel_size",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "page_size",
            "kv_cache_memory_bytes",
            "kv_tier_bytes",
            "kv_tier_host_bytes",
            "num_pages",
            "num_states",
            "num_threads",
        ):
            _positive_integer(name, getattr(self, name))
        example = "{enable_thinking: false}"
        _is_mapping("default_chat_template_kwargs", self.default_chat_template_kwargs, example)
        example = "{disable_any_whitespace: true}"
        _is_mapping("structured_outputs_config", self.structured_outputs_config, example)
        StructuredOutputsConfig.of(self.structured_outputs_config)
        _is_mapping("hf_overrides", self.hf_overrides, "{num_hidden_layers: 4}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"gpu_memory_utilization={self.gpu_memory_utilization!r} must lie in (0, 1].",
                param="gpu_memory_utilization",
            )

    @property
    def needs_ray(self) -> bool:
        spec = self.speculative_config
        return self.tensor_parallel_size > 1 or (spec is not None and spec.placement != "colocated")

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> EngineConfig:  # Any: values come from YAML or flags.
        """Create a config from YAML or keyword arguments; `speculative_config` may be a mapping."""
        known = accept(settings)
        spec = known.get("speculative_config")
        if isinstance(spec, Mapping):
            known["speculative_config"] = from_mapping(
                SpeculativeConfig, accept_speculation(cast(Mapping[str, Any], spec)), "speculative_config."
            )
        return from_mapping(cls, known)


def from_mapping(cls: type[T], settings: Mapping[str, Any], prefix: str = "") -> T:
    """Create dataclass `cls` from a mapping. Raises ConfigError that names an unknown or missing key."""
    names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    for key in settings:
        if key not in names:
            hint = did_you_mean(str(key), names, prefix=prefix)
            raise ConfigError(f"Unknown setting {prefix}{key}. {hint}", param=f"{prefix}{key}")
    try:
        return cls(**settings)
    except TypeError as error:
        raise ConfigError(
            f"{prefix or 'engine settings'}: {error}.", param=prefix.rstrip(".") or None
        ) from None


def at_load(quantization: AnyQuantization | None) -> Quantization | None:
    """Return how weights are quantized at load; None if the setting only names the checkpoint's format."""
    return cast(Quantization, quantization) if quantization in get_args(Quantization) else None


def one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise ConfigError unless a setting has an allowed value."""
    if value not in allowed:
        choices = ", ".join(map(str, allowed))
        raise ConfigError(f"{name}={value!r} is not known. Choose one of: {choices}.", param=name)


def _is_mapping(name: str, value: object, example: str) -> None:
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{name}={value!r} must be a mapping, as {example}.", param=name)


def _positive(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 < value < float("inf"):
        raise ConfigError(f"{name}={value!r} must be a positive number.", param=name)


def _positive_integer(name: str, value: object) -> None:
    if value is not None:
        _integer_from(1, name, value)


def _integer_from(minimum: int, name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(f"{name}={value!r} must be an integer of at least {minimum}.", param=name)
