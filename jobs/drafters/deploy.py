"""Deploys a candidate drafter for a trial in a running application, through the deployment's `user_config`.

    manta drafter deploy B ─▶ user_config {drafter: A, candidate: {drafter: B, ...}} ─▶ replicas
    manta drafter status   ◀─ the reports that replicas share (`CanaryStore`)
    manta drafter promote  ─▶ user_config {drafter: B};   rollback ─▶ user_config {drafter: A}

An application deployed from a Serve config is redeployed with the changed `user_config`, as `serve deploy` of
the edited file would do. One that `manta serve` started has no config file; there the board stores the
`user_config`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ...actors.serve.drafter_canary import DrafterCandidate, ReplicaReport, ReplicaUserConfig
from ...cluster.errors import ConfigError, MantaError
from ...cluster.fleet.canary import ArmStats, Evidence, Verdict
from ..common.ray_session import join_ray, ray_address

UserConfig = dict[str, Any]  # Any: YAML

# What each verdict means for the drafter in use.
MEANINGS: dict[Verdict | None, str] = {
    None: "in progress",
    "promoted": "promoted: the candidate is now the drafter",
    "better": "the candidate is better and keeps its share of requests: `manta drafter promote`",
    "rolled_back": "rolled back: the candidate is worse, the drafter stays",
    "undecided": "undecided: the time is over, the drafter stays",
}


@dataclass(frozen=True, slots=True)
class TrialStatus:
    """State of a deployment's drafters; `drafter` None is that of `args`; `verdict` None: not decided."""

    user_config: UserConfig
    drafter: str | None
    candidate: DrafterCandidate | None
    verdict: Verdict | None
    reports: dict[str, ReplicaReport]

    @property
    def evidence(self) -> Evidence:
        return Evidence.pooled(report.evidence for report in self.reports.values())

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        evidence = self.evidence
        return {
            "drafter": self.drafter,
            "candidate": None if self.candidate is None else asdict(self.candidate),
            "verdict": self.verdict,
            "incumbent_tokens_per_step": evidence.incumbent.tokens_per_step,
            "candidate_tokens_per_step": evidence.candidate.tokens_per_step,
            **_evidence_json(evidence),
            "replicas": {
                replica: {**_evidence_json(report.evidence), "refused": report.refused}
                for replica, report in self.reports.items()
            },
        }


