"""What users declare about columns whose types do not say it: shapes, dtypes, encoded images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, get_args

import torch

from sparkdl.arguments import as_list, as_number, as_whole, plain
from sparkdl.errors import ConfigError
from sparkdl.feed.columns.ragged import sequence_names
from sparkdl.outputs import OutputKey, names_output
from sparkdl.protocols import UNKNOWN, ColumnSpec, Padding, SequenceInput
from sparkdl.spark.rows.columns import InputColumn
from sparkdl.spark.rows.image_columns import ImageColumns

T = TypeVar("T")

DTYPES = (
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "bool",
)
"""The dtypes that ``columnDtypes`` accepts, by their torch names."""

GROUPS_WITHOUT_PADDING = "groupByLength sorts padded rows, but padCols names no column. Drop it"


def names(param: str) -> Callable[[Any], list[str] | None]:
    """A converter that checks a list of column names, or None.

    Args:
        param: the Param it was given for, named in messages.
    """

    def convert(value: Any) -> list[str] | None:
        if value is None:
            return None
        given = as_list(value)
        if not given or not all(isinstance(name, str) for name in given):
            raise ConfigError(f"{param} must be a list of column names, got {value!r}")
        return [str(name) for name in given]

    return convert


def _by_column(
    convert: Callable[[Any], T | None], wanted: str, *, may_be_empty: bool = True
) -> Callable[[Any], dict[str, T] | None]:
    """A converter that checks a dict by column, or None.

    Args:
        convert: converts what is given for a column; None if it cannot be.
        wanted: the beginning of the message about anything else.
        may_be_empty: whether there may be no column.
    """

    def check(value: Any) -> dict[str, T] | None:
        if value is None:
            return None
        items = value.items() if isinstance(value, dict) else ()
        given = {str(name): convert(each) for name, each in items}
        sound = {name: each for name, each in given.items() if each is not None}
        if not isinstance(value, dict) or sound != given or not (given or may_be_empty):
            raise ConfigError(f"{wanted}; got {value!r}")
        return sound

    return check


def _shape(shape: Any) -> list[int | None] | None:
    """A shape with Python's own numbers; None if it is none."""
    given = as_list(shape)
    if given is None:
        return None
    sizes = [size if size is None else as_whole(size) for size in given]
    wrong = (
        (given[place] is not None or place > 0) if size is None else size < 1
        for place, size in enumerate(sizes)
    )
    return None if any(wrong) else sizes


shapes = _by_column(
    _shape,
    "columnShapes must give for each column the shape of one row in whole numbers > 0, for example "
    "{'image': [3, 32, 32]}, and None for the length of padded rows",
)
"""Checks what was given for ``columnShapes``."""

dtypes = _by_column(
    lambda name: str(name) if name in DTYPES else None,
    f"columnDtypes must give for each column one of {', '.join(DTYPES)}",
)
"""Checks what was given for ``columnDtypes``."""

paddings = _by_column(
    as_number,
    "padCols must give for each column the number that shorter rows are padded with, for example "
    "{'tokens': 0}",
    may_be_empty=False,
)
"""Checks what was given for ``padCols``."""


def _sequence_input(kind: Any) -> SequenceInput | None:
    return kind if kind in get_args(SequenceInput) else None


pad_inputs: Callable[[Any], dict[str, SequenceInput] | None] = _by_column(
    _sequence_input,
    f"padInputs must give for columns of padCols one of {', '.join(get_args(SequenceInput))}, for "
    "example {'tokens': 'lengths'}",
)
"""Checks what was given for ``padInputs``."""


def _output(key: Any) -> OutputKey | None:
    given: OutputKey = plain(key)
    return given if names_output(given) else None


outputs = _by_column(
    _output,
    "outputCols must give for each column the name of the model's output or its position in a "
    "tuple, for example {'prediction': 'logits', 'embedding': 1}",
    may_be_empty=False,
)
"""Checks what was given for ``outputCols``."""


def require_distinct(specs: Sequence[ColumnSpec]) -> None:
    """Check that a model that takes its features by name is given each name once.

    Raises:
        ConfigError: a mask or a length has the same name as a column.
    """
    names = [spec.name for spec in specs]
    both = sorted(set(names) & set(sequence_names(specs)))
    if both:
        raise ConfigError(
            f"the model would be given '{both[0]}' twice: as a column, and as the input that "
            "padInputs adds for a padded one. Drop the column, or set padInputs={} to add "
            "nothing"
        )


