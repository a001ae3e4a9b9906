"""What tests of operators share: the backends that run on this machine's CPU."""

from __future__ import annotations

import pytest
from manta.drafter.compute.backend import Backend
from manta.drafter.compute.cpu_numba.backend import NumbaBackend
from manta.drafter.compute.eager.backend import EagerBackend

BACKENDS = {"eager": EagerBackend, "loops": NumbaBackend}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    """PyTorch's operators, and the compiled loops."""
    return BACKENDS[request.param]()
