"""From a DataFrame's schema to what workers receive: which columns, by which expression.

Which Spark types arrive in which encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkdl.arguments import listed
from sparkdl.encodings import BYTES, NUMBERS, PIXELS, VECTOR, Encoding, pixels
from sparkdl.errors import ConfigError, DataError
from sparkdl.feed.conversion import limits
from sparkdl.feed.decode import in_sql
from sparkdl.protocols import UNKNOWN, ColumnSpec, Padding

_CASE = "spark.sql.caseSensitive"
_INTEGRAL = (T.ByteType, T.ShortType, T.IntegerType, T.LongType, T.BooleanType)
_FRACTIONAL = (T.FloatType, T.DoubleType, T.DecimalType)


def recognized(kind: T.DataType) -> tuple[Encoding, bool, int | None] | None:
    """How the rows of a type arrive; None if they cannot feed a model.

    Returns:
        The encoding, whether the numbers are integers or booleans, and the dimensions of one row's
        value: 0 for a number, 1 for an array or vector; None for bytes, which do not say.
    """
    if isinstance(kind, VectorUDT):
        return VECTOR, False, 1
    if isinstance(kind, T.BinaryType):
        return BYTES, True, None
    if isinstance(kind, T.StructType) and kind.names == pixels.FIELDS:
        return PIXELS, True, 3
    dimensions = 0
    while isinstance(kind, T.ArrayType):
        kind = kind.elementType
        dimensions += 1
    integral = isinstance(kind, _INTEGRAL)
    return (NUMBERS, integral, dimensions) if integral or isinstance(kind, _FRACTIONAL) else None


def digits_of(kind: T.DataType) -> int:
    """The most that decimals of a type, or in its arrays, have before the point; else 0."""
    while isinstance(kind, T.ArrayType):
        kind = kind.elementType
    return kind.precision - kind.scale if isinstance(kind, T.DecimalType) else 0


def without_decimals(kind: T.DataType) -> T.DataType:
    """The type that a column arrives as: decimals, also in arrays, are cast to doubles."""
    if isinstance(kind, T.ArrayType):
        return T.ArrayType(without_decimals(kind.elementType), kind.containsNull)
    return T.DoubleType() if isinstance(kind, T.DecimalType) else kind


_EXACT_DIGITS = 15
"""Doubles hold all whole numbers of so many digits."""


def require_exact(name: str, digits: int, dtype: torch.dtype) -> None:
    """Refuse to make int64 of decimals that were rounded when they became doubles.

    Args:
        name: the column's, for the message.
        digits: the most that one has before its point.
        dtype: of the tensor; the others hold no whole number that a double rounds.

    Raises:
        DataError: they may have been.
    """
    if dtype is torch.int64 and digits > _EXACT_DIGITS:
        raise DataError(
            f"column '{name}' is to become int64, but holds decimals of up to {digits} digits, "
            f"which arrive as doubles: those are exact for {_EXACT_DIGITS}. Cast it to BIGINT, or "
            "to ARRAY<BIGINT>"
        )


_FIXES: tuple[tuple[type[T.DataType], str], ...] = (
    (T.StringType, "index it with pyspark.ml.feature.StringIndexer, or cast it to a number"),
    (T.TimestampType, "take numbers from it: F.unix_timestamp, F.hour, F.dayofweek"),
    (T.TimestampNTZType, "take numbers from it: F.hour, F.dayofweek, F.dayofyear"),
    (T.DateType, "take numbers from it: F.dayofyear, F.dayofweek, F.datediff"),
    (T.StructType, "select its numeric fields as columns of their own"),
    (T.MapType, "select its values as columns of their own"),
)


@dataclass(frozen=True, slots=True)
class InputColumn:
    """One column of the user's DataFrame that feeds the model.

    Attributes:
        name: as the user knows it.
        type_name: its SQL type, for messages.
        integral: whether its numbers are integers or booleans.
        encoding: how its rows arrive, as far as its type tells.
        dimensions: those of one row's value: 0 for a number, 1 for an array or vector;
            None for bytes, which do not say.
        cast: the type that Spark casts it to on the way; None to leave it as it is.
        computed: what it is computed by, if the DataFrame does not have it.
        digits: the most that its decimals have before the point; 0 for other numbers.
    """

    name: str
    type_name: str
    integral: bool
    encoding: Encoding = NUMBERS
    dimensions: int | None = 0
    cast: T.DataType | None = None
    computed: Callable[[], Column] | None = None
    digits: int = 0

    def tensor_dtype(self, fractions: torch.dtype) -> torch.dtype:
        """int64 for integers and booleans, as embeddings take them; else ``fractions``."""
        return torch.int64 if self.integral else fractions

    def default_dtype(self, fractions: torch.dtype) -> torch.dtype:
        """The encoding's own dtype if it has one, else ``tensor_dtype``."""
        return torch.uint8 if self.encoding.of_bytes else self.tensor_dtype(fractions)

    def spec(
        self,
        dtype: torch.dtype,
        shape: Sequence[int] | None = None,
        *,
        encoding: Encoding | None = None,
        padding: Padding | None = None,
    ) -> ColumnSpec:
        """The tensor that the column becomes.

        Args:
            dtype: its element type.
            shape: one row's shape, if it was declared; UNKNOWN for the length of padded rows.
            encoding: how its rows arrive, if that was declared; None for what its type implies.
            padding: how rows of unequal length are padded; None if all have one shape.

        Raises:
            ConfigError: the declared shape is missing or impossible, or the column cannot be
                padded.
        """
        encoding = encoding or self.encoding
        if padding is not None:
            return ColumnSpec(
                self.name, dtype, self._padded_shape(dtype, shape, padding), encoding, padding
            )
        if shape is not None and UNKNOWN in shape:
            raise ConfigError(
                f"columnShapes leaves the length of column '{self.name}' open: set what shorter "
                f"rows are padded with, such as padCols={{'{self.name}': 0}}"
            )
        if shape is None:
            if self.dimensions not in (0, 1) or encoding.dimension_names:
                dimensions = encoding.dimension_names or ["..."] * (self.dimensions or 1)
                raise ConfigError(
                    f"column '{self.name}' ({self.type_name}) needs a declared shape: "
                    f"columnShapes={{'{self.name}': [{', '.join(dimensions)}]}}"
                    + (", or imageCols and imageSize" if encoding.dimension_names else "")
                )
            return ColumnSpec(self.name, dtype, (UNKNOWN,) * self.dimensions, encoding)
        fault = encoding.shape_fault(shape)
        if fault is not None:
            raise ConfigError(f"{fault}; columnShapes gives {list(shape)} for column '{self.name}'")
        if self.dimensions == 0 or ((self.dimensions or 0) > 1 and len(shape) != self.dimensions):
            raise ConfigError(
                f"columnShapes gives {list(shape)} for column '{self.name}' ({self.type_name}), "
                f"whose rows have {self.dimensions} dimensions"
            )
        return ColumnSpec(self.name, dtype, tuple(shape), encoding)

    def as_trained(self, known: ColumnSpec) -> ColumnSpec:
        """The tensor that the column becomes for a model that was trained with one like it.

        Raises:
            ConfigError: as ``spec``.
        """
        chosen = known.encoding.chosen and known.encoding.reads(self.encoding)
        encoding = known.encoding if chosen else None
        shape = known.row_shape or None
        spec = self.spec(known.dtype, shape, encoding=encoding, padding=known.padding)
        return replace(spec, scale=known.scale)

    def _padded_shape(
        self, dtype: torch.dtype, shape: Sequence[int] | None, padding: Padding
    ) -> tuple[int, ...]:
        """The shape of a row of unknown length."""
        name, given = self.name, f"'{self.name}' ({self.type_name})"
        if not self.encoding.paddable or self.dimensions not in (1, 2):
            raise ConfigError(
                f"padCols names column {given}, which has no length to pad: only arrays of "
                "numbers, arrays of arrays of one width, and vectors do"
            )
        low, high = limits(dtype)
        whole = dtype.is_floating_point or padding.value == int(padding.value)
        if not (low <= padding.value <= high and whole):
            raise ConfigError(
                f"padCols pads column {given} with {padding.value:g}, which its "
                f"{str(dtype).removeprefix('torch.')} tensor cannot hold"
            )
        if shape is None and self.dimensions == 1:
            return (UNKNOWN,)
        if (
            shape is None
            or len(shape) != self.dimensions
            or shape[0] != UNKNOWN
            or UNKNOWN in shape[1:]
        ):
            open_shape = ", ".join(["None", *["..."] * (self.dimensions - 1)])
            nested = ". Items of several numbers are arrays in an array"
            raise ConfigError(
                f"column {given} is padded, and only the length of its rows may be open: "
                f"columnShapes={{'{name}': [{open_shape}]}}"
                + ("" if shape is None else f"; it is {_as_declared(shape)}")
                + (nested if self.dimensions < len(shape or ()) else "")
            )
        return tuple(shape)

    def expression(self) -> Column:
        """The column as workers receive it."""
        column = quoted(self.name) if self.computed is None else self.computed()
        return column if self.cast is None else column.cast(self.cast)

    def arriving(self, kinds: Mapping[str, T.DataType]) -> T.DataType:
        """The type of ``expression``, given those of the DataFrame's columns."""
        return self.cast or kinds[self.name]


