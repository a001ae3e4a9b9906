"""Settings that can change in a running replica: the deployment's Serve `user_config`, set by `serve deploy`
or by `manta drafter deploy`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from ...cluster.config import from_mapping
from ...cluster.errors import ConfigError
from ...cluster.fleet.canary import TrialRules


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterCandidate:
    """A drafter that is tried on traffic before it replaces the current one (`cluster/fleet/canary.py`).

    Attributes:
        drafter: folder or hub id.
        trial: name of the trial; another name tries the same candidate again.
        rules: rules of the trial; in YAML its fields are next to these.
    """

    drafter: str
    trial: str = ""
    rules: TrialRules = field(default_factory=TrialRules)

    def __post_init__(self) -> None:
        _require_text("candidate.drafter", self.drafter)
        if not isinstance(self.trial, str):
            name = "user_config.candidate.trial"
            raise ConfigError(f"{name}={self.trial!r} must be a name, in quotes.", param=name)

    @classmethod
    def of(cls, told: object) -> Self:
        """Read a mapping. Raises ConfigError, which names the field."""
        if not isinstance(told, Mapping):
            raise ConfigError(
                f"user_config.candidate={told!r} must be a mapping, as {{drafter: ..., fraction: 0.1}}.",
                param="user_config.candidate",
            )
        settings, rules = dict(told), {each.name for each in fields(TrialRules)}
        ruled = {key: settings.pop(key) for key in list(settings) if key in rules}
        prefix = "user_config.candidate."
        return from_mapping(cls, {**settings, "rules": from_mapping(TrialRules, ruled, prefix)}, prefix)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaUserConfig:
    """The settings of a replica. Changing them needs no restart and interrupts no request.

    Attributes:
        drafter: folder or hub id of the drafter; None: the one that the replica started with. Tokens do not
            depend on it. On the target's device it loads while requests wait.
        candidate: another drafter to try alongside it.
    """

    drafter: str | None = None
    candidate: DrafterCandidate | None = None

    def __post_init__(self) -> None:
        if self.drafter is not None:
            _require_text("drafter", self.drafter)

    @property
    def trial_id(self) -> str:
        """Id of the trial of this candidate against that drafter, the same on all replicas."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @classmethod
    def of(cls, user_config: Mapping[str, Any]) -> Self:  # Any: YAML, checked here
        """Read a `user_config`. Raises ConfigError, which names the field."""
        settings = dict(user_config)
        if settings.get("candidate") is not None:
            settings["candidate"] = DrafterCandidate.of(settings["candidate"])
        return from_mapping(cls, settings, "user_config.")


def _require_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        field = f"user_config.{name}"
        raise ConfigError(f"{field}={value!r} must be a folder or hub id.", param=field)
