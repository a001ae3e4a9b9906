"""Stored outputs of a target: what is read back, what a kill leaves, and the size told beforehand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from manta.actors.capture.target_outputs import (
    OutputLayout,
    OutputShardWriter,
    SequenceOutputs,
    TargetOutputs,
    likeliest_tokens,
)

LAYOUT = OutputLayout.of(layer_ids=(1, 3), width=4, vocab_size=5)
Sequence = tuple[list[int], int]  # token ids, and the position of the answer
LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(2, 9)), max_size=12)


def sequences(lengths: list[tuple[int, int]]) -> list[Sequence]:
    return [([i, *range(prompt + answer - 1)], prompt) for i, (prompt, answer) in enumerate(lengths)]


def outputs_of(sequence: Sequence) -> SequenceOutputs:
    ids, first = sequence
    random = np.random.default_rng(ids[0])
    taps = random.integers(0, 2**16, (len(ids) - 1, 8)).astype(np.uint16)
    likeliest, log_probs = likeliest_tokens(torch.from_numpy(random.normal(size=(len(ids) - first, 5))))
    return SequenceOutputs(taps, likeliest.numpy(), log_probs.numpy())


def write(folder: Path, name: str, found: list[Sequence]) -> None:
    with OutputShardWriter(folder, name, LAYOUT) as shard:
        for ids, first in found:
            shard.add(ids, first, outputs_of((ids, first)))


@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS, num_shards=st.integers(1, 3))
def test_all_sequences_are_read_back_as_written(
    lengths: list[tuple[int, int]], num_shards: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, all_sequences = tmp_path_factory.mktemp("outputs"), sequences(lengths)
    for shard in range(num_shards):
        write(folder, f"{shard:06}", all_sequences[shard::num_shards])
    stored = TargetOutputs(LAYOUT, [folder])
    assert len(stored) == len(all_sequences)
    for ids, first in all_sequences:
        for read, written in zip(stored.of(ids, first).arrays, outputs_of((ids, first)).arrays, strict=True):
            assert read.dtype == written.dtype and (read == written).all()


def test_a_kill_loses_no_more_than_the_current_shard(tmp_path: Path) -> None:
    found = sequences([(3, 4)] * 6)
    write(tmp_path, "000000", found[:3])
    with pytest.raises(KeyboardInterrupt), OutputShardWriter(tmp_path, "000001", LAYOUT) as shard:
        shard.add(*found[3], outputs_of(found[3]))
        raise KeyboardInterrupt
    killed = OutputShardWriter(tmp_path, "000001", LAYOUT).__enter__()  # a kill leaves this as it is
    killed.add(*found[3], outputs_of(found[3]))
    stored = TargetOutputs(LAYOUT, [tmp_path])
    assert [stored.has(*each) for each in found] == [True] * 3 + [False] * 3
    write(tmp_path, "000001", found[3:])
    write(tmp_path, "000001", found[3:])  # as by a run that was killed before it knew
    assert len(TargetOutputs(LAYOUT, [tmp_path])) == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000000.outputs", "000001.outputs"]


def test_another_start_of_the_answer_or_other_taps_are_not_what_was_stored(tmp_path: Path) -> None:
    ((ids, first),) = found = sequences([(3, 4)])
    write(tmp_path, "000000", found)
    stored = TargetOutputs(LAYOUT, [tmp_path])
    assert stored.has(ids, first)
    assert not stored.has(ids, first + 1) and not stored.has([*ids, 9], first)
    for other in (
        OutputLayout.of((1, 2), 4, 5),
        OutputLayout.of((1, 3), 2, 5),
        OutputLayout.of((1, 3), 4, 4),
    ):
        assert not len(TargetOutputs(other, [tmp_path]))


@pytest.mark.parametrize("layer_ids", [(1,), (3,), (3, 1)])
def test_some_of_the_stored_taps_are_read_in_any_order(layer_ids: tuple[int, ...], tmp_path: Path) -> None:
    """So that one pass over the target serves drafters with different taps."""
    ((ids, first),) = found = sequences([(3, 4)])
    write(tmp_path, "000000", found)
    read, written = (
        TargetOutputs(OutputLayout.of(layer_ids, 4, 5), [tmp_path]).of(ids, first),
        outputs_of(found[0]),
    )
    by_layer = dict(zip(LAYOUT.layer_ids, np.split(written.taps, 2, axis=1), strict=True))
    assert (read.taps == np.concatenate([by_layer[layer_id] for layer_id in layer_ids], axis=1)).all()
    assert (read.likeliest_ids == written.likeliest_ids).all()


def test_the_size_told_beforehand_bounds_the_size_on_disk(tmp_path: Path) -> None:
    found = sequences([(3, 40)] * 20)
    write(tmp_path, "000000", found)
    headers = 3 * 128
    stored = sum(path.stat().st_size for path in tmp_path.glob("*/*.npy")) - headers
    told = LAYOUT.num_bytes(20 * 43, 20 * 40)
    assert 0.97 * told < stored <= told, "last tokens have no taps"
    assert "860 tokens x 2 taps x 4 x 2 bytes + 800 answer tokens" in LAYOUT.describe_size(20 * 43, 20 * 40)


def test_likeliest_tokens_equal_torchs_log_softmax() -> None:
    logits = torch.randn(7, 300, generator=torch.Generator().manual_seed(0)) * 4
    ids, log_probs = likeliest_tokens(logits)
    expected = logits.log_softmax(-1).topk(64)
    assert torch.equal(ids.long(), expected.indices)
    torch.testing.assert_close(log_probs.float(), expected.values, atol=1e-2, rtol=1e-3)
