"""Sustained memory bandwidth and FLOP/s of a device: given by the user, known by name, or measured.

Called by `jobs/bench/step_cost.py` for its lower bounds (`cluster/hardware/roofline.py`), and by the doctor.

Legend: N rows, O outputs, I inputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from ....cluster.hardware.roofline import GPUS, Device

_COPY_BYTES = {"cpu": 2**26, "cuda": 2**30}  # larger than the caches
_PRODUCT_SIZE = {"cpu": 1024, "cuda": 8192}
_REPEATS = 5


def find_device(device: torch.device, dtype: torch.dtype, stated: str | None) -> Device:
    """Return the rates of `device` for products in `dtype`; `stated` ("GB/s,TFLOP/s") takes precedence."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    if stated is not None:
        return Device.parse(f"{name}, rates as stated", stated)
    return published_rates(device, dtype) or measure_device(f"{name}, rates as measured", device, dtype)


def published_rates(device: torch.device, dtype: torch.dtype) -> Device | None:
    """Return the measured rates of a known GPU for 16-bit products; None for other devices and dtypes."""
    if device.type != "cuda" or dtype.itemsize != 2:
        return None
    return GPUS.get(torch.cuda.get_device_name(device))


def measure_device(name: str, device: torch.device, dtype: torch.dtype) -> Device:
    num_bytes, size = _COPY_BYTES[device.type], _PRODUCT_SIZE[device.type]
    source, copy = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    copy_s = _min_s(device, lambda: copy.copy_(source))
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product_s = _min_s(device, lambda: left @ right)
    return Device(name, 2 * num_bytes / copy_s, 2 * size**3 / product_s)


def weight_bytes_per_s(
    device: torch.device,
    products: Sequence[Callable[[torch.Tensor], object]],
    x_NI: torch.Tensor,
    num_bytes: int,
) -> float:
    """Return bytes/s of weights that products read one after the other (`num_bytes` in total); best of 5."""
    return num_bytes / _min_s(device, lambda: [product(x_NI) for product in products])


def _min_s(device: torch.device, work: Callable[[], object]) -> float:
    return min(_seconds(device, work) for _ in range(_REPEATS))


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin_s
