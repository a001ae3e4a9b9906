"""GPUs and the links between them, with the source of each number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ConfigError, did_you_mean
from .kernel_loops import ISSUE_SHARE, IssuedInstructions
from .roofline import GPUS as MEASURED
from .roofline import Device

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Link:
    """A link between GPUs of one node: sustained rate of one GPU, and seconds of a small collective."""

    bytes_per_s: float
    latency_s: float

    def send_s(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s

    def all_reduce_s(self, ranks: int, num_bytes: float) -> float:
        """Return the seconds of a ring all-reduce, which moves 2 (n - 1) / n of the bytes over every link."""
        return self.latency_s + 2 * (ranks - 1) / ranks * num_bytes / self.bytes_per_s if ranks > 1 else 0.0


# Estimates: 80 % of the data sheet's rate per direction (NVLink 3, 4, 5: 300, 450, 900 GB/s; PCIe 4 x16: 32
# GB/s); 8 µs for a small all-reduce in a CUDA graph, 20 µs without peer access.
NVLINK_3, NVLINK_4, NVLINK_5 = (Link(0.8 * rate, 8e-6) for rate in (300e9, 450e9, 900e9))
PCIE_4 = Link(0.8 * 32e9, 20e-6)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU model.

    Attributes:
        memory_bytes: what CUDA can allocate, which is less than the data sheet says.
        processors: number of multiprocessors.
        clock_hz: of a multiprocessor, when boosted.
        capability: compute capability.
    """

    device: Device
    memory_bytes: int
    link: Link
    processors: int
    clock_hz: float
    capability: tuple[int, int]

    @property
    def is_blackwell(self) -> bool:
        """Whether kernels are those for sm_100; else those for sm_90 are assumed."""
        return self.capability[0] == 10

    @property
    def cycles_per_s(self) -> float:
        """Return the cycles of all multiprocessors together."""
        return self.processors * self.clock_hz

    def issue_s(self, issued: IssuedInstructions) -> float:
        """Return the seconds in which kernels issue these instructions."""
        count = issued.sm_100 if self.is_blackwell else issued.sm_90
        return count / (ISSUE_SHARE * self.cycles_per_s)

    @property
    def name(self) -> str:
        return self.device.name


def _gpu(
    device: Device, memory_gib: float, link: Link, processors: int, ghz: float, capability: tuple[int, int]
) -> Gpu:
    return Gpu(device, int(memory_gib * GIB), link, processors, ghz * 1e9, capability)


# H200, H100 and B200 have the measured rates of `roofline.GPUS`. The others have 90 % of the data sheet's
# bandwidth (2,039, 1,555 and 864 GB/s) and 78 % of its dense bf16 arithmetic (312, 312 and 362 TFLOP/s). B300
# has the bandwidth and dense bf16 arithmetic of B200 (8 TB/s, 2.25 PFLOP/s), as it only adds FP4. Memory is
# what PyTorch reports, and for B300 what nvidia-smi reports. Multiprocessors and clocks are the data sheets',
# but for B300's, which are B200's.
GPUS: Mapping[str, Gpu] = {
    "h200": _gpu(MEASURED["NVIDIA H200"], 139.8, NVLINK_4, 132, 1.75, (9, 0)),
    "h100": _gpu(MEASURED["NVIDIA H100 80GB HBM3"], 79.1, NVLINK_4, 132, 1.75, (9, 0)),
    "b200": _gpu(MEASURED["NVIDIA B200"], 178.3, NVLINK_5, 148, 1.94, (10, 0)),
    "b300": _gpu(Device("B300", 7.2e12, 1687.5e12), 268.5, NVLINK_5, 148, 1.94, (10, 3)),
    "a100-80gb": _gpu(Device("A100 80GB", 1.835e12, 243e12), 79.1, NVLINK_3, 108, 1.41, (8, 0)),
    "a100-40gb": _gpu(Device("A100 40GB", 1.4e12, 243e12), 39.4, NVLINK_3, 108, 1.41, (8, 0)),
    "l40s": _gpu(Device("L40S", 0.778e12, 282e12), 44.4, PCIE_4, 142, 2.52, (8, 9)),
}


def find_gpu(name: str) -> Gpu:
    """Return the GPU with this name in `GPUS`, ignoring case; ConfigError names the nearest one."""
    try:
        return GPUS[name.lower()]
    except KeyError:
        raise ConfigError(
            f"gpu={name!r} is not known. {did_you_mean(name.lower(), GPUS)}", param="gpu"
        ) from None
