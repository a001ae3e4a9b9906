"""A short `make soak-batch`: a real job on a simulated executor, and what its check finds."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from benchmarks.batch.soak_batch import ENGINE_BYTES, check_rows, run_soak
from manta.cluster.errors import MantaError


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_a_short_soak_counts_its_rows_and_its_memory(pair: tuple[Path, Path], tmp_path: Path) -> None:
    found = run_soak(pair[0], 1000, 1, tmp_path)
    assert found["rows"] == 1000
    assert 50 * 2**20 < found["engine_bytes"] < ENGINE_BYTES


def test_a_missing_or_duplicate_row_fails_the_soak(tmp_path: Path) -> None:
    for ids in (["0", "1"], ["0", "1", "2", "2"]):
        pq.write_table(pa.table({"id": ids}), tmp_path / "part-0.parquet")
        with pytest.raises(MantaError, match="row 2 is there"):
            check_rows(tmp_path, 3)
