"""A model as a function of columns, to be called in SQL and in expressions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.functions import arrow_udf

from sparkdl.errors import DataError
from sparkdl.protocols import ColumnSpec, Encoding
from sparkdl.spark.inference.predictor import Predictor

_STRUCTS: dict[tuple[str, ...], Encoding] = {
    ("type", "size", "indices", "values"): "vector",
    ("type", "numRows", "numCols", "colPtrs", "rowIndices", "values", "isTransposed"): "matrix",
    ("origin", "height", "width", "nChannels", "mode", "data"): "pixels",
}
"""By the names of their fields what structs hold: Spark's own types arrive as such."""


def predict_function(predictor: Predictor, features: Sequence[ColumnSpec]) -> Any:
    """A user-defined function of as many columns as the model has features.

    What a column holds is told from the batches themselves, because a function is made before
    anyone says of which columns.

    Args:
        predictor: what is to be done with the rows.
        features: the tensors that the model takes, as it was trained with them.

    Returns:
        What ``spark.udf.register`` takes, and what gives a Column when it is called with Columns.
        Its values are of the only output, or structs of several by their columns' names.
    """
    alone = len(predictor.outputs) == 1
    names = [each.name for each in predictor.outputs]

    def predict(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        def rows() -> Iterator[tuple[Sequence[pa.Array], Sequence[ColumnSpec]]]:
            for batch in batches:
                # Spark hands over a bare array if there is but one column.
                arrays = batch if isinstance(batch, tuple) else (batch,)
                if len(arrays) != len(features):
                    taken = ", ".join(each.name for each in features)
                    raise DataError(
                        f"the model was called with {len(arrays)} columns, but it takes "
                        f"{len(features)}: {taken}"
                    )
                yield arrays, list(map(_as_it_comes, features, arrays))

        for predicted in predictor.predictions(rows()):
            yield predicted[0] if alone else pa.StructArray.from_arrays(predicted, names=names)

    fields = [
        f"`{name.replace('`', '``')}` {sql}"
        for name, sql in zip(names, predictor.sql_types, strict=True)
    ]
    result = predictor.sql_types[0] if alone else f"struct<{', '.join(fields)}>"
    return arrow_udf(predict, result)  # type: ignore[call-overload]


def _as_it_comes(spec: ColumnSpec, rows: pa.Array) -> ColumnSpec:
    return spec if spec.encoding == "image" else replace(spec, encoding=_encoding(rows.type))


def _encoding(kind: pa.DataType) -> Encoding:
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return "bytes"
    if not pa.types.is_struct(kind):
        return "numbers"
    names = tuple(kind.field(index).name for index in range(kind.num_fields))
    if names not in _STRUCTS:
        raise DataError(
            f"the model was called with a column of structs ({', '.join(names)}), which cannot "
            "become a tensor. Call it with their numeric fields"
        )
    return _STRUCTS[names]
