"""The commands `simulate-fleet`, `simulate-policy` and `simulate-validate`."""

from __future__ import annotations

from manta.cluster.config import EngineConfig
from manta.jobs.common.engine_flags import Model, with_flags

from ..options import FleetOptions, PolicyOptions, ValidateOptions


@with_flags
def fleet(options: FleetOptions) -> None:
    """Simulate a day of traffic over replicas under Manta's scaling policy and Ray Serve's default.

    The replica is a coarse model; no Ray, checkpoint or GPU is used.
    """
    from .fleet import run_fleet

    run_fleet(options)


@with_flags
def policy(options: PolicyOptions) -> None:
    """Compare adaptive speculation with plain decoding and fixed draft lengths, by concurrency and context.

    Runs the real scheduler and policies with the roofline's step times. Prompts take no time.
    """
    from .policy import run_policy

    run_policy(options)


@with_flags
def validate(options: ValidateOptions, config: EngineConfig, model_: Model = None) -> None:
    """Compare the simulation with this machine's engine under the same load, after measuring its steps."""
    from .validate import run_validate

    run_validate(config, options)
