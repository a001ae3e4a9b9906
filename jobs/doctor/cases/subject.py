"""Inputs of the kernel cases: device, backend, dtype, and random operands of typical sizes.

On a GPU the sizes are Qwen3-8B's with z-lab's b16 drafter, so that tiles, splits and launches are those of
serving. They are small on a CPU, and smaller in Triton's interpreter, which takes milliseconds per tile.
Nothing is read from disk. Used by all cases.

Legend: N rows, R requests, P pages of a request, S page size, L layers, K kv heads, D head dim.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ....actors.targets.loading.backend_selection import BackendName, why_not
from ....actors.targets.loading.operator_factory import make_backend
from ....actors.targets.loading.resolved_config import resolve_models
from ....actors.targets.model.attention import TargetAttention
from ....cluster.config import EngineConfig
from ....cluster.pages.kv_cache_groups import KVCacheSpec
from ....drafter.compute.backend import Backend, DeviceCapabilities, PlacedRows
from ....drafter.compute.block_weights import AttentionShape
from ....drafter.compute.eager.backend import EagerBackend
from ....drafter.compute.layers.rope import RopeConfig, RotaryEmbedding
from ....drafter.compute.memory.kv_cache import PagedKVCache
from ...bench.common.random_weights import QWEN3_8B, PairShape

Requests = Sequence[tuple[int, int]]  # context tokens and rows of each request
HALVES = (torch.bfloat16, torch.float16)
_SMALL = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
}
_GPU_REQUESTS: Mapping[str, Requests] = {
    "blocks": ((8000, 16), (301, 16), (0, 16), (2500, 5)),
    "single rows": ((5000, 1), (77, 1), (0, 1)),
    "prompts": ((0, 700), (130, 90)),
}
_CPU_REQUESTS: Mapping[str, Requests] = {
    "blocks": ((300, 16), (33, 16), (0, 5)),
    "single rows": ((200, 1), (5, 1)),
    "prompts": ((0, 90), (40, 70)),
}
_INTERPRETED: Mapping[str, Requests] = {
    "blocks": ((140, 16), (5, 3)),  # more keys than one split holds
    "single rows": ((40, 1), (0, 1)),
    "prompts": ((0, 40),),
}


@dataclass(frozen=True, slots=True)
class MachineKind:
    """A device with the sizes that are used on it; `context` is before the block of a whole pass."""

    device: torch.device
    shape: PairShape
    requests: Mapping[str, Requests]
    context: int
    vocab_size: int
    interpreted: bool = False

    @classmethod
    def detect(cls) -> MachineKind:
        """Return the place of this machine: its GPU if there is one, unless TRITON_INTERPRET is set."""
        interpreted = bool(os.environ.get("TRITON_INTERPRET"))
        if torch.cuda.is_available() and not interpreted:
            device = torch.device("cuda", torch.cuda.current_device())
            return cls(device, PairShape.of("Qwen3-8B", QWEN3_8B), _GPU_REQUESTS, 1100, 151936)
        small = PairShape.of("a small model", {**QWEN3_8B, **_SMALL})
        if interpreted:
            return cls(torch.device("cpu"), small, _INTERPRETED, 40, 1500, interpreted=True)
        return cls(torch.device("cpu"), small, _CPU_REQUESTS, 300, 4096)


@dataclass(frozen=True, slots=True)
class BackendCandidate:
    """A backend to check, which `setting` selects; None if the definition is not selectable here."""

    name: str
    setting: BackendName | None
    dtypes: tuple[torch.dtype, ...]
    page_size: int = 16

    def examined(self, *, quick: bool) -> tuple[torch.dtype, ...]:
        spared = torch.float16 if quick and torch.bfloat16 in self.dtypes else None
        return tuple(dtype for dtype in self.dtypes if dtype is not spared)

    def why_not(self, machine: MachineKind, dtype: torch.dtype) -> str | None:
        """Return why it does not run here, as text that follows its name; None if it runs."""
        shape = machine.shape
        capabilities = DeviceCapabilities(machine.device, dtype, self.page_size, num_ranks=1)
        backend = "loops" if self.name == "loops" else self.setting or "torch"
        return why_not(backend, [shape.target.stack_spec(), shape.drafter.stack_spec()], capabilities)


def candidates(machine: MachineKind) -> list[BackendCandidate]:
    both = (torch.float32, torch.bfloat16)
    if machine.interpreted:  # the interpreter's bf16 products are wrong
        return [BackendCandidate("triton", "triton", (torch.float32, torch.float16))]
    if machine.device.type == "cuda":
        return [
            BackendCandidate("triton", "triton", (*HALVES, torch.float32)),
            BackendCandidate("triton, pages of 64", "triton", (torch.bfloat16,), page_size=64),
            BackendCandidate("flash_attn", "flash_attn", HALVES, page_size=256),
            BackendCandidate("torch", "torch", (torch.bfloat16, torch.float32)),
        ]
    return [
        BackendCandidate("compiled", "compiled", (torch.bfloat16,)),
        BackendCandidate("loops", "torch", both),
        BackendCandidate("torch", None, both),
    ]


class KernelInputs:
    """A backend with a dtype (which must run here) and reproducible random operands."""

    def __init__(
        self,
        machine: MachineKind,
        candidate: BackendCandidate,
        dtype: torch.dtype,
        backend: Backend | None = None,
    ) -> None:
        self.machine, self.candidate, self.dtype = machine, candidate, dtype
        self.backend = backend or _open(machine, candidate, dtype)
        self.eps = machine.shape.target.rms_norm_eps
        self.hidden = machine.shape.target.hidden_size
        dense = machine.shape.target.layers[0].dense
        assert dense is not None, "shapes must be those of dense pairs"
        self.inner = dense.inner_size
        self.attention: TargetAttention = machine.shape.target.attention(0)
        self.is_examined = True  # False for the definition
        self._drawn_dtype = dtype
        self._random = torch.Generator(machine.device).manual_seed(0)

    def definition(self) -> KernelInputs:
        """Return inputs with PyTorch's operators in fp64; the next operands equal these."""
        found = KernelInputs(self.machine, self.candidate, self.dtype, EagerBackend())
        found.dtype, found.is_examined = torch.float64, False
        found._random.set_state(self._random.get_state())
        return found

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        tensor = torch.randn(shape, generator=self._random, device=self.machine.device)
        return self.rounded(tensor.mul_(scale))

    def rounded(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._drawn_dtype).to(self.dtype)

    def wide(self, tensor: Tensor) -> Tensor:
        """Convert to fp32, in which models keep a few tensors; fp64 for the definition."""
        return tensor.to(torch.promote_types(self.dtype, torch.float32))

    def norm_weight(self, *shape: int) -> Tensor:
        return self.rounded(1 + self.randn(*shape, scale=0.1))

    def weight(self, outputs: int, inputs: int, scale: float = 1.0) -> Tensor:
        """Return a weight [O, I] that preserves the magnitude of its input, times `scale`."""
        return self.randn(outputs, inputs, scale=scale * inputs**-0.5)

    def rope(self, max_positions: int, head_dim: int | None = None) -> RotaryEmbedding:
        config = RopeConfig(head_dim or self.attention.head_dim, 1e6, "default", {})
        rope = RotaryEmbedding(config, max_positions, self._drawn_dtype, self.machine.device)
        rope.cos_TD, rope.sin_TD = (table.to(self.dtype) for table in (rope.cos_TD, rope.sin_TD))
        return rope

    def attention_shape(
        self, rope: RotaryEmbedding, *, causal: bool, window: int | None, sinks_Q: Tensor | None = None
    ) -> AttentionShape:
        of = self.attention
        return AttentionShape(
            num_heads=of.num_heads,
            num_kv_heads=of.num_kv_heads,
            head_dim=of.head_dim,
            v_head_dim=of.head_dim,
            q_norm_D=self.norm_weight(of.head_dim),
            k_norm_D=self.norm_weight(of.head_dim),
            eps=self.eps,
            rope=rope,
            scale=of.scale,
            causal=causal,
            window=window,
            sinks_Q=sinks_Q,
        )