def _as_declared(shape: Sequence[int]) -> list[int | None]:
    return [None if size == UNKNOWN else size for size in shape]


def quoted(name: str) -> Column:
    """A column by its exact name, whatever characters that contains."""
    return F.col(in_sql(name))


def input_column(frame: DataFrame, name: str, param: str) -> InputColumn:
    """Look up one column; see ``input_columns``."""
    return input_columns(frame, [name], param)[0]


def input_columns(frame: DataFrame, names: Sequence[str], param: str) -> list[InputColumn]:
    """Look up columns and check that they can feed a model.

    Args:
        frame: the user's DataFrame.
        names: the columns' names.
        param: the Param that names them, for messages.

    Raises:
        DataError: a column is missing, duplicated or not told from another by Spark, or its type
            cannot become a tensor.
    """
    fields: dict[str, list[T.StructField]] = {}
    spellings: dict[str, set[str]] = {}
    for field in frame.schema.fields:
        fields.setdefault(field.name, []).append(field)
        spellings.setdefault(field.name.lower(), set()).add(field.name)
    found = [_input_column(frame, fields.get(name, []), name, param) for name in names]
    alike = next((each for name in names if len(each := spellings[name.lower()]) > 1), None)
    if alike and str(frame.sparkSession.conf.get(_CASE)).lower() != "true":
        raise DataError(
            f"{param} names one of the columns {listed(map(repr, sorted(alike)))}, which are one "
            f"to Spark unless {_CASE} is true. Drop or rename the others"
        )
    return found


