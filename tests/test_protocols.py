"""Minibatches and schemas with any number of labels."""

from __future__ import annotations

import pytest
import torch

from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.protocols import UNKNOWN, Batch, ColumnSpec

DEVICE = torch.device("cpu")


@pytest.mark.parametrize("by_name", [False, True])
def test_a_minibatch_without_labels_has_as_many_examples_as_features(by_name: bool) -> None:
    features = torch.zeros(3, 2)
    batch = Batch({"x": features} if by_name else (features,), (), last=False)
    assert batch.examples == 3
    assert batch.to(DEVICE) is batch


def test_a_minibatch_without_labels_moves_with_its_features() -> None:
    batch = Batch((torch.zeros(3, 2),), (), last=True).to(torch.device("meta"))
    (features,) = batch.features
    assert (features.device.type, batch.targets, batch.last) == ("meta", (), True)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_labels_that_are_a_tuple_stay_one_when_lengths_are_known(count: int) -> None:
    labels = tuple(ColumnSpec(f"y{n}", torch.float32, (UNKNOWN,)) for n in range(count))
    schema = FeedSchema((ColumnSpec("x", torch.float32),), labels).of_lengths([None] + [4] * count)
    assert schema.label == tuple(ColumnSpec(f"y{n}", torch.float32, (4,)) for n in range(count))


def test_a_label_of_its_own_stays_one_when_lengths_are_known() -> None:
    schema = FeedSchema((ColumnSpec("x", torch.float32),), ColumnSpec("y", torch.int64))
    assert schema.of_lengths([None, None]) == schema