class DrafterDeployment:
    def __init__(self, application: str, deployment: str) -> None:
        connect()
        from ray.serve.context import _get_global_client

        from ...actors.serve.drafter_canary import CanaryStore

        self._application, self._deployment = application, deployment
        client = _get_global_client(raise_if_no_controller_running=False)
        if client is None:
            raise MantaError("Ray Serve is not running in this Ray cluster.")
        self._client = client
        self._store = CanaryStore(application, deployment)
        known = self._details()["applications"]
        if deployment not in known.get(application, {}).get("deployments", {}):
            names = [f"{app}/{name}" for app, found in known.items() for name in found["deployments"]]
            raise MantaError(
                f"There is no deployment {application}/{deployment} in this Ray cluster; there are: "
                f"{', '.join(names) or 'none'}. Choose one with --app and --deployment."
            )

    def deploy(self, candidate: UserConfig) -> DrafterCandidate:
        """Start the trial of a candidate, replacing one in progress. Raises ConfigError before any change."""
        drafter = self.status().drafter
        named = {**candidate, "trial": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        found = DrafterCandidate.of(named)
        if found.drafter == drafter:
            raise ConfigError(f"{drafter} is already the drafter.", param="candidate")
        self._store.clear()
        self._write({**_named(drafter), "candidate": named})
        return found

    def promote(self) -> str:
        """Make the candidate the drafter, whatever the verdict. Raises MantaError without a candidate."""
        if (candidate := self.status().candidate) is None:
            raise MantaError("No candidate is on trial. Start one with `manta drafter deploy`.")
        self._write({"drafter": candidate.drafter})
        return candidate.drafter

    def rollback(self) -> str | None:
        """Return to the drafter before the candidate. Raises MantaError without a candidate."""
        settings = ReplicaUserConfig.of(self._read())
        if settings.candidate is None:
            raise MantaError("No candidate is on trial or was promoted: there is nothing to roll back.")
        self._write(_named(settings.drafter))
        return settings.drafter

    def status(self) -> TrialStatus:
        user_config = self._read()
        settings = ReplicaUserConfig.of(user_config)
        candidate, drafter, verdict, reports = settings.candidate, settings.drafter, None, {}
        if candidate is not None:
            trial = settings.trial_id
            verdict, reports = self._store.verdict(trial), dict(self._store.all_reports(trial))
        if candidate is not None and verdict == "promoted":
            drafter = candidate.drafter
        return TrialStatus(user_config, drafter, candidate, verdict, reports)

    def _details(self) -> dict[str, Any]:  # Any: Serve's own
        return self._client.get_serve_details()

    def _config(self) -> dict[str, Any] | None:  # Any: as above
        return self._details()["applications"][self._application]["deployed_app_config"]

    def _read(self) -> UserConfig:
        config = self._config()
        deployments = [] if config is None else config.get("deployments", [])
        stored = next((each for each in deployments if each["name"] == self._deployment), {}).get(
            "user_config"
        )
        return dict(stored or self._store.desired_config() or {})

    def _write(self, user_config: UserConfig) -> None:
        config = self._config()
        if config is None:
            self._store.set_desired_config(user_config)
            return
        from ray.serve.schema import ServeDeploySchema

        others = [each for each in config.get("deployments", []) if each["name"] != self._deployment]
        mine = next((each for each in config.get("deployments", []) if each["name"] == self._deployment), {})
        changed = {**mine, "name": self._deployment, "user_config": user_config}
        config["deployments"] = [*others, changed]
        every = self._details()["applications"].values()
        configs = [each["deployed_app_config"] for each in every if each["deployed_app_config"] is not None]
        applications = [config if each["name"] == self._application else each for each in configs]
        self._client.deploy_apps(ServeDeploySchema.model_validate({"applications": applications}))


def connect() -> None:
    """Connect to the Ray cluster of this node or of RAY_ADDRESS. Raises MantaError if there is none."""
    import ray

    if ray.is_initialized():
        return
    try:
        join_ray(ray_address() or "auto", namespace="serve", log_to_driver=False)
    except ConnectionError as error:
        raise MantaError(
            f"No Ray cluster runs here ({error}). Run this on a node of the cluster, or set RAY_ADDRESS."
        ) from None


def await_verdict(
    deployment: DrafterDeployment, report: Callable[[str], None], every_s: float
) -> TrialStatus:
    while True:
        status = deployment.status()
        report(progress(status))
        if status.verdict is not None or status.candidate is None:
            return status
        time.sleep(every_s)


def progress(status: TrialStatus) -> str:
    evidence = status.evidence
    sides = "; ".join(
        f"{name} {_length(tally)} tokens/step over {tally.requests} requests"
        for name, tally in (("drafter", evidence.incumbent), ("candidate", evidence.candidate))
    )
    return f"{sides}; {MEANINGS[status.verdict]}"


def describe(status: TrialStatus) -> list[str]:
    lines = [f"drafter    {status.drafter or 'the one in args'}"]
    if status.candidate is None:
        return [*lines, "candidate  none"]
    rules, evidence = status.candidate.rules, status.evidence
    share = f"{rules.fraction:.0%} of {'answers, in shadow mode' if rules.shadow else 'requests'}"
    lines += [
        f"candidate  {status.candidate.drafter}   ({share})",
        f"trial      {status.candidate.trial or 'unnamed'}",
        f"verdict    {MEANINGS[status.verdict]}",
        f"           {'requests':>9} {'steps':>9} {'tokens/step':>12}",
    ]
    for name, tally in (("drafter", evidence.incumbent), ("candidate", evidence.candidate)):
        lines.append(f"{name:<10} {tally.requests:>9} {tally.steps:>9} {_length(tally):>12}")
    better, worse = _odds(evidence.log_better), _odds(evidence.log_worse)
    lines.append(f"evidence   {better} for better, {worse} for worse; {1 / rules.alpha:g} decides")
    lines += [f"{name}: refused: {each.refused}" for name, each in status.reports.items() if each.refused]
    return lines


def _evidence_json(evidence: Evidence) -> dict[str, Any]:  # Any: JSON
    tallies = {role: getattr(evidence, role)._asdict() for role in ("incumbent", "candidate")}
    return {"log_better": evidence.log_better, "log_worse": evidence.log_worse, **tallies}


def _named(drafter: str | None) -> UserConfig:
    return {} if drafter is None else {"drafter": drafter}


def _length(tally: ArmStats) -> str:
    return "-" if tally.tokens_per_step is None else f"{tally.tokens_per_step:.3f}"


def _odds(log: float) -> str:
    """Return exp(log) as text, also where it overflows."""
    return f"1e{log / 2.302585:.0f}" if abs(log) > 14 else f"{2.718281828**log:.3g}"
