"""Programmatic dependent launch: a kernel is set up while the one before still runs (sm_90 and newer).

    host      _kernel[grid](..., **dependent_launch(x.device))
    kernel    wait_for_predecessor(PDL) comes first, before anything is read or written

Right by construction: `griddepcontrol.wait` returns when the kernel before is complete and its writes are
visible. As every program waits before it does anything, a kernel is complete only after the one before it is:
what holds of the direct predecessor holds of all. So `launch_dependents` may come at once: it lets the next
kernel be set up, and the next kernel waits too if it was launched by these options; without them it begins
after this one's end, as ever. What is won is the launch, not the first loads. Used by the kernels of a layer.
"""

# Type checkers do not find Triton's backends.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import os
from functools import cache

import torch
import triton
import triton.language as tl

_FIRST_CAPABILITY = (9, 0)


@cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Launch options and the compile-time argument `PDL` of a kernel whose first act is to wait."""
    if device.type != "cuda" or torch.version.hip or os.environ.get("TRITON_INTERPRET"):
        return {"PDL": False}
    if torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """See the module's text; nothing where kernels are launched one after another."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
