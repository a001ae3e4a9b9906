"""Creates the operators: those of a forward pass (`Backend`) and those of a step (`StepOperators`).

Imports only what the settings choose: no Numba or LLVM in a GPU process, no Triton in a CPU process.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal

import torch

from ....cluster.config import Quantization, at_load
from ....cluster.errors import brief
from ....drafter.compute.backend import Backend
from ....drafter.compute.checkpoint.quantized_matrix import CODES, ON_GPUS, Code
from ....drafter.compute.eager.backend import EagerBackend
from ....drafter.compute.memory.peer_buffers import FusedSum
from ....drafter.step.sampling.step_ops import DEFINITION, StepOperators
from ...checkpoints.checkpoint_paths import has_tokenizer, tokenizer_folder
from ...system.host_resources import owned_cores
from ..model.tensor_parallel import Communicator
from .backend_selection import can_pack, quantizes_to_integers, take_cpu, why_not
from .resolved_config import ResolvedConfig

if TYPE_CHECKING:
    from ....drafter.grammars.matchers import GrammarStates

logger = logging.getLogger(__name__)

_TRITON = ("triton", "flash_attn")  # backends with Triton's kernels


def make_backend(resolved: ResolvedConfig, ranks: Communicator | None = None) -> Backend:
    """Create the target's backend, which may take over PyTorch's threads; `ranks` choose kernels alike."""
    return _backend(resolved, at_load(resolved.config.quantization), ranks)


def own_backend(resolved: ResolvedConfig, backend: Backend) -> Backend:
    """Return a backend for what this rank alone computes: one that agrees with no other rank on kernels."""
    return make_backend(resolved) if resolved.attention_backend in _TRITON else backend


def make_drafter_backend(
    resolved: ResolvedConfig, target_backend: Backend | None = None, ranks: Communicator | None = None
) -> Backend:
    """Return the drafter's backend: the target's if it is given and quantized alike, else a new one.

    `ranks` compute the same drafter and choose kernels alike.
    """
    spec = resolved.config.speculative_config
    assert spec is not None, "only speculation needs a drafter's backend"
    if target_backend is not None and spec.quantization == resolved.config.quantization:
        return target_backend
    if target_backend is not None and target_backend.kept_codes and resolved.attention_backend not in _TRITON:
        from ....drafter.compute.cpu_fused.backend import PackedCpuBackend

        assert isinstance(target_backend, PackedCpuBackend), "no other CPU backend keeps codes"
        return target_backend.quantizing(_integers(at_load(spec.quantization)))
    return _backend(resolved, at_load(spec.quantization), ranks)


def _integers(quantization: Quantization | None) -> Literal["int8", "int4"] | None:
    return None if quantization == "fp8" else quantization


def kept_codes(resolved: ResolvedConfig) -> frozenset[Code]:
    """Return the codes that the models' backends multiply: always, or where models have codes."""
    if resolved.attention_backend in _TRITON:
        return ON_GPUS
    has_codes = quantizes_to_integers(resolved.config) or resolved.target.quantization is not None
    packs = (
        resolved.attention_backend == "torch"
        and has_codes
        and _has_loops(resolved)
        and can_pack(resolved.machine)
    )
    return CODES if resolved.attention_backend == "compiled" or packs else frozenset()


def _backend(
    resolved: ResolvedConfig, quantization: Quantization | None, ranks: Communicator | None
) -> Backend:
    if resolved.attention_backend == "compiled" or (
        resolved.attention_backend == "torch" and _has_loops(resolved)
    ):
        packs = bool(kept_codes(resolved))
        return take_cpu(resolved.attention_backend, packs=packs, quantization=_integers(quantization))
    if resolved.attention_backend == "torch":
        return EagerBackend()
    from ....drafter.compute.gpu_triton.backend import TritonBackend

    if resolved.config.batch_invariant:  # these flags are for GEMMs outside of layers
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    if resolved.attention_backend == "triton":
        invariant = resolved.config.batch_invariant
        return TritonBackend(
            resolved.device, batch_invariant=invariant, quantization=quantization, ranks=ranks
        )
    from ....drafter.compute.gpu_triton.flash_attention import FlashAttention

    return TritonBackend(
        resolved.device, FlashAttention(resolved.device), quantization=quantization, ranks=ranks
    )


def make_fused_sum(resolved: ResolvedConfig) -> FusedSum | None:
    """Return the kernel that sums over ranks with the norm after it; None for backends without one."""
    if resolved.attention_backend not in _TRITON:
        return None
    from ....drafter.compute.gpu_triton.linear.all_reduce_norm import sum_add_rms_norm

    return sum_add_rms_norm


def make_step_operators(resolved: ResolvedConfig) -> StepOperators:
    if not _has_loops(resolved):
        return DEFINITION
    from ....drafter.step.cpu_numba.step_ops import LOOPS

    return LOOPS


def _has_loops(resolved: ResolvedConfig) -> bool:
    if resolved.device.type != "cpu":
        return False  # do not import Numba to find out
    return why_not("loops", resolved.models, resolved.machine) is None


MAX_MASK_THREADS = 8


def make_grammars(resolved: ResolvedConfig) -> GrammarStates | None:
    """Return the grammars; None without a tokenizer, or if none of the target's end tokens is in it.

    Also None, with a warning, for a tokenizer that llguidance does not know: only grammars need it.
    """
    config = resolved.config
    folder = resolved.target_folder if config.tokenizer is None else tokenizer_folder(config)
    if config.skip_tokenizer_init or not resolved.target.eos_token_ids or not has_tokenizer(folder):
        return None
    from ....drafter.grammars.compiler import GrammarCompiler
    from ....drafter.grammars.matchers import GrammarStates
    from ...tokenization.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder)
    if not (eos := tokenizer.ids_in_vocabulary(resolved.target.eos_token_ids)):
        return None
    try:
        compiler = GrammarCompiler(tokenizer.to_json(), resolved.target.vocab_size, eos)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of llguidance is no Exception
        logger.warning(
            "structured outputs and forced tool calls are off, because llguidance does not support this "
            "tokenizer: %s",
            brief(str(error), 200),
        )
        return None
    return GrammarStates(compiler, max(1, min(MAX_MASK_THREADS, owned_cores() // 2)))


def count_compilations(resolved: ResolvedConfig) -> AbstractContextManager[object]:
    """Count the kernels that a GPU's start compiles; what is counted is true if there are any."""
    if not resolved.runs_on_device or resolved.device.type != "cuda":
        return nullcontext()
    from ....drafter.compute.gpu_triton.common import compilations

    return compilations.count_compilations()
