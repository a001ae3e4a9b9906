"""Chooses between Manta's and PyTorch's GEMMs by measurement, once per shape and device.

cuBLAS is tuned for many rows; at 16 it may leave a third of the memory bandwidth unused. The comparison
includes what each fuses: Manta's kernel against PyTorch's GEMM and the kernels after it, and of codes before
it, with the weights out of cache. Shapes are measured in warm-up passes, before graphs are captured.

The two differ in their last bits, so all ranks must choose alike: otherwise a near-tie in a router would send
a row to different experts on different ranks. Rank 0 measures and broadcasts. Its choices are kept on disk,
so every start on this kind of device computes the same bits.

Legend: N rows, K inputs, O outputs, T tiles of a product's outputs.
"""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_left
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from .....cluster.disk_cache import FOREVER_S, DiskCache
from ...layers.linear import RMSNorm
from .gemm_tiles import ROW_TILES, tile_columns
from .projections import OwnProjection, PendingNorm, TorchProjection, Use

logger = logging.getLogger(__name__)

# Measures milliseconds of a call whose data are in memory, not in caches.
Clock = Callable[[Callable[[], object]], float]
_FAILED = -1


class Ranks(Protocol):
    """The ranks that compute the same model, as `tensor_parallel.Communicator` in actors."""

    @property
    def rank(self) -> int: ...

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Copy the tensor of rank `source` to all ranks, in place."""
        ...


class MeasuredChoice:
    """A `projections.GemmChoice` by measurement; rows are counted up to the next of `measured_rows`.

    Args:
        clock: by default Triton's, which flushes the cache before each call.
        ranks: agree on each choice; all of them must run the same passes. None: there is one.
    """

    def __init__(self, clock: Clock | None = None, ranks: Ranks | None = None) -> None:
        self._clock, self._ranks = clock or _milliseconds, ranks
        self._ours: dict[tuple[object, ...], list[bool]] = {}

    def __call__(
        self, use: Use, own: OwnProjection, other: TorchProjection, num_rows: int, dtype: torch.dtype
    ) -> bool:
        if not 0 < num_rows <= own.most_rows:
            return False
        kind, measured = (use, own.form, dtype), measured_rows(own)
        if kind not in self._ours:
            self._ours[kind] = self._agree(use, own, other, dtype)
        return self._ours[kind][bisect_left(measured, num_rows)]

    def _agree(self, use: Use, own: OwnProjection, other: TorchProjection, dtype: torch.dtype) -> list[bool]:
        """Return whether ours is used, by measured rows, as rank 0 found it. Collective."""
        measured = measured_rows(own)
        choices_T = torch.full((len(measured),), _FAILED, dtype=torch.int32, device=own.device)
        is_first, error = self._ranks is None or self._ranks.rank == 0, None
        if is_first:
            try:
                choices_T.copy_(torch.tensor(self._read_or_measure(use, own, other, dtype)))
            except Exception as raised:  # the other ranks wait for an answer
                error = raised
        if self._ranks is not None:
            self._ranks.broadcast(choices_T)
        if error is not None:
            raise error
        choices = choices_T.tolist()
        if _FAILED in choices:
            raise RuntimeError(f"rank 0 could not measure a product of {own.form}")
        for rows, is_ours in zip(measured, choices, strict=True):
            if is_ours:  # load its kernel now, not in a request
                _call(use, own, own, rows, dtype)()
        return list(map(bool, choices))

    def _read_or_measure(
        self, use: Use, own: OwnProjection, other: TorchProjection, dtype: torch.dtype
    ) -> list[bool]:
        cache, rows = DiskCache("gemm-choice", _subject(use, own, dtype), FOREVER_S), measured_rows(own)
        read = partial(_choices, count=len(rows))
        found = cache.read(read)
        if found is None:
            measured = [self._is_ours_sooner(use, own, other, each, dtype) for each in rows]
            found = cache.write_once(measured, read)
        return found

    def _is_ours_sooner(
        self, use: Use, own: OwnProjection, other: TorchProjection, num_rows: int, dtype: torch.dtype
    ) -> bool:
        ours, theirs = (self._clock(_call(use, each, own, num_rows, dtype)) for each in (own, other))
        logger.info(
            "product %s %s, %d rows: ours %.1f us, PyTorch's %.1f us",
            own.form,
            use,
            num_rows,
            1e3 * ours,
            1e3 * theirs,
        )
        return ours <= theirs


def choose_own(
    use: Use, own: OwnProjection, other: TorchProjection, num_rows: int, dtype: torch.dtype
) -> bool:
    """A `projections.GemmChoice` that takes Manta's product wherever it may be faster."""
    return 0 < num_rows <= own.most_rows


def measured_rows(own: OwnProjection) -> tuple[int, ...]:
    """Return the numbers of rows at which a product is measured, each for all from the one before on."""
    return (*(tile for tile in ROW_TILES if tile < own.most_rows), own.most_rows)


def _subject(use: Use, own: OwnProjection, dtype: torch.dtype) -> dict[str, str | int | float | None]:
    """Return what a choice depends on."""
    device = {"device": str(own.device)}
    if own.device.type == "cuda":
        found = torch.cuda.get_device_properties(own.device)
        device = {
            "device": found.name,
            "capability": f"{found.major}.{found.minor}",
            "processors": found.multi_processor_count,
        }
    return {
        **device,
        "use": use,
        "product": own.form,
        "dtype": str(dtype),
        "torch": torch.__version__,
        "code": _code(),
    }


@cache
def _code() -> str:
    """Return a digest of the products' code, so that measurements of other code are not used."""
    folder = Path(__file__).parent
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))).hexdigest()


def _choices(found: Any, count: int) -> list[bool]:  # Any: JSON
    """Return saved choices. Raises ValueError."""
    if isinstance(found, list) and len(found) == count and all(x in (True, False) for x in found):
        return found
    raise ValueError("these are no choices")


def _call(
    use: Use,
    projection: OwnProjection | TorchProjection,
    own: OwnProjection,
    num_rows: int,
    dtype: torch.dtype,
) -> Callable[[], object]:
    outputs, inputs = own.shape

    def ones(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=own.device)

    x_NK, norm = ones(num_rows, inputs), RMSNorm(ones(inputs), 1e-6)
    columns = tile_columns(own.row_tile(num_rows, dtype))
    squares_NT = ones(num_rows, -(-inputs // columns), dtype=torch.float32)  # as `added` leaves them
    pending = PendingNorm(x_NK, squares_NT, norm)
    x = pending if projection is own else x_NK  # PyTorch's path norms right after the residual addition
    match use:
        case "plain":
            return lambda: projection(x_NK)
        case "normed":
            return lambda: projection(x)
        case "gated":
            return lambda: projection.gated(x, "silu")
        case "added":
            residual_NO, next_norm = ones(num_rows, outputs), RMSNorm(ones(outputs), 1e-6)
            return lambda: projection.added(x_NK, residual_NO, next_norm)


def _milliseconds(call: Callable[[], object]) -> float:
    from triton.testing import do_bench

    assert not torch.cuda.is_current_stream_capturing(), "every kind of step runs before it is captured"
    median = do_bench(call, warmup=2, rep=10, return_mode="median")
    assert isinstance(median, float), "one mode, one number"
    return median
