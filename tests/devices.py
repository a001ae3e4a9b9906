"""Where kernels' tests run, said in one place: the environment variable MANTA_TEST_DEVICE.

    interpret   Triton's interpreter on the CPU (the default); its bf16 products are broken, so no bf16
    cuda        a GPU: every dtype

Imported by `conftest.py` before any kernel is: Triton reads TRITON_INTERPRET when it decorates one.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
import torch


def _mend_tritons_interpreter() -> None:
    """Version 3.6 reads loops' bounds by int() of arrays of one element, which NumPy refuses from 2.4 on.

    Version 3.7 squeezes them first, and so does this. A kernel has no say in it: `range(lo, hi)` over bounds
    that are loaded is what a GPU's loops are pipelined for.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = mended


def _has_triton_3_6() -> bool:
    try:
        return version("triton").startswith("3.6.")
    except PackageNotFoundError:
        return False


KIND = os.environ.get("MANTA_TEST_DEVICE", "interpret")
if KIND == "interpret":
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if _has_triton_3_6():
        _mend_tritons_interpreter()
elif KIND == "cuda":
    os.environ.pop("TRITON_INTERPRET", None)
    if not torch.cuda.is_available():
        raise pytest.UsageError("MANTA_TEST_DEVICE=cuda, but PyTorch sees no GPU.")
else:
    raise pytest.UsageError(f"MANTA_TEST_DEVICE={KIND!r} is not known. Choose one of: interpret, cuda.")

ON_GPU = KIND == "cuda"
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# Dtypes of 16 bits that products are computed in.
HALVES = (torch.bfloat16, torch.float16) if ON_GPU else (torch.float16,)
