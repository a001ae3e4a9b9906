"""The number of compiled kernel variants: Triton's own cache keys, for steps of many shapes.

A kernel is compiled once for each key: the values of its compile-time arguments, the types of the others,
whether an integer is 1 or divisible by 16, whether a pointer is. A step with a new key waits seconds for the
compiler. The keys are computed by Triton's code for sm_90; the kernels themselves run in the interpreter
only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from manta.actors.targets.loading.rank_loader import load_runner
from manta.cluster.step.dummy_steps import dummy_step
from manta.cluster.step.scheduler_output import AdmittedRequest, SlotSampling
from manta.drafter.compute.checkpoint.safetensors_reader import TensorFolder
from manta.drafter.compute.gpu_triton.attention.attention_tiles import (
    AttentionKind,
    AttentionWorkspace,
    list_work,
    rows_from_host,
)
from manta.drafter.compute.gpu_triton.attention.paged_attention import verify_attention
from support.checkpoints.tiny import make_tiny_drafter, make_tiny_target
from support.engines.devices import ON_GPU
from support.engines.steps import settings
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

pytestmark = pytest.mark.skipif(ON_GPU, reason="the kernels do not run")
FILTERED = SlotSampling(0.6, 20, 0.95, 0.01, 0, 0, ())
MAX_REQUESTS, MOST_ROWS = 9, 16  # of a request that decodes
NOT_GIVEN = str(("constexpr", None))
# Different in target and drafter, the same in every step.
OF_A_MODEL = {("_lay_out_rows", "mask_id")}

Key = tuple[tuple[str, str], ...]


class Keys:
    """The keys of all launches, by kernel: a value for each argument and option."""

    def __init__(self) -> None:
        self._backend = make_backend(GPUTarget("cuda", 90, 32))
        self._binders: dict[InterpretedFunction, Callable[..., Any]] = {}
        self.found: dict[str, set[Key]] = defaultdict(set)
        self.first: dict[str, set[Key]] = {}

    def take(self, kernel: InterpretedFunction, *args: object, **kwargs: Any) -> None:
        """Record a launch and run it; replaces `InterpretedFunction.run`."""
        del kwargs["grid"], kwargs["warmup"]
        if kernel not in self._binders:
            jitted = JITFunction(kernel.fn, **kernel.kwargs)
            self._binders[kernel] = create_function_from_signature(
                jitted.signature, jitted.params, self._backend
            )
        bound, key, options = self._binders[kernel](*args, **kwargs)
        pairs = [*zip(bound, key, strict=True), *options.items()]
        self.found[kernel.__name__].add(tuple((name, str(value)) for name, value in pairs))

    def mark_first(self) -> None:
        self.first = {kernel: set(keys) for kernel, keys in self.found.items()}

    def values(self, kernel: str, name: str) -> set[str]:
        return {dict(key)[name] for key in self.found[kernel]} - {NOT_GIVEN}

    def varying(self) -> set[tuple[str, str]]:
        """Return (kernel, runtime argument) pairs whose keys differ."""
        return {
            (kernel, name)
            for kernel, keys in self.found.items()
            for name, _ in next(iter(keys))
            if name.islower() and len(self.values(kernel, name)) > 1
        }


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keys]:
    """Run a target with two kinds of layers and a DFlash2 drafter with a window: `first`, then many steps."""
    folder, keys = tmp_path_factory.mktemp("variants"), Keys()
    target = make_tiny_target(folder / "target", "gemma3")
    drafter = make_tiny_drafter(folder / "drafter", hidden_size=72, sliding_window=7, second=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", lambda kernel, *a, **k: keys.take(kernel, *a, **k))
        # On a GPU weights are copied out of their files, to where tensors begin at multiples of 16.
        get = TensorFolder.get
        patch.setattr(TensorFolder, "get", lambda folder, name: get(folder, name).clone())
        # What a kernel would have written is read by PyTorch's operators between them.
        patch.setattr(torch, "empty", torch.zeros)
        patch.setattr(torch, "empty_like", torch.zeros_like)
        patch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
        maximum = {"max_num_seqs": MAX_REQUESTS}
        config = settings(target, drafter, attention_backend="triton", device="cpu", **maximum)
        runner, _ = load_runner(config)

        def step(rows: list[int], drafts: list[int]) -> None:
            runner.execute(dummy_step([20] * len(rows), rows, drafts))

        prompt = np.ones(20, dtype=np.int32)
        for sampling in (None, FILTERED):
            if sampling is not None:
                admitted = AdmittedRequest(0, "filtered", prompt, sampling)
                runner.execute(replace(dummy_step([0], [20], [0]), admitted=(admitted,)))
            for rows in (1, 4, MOST_ROWS, 30, 60):  # each tile height, the drafter too
                step([rows], [rows - 1 if rows <= MOST_ROWS else 0])
        keys.mark_first()
        for requests in (1, 2, 3, 4, 8, MAX_REQUESTS):
            for rows in (1, 4, 15, MOST_ROWS) if requests % 4 else (7,):
                step([rows] * requests, [rows - 1] * requests)
            mixed = [1 + 7 * i % 47 for i in range(requests)]
            step(mixed, [0] * requests)
        yield keys


def test_values_that_change_between_steps_are_no_part_of_a_kernels_key(keys: Keys):
    assert {"_attend", "_lay_out_rows", "_choose", "_write_words"} <= keys.found.keys()
    assert {"_convolve", "_best_of_chunk", "_best_of_row", "_walk"} <= keys.found.keys()
    assert keys.varying() <= OF_A_MODEL


def test_few_steps_compile_every_kernel_variant(keys: Keys):
    assert not {kernel for kernel, found in keys.found.items() if found - keys.first[kernel]}


def test_attention_has_a_key_for_each_kind_of_layer_and_tile_height(keys: Keys):
    heights, windows = keys.values("_attend", "BLOCK_ROWS"), keys.values("_attend", "WINDOW")
    assert len(heights) <= 4 and len(windows) == 3  # all keys, the target's window, the drafter's
    assert len(keys.found["_list_work"]) <= len(keys.found["_attend"]) <= len(heights) * len(windows)


def test_host_laid_out_rows_compile_no_further_variant(keys: Keys):
    """Their page table is as wide as the step's longest request needs."""
    kind, workspace = AttentionKind(4, 2, 16, 16, torch.float32, 16), AttentionWorkspace(16, "cpu")
    q_NQD, kv_PS2KD = torch.zeros(3, 4, 16), torch.zeros(2, 16, 2, 2, 16)
    known = set(keys.found["_attend"])
    for pages in (1, 3, 4, 16):
        rows = rows_from_host(np.array([9]), np.array([3]), np.zeros((1, pages)), 16, "cpu")
        work = list_work(kind, rows, workspace)
        verify_attention(q_NQD, *kv_PS2KD.unbind(2), rows, work, 1.0)
    assert len(keys.found["_attend"] - known) <= 1