def type_of(
    frame: DataFrame, found: Sequence[T.StructField], name: str, param: str, fix: str = ""
) -> T.DataType:
    """The type of a column.

    Args:
        frame: the user's DataFrame.
        found: its fields with the column's name.
        name: the column's.
        param: the Param that names it, for messages.
        fix: what else may be done if it is missing, as the end of a sentence.

    Raises:
        DataError: it is missing or duplicated.
    """
    if not found:
        raise DataError(
            f"{param} names the column '{name}', which the DataFrame does not have. "
            f"It has: {listed(frame.columns)}{fix}"
        )
    if len(found) > 1:
        raise DataError(
            f"{param} names the column '{name}', which occurs {len(found)} times in the "
            "DataFrame. Drop or rename the others, for example after a join: "
            "df.drop(other['key'])"
        )
    return found[0].dataType


def _input_column(
    frame: DataFrame, found: Sequence[T.StructField], name: str, param: str
) -> InputColumn:
    kind = type_of(frame, found, name, param)
    column = recognized(kind)
    if column is not None:
        encoding, integral, dimensions = column
        arriving = without_decimals(kind)
        cast = None if arriving == kind else arriving
        text = kind.simpleString()
        return InputColumn(name, text, integral, encoding, dimensions, cast, digits=digits_of(kind))
    fix = next(
        (fix for refused, fix in _FIXES if isinstance(kind, refused)),
        "convert it to a number or an array of numbers",
    )
    raise DataError(
        f"column '{name}' ({param}) has type {kind.simpleString()}, which cannot become a tensor: "
        f"{fix}. A tensor can be made of numbers, booleans, (nested) arrays of them, pyspark.ml "
        "vectors, binary columns and Spark's images"
    )


def held_out_fraction(content: tuple[InputColumn, ...], fraction: float, seed: int) -> InputColumn:
    """A column of booleans that no DataFrame has: true for a fraction of its rows.

    A row's side depends on its content and a seed, and on nothing else: it is the same whatever
    the rows' partitions and order, for every number of workers and in every later fit. Rows of the
    same content are on the same side.

    Args:
        content: the columns that tell one row from another.
        fraction: the fraction of rows to hold out, 0 < fraction < 1.
        seed: determines the choice.
    """

    def is_held_out() -> Column:
        """Whether the row's hash, one of 2^64 numbers, is among the lowest."""
        # Differs from the hash by which rows are ordered, where the seed comes first.
        known = (F.lit("held out"), F.lit(seed), *[column.expression() for column in content])
        return F.xxhash64(*known) < F.lit(round((fraction - 0.5) * (1 << 64)))

    name = f"validationFraction={fraction:g}"
    return InputColumn(name, "boolean", integral=True, computed=is_held_out)
