"""Columns that are read for predictions and metrics, and rows that are skipped."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
import torch
from every_row import every, every_row
from pictures import by_pillow, drawn, encoded
from pyspark.sql import types as T
from test_predictor import predictions_of
from torch import Tensor, nn

from sparkdl.encodings import NUMBERS
from sparkdl.encodings.any_size import FITS
from sparkdl.encodings.scale import Scale
from sparkdl.errors import DataError
from sparkdl.feed.decode import tensors_of
from sparkdl.protocols import UNKNOWN, ColumnSpec, Padding
from sparkdl.spark.inference.columns import _as_it_comes, _without_decimals
from sparkdl.spark.inference.evaluation import _weights
from sparkdl.spark.inference.predictor import Labels, PredictionSettings, Score
from sparkdl.spark.rows.column_overrides import ColumnOverrides
from sparkdl.spark.rows.columns import InputColumn, _input_column

ONE, THREE = (ColumnSpec("x", torch.float32, shape) for shape in ((), (3,)))


def test_columns_of_other_types_are_refused() -> None:
    cases = [
        (THREE, pa.array([1.0]), r"of double, but 'x' takes arrays of 3 numbers.*array\(x, ...\)"),
        (ONE, pa.array([[1.0]]), r"list.*, but 'x' takes one number per row.*x\[0\]"),
        (ONE, pa.array(["1"]), r"of string, but 'x' takes one number per row.*CAST\(x AS DOUBLE\)"),
        (THREE, pa.array([["1"] * 3]), r"string.*CAST\(x AS ARRAY<DOUBLE>\)"),
        (ONE, pa.array([[("a", 1.0)]], pa.map_(pa.string(), pa.float64())), "of map<string"),
    ]
    for spec, rows, message in cases:
        with pytest.raises(DataError, match=message):
            _as_it_comes(spec, rows)


def test_decimals_become_the_nearest_doubles() -> None:
    texts = ["0.1", "123456789012345678.1234567891", "0.0000000001", "-7.25", "99.995"]
    decimals = [Decimal(text) for text in texts]
    nearest, kind = list(map(float, texts)), pa.decimal128(38, 10)
    assert _without_decimals(pa.array([*decimals, None], kind), ONE).to_pylist() == [*nearest, None]
    for kinds in (pa.list_(kind), pa.large_list(kind)):
        assert _without_decimals(pa.array([decimals, None, []], kinds), THREE).to_pylist() == [
            nearest,
            None,
            [],
        ]
    rows = pa.array([[1.5]])
    assert _without_decimals(rows, THREE) is rows


def test_decimals_that_a_double_may_have_rounded_do_not_become_int64() -> None:
    whole, told = ColumnSpec("x", torch.int64, ()), r"'x'.*up to 20 digits.*exact for 15.*BIGINT"
    declared = ColumnOverrides(dtypes={"x": "int64"})
    number, kind = Decimal(2**53 + 1), pa.decimal128(20, 0)
    for rows in (pa.array([number], kind), pa.array([[number]], pa.list_(kind))):
        with pytest.raises(DataError, match=told):
            _without_decimals(rows, whole)
    for column in map(_read, (T.DecimalType(20, 0), T.ArrayType(T.DecimalType(20, 0)))):
        with pytest.raises(DataError, match=told):
            declared.spec(column, torch.float32)
        # Of labels, only classes become int64 by themselves: fewer than a double rounds.
        assert declared.spec(column, torch.float32, target=torch.int64).dtype is torch.int64
    few = pa.array([Decimal(7)], pa.decimal128(18, 3))
    assert _without_decimals(few, whole).to_pylist() == [7.0]
    assert declared.spec(_read(T.DecimalType(18, 3)), torch.float32).dtype is torch.int64
    assert ColumnOverrides().spec(_read(T.DecimalType(20, 0)), torch.float32) == ONE


def _read(kind: T.DataType) -> InputColumn:
    frame: Any = None  # only errors tell of it
    return _input_column(frame, [T.StructField("x", kind)], "x", "featuresCol")


def test_padded_columns_take_arrays_of_any_length() -> None:
    padded = ColumnSpec("x", torch.float32, (UNKNOWN,), padding=Padding(0.0))
    with pytest.raises(DataError, match="'x' takes arrays of numbers"):
        _as_it_comes(padded, pa.array([1.0]))
    assert _as_it_comes(padded, pa.array([[1.0], [1.0, 2.0]])).encoding == NUMBERS


def test_numbers_of_any_kind_are_taken() -> None:
    for rows in (pa.array([1, 2]), pa.array([True, False]), pa.array([1.0, 2.0])):
        (found,) = tensors_of([rows], [_as_it_comes(ONE, rows)])
        assert isinstance(found, torch.Tensor)
        assert found.tolist() == [float(row) for row in rows.to_pylist()]


def test_a_column_of_nulls_is_refused_as_nulls() -> None:
    rows = pa.nulls(2)
    with pytest.raises(DataError, match="2 null values"):
        tensors_of([rows], [_as_it_comes(ONE, rows)])


WEIGHT = ColumnSpec("w", torch.float32)


def test_weights_are_numbers_of_any_type() -> None:
    for numbers in (pa.array([2.0, 0.0]), pa.array([2, 0], pa.int16())):
        assert _weights(numbers, WEIGHT).tolist() == [2.0, 0.0]


@every_row(
    (None, "column 'w' has 1 null"),
    (-1.0, "'w' holds -1; weights are numbers >= 0"),
    (float("nan"), "'w' holds nan"),
    (float("inf"), "'w' holds inf"),
)
def test_a_weight_that_weighs_nothing_meaningful_is_refused(wrong: object, words: str) -> None:
    with pytest.raises(DataError, match=words):
        _weights(pa.array([1.0, wrong], pa.float32()), WEIGHT)


PHOTO = ColumnSpec("photo", torch.uint8, (3, 8, 8), FITS["crop"], scale=Scale(torch.float32))
NUMBER = ColumnSpec("number", torch.float32)
LABEL = ColumnSpec("label", torch.float32)
GOOD = [encoded(drawn(20 + i, 30, seed=i), "PNG") for i in range(5)]
MEANS = [by_pillow(each, 3, "crop", (8, 8)).mean((1, 2)) / 255 for each in GOOD]


class Colours(nn.Module):
    """The mean of each channel, and the number."""

    def forward(self, photo: Tensor, number: Tensor) -> Tensor:
        return torch.cat([photo.mean((2, 3)), number[:, None]], 1)


def predicted(
    monkeypatch: pytest.MonkeyPatch, photos: list[Any], numbers: list[Any], **changes: Any
) -> list[Any]:
    """One list a row, or None."""
    columns = [(PHOTO, pa.array(photos, pa.binary())), (NUMBER, pa.array(numbers, pa.float32()))]
    given = {"skip_invalid": True, "batch_rows": 2, **changes}
    found = predictions_of(Colours(), columns, monkeypatch, **given)
    return [row for part in found for row in part[0].to_pylist()]


@every_row(
    (GOOD, [0.0] * 5, [0, 1, 2, 3, 4]),
    ([*GOOD[:2], b"no", *GOOD[3:]], [0.0] * 5, [0, 1, 3, 4]),
    ([None, *GOOD[1:4], b""], [0.0] * 5, [1, 2, 3]),
    (GOOD, [0.0, None, 0.0, float("nan"), float("inf")], [0, 2]),
    ([b"no", None, *GOOD[2:]], [0.0, 0.0, None, 0.0, 0.0], [3, 4]),
    ([b"no"] * 5, [0.0] * 5, []),
)
def test_a_row_that_cannot_be_used_is_null_and_the_others_are_not(
    monkeypatch: pytest.MonkeyPatch, photos: list[Any], numbers: list[Any], left: list[int]
) -> None:
    found = predicted(monkeypatch, photos, numbers)
    assert [row for row, each in enumerate(found) if each is not None] == left
    for row in left:
        assert found[row] == pytest.approx([*MEANS[row], 0.0], abs=1e-6)


def test_without_skip_such_a_row_ends_the_job_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"'photo' has 1 row in a batch of 5 .*: row 2 is not a"):
        predicted(monkeypatch, [*GOOD[:2], b"no", *GOOD[3:]], [0.0] * 5, skip_invalid=False)
    with pytest.raises(DataError, match="'photo' has 1 null value "):
        predicted(monkeypatch, [*GOOD[:4], None], [0.0] * 5, skip_invalid=False)


def test_a_loss_is_that_of_the_rows_own_label(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = [
        (PHOTO, pa.array([GOOD[0], b"no", GOOD[2], GOOD[3], None], pa.binary())),
        (NUMBER, pa.array([1.0, 2.0, 3.0, 4.0, 5.0], pa.float32())),
        (LABEL, pa.array([10.0, None, 30.0, 40.0, float("nan")], pa.float32())),
    ]

    def own(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs[:, 3], targets, reduction="none")

    score = Score(own, Labels([LABEL], as_one=True))
    pickled = cloudpickle.dumps(score)
    (found,) = predictions_of(
        Colours(), columns, monkeypatch, 2, batch_rows=2, score=pickled, skip_invalid=True
    )
    flat = [None if each is None else each[0] for each in found[1].to_pylist()]
    assert flat == [81.0, None, 27.0**2, 36.0**2, None]


def test_padded_rows_come_back_in_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ColumnSpec("tokens", torch.float32, (-1,), padding=Padding(0.0))
    rows = pa.array([[1.0], [float("nan")], [1.0, 2.0, 3.0], None, [], [4.0, 4.0]])

    class Sums(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return tokens.sum(1, keepdim=True)

    (found,) = predictions_of(Sums(), [(spec, rows)], monkeypatch, batch_rows=2, skip_invalid=True)
    assert found[0].to_pylist() == [[1.0], None, [6.0], None, [0.0], [8.0]]


def test_a_large_batch_goes_through_in_parts_whose_rows_are_all_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sparkdl.feed.decode.DECODED_BYTES", 8 * 3 * 8 * 8 * 2)
    found = predicted(monkeypatch, [*GOOD, b"no", *GOOD], [float(i) for i in range(11)])
    numbers = [None if each is None else each[3] for each in found]
    assert numbers == [0.0, 1.0, 2.0, 3.0, 4.0, None, 6.0, 7.0, 8.0, 9.0, 10.0]


@every("dtype", [torch.bfloat16, torch.float16, None])
def test_floats_of_images_have_the_precision_in_which_the_model_predicts(
    dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class Sees(nn.Module):
        def forward(self, photo: Tensor) -> Tensor:
            seen.append(photo)
            return photo.mean((2, 3)).float()

    init = PredictionSettings.__init__

    def settings(self: PredictionSettings, **values: Any) -> None:
        init(self, **{**values, "dtype": dtype})

    monkeypatch.setattr(PredictionSettings, "__init__", settings)
    predictions_of(Sees(), [(PHOTO, pa.array(GOOD))], monkeypatch, batch_rows=9)
    pixels = np.stack([by_pillow(each, 3, "crop", (8, 8)) for each in GOOD])
    expected = torch.from_numpy(pixels).float().div(255).to(dtype or torch.float32)
    assert torch.equal(seen[0], expected)


SPEC = ColumnSpec("w", torch.float64)


@every("weight", [1e-46, 1e39, -1.0, float("inf"), float("nan")])
def test_a_weight_that_float32_would_change_beyond_rounding_is_refused_by_name(
    weight: float,
) -> None:
    with pytest.raises(DataError, match="weight column 'w' holds"):
        _weights(pa.array([1.0, weight]), SPEC)


def test_other_weights_are_rounded() -> None:
    found = _weights(pa.array([0.0, 0.1, 1e-40]), SPEC)
    assert found.tolist() == torch.tensor([0.0, 0.1, 1e-40]).tolist()
