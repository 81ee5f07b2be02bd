"""What users declare about columns whose types do not say it: shapes, dtypes, encoded images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparkdl.arguments import listed
from sparkdl.encodings import IMAGE, PIXELS, Encoding
from sparkdl.encodings.any_size import FITS
from sparkdl.encodings.scale import Scale
from sparkdl.errors import ConfigError
from sparkdl.feed.schema import sequence_names
from sparkdl.protocols import UNKNOWN, ColumnSpec, Padding, SequenceInput
from sparkdl.spark.rows import converters as convert
from sparkdl.spark.rows.columns import InputColumn, require_exact

ImageScale = str | Sequence[Any]
"""One of ``LARGEST``, or (mean, std): numbers, or one of each for every channel."""
COLOURS = 3
"""Channels of an image of which ``columnShapes`` says nothing."""


@dataclass(frozen=True)
class ImageColumns:
    """The columns of images, and what they become.

    Attributes:
        names: the columns.
        size: height and width that images of any size are brought to; None if all have the
            declared shape.
        fit: how they are brought to it, a key of ``FITS``.
        scale: as what floats a model is given them; None for bytes.

    Raises:
        ConfigError: something is declared that has no effect.
    """

    names: Sequence[str] = ()
    size: Sequence[int] | None = None
    fit: str = "crop"
    scale: ImageScale | None = None

    def __post_init__(self) -> None:
        for param, given in (("imageSize", self.size), ("imageScale", self.scale)):
            if given is not None and not self.names:
                raise ConfigError(
                    f"{param} is of the columns of images, but imageCols names none: for example "
                    "imageCols=['content']"
                )
        if self.size is None and self.fit != "crop":
            raise ConfigError(
                f"imageFit='{self.fit}' says how images are brought to a size: set imageSize="
                "(height, width)"
            )

    def encoding(self, column: InputColumn) -> Encoding:
        """How the rows of one of the columns arrive.

        Raises:
            ConfigError: they are no images.
        """
        encoding: Encoding = IMAGE if self.size is None else FITS[self.fit]
        if column.encoding == PIXELS and self.size is None:
            return PIXELS
        if not encoding.reads(column.encoding):
            raise ConfigError(
                f"imageCols names column '{column.name}', which has type {column.type_name}; "
                "encoded images are binary, and Spark's are structs"
            )
        return encoding

    def shape(self, name: str, declared: Sequence[int] | None) -> Sequence[int] | None:
        """The shape of a row of one of the columns, if it is known.

        Args:
            name: the column.
            declared: what ``columnShapes`` says.

        Raises:
            ConfigError: it says another size.
        """
        if self.size is None or declared is None:
            return declared if self.size is None else [COLOURS, *self.size]
        if list(declared[1:]) != list(self.size):
            raise ConfigError(
                f"columnShapes gives {list(declared)} for column '{name}', but imageSize brings "
                f"its images to [channels, {self.size[0]}, {self.size[1]}]: they must agree"
            )
        return declared

    def floats(self, name: str, dtype: torch.dtype, channels: int) -> Scale | None:
        """The floats that a model is given for one of the columns; None for bytes.

        Args:
            name: the column.
            dtype: of the floats.
            channels: of its images.

        Raises:
            ConfigError: the dtype holds no floats, or there is not a number for each channel.
        """
        if self.scale is None:
            return None
        if not dtype.is_floating_point:
            raise ConfigError(
                f"imageScale makes floats of the images in column '{name}', which are to be "
                f"{str(dtype).removeprefix('torch.')}: ask for a floating-point dtype, or drop it"
            )
        if isinstance(self.scale, str):
            return Scale(dtype, self.scale)
        wrong = [len(each) for each in self.scale if len(each) not in (1, channels)]
        if wrong:
            raise ConfigError(
                f"imageScale has {wrong[0]} numbers, but the images of column '{name}' have "
                f"{channels} channels: give one for each, or one for all"
            )
        mean, std = (tuple(each) * (channels // len(each)) for each in self.scale)
        return Scale(dtype, "0..1", mean, std)


GROUPS_WITHOUT_PADDING = "groupByLength sorts padded rows, but padCols names no column. Drop it"


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
        image_cols: the columns of images; what follows says what they become.
        image_size: see ``ImageColumns``, as for the next two.
        image_fit: how they are brought to that size.
        image_scale: as what floats a model is given them.
        paddings: by column, the number with which rows of unequal length are padded.
        inputs: by column, what a model is given besides the padded rows; None for a padding mask
            of each of its features.

    Raises:
        ConfigError: one is not what it has to be, or ``inputs`` names a column that is not padded.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int | None]] | None = None,
        dtypes: Mapping[str, str] | None = None,
        image_cols: Sequence[str] | None = None,
        image_size: Sequence[int] | None = None,
        image_fit: str = "crop",
        image_scale: ImageScale | None = None,
        paddings: Mapping[str, float] | None = None,
        inputs: Mapping[str, SequenceInput] | None = None,
    ) -> None:
        self._shapes = {
            name: [UNKNOWN if size is None else size for size in shape]
            for name, shape in (convert.shapes(shapes) or {}).items()
        }
        self._dtypes = convert.dtypes(dtypes) or {}
        self.images = ImageColumns(
            convert.names("imageCols")(image_cols) or (),
            convert.image_size(image_size),
            convert.one_of("imageFit", tuple(FITS))(image_fit),
            convert.image_scale(image_scale),
        )
        self._paddings = convert.paddings(paddings) or {}
        self._inputs = convert.pad_inputs(inputs)
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
            DataError: the column's decimals do not fit into the dtype.
        """
        name, encoding = column.name, column.encoding
        if name in self.images.names:
            return self._pictures(column, fractions, target)
        if encoding.needs_dtype and name not in self._dtypes:
            raise ConfigError(
                f"column '{name}' is binary: declare its bytes with columnDtypes={{'{name}': "
                f"'float32'}} and columnShapes={{'{name}': [...]}}, or imageCols=['{name}'] if "
                "they are encoded images"
            )
        default = column.default_dtype(fractions) if target is None else target
        dtype = getattr(torch, self._dtypes[name]) if name in self._dtypes else default
        if target is None:  # a label of so many digits is no class, and refused as such
            require_exact(name, column.digits, dtype)
        padding = self.padding(name, label=target is not None)
        return column.spec(dtype, self._shapes.get(name), padding=padding)

    def _pictures(
        self, column: InputColumn, fractions: torch.dtype, target: torch.dtype | None
    ) -> ColumnSpec:
        """The tensor that a column of images becomes; see ``spec``."""
        name, images = column.name, self.images
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
            ("imageCols", self.images.names),
            ("padCols", self._paddings),
        ):
            unknown = sorted(set(given) - set(names))
            if unknown:
                raise ConfigError(
                    f"{param} names '{unknown[0]}', which is not among the columns fed: "
                    + listed(names)
                )
