"""The wire format: tensors and headers survive it, and what does not fit is refused."""

from __future__ import annotations

import ast
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparkdl.averager
from sparkdl.averager.wire import (
    Chunk,
    from_message,
    pack_header,
    plan_chunks,
    to_message,
    unpack_header,
)
from sparkdl.errors import TrainingError
from sparkdl.protocols import Segment

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


@given(
    sizes=st.lists(st.tuples(st.integers(0, 50), st.sampled_from(DTYPES)), max_size=5),
    chunk_bytes=st.integers(1, 100),
)
def test_chunks_cover_every_element_once_and_in_order(
    sizes: list[tuple[int, torch.dtype]], chunk_bytes: int
) -> None:
    layout = tuple(Segment("parameters", dtype, numel) for numel, dtype in sizes)

    chunks = plan_chunks(layout, chunk_bytes)

    covered = [(c.segment, i) for c in chunks for i in range(c.start, c.stop)]
    assert covered == [(s, i) for s, (numel, _) in enumerate(sizes) for i in range(numel)]
    for chunk in chunks:
        itemsize = layout[chunk.segment].center_dtype.itemsize
        assert (chunk.stop - chunk.start) * itemsize <= max(chunk_bytes, itemsize)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_survive_the_wire_bit_for_bit(dtype: torch.dtype) -> None:
    values = torch.randn(37).mul(100).to(dtype)

    received = from_message(to_message(values), dtype, 37)

    assert received.dtype is dtype
    assert torch.equal(received, values)


def test_a_message_is_a_view_of_the_tensor() -> None:
    values = torch.zeros(8)
    message = to_message(values[2:6])
    values[3] = 5.0

    assert from_message(message, torch.float32, 4).tolist() == [0.0, 5.0, 0.0, 0.0]


def test_a_chunk_is_a_view_of_its_segment() -> None:
    segments = [torch.zeros(3), torch.zeros(4)]
    Chunk(1, 1, 3).of(segments).fill_(7)
    assert segments[1].tolist() == [0, 7, 7, 0]


@pytest.mark.parametrize(
    "message",
    [
        None,
        pa.record_batch({"bytes": pa.array([1, 2, 3], pa.uint8())}),
        pa.record_batch({"bytes": pa.array([], pa.uint8())}),
        pa.record_batch({"other": pa.array([0] * 16, pa.uint8())}),
        pa.record_batch({"bytes": pa.array([0.0] * 16, pa.float32())}),
        pa.record_batch({"bytes": pa.array([0] * 16, pa.uint8()), "b": pa.array([0] * 16)}),
    ],
    ids=["none", "short", "empty", "other-name", "other-type", "two-columns"],
)
def test_a_message_of_another_size_or_form_is_refused(message: pa.RecordBatch | None) -> None:
    with pytest.raises(TrainingError, match=r"where 4 values of torch.float32 \(16 bytes\) belong"):
        from_message(message, torch.float32, 4)


@pytest.mark.parametrize("octets", [b"", b"{", b"[1]", b"3", b"null", b"\xff\xfe"])
def test_an_unreadable_header_is_refused(octets: bytes) -> None:
    with pytest.raises(TrainingError, match="readable header"):
        unpack_header(pa.py_buffer(octets))


def test_a_missing_header_is_refused() -> None:
    with pytest.raises(TrainingError, match="readable header"):
        unpack_header(None)


@given(
    fields=st.dictionaries(st.text(), st.integers() | st.text() | st.booleans() | st.floats(0, 1))
)
def test_headers_survive_the_wire(fields: dict[str, object]) -> None:
    assert unpack_header(pack_header(fields)) == fields


def test_nothing_in_the_averager_can_unpickle() -> None:
    """Reads the imports and calls: no pickle, no torch.load, no eval."""
    for path in Path(sparkdl.averager.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        imported = {
            name.name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in node.names
        } | {
            (node.module or "").split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
        }
        called = {
            getattr(node.func, "attr", getattr(node.func, "id", ""))
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
        }
        forbidden = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
        assert not imported & forbidden, path
        assert not called & {"load", "eval", "exec", "allow_pickle", "__import__"}, path
