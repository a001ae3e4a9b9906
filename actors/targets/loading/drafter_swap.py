"""Replaces a running engine's drafter.

Pages, taps and steps that were planned for the old drafter stay, so the new one must have the same shape,
which is checked before a weight is read. The old one drafts until the new one is loaded. Called between
steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from ....cluster.errors import ConfigError
from ....drafter.dflash.config import DrafterConfig
from ....drafter.eagle3.config import Eagle3Config
from ...checkpoints.checkpoint_paths import drafter_folder, with_drafter
from ..model.tensor_parallel import Communicator
from ..runners.drafts.draft_source import Drafter
from ..runners.runner_interface import Runner
from .checkpoint_models import Checkpoints
from .draft_window import DraftConfig, with_window
from .operator_factory import make_drafter_backend
from .resolved_config import ResolvedConfig, read_drafter

FIELD = "speculative_config.model"


class RemoteSide(Protocol):
    """A rank's connection to a drafter in another process."""

    def load(self, resolved: ResolvedConfig) -> None: ...

    def use(self) -> None: ...


class DrafterSwap:
    """Loads and swaps the drafters of one rank.

    Args:
        remote: given if the drafter is in another process.
        ranks: all ranks of the target; None for a single one.
    """

    def __init__(
        self,
        resolved: ResolvedConfig,
        runner: Runner,
        remote: RemoteSide | None = None,
        ranks: Communicator | None = None,
    ) -> None:
        self._resolved, self._runner, self._remote, self._ranks = resolved, runner, remote, ranks
        self._next_resolved: ResolvedConfig | None = None
        self._next_drafter: Drafter | None = None

    @torch.inference_mode()
    def load(self, model: str) -> None:
        """Load a drafter next to the current one, which stays if CheckpointError or ConfigError is raised."""
        resolved = _with_drafter(self._resolved, model)
        if self._remote is not None:
            self._remote.load(resolved)
        else:
            target = self._runner.model
            backend = make_drafter_backend(resolved, target.backend, self._ranks)
            self._next_drafter = Checkpoints().drafter(resolved, target.shared_embeddings, backend)
        self._next_resolved = resolved

    @torch.inference_mode()
    def use(self) -> None:
        assert self._next_resolved is not None, "call load() first"
        if self._remote is not None:
            self._remote.use()
            self._runner.prepare()  # graphs hold the old drafter's part of the target's process
        elif self._next_drafter is not None:
            self._runner.swap_drafter(self._next_drafter)
        self._resolved = self._next_resolved
        self.forget()

    def forget(self) -> None:
        self._next_resolved = self._next_drafter = None


def _with_drafter(resolved: ResolvedConfig, model: str) -> ResolvedConfig:
    """Return the settings with another drafter. Raises CheckpointError or ConfigError if it does not fit."""
    config = with_drafter(resolved.config, model)
    assert resolved.drafter is not None, "a swap needs a drafter"
    folder = drafter_folder(config, model)
    new = with_window(read_drafter(config, folder, resolved.facts), resolved.draft_window)
    assert isinstance(new, DrafterConfig | Eagle3Config), "as it was read"
    _check_same_shape(resolved.drafter, new, resolved)
    return replace(resolved, config=config, drafter_folder=folder, drafter=new)


def _check_same_shape(old: DraftConfig, new: DrafterConfig | Eagle3Config, resolved: ResolvedConfig) -> None:
    for name in ("target_layer_ids", "hidden_size", "layers", "num_kv_heads", "head_dim", "rms_norm_eps"):
        old_value, new_value = getattr(old, name), getattr(new, name)
        if old_value != new_value:
            raise ConfigError(
                f"{FIELD}: {new.file} has {name}={new_value}, but the running drafter has {old_value}. Use a "
                "drafter of the same shape, or restart the engine.",
                param=FIELD,
            )
    if isinstance(new, DrafterConfig) and new.max_drafts < resolved.num_speculative_tokens:
        raise ConfigError(
            f"{FIELD}: {new.file} proposes at most {new.max_drafts} tokens, and the engine was started with "
            f"num_speculative_tokens={resolved.num_speculative_tokens}. Restart it with fewer.",
            param=FIELD,
        )
