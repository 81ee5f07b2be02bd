"""What users declare about columns of images: which they are, their size and their floats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparkdl.encodings import IMAGE, PIXELS, Encoding
from sparkdl.encodings.any_size import FITS
from sparkdl.encodings.scale import Scale
from sparkdl.errors import ConfigError
from sparkdl.spark.rows.columns import InputColumn

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
