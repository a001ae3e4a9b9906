"""What tests of datasets and ledgers share: an output on the disk, and an S3 server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from manta.actors.batch.dataset.storage import Storage
from support.jobs.batch_outputs import JobRuns
from support.jobs.s3_outputs import S3Server, make_bucket, s3_server


@pytest.fixture
def output(tmp_path: Path) -> Storage:
    """The folder `out` of the test's folder, which does not exist yet."""
    return Storage.open(str(tmp_path / "out"), field="output")


@pytest.fixture
def runs(output: Storage) -> Iterator[JobRuns]:
    """Runs of jobs on this output, the last of which ends with the test."""
    runs = JobRuns(output)
    yield runs
    runs.close()


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """A server with a bucket called `bucket`."""
    with s3_server() as server:
        make_bucket(server, "bucket")
        yield server
