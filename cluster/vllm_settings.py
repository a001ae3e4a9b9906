"""vLLM settings with another name here, or none, and the response to each.

Names are those of vLLM's `EngineArgs`, `FrontendArgs` and `SpeculativeConfig` (0.33), except for settings
with the same name here. Flags (`jobs/common/vllm_flags.py`), YAML files, Serve configs and `manta.LLM(...)`
all use this table. A setting with a value that requests nothing, such as `pipeline_parallel_size: 1`, is
silently accepted. One without effect on Manta is dropped with a warning that says why. One that would be
missed later is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .errors import ConfigError, brief

logger = logging.getLogger(__name__)

Kind = Literal["switch", "value", "list"]  # form of the flag: --x, --x VALUE, --x VALUE VALUE


@dataclass(frozen=True, slots=True)
class SettingAnswer:
    """The response to some settings of vLLM.

    Attributes:
        message: a sentence that follows the setting's name.
        switches, values, lists: names, by the form of their flags.
        unasked: values that request nothing, in addition to None and false.
        refused: whether a setting is an error; otherwise it is dropped.
    """

    message: str
    switches: str = ""
    values: str = ""
    lists: str = ""
    unasked: tuple[object, ...] = ()
    refused: bool = False

    def kinds(self) -> dict[str, Kind]:
        """Return the flag's form for each name."""
        groups: tuple[tuple[str, Kind], ...] = (
            (self.switches, "switch"),
            (self.values, "value"),
            (self.lists, "list"),
        )
        return {name: kind for names, kind in groups for name in names.split()}

    def is_set(self, value: object) -> bool:
        if not value or value == "None":
            return False
        return not any(type(value) is type(other) and value == other for other in self.unasked)