class Contexts:
    """Requests (context, rows) in scattered pages of a cache; other slots hold large, visible values."""

    def __init__(
        self, inputs: KernelInputs, requests: Requests, num_layers: int, geometry: KVCacheSpec | None = None
    ) -> None:
        self.first_R, self.rows_R = (np.array(column) for column in zip(*requests, strict=True))
        self._backend = inputs.backend
        self._device, self._page_size = inputs.machine.device, inputs.candidate.page_size
        pages_each = -(-self.length // self._page_size)
        num_pages = pages_each * len(requests)
        scattered = np.random.default_rng(0).permutation(num_pages)
        self._pages_RP = scattered.reshape(len(requests), pages_each)
        heads = inputs.attention
        geometry = geometry or KVCacheSpec(heads.num_kv_heads, heads.head_dim, heads.head_dim)
        self.cache = PagedKVCache(
            num_layers, num_pages, self._page_size, geometry, inputs.dtype, inputs.machine.device
        )
        # A kernel that reads a slot that is not its request's shows it in its result.
        self.cache.kv.fill_(1e4)

    @property
    def length(self) -> int:
        return int((self.first_R + self.rows_R).max())

    def rows(self, window: int | None = None, padding: int = 0) -> PlacedRows:
        return self._locate(self.first_R, self.rows_R, window, padding)

    def pending_rows(self) -> PlacedRows:
        """Return the context tokens as the rows of a prefill; every request must have some."""
        return self._locate(np.zeros_like(self.first_R), self.first_R)

    def fill(self, inputs: KernelInputs) -> None:
        for r, length in enumerate(self.first_R.tolist()):
            self.cache.write(1, self._slots(r, length), inputs.randn(length, self.cache.geometries[1].width))

    def split(self, rows: Tensor) -> list[Tensor]:
        return list(rows.split(self.rows_R.tolist()))

    def kv(self, num_layers: int, slots_N: Tensor) -> Tensor:
        first = self.cache.num_layers - num_layers
        kind = self.cache.geometries[first]
        found_LNw = self.cache.slots(first, num_layers)[:, slots_N]
        return found_LNw.unflatten(-1, (2, kind.num_kv_heads, kind.head_dim)).movedim(2, 0)

    def _slots(self, request: int, length: int) -> Tensor:
        at = np.arange(length)
        return self._put(
            self._pages_RP[request][at // self._page_size] * self._page_size + at % self._page_size
        )

    def _locate(
        self, first_R: np.ndarray, rows_R: np.ndarray, window: int | None = None, padding: int = 0
    ) -> PlacedRows:
        spans = [np.arange(first, first + rows) for first, rows in zip(first_R, rows_R, strict=True)]
        slots = [self._slots(r, int(at[-1]) + 1)[int(at[0]) :] for r, at in enumerate(spans)]
        batch = self._backend.attention_batch(
            first_R, rows_R, self._pages_RP, self._page_size, self._device, window
        )
        positions_N = torch.nn.functional.pad(self._put(np.concatenate(spans)), (0, padding))
        slots_N = torch.nn.functional.pad(torch.cat(slots), (0, padding), value=self.cache.skip_slot)
        return PlacedRows(positions_N, (slots_N,), (batch,))

    def _put(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _open(machine: MachineKind, candidate: BackendCandidate, dtype: torch.dtype) -> Backend:
    if candidate.setting is None:
        return EagerBackend()
    config = EngineConfig(
        model=machine.shape.name,
        skip_tokenizer_init=True,
        dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
        device="cuda" if machine.device.type == "cuda" else "cpu",
        attention_backend=candidate.setting,
        page_size=candidate.page_size,
    )
    nowhere, threads = Path(machine.shape.name), torch.get_num_threads()
    backend = make_backend(resolve_models(config, nowhere, machine.shape.target, None, None, machine.context))
    torch.set_num_threads(threads)  # a backend with its own threads reduces PyTorch's
    return backend
