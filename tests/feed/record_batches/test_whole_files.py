"""Rows that come as the path of a file, whose bytes they hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pytest

from sparkdl.errors import DataError
from sparkdl.feed.record_batches import whole_files
from sparkdl.feed.record_batches.packed import unpacked_rows
from sparkdl.feed.record_batches.parquet_rows import PATH, WHOLE, FileColumn, name_of_columns

CONTENT = FileColumn("content", WHOLE, 0, exactly=False)


def named(names: Sequence[str], paths: Sequence[Path]) -> Any:
    urls = pa.array(["file://" + quote(str(path)) for path in paths], pa.string())
    where = pa.StructArray.from_arrays([urls], names=[PATH])
    return pa.record_batch({name_of_columns(dict.fromkeys(names, CONTENT)): where})


def test_files_are_their_rows_whatever_their_sizes_and_the_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_files, "PIECE_BYTES", 10)
    contents = [b"abc", b"", b"x" * 25, b"", b"y" * 10, b"z", b"12345678", b"9"]
    paths = [tmp_path / f"{number} ü%20#?.jpg" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    batch = named(["c0", "c2"], paths).append_column("c1", pa.array(range(len(contents))))
    pieces = list(unpacked_rows(iter([batch, named(["c0", "c2"], []), batch])))
    expected = [{"c0": each, "c1": k, "c2": each} for k, each in enumerate(contents)]
    assert [row for piece in pieces for row in piece.to_pylist()] == 2 * expected
    assert [piece.num_rows for piece in pieces] == 2 * [2, 1, 2, 3]


def test_a_file_that_cannot_be_read_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "there.jpg").write_bytes(b"a")
    rows = unpacked_rows(iter([named(["c0"], [tmp_path / "there.jpg", tmp_path / "gone 1.jpg"])]))
    with pytest.raises(DataError, match=r"gone%201\.jpg could not be read: .*No such.*read the"):
        list(rows)


def test_a_file_that_no_row_of_sparks_holds_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 31)  # sparse
    with pytest.raises(DataError, match="large has more than 2,147,483,647 bytes"):
        list(unpacked_rows(iter([named(["c0"], [tmp_path / "large"])])))
