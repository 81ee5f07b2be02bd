"""What users declare of columns whose types do not say it: shapes, dtypes, encoded images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sparkdl.errors import ConfigError
from sparkdl.outputs import OutputKey, names_output
from sparkdl.protocols import ColumnSpec
from sparkdl.spark.rows.columns import InputColumn

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
"""What ``columnDtypes`` knows, by torch's names."""


def names(param: str) -> Callable[[Any], list[str] | None]:
    """What checks a list of column names, or None.

    Args:
        param: what it was given for, for messages.
    """

    def convert(value: Any) -> list[str] | None:
        if value is None:
            return None
        given = list(value) if isinstance(value, (list, tuple)) else []
        if not given or not all(isinstance(name, str) for name in given):
            raise ConfigError(f"{param} must be a list of column names, got {value!r}")
        return given

    return convert


def shapes(value: Any) -> dict[str, list[int]] | None:
    """Check what was given for ``columnShapes``.

    Raises:
        ConfigError: it is not a shape a column, nor None.
    """
    if value is None:
        return None

    def sound(shape: Any) -> bool:
        return isinstance(shape, (list, tuple)) and all(
            isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in shape
        )

    if not isinstance(value, dict) or not all(map(sound, value.values())):
        raise ConfigError(
            "columnShapes must say for each column the shape of one row in whole numbers > 0, for "
            f"example {{'image': [3, 32, 32]}}; got {value!r}"
        )
    return {str(name): list(shape) for name, shape in value.items()}


def dtypes(value: Any) -> dict[str, str] | None:
    """Check what was given for ``columnDtypes``.

    Raises:
        ConfigError: it is not a known dtype a column, nor None.
    """
    if value is None:
        return None
    if not isinstance(value, dict) or not all(name in DTYPES for name in value.values()):
        raise ConfigError(
            f"columnDtypes must say for each column one of {', '.join(DTYPES)}; got {value!r}"
        )
    return {str(name): str(dtype) for name, dtype in value.items()}


def outputs(value: Any) -> dict[str, OutputKey] | None:
    """Check what was given for ``outputCols``.

    Raises:
        ConfigError: it is not an output a column, nor None.
    """
    if value is None:
        return None
    if not isinstance(value, dict) or not value or not all(map(names_output, value.values())):
        raise ConfigError(
            "outputCols must say for each column the name of the model's output or its position "
            f"in a tuple, for example {{'prediction': 'logits', 'embedding': 1}}; got {value!r}"
        )
    return {str(name): key for name, key in value.items()}


class ColumnOverrides:
    """What the user said about columns whose types do not say it.

    Args:
        shapes: one row's shape by column.
        dtypes: the tensor's dtype by column.
        images: binary columns that hold encoded images.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]] | None,
        dtypes: Mapping[str, str] | None,
        images: Sequence[str] | None,
    ) -> None:
        self._shapes = shapes or {}
        self._dtypes = dtypes or {}
        self._images = images or []

    def spec(self, column: InputColumn, default: torch.dtype) -> ColumnSpec:
        """The tensor that a column becomes.

        Args:
            column: of the user's DataFrame.
            default: its dtype if none was declared.

        Raises:
            ConfigError: what was declared does not fit the column, or is missing.
        """
        name, image = column.name, column.name in self._images
        if image and column.encoding != "bytes":
            raise ConfigError(
                f"imageCols names column '{name}', which has type {column.type_name}; encoded "
                "images are binary"
            )
        if column.encoding == "bytes" and not image and name not in self._dtypes:
            raise ConfigError(
                f"column '{name}' is binary: say what its bytes are with columnDtypes="
                f"{{'{name}': 'float32'}} and columnShapes={{'{name}': [...]}}, or imageCols="
                f"['{name}'] if they are encoded images"
            )
        dtype = getattr(torch, self._dtypes[name]) if name in self._dtypes else default
        return column.spec(dtype, self._shapes.get(name), image=image)

    def require_known(self, names: Sequence[str]) -> None:
        """Refuse what was declared of other columns.

        Args:
            names: of the columns that are fed.

        Raises:
            ConfigError: something was.
        """
        for param, declared in (
            ("columnShapes", self._shapes),
            ("columnDtypes", self._dtypes),
            ("imageCols", self._images),
        ):
            unknown = sorted(set(declared) - set(names))
            if unknown:
                raise ConfigError(
                    f"{param} speaks of '{unknown[0]}', which is none of the columns that are fed: "
                    + ", ".join(names)
                )
