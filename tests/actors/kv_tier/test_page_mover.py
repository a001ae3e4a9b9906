"""Moves of pages: all that models keep by page moves through host memory; what cannot be read is zero."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from manta.actors.targets.runners import page_mover
from manta.actors.targets.runners.page_mover import PageMemory, PageMover
from manta.cluster.pages.page_files import PageFiles, PageFolder
from manta.cluster.step.page_transfer import KVTierInfo, MovedPage, PagesMoved, PageTransfer

NUM_PAGES = 5


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def kept() -> list[torch.Tensor]:
    """What models keep by page: planes of K and V of two dtypes, and a feature."""
    torch.manual_seed(0)
    return [
        torch.randn(3, NUM_PAGES, 4, 6),
        torch.randn(2, NUM_PAGES, 4, 8).to(torch.float8_e4m3fn),
        torch.randn(1, NUM_PAGES, 7, dtype=torch.bfloat16),
    ]


def content(tensors: list[torch.Tensor], page: int) -> list[list[int]]:
    return [tensor[:, page].contiguous().view(torch.uint8).flatten().tolist() for tensor in tensors]


def move(mover: PageMover, *pages: MovedPage, loads: bool) -> tuple[bool, ...]:
    mover.begin(PageTransfer(1, loads, pages))
    ended: list[PagesMoved] = []
    while not ended:
        ended = mover.take_ended(1.0)
    return ended[0].moved


@pytest.fixture
def mover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[PageMover, list[torch.Tensor]]]:
    """With two places, in different allocations, and files."""
    tensors = kept()
    memory = PageMemory.of([*tensors, tensors[0]])
    assert memory.page_bytes == sum(len(part) for part in content(tensors, 0))
    monkeypatch.setattr(page_mover, "_CHUNK_BYTES", memory.page_bytes)
    folder = PageFolder(tmp_path / "subject" / "0")
    made = PageMover(
        KVTierInfo((memory.page_bytes,), (2,), folder), PageFiles(tmp_path, folder, 2**20), [memory]
    )
    made.start()
    yield made, tensors
    made.close()
    assert not made._thread.is_alive()


def test_pages_are_moved_to_places_and_files_and_back(mover: tuple[PageMover, list[torch.Tensor]]) -> None:
    moving, tensors = mover
    wanted = [content(tensors, page) for page in range(NUM_PAGES)]
    saved = [
        MovedPage(0, key(page), page, 0.0, place) for page, place in ((0, 1), (1, 0), (2, None), (3, None))
    ]
    assert move(moving, *saved, loads=False) == (True,) * 4
    for tensor in tensors:
        tensor.view(torch.uint8).fill_(77)
    others = [page._replace(page=page.page + 1) for page in saved]
    assert move(moving, *others, loads=True) == (True,) * 4
    assert [content(tensors, page + 1) for page in range(4)] == wanted[:4]
    for page in (0, 1):  # which are in files as well
        assert move(moving, saved[page]._replace(place=None), loads=True) == (True,)
        assert content(tensors, page) == wanted[page]


def test_a_page_that_cannot_be_read_is_zero_and_a_full_disk_leaves_the_places(
    mover: tuple[PageMover, list[torch.Tensor]], tmp_path: Path
) -> None:
    moving, tensors = mover
    before = content(tensors, 1)
    assert (
        move(moving, MovedPage(0, key(9), 0, 0.0), MovedPage(0, key(9), 2, 0.0), loads=True) == (False,) * 2
    )
    for page in (0, 2):
        assert not any(map(any, content(tensors, page)))
    assert content(tensors, 1) == before
    (tmp_path / "subject").write_bytes(b"no folder")
    pages = MovedPage(0, key(1), 1, 0.0, 0), MovedPage(0, key(3), 3, 0.0)
    assert move(moving, *pages, loads=False) == (True, False)
    assert move(moving, pages[0]._replace(page=4), loads=True) == (True,)
    assert content(tensors, 4) == before
