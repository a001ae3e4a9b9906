"""Shared state of a deployment's drafter trials in Ray's internal key-value store.

Serve keeps its own state there, so the trial state lives as long as the application: a replica that replaces
a dead one finds the verdict that others reached. Every replica writes under its own key; the first verdict is
final. Calls take a network round trip, so they must not run on an event loop. Used by `drafter_canary.py` and
by `manta drafter` (jobs/drafters/deploy.py).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, get_args

from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
    internal_kv_get_gcs_client,
)

from ...cluster.fleet.canary import ArmStats, Evidence, Verdict
from .drafter_canary import ReplicaReport

NAMESPACE = b"manta"


class CanaryStore:
    """The trial state of one deployment of one application."""

    def __init__(self, application: str, deployment: str) -> None:
        self._place = f"drafters/{application}/{deployment}/"

    def wish(self) -> dict[str, Any] | None:  # Any: a user_config
        """Return the replacement for a `user_config` that Serve was not given, if one is stored."""
        found = _internal_kv_get(self._key("wish"), namespace=NAMESPACE)
        return None if found is None else json.loads(found)

    def set_wish(self, user_config: dict[str, Any]) -> None:  # Any: as above
        _internal_kv_put(self._key("wish"), json.dumps(user_config), overwrite=True, namespace=NAMESPACE)

    def began_s(self, trial: str, now_s: float) -> float:
        """Return the Unix time of the first call for this trial by any replica."""
        return float(self._settle(f"{trial}/began", repr(now_s)))

    def tell(self, trial: str, replica: str, report: ReplicaReport) -> None:
        text = json.dumps(asdict(report))
        _internal_kv_put(self._key(f"{trial}/of/{replica}"), text, overwrite=True, namespace=NAMESPACE)

    def told(self, trial: str) -> dict[str, ReplicaReport]:
        """Return the reports by replica, including replicas that are gone, since their evidence counts."""
        prefix = self._key(f"{trial}/of/")
        keys = _internal_kv_list(prefix, namespace=NAMESPACE)
        client = internal_kv_get_gcs_client()
        found = client.internal_kv_multi_get(keys, NAMESPACE) if keys and client is not None else {}
        return {key[len(prefix) :].decode(): _report(json.loads(text)) for key, text in found.items()}

    def verdict(self, trial: str) -> Verdict | None:
        found = _internal_kv_get(self._key(f"{trial}/verdict"), namespace=NAMESPACE)
        return None if found is None else _verdict(found.decode())

    def settle(self, trial: str, verdict: Verdict) -> Verdict:
        """Store the verdict unless there is one already. Return the one in effect."""
        return _verdict(self._settle(f"{trial}/verdict", verdict))

    def clear(self) -> None:
        _internal_kv_del(self._key(""), del_by_prefix=True, namespace=NAMESPACE)

    def _settle(self, name: str, value: str) -> str:
        key = self._key(name)
        _internal_kv_put(key, value, overwrite=False, namespace=NAMESPACE)
        found = _internal_kv_get(key, namespace=NAMESPACE)
        assert found is not None, "another replica wrote it"
        return found.decode()

    def _key(self, name: str) -> bytes:
        return (self._place + name).encode()


def _report(told: dict[str, Any]) -> ReplicaReport:  # Any: JSON
    found = told["evidence"]
    logs = found["log_better"], found["log_worse"]
    evidence = Evidence(*logs, ArmStats(*found["incumbent"]), ArmStats(*found["candidate"]))
    return ReplicaReport(evidence, told["refused"])


def _verdict(text: str) -> Verdict:
    (found,) = (each for each in get_args(Verdict) if each == text)
    return found
