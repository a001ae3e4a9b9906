"""The former place of the autoscaling policy, which configurations may name; goes with the next release."""

from .serve.autoscaling_policy import SpeculativeScaling

__all__ = ["SpeculativeScaling"]
