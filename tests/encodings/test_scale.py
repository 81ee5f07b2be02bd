"""Pixels as floats, to the bit what torchvision's ToTensor and Normalize compute."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from every_row import every
from torch import Tensor

from sparkdl.encodings import IMAGE
from sparkdl.encodings.scale import Scale
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.protocols import ColumnSpec

PIXELS = np.arange(2 * 3 * 16 * 8, dtype=np.int64).astype(np.uint8).reshape(2, 3, 16, 8)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def by_channel(numbers: tuple[float, ...], dtype: type) -> np.ndarray:
    return np.array(numbers, dtype)[:, None, None]


@every(("dtype", "exact"), [(torch.float32, np.float32), (torch.float64, np.float64)])
def test_each_range_is_computed_in_the_precision_of_the_floats(
    dtype: torch.dtype, exact: type
) -> None:
    rows = torch.from_numpy(PIXELS)
    as_is = PIXELS.astype(exact)
    unit = as_is / exact(255)
    normal = (unit - by_channel(MEAN, exact)) / by_channel(STD, exact)
    for scale, expected in (
        (Scale(dtype, "0..255"), as_is),
        (Scale(dtype, "0..1"), unit),
        (Scale(dtype, "0..1", MEAN, STD), normal),
    ):
        floats = scale.floats(rows)
        assert floats.dtype == dtype
        assert np.array_equal(floats.numpy(), expected)
    assert np.array_equal(rows.numpy(), PIXELS)


@every("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    rows = torch.from_numpy(PIXELS)
    exact = Scale(torch.float32, "0..1", MEAN, STD).floats(rows)
    assert torch.equal(Scale(dtype, "0..1", MEAN, STD).floats(rows), exact.to(dtype))


def test_a_minibatch_has_floats_of_features_and_labels_though_rows_are_bytes() -> None:
    picture = ColumnSpec("x", torch.uint8, (3, 16, 8), IMAGE, scale=Scale(torch.float32))
    schema = FeedSchema((picture,), replace(picture, name="y"))
    rows = torch.from_numpy(PIXELS)
    batch = schema.batch([rows, rows], last=True)
    assert isinstance(batch.features, tuple)
    assert isinstance(batch.targets, Tensor)
    expected = rows.float().div(255)
    assert torch.equal(batch.features[0], expected)
    assert torch.equal(batch.targets, expected)
