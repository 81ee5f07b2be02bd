"""Python functions of Arrow arrays as functions of columns, in every version of Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from sparkdl.spark.launch.environments import checked

Arrays = tuple[pa.Array, ...]
Function = Callable[[Iterator[Arrays]], Iterator[pa.Array]]
"""From the columns of each batch to as many values, in batches of any size."""


def has_arrow_functions() -> bool:
    """Whether this Spark passes Arrow arrays."""
    return hasattr(F, "arrow_udf")


def called_on(
    frame: DataFrame, inputs: Mapping[str, Column], function: Function, fields: Mapping[str, str]
) -> dict[str, Column]:
    """Call a function on columns.

    Args:
        frame: the DataFrame of the columns.
        inputs: the function's arguments, by any names.
        function: returns structs of floats, doubles or arrays of these, null for all or none.
        fields: the SQL types of the structs' fields, by name.

    Returns:
        The fields as columns; the function runs once for all of them.
    """
    if not has_arrow_functions():
        # pandas takes a while to import, and nothing else here needs it.
        from sparkdl.spark.inference import pandas_functions

        return pandas_functions.called_on(frame, inputs, function, fields)
    structs = _arrow_udf(function, struct_of(fields))(*inputs.values())
    return {name: structs[name] for name in fields}


def function_of_columns(function: Function, result: str, *, skips_nan: bool) -> Any:
    """Make a function of any columns, for SQL and expressions.

    Args:
        function: takes them as they come.
        result: the SQL type of its values.
        skips_nan: whether the function treats NaN and null alike.
    """
    if has_arrow_functions():
        return _arrow_udf(function, result)
    from sparkdl.spark.inference import pandas_functions

    return pandas_functions.function_of_columns(function, result, skips_nan=skips_nan)


def _arrow_udf(function: Function, result: str) -> Any:
    def on_arrays(batches: Iterator[Any]) -> Iterator[pa.Array]:
        return function(map(columns_of, batches))

    # By this PySpark tells that batches come one after another, each of any number of columns.
    on_arrays.__annotations__ = {
        "batches": Iterator[tuple[pa.Array, ...]],
        "return": Iterator[pa.Array],
    }
    on_arrays.__name__ = function.__name__  # which names the column
    return F.arrow_udf(checked(on_arrays), result)  # type: ignore[attr-defined]


def columns_of(batch: Any) -> tuple[Any, ...]:
    """A batch's columns; Spark passes a bare one if there is only one."""
    return batch if isinstance(batch, tuple) else (batch,)


def struct_of(fields: Mapping[str, str]) -> str:
    """The SQL type of structs of these fields."""
    return f"struct<{', '.join(f'{name} {sql}' for name, sql in fields.items())}>"