SETTINGS = (
    SettingAnswer(
        "has no effect: Manta runs no code from checkpoints; its own code reads families and tokenizers",
        switches="trust_remote_code",
        values="code_revision",
    ),
    SettingAnswer(
        "has no effect: Manta serves text, and loads only a checkpoint's language model",
        switches="language_model_only enable_mm_embeds interleave_mm_strings mm_encoder_only "
        "skip_mm_profiling disable_chunked_mm_input enable_mm_processor_stats disable_mm_preprocessor_cache",
        values="limit_mm_per_prompt media_io_kwargs mm_processor_kwargs mm_processor_cache_gb "
        "mm_processor_cache_type mm_encoder_tp_mode mm_encoder_attn_backend mm_processor_device "
        "mm_shm_cache_max_object_size_mb video_pruning_rate allowed_local_media_path",
        lists="allowed_media_domains",
    ),
    SettingAnswer(
        "has no effect: decoding steps on a GPU are captured as CUDA graphs, with the same outputs; on a CPU "
        "there are none",
        switches="enforce_eager",
        values="compilation_config max_cudagraph_capture_size max_seq_len_to_capture optimization_level "
        "performance_mode",
        lists="cudagraph_capture_sizes",
    ),
    SettingAnswer(
        "has no effect: Manta chooses kernels and how steps are computed (attention_backend selects "
        "among them)",
        switches="disable_custom_all_reduce disable_cascade_attn enable_flashinfer_autotune use_replayssm "
        "enable_mamba_cache_stochastic_rounding kv_sharing_fast_prefill enable_dbo enable_cumem_allocator "
        "use_fp64_gumbel numa_bind",
        values="attention_config kernel_config mamba_config moe_backend linear_backend all2all_backend "
        "mamba_backend gdn_prefill_backend kda_prefill_backend mamba_cache_dtype mamba_ssm_cache_dtype "
        "mamba_block_size mamba_cache_mode ir_op_priority ubatch_size calculate_kv_scales additional_config",
        lists="numa_bind_nodes numa_bind_cpus",
        unasked=("auto",),
    ),
    SettingAnswer(
        "has no effect: prompts and answers are never logged. `manta logs explain ID` shows what happened to "
        "a request; `capture` stores traffic as token ids",
        switches="enable_log_requests enable_log_outputs enable_log_deltas log_error_stack",
        values="max_log_len",
    ),
    SettingAnswer(
        "has no effect: this is always the case",
        switches="disable_log_requests enable_request_id_headers enable_prompt_tokens_details "
        "enable_server_load_tracking enable_offline_docs use_tqdm_on_load",
        unasked=(True,),
    ),
    SettingAnswer(
        "has no effect: there is no access log; log_format chooses the form of the log",
        switches="disable_uvicorn_access_log disable_log_stats aggregate_engine_logging",
        values="uvicorn_log_level disable_access_log_for_endpoints log_config_file",
    ),
    SettingAnswer(
        "has no effect: each replica has one HTTP front; `replicas` adds engines",
        switches="disable_frontend_multiprocessing",
        values="api_server_count renderer_num_workers",
        unasked=(1,),
    ),
    SettingAnswer(
        "has no effect: config.json names the family, which Manta's own decoder runs; tokenizer.json or "
        "tiktoken.model is read",
        values="model_impl config_format hf_config_path model_class_overrides tokenizer_mode",
        unasked=("auto", "hf", "vllm", "fast"),
    ),
    SettingAnswer(
        "has no effect: several ranks run under Ray",
        switches="worker_use_ray ray_workers_use_nsight",
        values="distributed_executor_backend max_parallel_loading_workers distributed_timeout_seconds",
        unasked=("ray",),
    ),
    SettingAnswer(
        "has no effect: routed experts are sharded over the ranks of tensor_parallel_size",
        switches="enable_expert_parallel enable_eplb enable_elastic_ep enable_ep_weight_filter",
        values="eplb_config expert_placement_strategy",
    ),
    SettingAnswer(
        "has no effect: llguidance enforces schemas and grammars",
        values="guided_decoding_backend reasoning_config",
        unasked=("auto", "guidance"),
    ),
    SettingAnswer(
        "has no effect: a preempted request is computed again from its cached beginning",
        values="swap_space preemption_mode",
    ),
    SettingAnswer(
        "has no effect: the scheduler measures what prompt rows cost next to decoding requests",
        switches="scheduler_reserve_full_isl disable_hybrid_kv_cache_manager",
        values="long_prefill_token_threshold max_num_partial_prefills max_long_partial_prefills "
        "max_num_scheduled_tokens prefill_schedule_interval scheduler_delay_factor watermark stream_interval "
        "prefix_caching_hash_algo prefix_cache_retention_interval prefix_match_unit num_scheduler_steps",
        unasked=(1,),
    ),
    SettingAnswer(
        "has no effect: safetensors files are read directly, by each rank its own part",
        values="safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size "
        "model_loader_extra_config pt_load_map_location ignore_patterns",
    ),
    SettingAnswer(
        "has no effect: metrics are those of /metrics, spans those of otlp_traces_endpoint",
        switches="kv_cache_metrics cudagraph_metrics enable_mfu_metrics enable_layerwise_nvtx_tracing "
        "enable_logging_iteration_details jit_monitor_verbose",
        values="show_hidden_metrics_for_version kv_cache_metrics_sample profiler_config jit_monitor_mode",
        lists="collect_detailed_traces",
    ),
    SettingAnswer(
        "has no effect: requests may get up to 20 log probabilities per token",
        values="max_logprobs logprobs_mode",
        unasked=(20, "raw_logprobs"),
    ),
    SettingAnswer(
        "has no effect: messages have the form that the chat template expects, and answers are the "
        "assistant's",
        values="chat_template_content_format response_role",
        unasked=("auto", "assistant"),
    ),
    SettingAnswer(
        "has no effect: pages of allowed_origins may use every method and header; the front bounds headers",
        switches="allow_credentials",
        values="allowed_methods allowed_headers h11_max_incomplete_event_size h11_max_header_count",
    ),
    SettingAnswer(
        "is not served: the ranks of an engine are tensor-parallel (tensor_parallel_size), replicas sets the "
        "number of engines, and Ray places them (`ray start` joins nodes)",
        switches="headless data_parallel_hybrid_lb data_parallel_external_lb",
        values="data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address "
        "pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size "
        "data_parallel_rpc_port data_parallel_backend nnodes node_rank master_addr master_port",
        unasked=(1,),
        refused=True,
    ),
    SettingAnswer(
        "is not served: there are no adapters. Merge the adapter into the weights",
        switches="enable_lora fully_sharded_loras",
        values="max_loras max_lora_rank max_cpu_loras lora_dtype default_mm_loras",
        lists="lora_modules lora_target_modules",
        refused=True,
    ),
    SettingAnswer(
        "is not served: kv_cache_dtype holds for all layers. Leave it out",
        lists="kv_cache_dtype_skip_layers",
        refused=True,
    ),
    SettingAnswer(
        "is not served: weights and K/V stay on the engine's own devices. Leave it out, and see `manta plan` "
        "for what fits",
        values="cpu_offload_gb offload_backend offload_group_size kv_events_config ec_transfer_config",
        lists="cpu_offload_params offload_params",
        unasked=("auto",),
        refused=True,
    ),
    SettingAnswer(
        "is not served: K/V pages that leave the cache can be kept in host memory and in files. Leave it "
        "out, or set kv_tier_host_bytes or kv_tier_path",
        values="kv_offloading_size kv_offloading_backend kv_transfer_config",
        refused=True,
    ),
    SettingAnswer(
        "is not served: Manta generates text. Leave it out",
        values="runner convert task pooler_config",
        unasked=("auto", "generate", "none"),
        refused=True,
    ),
    SettingAnswer(
        "is not served: a checkpoint's windows are part of the model. Lower max_model_len",
        switches="disable_sliding_window",
        refused=True,
    ),
    SettingAnswer(
        "is not served: the server loads no external code. Leave it out",
        values="worker_cls worker_extension_cls scheduler_cls io_processor_plugin tool_parser_plugin "
        "reasoning_parser_plugin tool_server",
        lists="logits_processors middleware",
        unasked=("auto",),
        refused=True,
    ),
    SettingAnswer(
        "is not served: the endpoint is plain HTTP on a port. Put a proxy in front for TLS, a path or a "
        "socket (docs/security.md)",
        switches="enable_ssl_refresh",
        values="ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs ssl_ciphers root_path uds",
        refused=True,
    ),
    SettingAnswer(
        "is not served. Leave it out",
        switches="enable_sleep_mode enable_prompt_embeds enable_return_routed_experts return_sampling_mask "
        "return_tokens_as_token_ids exclude_tools_when_tool_choice_none enable_tokenizer_info_endpoint "
        "enable_force_include_usage disable_fastapi_docs tokens_only enable_fault_tolerance",
        values="weight_transfer_config diffusion_config quantization_config max_num_queued_tokens",
        refused=True,
    ),
    SettingAnswer(
        "would be visible in the process list: set HF_TOKEN in the environment, or run `hf auth login`",
        values="hf_token",
        refused=True,
    ),
    SettingAnswer(
        "is not served: the tokenizer has the target's `revision`. Set `tokenizer` to a folder",
        values="tokenizer_revision",
        refused=True,
    ),
    SettingAnswer("is taken from CUDA_VISIBLE_DEVICES: set that", lists="device_ids", refused=True),
    SettingAnswer(
        "is a key of speculative_config now. Use --spec-model, --spec-tokens or --speculative-config",
        values="speculative_model num_speculative_tokens speculative_draft_tensor_parallel_size "
        "speculative_disable_by_batch_size ngram_prompt_lookup_max ngram_prompt_lookup_min "
        "spec_decoding_acceptance_method",
        refused=True,
    ),
)
_SERVED = "Choose dflash, eagle3, mtp, suffix or ngram"
SPECULATION = (
    SettingAnswer(
        "has no effect: a colocated drafter runs on the target's ranks; `placement` gives it others",
        values="draft_tensor_parallel_size tensor_parallel_size",
        unasked=(1,),
    ),
    SettingAnswer(
        "has no effect: drafts are chosen under the target's own noise, so that sampled tokens agree as "
        "often as they can",
        values="draft_sample_method",
        unasked=("greedy",),
    ),
    SettingAnswer(
        "has no effect: a draft is accepted if it equals the target's own choice, so no token changes",
        values="rejection_sample_method",
        unasked=("standard", "strict"),
    ),
    SettingAnswer(
        "has no effect: the draft length follows the measured benefit, down to none (`adaptive`)",
        values="disable_by_batch_size disable_padded_drafter_batch",
    ),
    SettingAnswer(
        "has no effect: cached pages of a prompt hold the K/V of target and drafter",
        switches="disable_eagle_block_drop disable_lookahead_block_hashes",
    ),
    SettingAnswer(
        "has no effect: drafts are scored by the target's own head, as it is stored",
        values="draft_lm_head_quantization",
    ),
    SettingAnswer(
        "has no effect: the drafter uses the engine's kernels, dtype and maximum length",
        switches="enforce_eager use_local_argmax_reduction index_share_for_mtp_iteration",
        values="moe_backend attention_backend max_model_len draft_load_config",
        unasked=("auto",),
    ),
    SettingAnswer("has no effect: Manta runs no code from checkpoints", values="code_revision"),
    SettingAnswer('has no effect: "dflash" drafts a block in one pass', switches="parallel_drafting"),
    SettingAnswer(
        "is not served: the drafter's K/V have the engine's kv_cache_dtype. Leave it out",
        values="kv_cache_dtype",
        unasked=("auto",),
        refused=True,
    ),
    SettingAnswer(
        "is not served: it would change tokens. Leave it out; `manta simulate node` simulates acceptance "
        "rates",
        values="synthetic_acceptance_rates synthetic_acceptance_length acceptance_method posterior_threshold "
        "posterior_alpha typical_acceptance_sampler_posterior_threshold fly_window_size "
        "fly_entropy_threshold fly_entropy_top_k",
        refused=True,
    ),
    SettingAnswer(
        "has no effect: a suffix automaton matches runs of any length, and drafts are cut by their "
        "calibrated chance",
        values="suffix_decoding_max_tree_depth suffix_decoding_max_spec_factor "
        "suffix_decoding_min_token_prob",
    ),
    SettingAnswer(
        f"belongs to a method that is not served. {_SERVED}",
        switches="use_heterogeneous_vocab",
        values="xpress_topc",
        refused=True,
    ),
    SettingAnswer(
        "has no effect: a Markov head's bias is added to the 64 best candidates of a row",
        values="dspark_draft_topk",
    ),
)


