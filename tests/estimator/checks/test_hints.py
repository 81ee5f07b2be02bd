"""Where a Param of ours is what helps, the refusal of a model names it, column and all."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from every_row import every
from torch import Tensor, nn

from sparkdl import encodings
from sparkdl.encodings.any_size import FITS
from sparkdl.errors import ModelError
from sparkdl.estimator.checks.building import build
from sparkdl.estimator.checks.probe import probe
from sparkdl.estimator.head import Head
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.feed.statistics.column import ColumnStatistics
from sparkdl.protocols import UNKNOWN, ColumnSpec, Padding, SequenceInput

LABEL = ColumnSpec("label", torch.int64)
PIXELS = ColumnSpec("pixels", torch.float32, (36,))
MASK = ColumnSpec("mask", torch.int64)


def refusal(model: type[nn.Module], *features: ColumnSpec, **found: Any) -> str:
    replica = build(model, partial(torch.optim.SGD, lr=0.1), nn.CrossEntropyLoss(), 0)
    statistics = [ColumnStatistics(smallest=0, largest=1, **found) for _ in (*features, LABEL)]
    with pytest.raises(ModelError) as caught:
        probe(replica, FeedSchema(features, LABEL), statistics, Head.LOGITS)
    return str(caught.value)


class Convolves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 3, 6), nn.Flatten())

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features)


class Normalizes(Convolves):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten())


class Masks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(36, 3)

    def forward(self, pixels: Tensor, mask: Tensor) -> Tensor:
        return self.layer(pixels.masked_fill(mask[:, None], 0.0))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(36, 2)

    def forward(self, pixels: Tensor, mask: Tensor) -> Tensor:
        sequence = pixels[None]
        found: Tensor = self.layer(sequence, sequence, sequence, attn_mask=mask[:, None])[0]
        return found[0]


@every("model", [Convolves, Normalizes])
def test_a_convolution_of_flat_rows_is_told_of_column_shapes(model: type[nn.Module]) -> None:
    assert refusal(model, PIXELS).endswith("columnShapes={'pixels': [channels, height, width]}")


@every("model", [Masks, Attends])
def test_a_mask_of_numbers_is_told_of_column_dtypes(model: type[nn.Module]) -> None:
    assert refusal(model, PIXELS, MASK).endswith("columnDtypes={'mask': 'bool'}")


def test_other_failures_are_told_of_neither() -> None:
    class Narrow(nn.Linear):
        def __init__(self) -> None:
            super().__init__(5, 3)

    text = refusal(Narrow, PIXELS)
    assert "columnShapes" not in text
    assert "columnDtypes" not in text


def test_a_model_of_floats_that_is_given_bytes_of_images_is_told_of_their_scale() -> None:
    photo = ColumnSpec("photo", torch.uint8, (1, 6, 6), FITS["crop"])
    told = refusal(Convolves, photo)
    assert "Images are fed as bytes" in told
    assert "imageCols=['photo'], and imageScale='0..1', '0..255' or (mean, std)" in told


class Flattens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features)


def test_so_is_one_of_linear_layers_and_one_of_sparks_own_images() -> None:
    told = refusal(Flattens, ColumnSpec("image", torch.uint8, (1, 6, 6), encodings.PIXELS))
    assert "imageCols=['image'], and imageScale=" in told


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.recurrent = nn.Embedding(2, 3), nn.GRU(3, 3, batch_first=True)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        embedded = self.embedding(tokens)
        packed = nn.utils.rnn.pack_padded_sequence(
            embedded, lengths, batch_first=True, enforce_sorted=False
        )
        states: Tensor = self.recurrent(packed)[1]
        return states[0]


def tokens(told: SequenceInput | None) -> ColumnSpec:
    return ColumnSpec("tokens", torch.int64, (UNKNOWN,), padding=Padding(0, told))


def test_a_model_that_is_given_a_mask_in_place_of_lengths_is_told_of_pad_inputs() -> None:
    text = refusal(Packs, tokens("padding_mask"), shortest=2, longest=4)
    assert "The last input, padding_mask, says where rows are padded because of padCols" in text
    assert "(a mask, True there): padInputs={'tokens': 'lengths'} gives their lengths" in text
    # One word too few in the embedding is not the mask's fault.
    spec = ColumnSpec("tokens", torch.int64, (UNKNOWN,), padding=Padding(7, "padding_mask"))
    assert "padInputs" not in refusal(Packs, spec, shortest=2, longest=4)


def test_an_empty_sequence_that_cannot_be_packed_is_named_with_its_row() -> None:
    text = refusal(Packs, tokens("lengths"), shortest=0, longest=4, places={"shortest": (2, 31)})
    assert "'tokens' is empty in row 31 of partition 2. Leave such rows out: df.where(" in text
    assert "padInputs" not in text
