"""The encodings that there are: known by the names that saved models have, and equal by them."""

from __future__ import annotations

import pickle
from typing import Any

import pyarrow as pa
import pytest
import torch
from every_row import every
from pyspark.sql.types import DateType

from sparkdl.encodings import Encoding, known, named, register
from sparkdl.protocols import ColumnSpec
from sparkdl.spark.rows import column_types
from sparkdl.spark.rows.column_types import RowType, recognized, register_column_type

NAMES = ["numbers", "vector", "matrix", "bytes", "image", "pixels"]
NAMES += ["image cropped", "image padded", "image stretched"]


@every("name", NAMES)
def test_a_name_in_a_saved_model_stays_what_it_is(name: str) -> None:
    assert named(name).name == name


@every("name", ["vectors", "", None, 3, ["numbers"]])
def test_other_names_are_refused_with_those_that_there_are(name: Any) -> None:
    with pytest.raises(ValueError, match=f"is not an encoding: there are {', '.join(NAMES)}"):
        named(name)


@every("name", NAMES)
def test_a_column_that_has_travelled_equals_the_one_that_was_sent(name: str) -> None:
    sent = ColumnSpec("x", torch.float32, (3, 2, 2), named(name))
    assert pickle.loads(pickle.dumps(sent)) == sent
    assert sent != ColumnSpec("x", torch.float32, (3, 2, 2), named(NAMES[NAMES.index(name) - 1]))


def test_no_encoding_takes_the_name_of_another() -> None:
    class Others(Encoding):
        name = "vector"

        def takes(self, kind: pa.DataType) -> bool:
            return False

        def decode(self, values: pa.Array, shape: Any, dtype: torch.dtype) -> Any:
            raise NotImplementedError

    with pytest.raises(ValueError, match="another encoding named 'vector'"):
        register(Others())
    register(named("vector"))
    assert type(named("vector")) is not Others


def cell_of_a_notebook() -> Encoding:
    """What running it defines; each time another class of one name."""

    class Days(Encoding):
        name = "days"

        def takes(self, kind: pa.DataType) -> bool:
            return bool(pa.types.is_date32(kind))

        def decode(
            self, values: pa.Array, shape: tuple[int, ...], dtype: torch.dtype
        ) -> tuple[pa.Array, None]:
            return values, None

    return Days()


def test_a_cell_that_is_run_again_replaces_what_it_has_defined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known, "_known", dict(known._known))
    monkeypatch.setattr(column_types, "_types", dict(column_types._types))
    for _ in range(2):
        days = cell_of_a_notebook()
        register_column_type(
            days, lambda kind: RowType(True) if isinstance(kind, DateType) else None
        )
        assert named("days") is days
        found = recognized(DateType())
        assert found is not None
        assert found[0] is days
