"""The flags that commands share, as typer options: engine settings and sampling parameters.

A command declared with `@engine_options` receives them as `settings`, a flat mapping (see `settings.py`);
with `@sampling_options` as `sampling`, the parameters that were given. Names are vLLM's where vLLM has them.
Imports neither torch nor Ray: `--help` starts at once.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..cluster.config import (
    AttentionBackend,
    DeviceKind,
    DraftMethod,
    DType,
    LoadFormat,
    Policy,
    Quantization,
)
from .settings import merge_settings

ENGINE = "Engine"
SPECULATION = "Speculation"
SAMPLING = "Sampling"
_SIZES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}

Command = Callable[..., None]

# The target as a command's own argument, beside `--model`.
Model = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", show_default=False, help="Target checkpoint (or --model).")
]


def parse_size(text: str | int) -> int:
    """A whole number, perhaps with k, m, g (powers of 1000) or K, M, G (powers of 1024): 32k, 1.5G."""
    text = str(text).strip()
    factor = _SIZES.get(text[-1:], 1)
    try:
        return int(float(text[:-1]) * factor) if factor > 1 else int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number; write 4096, 32k or 1G.") from None


def parse_object(text: str | dict[str, Any]) -> dict[str, Any]:
    """A JSON object."""
    try:
        found = json.loads(text) if isinstance(text, str) else text
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{text!r} is not a JSON object; write it like '{{\"key\": true}}'.")
    return found


def _option(kind: Any, *names: str, panel: str, help: str, **more: Any) -> Any:  # Any: a typing form
    return Annotated[kind | None, typer.Option(*names, help=help, rich_help_panel=panel, **more)]


def _engine(kind: Any, *names: str, help: str, **more: Any) -> Any:
    return _option(kind, *names, panel=ENGINE, help=help, **more)


def _size(*names: str, help: str) -> Any:
    return _engine(int, *names, help=help, parser=parse_size, metavar="SIZE")


# Setting -> option. None always means "not given", so that YAML and the engine's own defaults hold.
ENGINE_OPTIONS: Mapping[str, Any] = {
    "config": _engine(
        Path,
        "--config",
        help="YAML: a ray_config.yaml (applications[0].args), or flag names. Flags win. Without it and "
        "--model, ./ray_config.yaml is read.",
    ),
    "model": _engine(str, "--model", "-m", help="Target checkpoint: folder or Hugging Face id."),
    "revision": _engine(str, "--revision", help="Branch, tag or commit of the target on the hub."),
    "download_dir": _engine(
        str, "--download-dir", help="Where snapshots from the hub are kept; its own cache if absent."
    ),
    "tokenizer": _engine(str, "--tokenizer", help="Folder or id; the target's if absent."),
    "chat_template": _engine(
        str,
        "--chat-template",
        parser=lambda path: str(Path(path).absolute()),
        metavar="FILE",
        help="A Jinja template in place of the tokenizer's own.",
    ),
    "default_chat_template_kwargs": _engine(
        dict,
        "--default-chat-template-kwargs",
        parser=parse_object,
        metavar="JSON",
        help="Variables for the template where a request sets none: '{\"enable_thinking\": false}'.",
    ),
    "trust_request_chat_template": _engine(
        bool,
        "--trust-request-chat-template/--no-trust-request-chat-template",
        help="Take templates from requests; they are code, and can use up memory.",
    ),
    "split_special_tokens": _engine(
        bool,
        "--split-special-tokens/--no-split-special-tokens",
        help="Encode special tokens that messages contain as text, so that no user can forge a role.",
    ),
    "load_format": _engine(
        LoadFormat, "--load-format", help="dummy: random weights of the right shapes; none are read."
    ),
    "hf_overrides": _engine(
        dict,
        "--hf-overrides",
        parser=parse_object,
        metavar="JSON",
        help="Other values for keys of the target's config.json: '{\"num_hidden_layers\": 4}'.",
    ),
    "dtype": _engine(DType, "--dtype", help="Of weights and K/V."),
    "device": _engine(DeviceKind, "--device", help="Where the models run."),
    "attention_backend": _engine(
        AttentionBackend,
        "--attention-backend",
        help="Kernels of a step; auto is triton on a GPU, compiled on a CPU that can.",
    ),
    "quantization": _engine(
        Quantization,
        "--quantization",
        help="fp8: the target's weights in eight bits, on GPUs; outputs are the quantised target's.",
    ),
    "batch_invariant": _engine(
        bool,
        "--batch-invariant/--no-batch-invariant",
        help="Give a row the same bits in any batch; refused where that cannot hold.",
    ),
    "tensor_parallel_size": _engine(
        int, "--tensor-parallel-size", "-tp", help="Ranks that share the target; more than 1 runs under Ray."
    ),
    "max_model_len": _size("--max-model-len", help="Longest sequence in tokens."),
    "max_num_seqs": _engine(int, "--max-num-seqs", help="Most requests that run at once."),
    "max_num_batched_tokens": _size("--max-num-batched-tokens", help="Most rows in one step."),
    "enable_chunked_prefill": _engine(
        bool, "--enable-chunked-prefill/--no-enable-chunked-prefill", help="Split long prompts over steps."
    ),
    "enable_prefix_caching": _engine(
        bool, "--enable-prefix-caching/--no-enable-prefix-caching", help="Reuse pages of equal beginnings."
    ),
    "page_size": _engine(
        int, "--block-size", "--page-size", help="Tokens per K/V page; by device if absent."
    ),
    "num_pages": _engine(int, "--num-gpu-blocks-override", "--num-pages", help="K/V pages of each pool."),
    "num_states": _engine(int, "--num-states", help="Recurrent states, of requests and prefixes."),
    "kv_cache_memory_bytes": _size("--kv-cache-memory-bytes", help="Memory of all K/V pools of a rank."),
    "gpu_memory_utilization": _engine(float, "--gpu-memory-utilization", help="Share of a GPU to use."),
    "scheduling_policy": _engine(Policy, "--scheduling-policy", help="Who runs first."),
    "async_scheduling": _engine(
        bool, "--async-scheduling/--no-async-scheduling", help="Plan a step while the last one is computed."
    ),
    "max_num_queued_reqs": _engine(
        int, "--max-num-queued-reqs", help="Refuse requests beyond so many waiting."
    ),
    "num_threads": _engine(int, "--num-threads", help="Threads of each CPU worker."),
    "seed": _engine(int, "--seed", help="Makes requests without a seed reproducible."),
    "speculative_config": _option(
        str,
        "--speculative-config",
        panel=SPECULATION,
        help='JSON: \'{"model": DRAFTER, "num_speculative_tokens": 15, "placement": "colocated"}\'; '
        "none decodes plainly.",
    ),
    "spec_model": _option(
        str, "--spec-model", panel=SPECULATION, help="Drafter checkpoint (instead of --speculative-config)."
    ),
    "spec_method": _option(
        DraftMethod,
        "--spec-method",
        panel=SPECULATION,
        help="dflash (the default), eagle3, or ngram, which needs no --spec-model.",
    ),
    "spec_tokens": _option(
        int,
        "--spec-tokens",
        panel=SPECULATION,
        help="num_speculative_tokens: drafts per step, at most the drafter's block size - 1 (the default; 15 "
        "for a block of 16, whose first slot holds the last accepted token). SGLang's "
        "--speculative-num-draft-tokens counts that slot too: its 16 is 15 here. 5 for eagle3, 8 for ngram.",
    ),
    "no_speculation": _option(
        bool, "--no-speculation", panel=SPECULATION, help="Decode plainly, whatever the YAML file says."
    ),
}


def _sampling(kind: Any, *names: str, help: str) -> Any:
    return _option(kind, *names, panel=SAMPLING, help=help)


SAMPLING_OPTIONS: Mapping[str, Any] = {
    "max_tokens": _sampling(
        int,
        "--max-tokens",
        help="Most tokens to generate (256; OpenAI batch lines have OpenAI's own default).",
    ),
    "min_tokens": _sampling(int, "--min-tokens", help="No end before so many tokens."),
    "temperature": _sampling(float, "--temperature", "-t", help="0 is greedy."),
    "top_p": _sampling(float, "--top-p", help="Nucleus sampling, in (0, 1]."),
    "top_k": _sampling(int, "--top-k", help="Keep the k most likely tokens; 0 keeps all."),
    "min_p": _sampling(float, "--min-p", help="Least likelihood relative to the most likely token."),
    "stop": _sampling(list[str], "--stop", help="A string that ends the text; may be repeated."),
    "ignore_eos": _sampling(bool, "--ignore-eos", help="Go on after the model's end of sequence."),
}


def engine_options(command: Command) -> Command:
    """Give `command` the engine flags; it receives the merged `settings`, also from a positional `model_`."""

    def gather(flags: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
        positional = arguments.pop("model_", None)
        if positional is not None and flags["model"] is not None:
            raise typer.BadParameter("Give the model as an argument or with --model, not both.")
        flags["model"] = positional if positional is not None else flags["model"]
        return merge_settings(flags, flags.pop("config"))

    return with_options(command, ENGINE_OPTIONS, "settings", gather)


def sampling_options(command: Command) -> Command:
    """Give `command` the sampling flags; it receives those that were given as `sampling`."""

    def gather(flags: dict[str, Any], _: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in flags.items() if value not in (None, [])}

    return with_options(command, SAMPLING_OPTIONS, "sampling", gather)


def with_options(
    command: Command,
    options: Mapping[str, Any],
    receives: str,
    gather: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]],
) -> Command:
    """Append `options` to the signature that typer sees; `gather` makes one argument of their values."""

    @functools.wraps(command)
    def wrapped(**arguments: Any) -> None:
        flags = {name: arguments.pop(name) for name in options}
        command(**{receives: gather(flags, arguments)}, **arguments)

    own = [p for p in _parameters(command) if p.name != receives]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in options.items()
    ]
    signature = inspect.Signature([*own, *added])
    wrapped.__signature__ = signature  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return wrapped


def _parameters(command: Command) -> list[inspect.Parameter]:
    """The command's parameters by keyword, so that any order of defaults is legal."""
    found = inspect.signature(command, eval_str=True).parameters.values()
    return [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in found]
