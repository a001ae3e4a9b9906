"""Checks of a model before Ray starts, for `manta serve` and batch jobs.

They read what an engine reads, except the weights: config files, tensor headers, the tokenizer, the chat
template and the sampling defaults. So an error there is a sentence of the command, not of a replica's log.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...actors.targets.loading.memory_budget import refuse_unaffordable
from ...actors.targets.loading.resolved_config import ResolvedConfig, resolve_config
from ...actors.tokenization.generation_config import GenerationDefaults
from ...actors.tokenization.prompts import load_tokenizer
from ...actors.tokenization.tokenizer import Tokenizer
from ...cluster.config import EngineConfig


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """What was read. `tokenizer` is None with `skip_tokenizer_init`; `resolved.config` names its devices."""

    resolved: ResolvedConfig
    tokenizer: Tokenizer | None
    defaults: GenerationDefaults


def check_model(
    config: EngineConfig, *, generation_config: str = "auto", elsewhere: bool = False
) -> CheckedModel:
    """Raise CheckpointError or ConfigError, which names the field, if an engine could not load the model.

    Args:
        generation_config: source of the sampling defaults, as in `ServerSettings`.
        elsewhere: engines may run on other nodes, so neither devices nor memory are checked here.
    """
    if elsewhere and config.device != "cpu":
        config = replace(config, device="cpu", attention_backend="auto")
    resolved = resolve_config(config)
    if not elsewhere and resolved.device.type == "cpu":  # asking a GPU would initialize CUDA, before forks
        refuse_unaffordable(resolved)
    defaults = GenerationDefaults.of_source(generation_config, config)
    return CheckedModel(resolved, load_tokenizer(config), defaults)
