"""`manta compile`: pretends a start with the given settings, and compiles each kernel that it launches.

The start is the product's own, on a pretended GPU and with random weights: so each kernel is specialized as
it will be on a GPU, and Triton's key of it in the cache, a digest of the source, the specialization, the
options, Triton and ptxas, is the one that a start looks up.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ...actors.system.host_resources import owned_cores
from ...actors.system.wait_messages import Wait, counting, say
from ...cluster.config import EngineConfig
from ...cluster.errors import ConfigError
from ...cluster.hardware.gpu_specs import Gpu, find_gpu
from ..common.options import CompileOptions

if TYPE_CHECKING:
    from .kernel_compiler import CachedKernel

_LINE_EVERY_S = 60.0  # where standard error is no terminal


def run_compile(config: EngineConfig, options: CompileOptions) -> None:
    """Fill the cache, and print how much. Raises ConfigError, CheckpointError before anything long begins."""
    gpu, config = find_gpu(options.gpu), _of_start(config)
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "gpu: Triton is not installed, which compiles the kernels. pip install 'manta-dflash[gpu]'.",
            param="gpu",
        )
    os.environ["TRITON_INTERPRET"] = "0"
    if options.output is not None:
        os.environ["TRITON_CACHE_DIR"] = str(options.output.absolute())
    begin_s = time.monotonic()
    kernels = _compile(config, gpu, options.jobs or owned_cores())
    from triton import knobs

    there = sum(kernel.was_there for kernel in kernels)
    size = sum(kernel.num_bytes for kernel in kernels)
    say(
        f"{len(kernels)} kernels for {options.gpu} are in {knobs.cache.dir} ({size / 1e6:.1f} MB): "
        f"{len(kernels) - there} compiled in {time.monotonic() - begin_s:.0f} s, {there} were there"
    )


def _of_start(config: EngineConfig) -> EngineConfig:
    """Return the settings of a start that launches the same kernels, without weights. Raises ConfigError."""
    spec = config.speculative_config
    if config.device == "cpu":
        raise ConfigError('device="cpu" has no kernels to compile. Leave device out.', param="device")
    if config.attention_backend in ("torch", "compiled"):
        raise ConfigError(
            f'attention_backend="{config.attention_backend}" has no kernels to compile. Leave it out.',
            param="attention_backend",
        )
    if spec is not None and spec.placement != "colocated":
        raise ConfigError(
            f'speculative_config.placement="{spec.placement}" is not compiled: only starts of colocated '
            "drafters are pretended. Leave placement out of the command; the drafter's own process then "
            "compiles its kernels at its first start.",
            param="speculative_config.placement",
        )
    # flash_attn computes prompts instead of a kernel of ours, and has pages of its own size.
    page_size = 256 if config.attention_backend == "flash_attn" else None
    return replace(
        config,
        device="cuda",
        load_format="dummy",
        attention_backend="triton",
        page_size=config.page_size or page_size,
        kv_tier_path=None,
        kv_tier_host_bytes=None,
    )


def _compile(config: EngineConfig, gpu: Gpu, num_processes: int) -> list[CachedKernel]:
    from .kernel_compiler import KernelCompiler
    from .pretended_gpu import KernelForm, PretendedGpu, pretend

    class CompilingGpu(PretendedGpu):
        def on_specialized(self, form: KernelForm) -> None:
            compiler.submit(form)
            progress.on_found()

    device = CompilingGpu(gpu)
    pretend(device)
    from .pretended_start import start_first_rank

    with (
        _progress(gpu) as progress,
        KernelCompiler(device.target, num_processes, progress.on_compiled) as compiler,
    ):
        start_first_rank(config, device)
        return compiler.wait()


class _Progress:
    def __init__(self, wait: Wait) -> None:
        self._found, self._done, self._wait = 0, 0, wait
        self._next_s = time.monotonic() + _LINE_EVERY_S

    def on_found(self) -> None:
        self._found += 1
        self._show()

    def on_compiled(self) -> None:
        self._done += 1
        self._show()

    def _show(self) -> None:
        self._wait.what = f"compiled {self._done} of {self._found} kernels that were found"
        if not say.is_terminal and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _LINE_EVERY_S
            self._wait.report_stage()


@contextmanager
def _progress(gpu: Gpu) -> Iterator[_Progress]:
    with counting(f"looking for kernels of a start on {gpu.name}", say) as wait:
        yield _Progress(wait)
