"""Headers of GGUF files have the values that llama.cpp's writer stored; broken files are refused."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from manta.cluster.errors import CheckpointError
from manta.drafter.compute.checkpoint.gguf.gguf_file import GgufFile

VALUES = {
    "u8": (200, GGUFValueType.UINT8),
    "i8": (-100, GGUFValueType.INT8),
    "u16": (60_000, GGUFValueType.UINT16),
    "i16": (-30_000, GGUFValueType.INT16),
    "u32": (4_000_000_000, GGUFValueType.UINT32),
    "i32": (-2_000_000_000, GGUFValueType.INT32),
    "u64": (2**63 + 1, GGUFValueType.UINT64),
    "i64": (-(2**62), GGUFValueType.INT64),
    "f32": (0.25, GGUFValueType.FLOAT32),
    "f64": (1e-300, GGUFValueType.FLOAT64),
    "bool": (True, GGUFValueType.BOOL),
    "string": ("Ġ▁é\n", GGUFValueType.STRING),
}
ARRAYS = {
    "strings": ["", "a", "▁the", "<|im_start|>"],
    "integers": [1, -2, 3],
    "floats": [0.5, -1.0],
    "bools": [True, False, True],
}


def write(path: Path, *, alignment: int | None = None, split: int = 0) -> dict[str, np.ndarray]:
    """Write a file with a value of every type; returns its tensors."""
    random = np.random.default_rng(3)
    writer = GGUFWriter(path, "llama", split_max_tensors=split)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, (value, kind) in VALUES.items():
        writer.add_key_value(f"test.{key}", value, kind)
    for key, value in ARRAYS.items():
        writer.add_array(f"test.{key}", value)
    tensors = {
        "vector": random.standard_normal(5).astype(np.float32),
        "half": random.standard_normal((3, 7)).astype(np.float16),
        "experts": random.standard_normal((2, 3, 4)).astype(np.float32),
    }
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    packed = gguf.quants.quantize(
        random.standard_normal((4, 64)).astype(np.float32), GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("packed", packed, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {**tensors, "packed": packed}


def check_tensors(file: GgufFile, expected: dict[str, np.ndarray]) -> None:
    assert file.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert file.blocks(name).tobytes() == tensor.tobytes()
        shape = (4, 64) if name == "packed" else tensor.shape
        assert file.tensors[name].shape == shape
        assert len(file.blocks(name)) == int(np.prod(shape[:-1]))


@pytest.mark.parametrize("alignment", [None, 8, 1024])
def test_values_and_tensors_are_those_that_were_written(alignment: int | None, tmp_path: Path) -> None:
    expected = write(tmp_path / "model.gguf", alignment=alignment)
    file = GgufFile(tmp_path / "model.gguf")
    assert file.metadata["general.architecture"] == "llama"
    assert file.alignment == (alignment or 32)
    for key, (value, _) in VALUES.items():
        found = file.metadata[f"test.{key}"]
        assert (type(found), found) == (type(value), value)
    for key, value in ARRAYS.items():
        assert list(file.metadata[f"test.{key}"]) == value
    check_tensors(file, expected)
    assert file.tensors["half"].type is GGMLQuantizationType.F16


def test_all_parts_of_a_split_file_are_found_from_any_of_them(tmp_path: Path) -> None:
    expected = write(tmp_path / "model.gguf", split=2)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) >= 2
    for part in parts:
        file = GgufFile(part)
        assert list(file.paths) == parts
        assert file.metadata["test.u8"] == 200
        check_tensors(file, expected)
    parts[1].rename(tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=f"{parts[1].name} is missing: the model is split into"):
        GgufFile(parts[0])
    with pytest.raises(CheckpointError, match="give all of them the names NAME-00001-of-0000N"):
        GgufFile(tmp_path / "other.gguf")
    (tmp_path / "other.gguf").rename(parts[1])
    parts[0].write_bytes(parts[1].read_bytes())
    with pytest.raises(CheckpointError, match="is named as part 1 of"):
        GgufFile(parts[1])


def test_parts_of_two_releases_are_refused(tmp_path: Path) -> None:
    for folder, split in (("a", 2), ("b", 3)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "model.gguf", split=split)
    first, second = sorted((tmp_path / "a").glob("*.gguf"))
    second.write_bytes((tmp_path / "b" / second.name).read_bytes())
    with pytest.raises(CheckpointError, match=r"split.tensors.count 4, but its parts have 3 tensors"):
        GgufFile(first)
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match=r"says split\.no 0"):
        GgufFile(first)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def header(*, keys: bytes = b"", num_keys: int = 0, tensors: bytes = b"", num_tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + keys + tensors


def tensor(name: str = "a", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
    return string(name) + sizes + struct.pack("<IQ", kind, offset)


def padded(content: bytes, after: int = 4096) -> bytes:
    return content + bytes(after)


HUGE = 2**60
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is no GGUF file"),
    "other format": (b"GGML" + bytes(64), "is no GGUF file: it does not begin with GGUF"),
    "magic alone": (b"GGUF", "ends before the bytes of its header"),
    "version 1": (
        b"GGUF" + struct.pack("<III", 1, 0, 0),
        "has version 1 of GGUF; convert it to version 2 or 3",
    ),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian"),
    "2^60 tensors": (padded(header(num_tensors=HUGE)), "ends before the tensors"),
    "2^60 keys": (padded(header(num_keys=HUGE)), "ends before the keys"),
    "2^60 numbers": (
        padded(header(num_keys=1, keys=string("k") + struct.pack("<IIQ", 9, 5, HUGE))),
        "ends before the values of k",
    ),
    "2^60 strings": (
        padded(header(num_keys=1, keys=string("k") + struct.pack("<IIQ", 9, 8, HUGE))),
        "ends before the strings of k",
    ),
    "string of 2 GB": (
        padded(header(num_keys=1, keys=string("k") + struct.pack("<IQ", 8, 2**31))),
        "ends before the strings of k",
    ),
    "array of arrays": (
        padded(header(num_keys=1, keys=string("k") + struct.pack("<IIQ", 9, 9, 1))),
        "has an array of arrays for k",
    ),
    "unknown value": (
        padded(header(num_keys=1, keys=string("k") + struct.pack("<I", 13))),
        "unknown type 13 for k",
    ),
    "no bool": (
        padded(header(num_keys=1, keys=string("k") + struct.pack("<IB", 7, 2))),
        "other than true and false",
    ),
    "no UTF-8": (
        padded(header(num_keys=1, keys=string("k") + struct.pack("<IQ", 8, 1) + b"\xff")),
        "has a string that is no UTF-8 for k",
    ),
    "key twice": (
        padded(header(num_keys=2, keys=2 * (string("k") + struct.pack("<IB", 7, 1)))),
        "has the key k twice",
    ),
    **{
        f"alignment {number}": (
            padded(header(num_keys=1, keys=string("general.alignment") + struct.pack("<II", 4, number))),
            f"has general.alignment {number}, which is no power of two",
        )
        for number in (0, 24)
    },
    "alignment text": (
        padded(header(num_keys=1, keys=string("general.alignment") + struct.pack("<I", 8) + string("32"))),
        "has general.alignment '32', which is no power of two",
    ),
    "tensor twice": (padded(header(num_tensors=2, tensors=2 * tensor())), "has the tensor a twice"),
    "unknown type": (
        padded(header(num_tensors=1, tensors=tensor(kind=4))),
        "stores a in the unknown type 4; take another quantization",
    ),
    "part of a block": (
        padded(header(num_tensors=1, tensors=tensor(shape=(3, 33), kind=8))),
        r"stores a of shape \[3, 33\] as Q8_0, whose blocks are 32 wide",
    ),
    "beyond the end": (
        header(num_tensors=1, tensors=tensor(shape=(16,))) + bytes(70),
        "bytes too short for a; download it again",
    ),
    "sizes of 2^60": (
        padded(header(num_tensors=1, tensors=tensor(shape=(HUGE, HUGE, HUGE, HUGE)))),
        "bytes too short for a; download it again",
    ),
    "not aligned": (
        padded(header(num_tensors=1, tensors=tensor(offset=8))),
        "places a at 8, no multiple of 32",
    ),
    "no elements": (
        padded(header(num_tensors=1, tensors=tensor(shape=(HUGE, 0)))),
        "has a tensor a without elements",
    ),
    "5 dimensions": (
        padded(header(num_tensors=1, tensors=tensor(shape=(1, 1, 1, 1, 1)))),
        "has a tensor a of 5 dimensions",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_refused_in_a_sentence(what: str, tmp_path: Path) -> None:
    content, says = BROKEN[what]
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=says) as caught:
        GgufFile(tmp_path / "model.gguf")
    assert "\n" not in caught.value.message


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        GgufFile(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        GgufFile(tmp_path)


@cache
def valid() -> bytes:
    with TemporaryDirectory() as folder:
        write(Path(folder) / "model.gguf")
        return (Path(folder) / "model.gguf").read_bytes()


def truncate(content: bytes, at: int, _: bytes) -> bytes:
    return content[: at % max(len(content), 1)]


def overwrite(content: bytes, at: int, by: bytes) -> bytes:
    at %= max(len(content), 1)
    return content[:at] + by + content[at + len(by) :]


def insert(content: bytes, at: int, by: bytes) -> bytes:
    at %= max(len(content), 1)
    return content[:at] + by + content[at:]


def delete(content: bytes, at: int, by: bytes) -> bytes:
    at %= max(len(content), 1)
    return content[:at] + content[at + len(by) :]


CHANGE: st.SearchStrategy[Callable[[bytes, int, bytes], bytes]] = st.sampled_from(
    [truncate, overwrite, insert, delete]
)
NUMBER = st.sampled_from([0, 1, 255, 2**31, 2**32 - 1, HUGE, 2**63, 2**64 - 1]).map(
    lambda n: n.to_bytes(8, "little")
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(CHANGE, st.integers(0, 2**16), NUMBER | st.binary(min_size=1, max_size=12)), max_size=3
    )
)
def test_damage_is_an_error_of_checkpoints_and_takes_no_memory(
    changes: list[tuple[Callable[[bytes, int, bytes], bytes], int, bytes]],
) -> None:
    content = valid()
    for change, at, by in changes:
        content = change(content, at, by)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        path.write_bytes(content)
        tracemalloc.start()
        try:
            file = GgufFile(path)
            for name in file.tensors:
                file.blocks(name)
        except CheckpointError as error:
            assert "\n" not in error.message
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    assert peak < 500_000