class ColumnOverrides:
    """What the user declared about columns whose types do not say it.

    Args:
        shapes: by column, the shape of one row.
        dtypes: by column, the tensor's dtype.
        images: the columns of images, and what those become.
        paddings: by column, the number with which rows of unequal length are padded.
        inputs: by column, what a model is given besides the padded rows; None for a padding mask
            of each of its features.

    Raises:
        ConfigError: ``inputs`` names a column that is not padded.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int | None]] | None,
        dtypes: Mapping[str, str] | None,
        images: ImageColumns | None = None,
        paddings: Mapping[str, float] | None = None,
        inputs: Mapping[str, SequenceInput] | None = None,
    ) -> None:
        self._shapes = {
            name: [UNKNOWN if size is None else size for size in shape]
            for name, shape in (shapes or {}).items()
        }
        self._dtypes = dtypes or {}
        self._images = images or ImageColumns()
        self._paddings = paddings or {}
        self._inputs = inputs
        unpadded = sorted(set(inputs or ()) - set(self._paddings))
        if unpadded:
            raise ConfigError(
                f"padInputs names '{unpadded[0]}', which padCols does not: only padded columns "
                "have masks and lengths"
            )

    def padding(self, name: str, *, label: bool = False) -> Padding | None:
        """How a column is padded; None if it is not.

        Args:
            name: the column's name.
            label: whether it is a label: a model is given neither that nor a mask of it.
        """
        if name not in self._paddings:
            return None
        inputs = self._inputs
        kind: SequenceInput | None = "padding_mask" if inputs is None else inputs.get(name)
        return Padding(self._paddings[name], None if label else kind)

    def spec(
        self, column: InputColumn, fractions: torch.dtype, *, target: torch.dtype | None = None
    ) -> ColumnSpec:
        """The tensor that a column becomes.

        Args:
            column: the column of the user's DataFrame.
            fractions: the dtype of fractional numbers if none was declared.
            target: that of a label in which the loss takes it; None for a feature.

        Raises:
            ConfigError: the overrides do not fit the column, or one is missing.
        """
        name, encoding = column.name, column.encoding
        if name in self._images.names:
            return self._pictures(column, fractions, target)
        if encoding.needs_dtype and name not in self._dtypes:
            raise ConfigError(
                f"column '{name}' is binary: declare its bytes with columnDtypes={{'{name}': "
                f"'float32'}} and columnShapes={{'{name}': [...]}}, or imageCols=['{name}'] if "
                "they are encoded images"
            )
        default = column.default_dtype(fractions) if target is None else target
        dtype = getattr(torch, self._dtypes[name]) if name in self._dtypes else default
        padding = self.padding(name, label=target is not None)
        return column.spec(dtype, self._shapes.get(name), padding=padding)

    def _pictures(
        self, column: InputColumn, fractions: torch.dtype, target: torch.dtype | None
    ) -> ColumnSpec:
        """The tensor that a column of images becomes; see ``spec``."""
        name, images = column.name, self._images
        encoding, shape = images.encoding(column), images.shape(name, self._shapes.get(name))
        declared = getattr(torch, self._dtypes[name]) if name in self._dtypes else None
        dtype = declared or target or torch.uint8
        if target is not None and images.size is not None and not dtype.is_floating_point:
            raise ConfigError(
                f"imageSize would blend the pixels of label column '{name}', which are classes "
                f"({str(dtype).removeprefix('torch.')}). Bring the masks to one size first, by "
                "nearest neighbours, or declare a floating-point dtype with columnDtypes if they "
                "are pictures"
            )
        padding = self.padding(name, label=target is not None)
        spec = column.spec(dtype, shape, encoding=encoding, padding=padding)
        floating = dtype if declared or dtype.is_floating_point else fractions
        scale = images.floats(name, floating, spec.row_shape[0])
        return spec if scale is None else replace(spec, dtype=torch.uint8, scale=scale)

    def require_known(self, names: Sequence[str]) -> None:
        """Refuse overrides of other columns.

        Args:
            names: the columns that are fed.

        Raises:
            ConfigError: something was declared about another column.
        """
        for param, given in (
            ("columnShapes", self._shapes),
            ("columnDtypes", self._dtypes),
            ("imageCols", self._images.names),
            ("padCols", self._paddings),
        ):
            unknown = sorted(set(given) - set(names))
            if unknown:
                raise ConfigError(
                    f"{param} names '{unknown[0]}', which is not among the columns fed: "
                    + ", ".join(names)
                )
