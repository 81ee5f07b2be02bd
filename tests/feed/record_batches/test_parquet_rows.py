"""Rows that come as the place in a Parquet file where they lie, or as the path of a whole file."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from every_row import every
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.errors import DataError
from sparkdl.feed.record_batches import parquet_rows
from sparkdl.feed.record_batches.packed import unpacked_rows
from sparkdl.feed.record_batches.parquet_rows import PATH, ROW, WHOLE, FileColumn, name_of_columns

LISTS = FileColumn("x", "float", 1, exactly=True)


def uri(path: Path) -> str:
    return "file://" + quote(str(path))


def named(columns: dict[str, FileColumn], paths: Sequence[str], rows: Sequence[int]) -> Any:
    where = pa.StructArray.from_arrays(
        [pa.array(paths, pa.string()), pa.array(rows, pa.int64())], names=[PATH, ROW]
    )
    return pa.record_batch({name_of_columns(columns): where})


def read(*batches: Any) -> list[dict[str, Any]]:
    return [row for batch in unpacked_rows(iter(batches)) for row in batch.to_pylist()]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_in_any_order_are_those_that_were_written(data: st.DataObject) -> None:
    """Whatever the files' groups of rows are, the order and the record batches."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet_rows, "MAX_PIECE_ROWS", data.draw(st.integers(1, 9)))
        sizes = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=3))
        written = []
        for number, size in enumerate(sizes):
            values = [None if k % 5 == 4 else [number, k] * (k % 3) for k in range(size)]
            path = Path(name) / f"{number} ü%20.parquet"
            table = pa.table({"x": pa.array(values, pa.list_(pa.float32())), "y": range(size)})
            pq.write_table(table, path, row_group_size=data.draw(st.integers(1, 12)))
            written += [(uri(path), k, value) for k, value in enumerate(values)]
        chosen = data.draw(st.lists(st.sampled_from(written), max_size=40))
        if data.draw(st.booleans()):
            chosen.sort(key=lambda each: each[:2])
        cut = data.draw(st.integers(0, len(chosen)))
        batches = [
            named({"c0": LISTS}, [each[0] for each in part], [each[1] for each in part])
            for part in (chosen[:cut], chosen[cut:])
        ]
        assert read(*batches) == [{"c0": value} for _, _, value in chosen]


def test_what_comes_with_the_place_belongs_to_the_same_row(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    values = pa.array([[float(k)] for k in range(10)], LISTS.type)
    pq.write_table(pa.table({"x": values}), path, row_group_size=4)
    rows = [1, 3, 4, 9]
    batch = named({"c1": LISTS}, [uri(path)] * 4, rows)
    batch = batch.append_column("c0", pa.array([10 * row for row in rows]))
    assert read(batch) == [{"c0": 10 * row, "c1": [float(row)]} for row in rows]


@every(
    ("values", "column", "expected"),
    [
        (
            pa.array([[1.0, 2.0]], pa.list_(pa.float32(), 2)),
            FileColumn("x", "float", 1, exactly=True),
            [1.0, 2.0],
        ),
        (pa.array([[1, 2]], pa.large_list(pa.int32())), FileColumn("x", "bigint", 1, True), [1, 2]),
        (pa.array([b"abc"], pa.large_binary()), FileColumn("x", "binary", 0, True), b"abc"),
        (pa.array([b"abc"]).dictionary_encode(), FileColumn("x", "binary", 0, True), b"abc"),
        (pa.array([[[1.0], []]]), FileColumn("x", "double", 2, True), [[1.0], []]),
        (pa.array([[1.0]]), FileColumn("X", "double", 1, exactly=False), [1.0]),
        (pa.array([[1.0]]), FileColumn("X", "double", 1, exactly=True), None),
        (
            pa.FixedShapeTensorArray.from_numpy_ndarray(np.ones((1, 2), np.float32)),
            FileColumn("x", "float", 1, exactly=True),
            [1.0, 1.0],
        ),
    ],
)
def test_values_come_as_spark_would_read_them(
    tmp_path: Path, values: pa.Array, column: FileColumn, expected: Any
) -> None:
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"x": values}), path)
    (batch,) = unpacked_rows(iter([named({"c0": column}, [uri(path)], [0])]))
    assert batch.schema.field("c0").type == column.type
    assert batch.to_pylist() == [{"c0": expected}]


