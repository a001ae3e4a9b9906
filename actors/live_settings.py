"""What of a running replica may be changed: Serve's `user_config` of the deployment, by `serve deploy`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ..cluster.config import from_mapping
from ..cluster.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSettings:
    """The change costs no restart and no request.

    Attributes:
        drafter: folder or hub id of the drafter to draft with; None: the one that the replica started with.
            Tokens do not depend on it. Beside the target it loads while requests wait.
    """

    drafter: str | None = None

    def __post_init__(self) -> None:
        if self.drafter is not None and (not isinstance(self.drafter, str) or not self.drafter):
            raise ConfigError(
                f"user_config.drafter={self.drafter!r} must be a folder or hub id.",
                param="user_config.drafter",
            )

    @classmethod
    def of(cls, user_config: Mapping[str, Any]) -> Self:  # Any: YAML, checked here
        """Raises ConfigError, which names the field."""
        return from_mapping(cls, user_config, "user_config.")
