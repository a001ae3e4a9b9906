"""What a device sustains: stated by the user, known for its name, or measured by a copy and a product.

Called by `step.py`, whose floors stand on it (`cluster/roofline.py`), and by the doctor.

Legend: N rows, O outputs, I inputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from ...cluster.roofline import GPUS, Device

_COPY_BYTES = {"cpu": 2**26, "cuda": 2**30}  # more than caches hold
_PRODUCT_SIZE = {"cpu": 1024, "cuda": 8192}
_REPEATS = 5


def find_device(device: torch.device, dtype: torch.dtype, stated: str | None) -> Device:
    """Rates of `device` for products in `dtype`.

    Args:
        stated: "GB/s,TFLOP/s", which wins.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    if stated is not None:
        return Device.parse(f"{name}, rates as stated", stated)
    return known_device(device, dtype) or measure_device(f"{name}, rates as measured", device, dtype)


def known_device(device: torch.device, dtype: torch.dtype) -> Device | None:
    """The rates of a GPU that has been measured, for products of 16 bits."""
    if device.type != "cuda" or dtype.itemsize != 2:
        return None
    return GPUS.get(torch.cuda.get_device_name(device))


def measure_device(name: str, device: torch.device, dtype: torch.dtype) -> Device:
    """The best of a few copies (bytes read and written) and of a few square products."""
    num_bytes, size = _COPY_BYTES[device.type], _PRODUCT_SIZE[device.type]
    source, copy = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    copy_s = _least_s(device, lambda: copy.copy_(source))
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product_s = _least_s(device, lambda: left @ right)
    return Device(name, 2 * num_bytes / copy_s, 2 * size**3 / product_s)


def weight_bytes_per_s(
    device: torch.device,
    products: Sequence[Callable[[torch.Tensor], object]],
    x_NI: torch.Tensor,
    num_bytes: int,
) -> float:
    """Of weights that these products read one after the other, `num_bytes` together: the best of a few."""
    return num_bytes / _least_s(device, lambda: [product(x_NI) for product in products])


def _least_s(device: torch.device, work: Callable[[], object]) -> float:
    return min(_seconds(device, work) for _ in range(_REPEATS))


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin_s