@every(
    ("found", "values", "kind"),
    [
        (pa.timestamp("us"), [1], "bigint"),
        (pa.date32(), [1], "int"),
        (pa.int32(), [300], "tinyint"),
        (pa.int64(), [1], "int"),
        (pa.uint32(), [1], "int"),
        (pa.decimal128(5, 2), [1], "int"),
        (pa.decimal128(5, 2), [1], "double"),
        (pa.float64(), [0.1], "float"),
        (pa.bool_(), [True], "int"),
        (pa.int32(), [1], "float"),
        (pa.string(), ["1"], "double"),
        (pa.float16(), [np.float16(1)], "float"),
    ],
)
def test_types_that_spark_reads_in_a_way_of_its_own_or_not_at_all_are_refused(
    tmp_path: Path, found: pa.DataType, values: list[Any], kind: str
) -> None:
    path = tmp_path / "table.parquet"
    for column, depth in ((pa.array(values, found), 0), (pa.array([values], pa.list_(found)), 1)):
        pq.write_table(pa.table({"x": column}), path)
        told = rf"it holds .*{re.escape(str(found))}.* in the column x, not .*withColumn"
        with pytest.raises(DataError, match=told):
            read(named({"c0": FileColumn("x", kind, depth, exactly=True)}, [uri(path)], [0]))


def test_vectors_are_read_only_with_the_fields_that_they_have(tmp_path: Path) -> None:
    path, column = tmp_path / "table.parquet", FileColumn("x", "vector", 0, exactly=True)
    value = {"type": 1, "size": None, "indices": None, "values": [1.0]}
    pq.write_table(pa.table({"x": pa.array([value], column.type)}), path)
    assert read(named({"c0": column}, [uri(path)], [0])) == [{"c0": value}]
    for fields in ([*column.type][:3], [each.with_name(each.name.upper()) for each in column.type]):
        values = pa.array([dict.fromkeys(each.name for each in fields)], pa.struct(fields))
        pq.write_table(pa.table({"x": values}), path)
        with pytest.raises(DataError, match="it holds struct"):
            read(named({"c0": column}, [uri(path)], [0]))


@every("exactly", [False, True])
def test_of_columns_that_differ_in_case_one_is_read_where_that_matters(
    tmp_path: Path, exactly: bool
) -> None:
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"X": [[8.0]], "x": [[9.0]]}), path)
    batch = named({"c0": FileColumn("x", "double", 1, exactly)}, [uri(path)], [0])
    if exactly:
        assert read(batch) == [{"c0": [9.0]}]
    else:  # as Spark
        with pytest.raises(DataError, match="several columns of that name: X, x"):
            read(batch)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gone.parquet"
    with pytest.raises(DataError, match=r"columns x could not be read from file://.*gone\.parquet"):
        read(named({"c0": LISTS}, [uri(path)], [0]))
    path.write_bytes(b"PAR1 is how they begin")
    with pytest.raises(DataError, match=r"df\.withColumn"):
        read(named({"c0": LISTS}, [uri(path)], [0]))


def test_a_file_that_was_written_anew_with_fewer_rows_is_named(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"x": pa.array([[1.0]], LISTS.type)}), path)
    with pytest.raises(DataError, match="row 7 is past its last one"):
        read(named({"c0": LISTS}, [uri(path)], [7]))


def test_other_record_batches_pass(tmp_path: Path) -> None:
    assert read(pa.record_batch({"c0": [1], "order": [2]})) == [{"c0": 1, "order": 2}]


CONTENT = FileColumn("content", WHOLE, 0, exactly=False)


def whole(names: Sequence[str], paths: Sequence[Path]) -> Any:
    urls = pa.array(["file://" + quote(str(path)) for path in paths], pa.string())
    where = pa.StructArray.from_arrays([urls], names=[PATH])
    return pa.record_batch({name_of_columns(dict.fromkeys(names, CONTENT)): where})


def test_files_are_their_rows_whatever_their_sizes_and_the_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_rows, "PIECE_BYTES", 10)
    contents = [b"abc", b"", b"x" * 25, b"", b"y" * 10, b"z", b"12345678", b"9"]
    paths = [tmp_path / f"{number} ü%20#?.jpg" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    batch = whole(["c0", "c2"], paths).append_column("c1", pa.array(range(len(contents))))
    pieces = list(unpacked_rows(iter([batch, whole(["c0", "c2"], []), batch])))
    expected = [{"c0": each, "c1": k, "c2": each} for k, each in enumerate(contents)]
    assert [row for piece in pieces for row in piece.to_pylist()] == 2 * expected
    assert [piece.num_rows for piece in pieces] == 2 * [2, 1, 2, 3]


def test_a_file_that_cannot_be_read_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "there.jpg").write_bytes(b"a")
    rows = unpacked_rows(iter([whole(["c0"], [tmp_path / "there.jpg", tmp_path / "gone 1.jpg"])]))
    with pytest.raises(DataError, match=r"gone%201\.jpg could not be read: .*No such.*read the"):
        list(rows)


def test_a_file_that_no_row_of_sparks_holds_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 31)  # sparse
    with pytest.raises(DataError, match="large has more than 2,147,483,647 bytes"):
        list(unpacked_rows(iter([whole(["c0"], [tmp_path / "large"])])))
