"""Weights are the bump divided by the sum of its copies, and sum to 1 everywhere."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from volume_case import bump

from sparkdl.volumes.blend import MovingSum, axis_weights, weights_within
from sparkdl.volumes.grid import Patches, starts_of


@given(st.integers(1, 400), st.integers(1, 90), st.integers(0, 89))
def test_weights_sum_to_one_along_any_axis(size: int, length: int, overlap: int) -> None:
    starts = starts_of(size, length, length - overlap % length)
    total = np.zeros(max(size, length))
    for start, weights in zip(starts, axis_weights(starts, length), strict=True):
        assert (weights >= 0).all()
        total[start : start + length] += weights
    assert np.abs(total - 1).max() < 1e-12


def test_weights_of_patches_of_thousands_of_voxels_sum_to_one_too() -> None:
    """The bump itself is 0 in float64 near the borders of such a patch."""
    starts = starts_of(20_000, 4096, 4096)
    assert np.exp(-1 / (1 - (2 / 4097 - 1) ** 2)) == 0
    assert len(starts) == 5
    total = np.zeros(20_000)
    for start, weights in zip(starts, axis_weights(starts, 4096), strict=True):
        total[start : start + 4096] += weights
    assert np.abs(total - 1).max() < 1e-12


def test_the_product_of_weights_is_the_bump_divided_by_the_sum_of_its_shifted_copies() -> None:
    patches = Patches((9, 13, 10), (6, 7, 5), (3, 3, 2), (0, 0, 0))
    mask, total = bump(patches.patch), np.zeros(patches.shape)
    places = [
        tuple(slice(s, s + p) for s, p in zip(start, patches.patch, strict=True))
        for start in itertools.product(*patches.starts)
    ]
    for place in places:
        total[place] += mask
    weights = [
        axis_weights(starts, p) for starts, p in zip(patches.starts, patches.patch, strict=True)
    ]
    for place, own in zip(places, itertools.product(*weights), strict=True):
        product = own[0][:, None, None] * own[1][:, None] * own[2]
        assert np.abs(product - mask / total[place]).max() < 1e-9


@given(st.integers(0, 80), st.integers(1, 40), st.integers(0, 19))
def test_a_patch_has_the_same_weights_whatever_the_interval(
    lower: int, length: int, overlap: int
) -> None:
    patches = Patches((100, 1), (20, 1), (overlap, 0), (0, 0))
    bounds = (lower, min(100, lower + length))
    numbers = patches.reaching(0, bounds)
    everywhere = weights_within(patches, 0, (0, 100), "cpu")[numbers.start : numbers.stop]
    for found, wanted in zip(weights_within(patches, 0, bounds, "cpu"), everywhere, strict=True):
        assert found[0] == wanted[0]
        assert torch.equal(found[1], wanted[1])


def test_a_moving_sum_gives_out_rows_once_and_forgets_them() -> None:
    sums = MovingSum(1, ((0, 6), (0, 2)), 4, "cpu")
    ones = [(0, torch.ones(3)), (0, torch.ones(2))]
    sums.add(torch.full((1, 3, 2), 1.0), (0, 0), ones)
    sums.add(torch.full((1, 3, 2), 2.0), (1, 0), ones)
    assert sums.take(2)[0, :, 0].tolist() == [1.0, 3.0]
    sums.add(torch.full((1, 3, 2), 4.0), (3, -1), ones)
    rest = sums.take(6)[0]
    assert rest[:, 0].tolist() == [3.0, 6.0, 4.0, 4.0]
    assert rest[:, 1].tolist() == [3.0, 2.0, 0.0, 0.0]