def _max_drafts(schedule: Any) -> int:  # Any: JSON
    """Return the most drafts of a schedule by batch size, [[from, to, drafts], ...]."""
    try:
        return max(int(entry[2]) for entry in schedule)
    except (TypeError, ValueError, IndexError, KeyError):
        raise ConfigError(
            f"speculative_config.num_speculative_tokens_per_batch_size={brief(schedule)} must be a list like "
            "[[1, 4, 7], [5, 64, 3]]: batch sizes from and to, and drafts. Manta measures the best number "
            "itself: num_speculative_tokens alone sets the maximum.",
            param="speculative_config.num_speculative_tokens_per_batch_size",
        ) from None


def _same(value: Any) -> Any:  # Any: whatever the setting takes
    return value


# vLLM's name -> the name here, and the conversion of the value.
RENAMED: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "block_size": ("page_size", _same),
    "num_gpu_blocks_override": ("num_pages", _same),
    "data_parallel_size": ("replicas", _same),
}
RENAMED_SPECULATION: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "num_speculative_tokens_per_batch_size": ("num_speculative_tokens", _max_drafts),
    "enable_adaptive_verification": ("adaptive", _same),
}
_METHODS: Mapping[object, str] = {
    "ngram_gpu": "ngram",
    "dspark": "dflash",
    # vLLM's name of each family's layers; the target's files decide whether it has some
    **{
        f"{family}_mtp": "mtp"
        for family in (
            *("bailing_hybrid", "bailing_hybrid_v3", "deepseek", "dots3_note", "ernie", "exaone4_5"),
            *("exaone_moe", "gemma4", "glm4_moe", "glm4_moe_lite", "glm5_next", "glm_ocr", "hy_v3", "hy_v4"),
            *("inkling", "kimi_k3", "longcat_flash", "mimo", "mimo_v2", "minimax_m3", "nemotron_h"),
            *("pangu_ultra_moe", "qwen3_5", "qwen3_next", "qwen4_exp", "step3p5", "step5"),
        )
    },
}
# Methods of vLLM that are refused, and why.
REFUSED_METHODS = {
    "eagle": "is not served: EAGLE-1 and EAGLE-2 are not; EAGLE-3 is (eagle3)",
    "draft_model": "is not served: Manta drafts with drafters, not with whole language models",
    "medusa": "is not served: Medusa's heads are not",
    "mlp_speculator": "is not served: MLP speculators are not",
    "custom_class": "is not served: Manta loads no external code",
    "extract_hidden_states": "is not served: it drafts nothing. `manta drafter train` reads them itself",
}
# Setting -> vLLM's name of a value -> the name here.
VALUES: Mapping[str, Mapping[object, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "load_format": {"safetensors": "auto", "hf": "auto"},
    "generation_config": {"vllm": "openai"},
    # Names of vLLM's kernels for a format; "fp8" and "gguf" are the same here.
    "quantization": {
        **{"awq_marlin": "awq", "gptq_marlin": "gptq", "auto_round": "auto-round", "inc": "auto-round"},
        **{"modelopt_fp4": "modelopt", "modelopt_mixed": "modelopt", "fbgemm_fp8": "fp8"},
        **{"gpt_oss_mxfp4": "mxfp4"},
    },
    **dict.fromkeys(("method", "spec_method"), _METHODS),
}
ANSWERS: Mapping[str, SettingAnswer] = {name: answer for answer in SETTINGS for name in answer.kinds()}
_SPECULATION_ANSWERS = {name: answer for answer in SPECULATION for name in answer.kinds()}


def accept(settings: Mapping[str, Any]) -> dict[str, Any]:  # Any: plain data, checked by its owner
    """Return settings of engine and server with their names here; others are unchanged.

    Raises:
        ConfigError: a setting of vLLM is refused, or is given under both names.
    """
    return _translate(settings, ANSWERS, RENAMED, "")


def accept_speculation(config: Mapping[str, Any]) -> dict[str, Any]:  # Any: as above
    """Return settings of `speculative_config` with their names here."""
    check_method(config.get("method"), "speculative_config.method")
    return _translate(config, _SPECULATION_ANSWERS, RENAMED_SPECULATION, "speculative_config.")


def check_method(method: object, shown_as: str) -> None:
    """Raise ConfigError, which says why, for a method of vLLM that is not served."""
    if isinstance(method, str) and method in REFUSED_METHODS:
        raise ConfigError(f"{shown_as}={method} {REFUSED_METHODS[method]}. {_SERVED}.", param=shown_as)


def answer(name: str, shown_as: str, value: object, answers: Mapping[str, SettingAnswer] = ANSWERS) -> None:
    """Log the response to a setting of vLLM that does not exist here, or raise it as a ConfigError."""
    entry = answers[name]
    if not entry.is_set(value):
        return
    if entry.refused:
        raise ConfigError(f"{shown_as} {entry.message}.", param=shown_as)
    logger.warning("%s %s.", shown_as, entry.message)


def _translate(
    settings: Mapping[str, Any],
    answers: Mapping[str, SettingAnswer],
    renamed: Mapping[str, tuple[str, Callable[[Any], Any]]],
    prefix: str,
) -> dict[str, Any]:
    translated: dict[str, Any] = {}
    for name, value in settings.items():
        if name in answers:
            answer(name, prefix + name, value, answers)
        elif name not in renamed:
            translated[name] = _translate_value(name, value)
        elif value is not None:
            own, convert = renamed[name]
            if settings.get(own) is not None:
                raise ConfigError(
                    f"{prefix}{name} is vLLM's name of {prefix}{own}, which is also set. Remove one of them.",
                    param=prefix + name,
                )
            translated[own] = convert(value)
    return translated


def _translate_value(name: str, value: Any) -> Any:
    words = VALUES.get(name)
    return words.get(value, value) if words and isinstance(value, str) else value
