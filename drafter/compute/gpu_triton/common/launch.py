"""Programmatic dependent launch: a kernel is set up while the previous one still runs (sm_90 and newer).

    host      _kernel[grid](..., **dependent_launch(x.device))
    kernel    wait_for_predecessor(PDL) comes first, before anything is read or written

Source: CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization". `griddepcontrol.wait`
returns when the previous kernel is complete and its writes are visible. As every program waits before it does
anything, a kernel completes only after all earlier ones. Therefore `launch_dependents` may be issued at once:
it lets the next kernel be set up, which also waits if it was launched with these options; otherwise it starts
after this one's end, as usual. This hides launch latency, not the first loads.
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
    """Return launch options and the compile-time argument `PDL` of a kernel that waits first."""
    if device.type != "cuda" or torch.version.hip or os.environ.get("TRITON_INTERPRET"):
        return {"PDL": False}
    if torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Wait for the previous kernel, then allow the next one to launch; no-op without PDL."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
