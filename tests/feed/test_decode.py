"""Every encoding of a column becomes the numbers that numpy gets; broken rows are told apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pytest
import torch
from every_row import every, every_row
from feeds import VECTOR, as_vector
from hypothesis import given
from hypothesis import strategies as st
from pictures import encoded
from torch import Tensor

from sparkdl import encodings
from sparkdl.errors import DataError
from sparkdl.feed.column_statistics import ColumnStatistics, places_from, scan
from sparkdl.feed.decode import decode, tensors_of
from sparkdl.feed.shards import DataStatistics, check_statistics
from sparkdl.protocols import UNKNOWN, ColumnSpec, Padding

IMAGE = pa.struct(
    [
        pa.field("origin", pa.string()),
        *[pa.field(name, pa.int32()) for name in ("height", "width", "nChannels", "mode")],
        pa.field("data", pa.binary()),
    ]
)


def tensor_of(values: pa.Array, spec: ColumnSpec) -> Tensor:
    (tensor,) = tensors_of([values], [spec])
    return tensor


def test_a_flat_array_takes_a_declared_shape() -> None:
    column = pa.array([[1, 2, 3, 4, 5, 6]] * 2, pa.list_(pa.float32()))
    found = tensor_of(column, ColumnSpec("x", torch.float32, (2, 3)))
    assert found.tolist() == [[[1, 2, 3], [4, 5, 6]]] * 2


@every_row((1, 0), (3, 16), (4, 24))
def test_sparks_images_become_rgb_channels_first(channels: int, mode: int) -> None:
    pixels = np.arange(2 * 3 * 2 * channels, dtype=np.uint8).reshape(2, 3, 2, channels)
    said = {"origin": "here", "height": 3, "width": 2, "nChannels": channels, "mode": mode}
    column = pa.array([{**said, "data": image.tobytes()} for image in pixels], IMAGE)
    spec = ColumnSpec("i", torch.float32, (channels, 3, 2), encodings.PIXELS)
    tensor = tensor_of(column, spec)
    blue_green_red = {1: [0], 3: [2, 1, 0], 4: [2, 1, 0, 3]}[channels]
    assert np.array_equal(tensor.numpy(), pixels[..., blue_green_red].transpose(0, 3, 1, 2))


PNG, SMALL = (encoded(PIL.Image.new("RGB", size), "PNG") for size in ((2, 2), (2, 1)))
PIXELS = {"origin": "", "height": 2, "width": 2, "nChannels": 3, "mode": 16, "data": b"\0" * 12}
BROKEN: dict[str, tuple[pa.Array, ColumnSpec, list[int], str]] = {
    "nested arrays": (
        pa.array([[[1, 2]], None, [[1, 2], [3]], [[1, 2]], []], pa.list_(pa.list_(pa.int64()))),
        ColumnSpec("x", torch.int64, (1, 2)),
        [2, 4],
        "not an array of shape (1, 2)",
    ),
    "an inner null": (
        pa.array([[[1, 2]], [None]], pa.list_(pa.list_(pa.int64()))),
        ColumnSpec("x", torch.int64, (1, 2)),
        [1],
        "not an array of shape",
    ),
    "an array of another length than declared": (
        pa.array([[1, 2], [1, 2, 3], None, [1]]),
        ColumnSpec("x", torch.int64, (2,)),
        [1, 3],
        "has 3 elements",
    ),
    "bytes": (
        pa.array([None, b"1234", b"123", b"12345678"]),
        ColumnSpec("x", torch.float32, (1,), encodings.BYTES),
        [2, 3],
        "has 3 bytes, but float32 of shape (1,) takes 4",
    ),
    "a corrupt image": (
        pa.array([PNG, PNG[:40], b"no image", None, PNG]),
        ColumnSpec("x", torch.uint8, (3, 2, 2), encodings.IMAGE),
        [1, 2],
        "not a valid image",
    ),
    "an image of another size": (
        pa.array([PNG, SMALL]),
        ColumnSpec("x", torch.uint8, (3, 2, 2), encodings.IMAGE),
        [1],
        "1 x 2 pixels, not 2 x 2",
    ),
    "Spark's image of another size": (
        pa.array([PIXELS, {**PIXELS, "width": 3}, {**PIXELS, "data": None}], IMAGE),
        ColumnSpec("x", torch.uint8, (3, 2, 2), encodings.PIXELS),
        [1, 2],
        "width 3",
    ),
    "nested arrays of which an inner one is too long": (
        pa.array([[[1, 2], [3, 4]], [[1, 2], [3, 4, 5]], [[1], [2, 3]]]),
        ColumnSpec("x", torch.int64, (2, 2)),
        [1, 2],
        "not an array of shape (2, 2)",
    ),
    "vectors that say what they are not": (
        pa.array(
            [
                as_vector(np.array([0.0, 5.0]), sparse=True),
                {"type": 0, "size": 2, "indices": [2], "values": [1.0]},
                {"type": 0, "size": 2, "indices": [-1], "values": [1.0]},
                {"type": 0, "size": -2, "indices": [], "values": []},
                {"type": 0, "size": 2, "indices": [0, 1], "values": [1.0]},
                {"type": 0, "size": 2, "indices": None, "values": [1.0]},
                {"type": 0, "size": 2, "indices": [0], "values": [None]},
                {"type": 0, "size": (1 << 31) - 1, "indices": [], "values": []},
                {"type": 7, "size": 2, "indices": [0], "values": [1.0]},
                {"type": 1, "size": None, "indices": None, "values": None},
                as_vector(np.array([3.0, 4.0]), sparse=False),
            ],
            VECTOR,
        ),
        ColumnSpec("x", torch.float32, (2,), encodings.VECTOR),
        [1, 2, 3, 4, 5, 6, 7, 8, 9],
        "is not a vector: its type is 0 (1 is dense, 0 sparse), its size 2",
    ),
}


@every("name", BROKEN)
def test_broken_rows_are_counted_placed_and_explained(name: str) -> None:
    values, spec, broken, reason = BROKEN[name]
    statistics = scan(decode(values, spec), spec, places_from(3, 100, 20))
    assert (statistics.broken, statistics.nulls) == (len(broken), values.null_count)
    assert statistics.places["broken"] == (3, 100 + broken[0])
    if values.null_count:
        assert statistics.places["nulls"] == (3, 100 + values.is_null().to_pylist().index(True))
        statistics = scan(decode(values.drop_null(), spec), spec)
    assert not statistics.sound
    with pytest.raises(DataError, match=r"column 'x' has (1 row|\d+ rows) of 9 that") as caught:
        check_statistics(DataStatistics((9,), (statistics,)), [spec], 1)
    assert reason in str(caught.value)
    assert "handleInvalid='skip'" in str(caught.value)
    assert ("columnShapes" in str(caught.value)) is not spec.encoding.chosen


NUMBERS = st.none() | st.lists(st.none() | st.floats(width=32), max_size=3)
SMALL_INTEGERS = st.none() | st.integers(-2, 4)
INDICES = st.none() | st.lists(SMALL_INTEGERS, max_size=3)
VECTORS = {"type": SMALL_INTEGERS, "size": SMALL_INTEGERS, "indices": INDICES, "values": NUMBERS}
SAID: list[tuple[st.SearchStrategy[Any], pa.DataType, list[ColumnSpec]]] = [
    (
        NUMBERS,
        pa.list_(pa.float32()),
        [
            ColumnSpec("x", torch.float32, (2,)),
            ColumnSpec("x", torch.uint8, (UNKNOWN,), padding=Padding(0)),
        ],
    ),
    (
        st.none() | st.lists(NUMBERS, max_size=3),
        pa.list_(pa.list_(pa.float32())),
        [
            ColumnSpec("x", torch.float32, (1, 2)),
            ColumnSpec("x", torch.int64, (UNKNOWN, 2), padding=Padding(0)),
        ],
    ),
    (
        st.none() | st.fixed_dictionaries(VECTORS),
        VECTOR,
        [ColumnSpec("x", torch.float32, (2,), encodings.VECTOR)],
    ),
    (
        st.none() | st.binary(max_size=9),
        pa.binary(),
        [
            ColumnSpec("x", torch.float32, (2,), encodings.BYTES),
            ColumnSpec("x", torch.uint8, (3, 2, 2), encodings.IMAGE),
        ],
    ),
]
"""What rows say, whatever their column was declared to be."""


@given(data=st.data())
def test_whatever_rows_say_they_are_counted_and_become_tensors_or_are_refused(data: Any) -> None:
    row, kind, specs = data.draw(st.sampled_from(SAID))
    values, spec = data.draw(st.lists(row, max_size=4)), data.draw(st.sampled_from(specs))
    values = pa.array(values, kind)
    found = scan(decode(values, spec), spec)
    try:
        (tensor,) = tensors_of([values], [spec])
    except DataError:
        return
    assert len(tensor) == len(values)
    assert found.broken == found.nulls == found.null_elements == 0


@every("name", [name for name in BROKEN if "length" not in name])
def test_broken_rows_are_refused_where_no_statistics_are_wanted(name: str) -> None:
    values, spec, _, reason = BROKEN[name]
    with pytest.raises(DataError, match=r"column 'x' has .*cannot be decoded: row") as caught:
        tensors_of([values], [spec])
    assert reason in str(caught.value)


def test_the_first_bad_value_is_told_with_its_row_and_partition() -> None:
    spec = ColumnSpec("x", torch.float32)
    statistics = scan(pa.array([1.0, None, 2.0, None]), spec, places_from(2, 40, 4))
    with pytest.raises(DataError, match=r"2 null values in 9 rows \(the first is row 41 of part"):
        check_statistics(DataStatistics((9,), (statistics,)), [spec])


def test_vectors_of_unequal_length_are_told_as_arrays_are() -> None:
    rows = [as_vector(np.ones(n), sparse=n == 2) for n in (2, 3)]
    spec = ColumnSpec("v", torch.float32, (UNKNOWN,), encodings.VECTOR)
    statistics = scan(decode(pa.array(rows, VECTOR), spec), spec)
    assert statistics == ColumnStatistics(shortest=2, longest=3)
    assert statistics.places["longest"] == (0, 1)


@every_row(
    (pa.array([[1.0] * 9]), encodings.NUMBERS, (UNKNOWN,), 0),
    (pa.array([as_vector(np.ones(9), sparse=True)], VECTOR), encodings.VECTOR, (UNKNOWN,), 9),
    (pa.array([as_vector(np.ones(9), sparse=False)], VECTOR), encodings.VECTOR, (UNKNOWN,), 0),
    (pa.array([PNG]), encodings.IMAGE, (3, 2, 2), 12),
    (pa.array([PIXELS], IMAGE), encodings.PIXELS, (3, 2, 2), 0),
    (pa.array([b"12"]), encodings.BYTES, (2,), 0),
)
def test_how_much_larger_rows_get_is_known_before(
    values: pa.Array, encoding: encodings.Encoding, shape: tuple[int, ...], elements: int
) -> None:
    assert encoding.grown_elements(values, shape) == elements
