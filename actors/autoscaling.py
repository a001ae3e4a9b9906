"""The former module of the autoscaling policy, for existing configurations; removed in the next release."""

from .serve.autoscaling_policy import SpeculativeScaling

__all__ = ["SpeculativeScaling"]
