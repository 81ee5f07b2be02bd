"""Chunks of a volume: each gives what a sliding window over the whole array does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from volume_case import InMemory, middle, predict, sliding_window

from sparkdl.errors import ModelError
from sparkdl.volumes.chunk import Recipe, predict_chunk
from sparkdl.volumes.grid import Patches, Sizes

NO_CROP = (0, 0, 0)


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, Patches, Sizes, Sizes]:
    """An array, patches, chunks of whole blocks, and blocks."""
    axes = draw(st.sampled_from([2, 3]))
    shape = tuple(draw(st.integers(1, 30 if axes == 2 else 14)) for _ in range(axes))
    patch = tuple(draw(st.integers(1, 9)) for _ in range(axes))
    crop = tuple(draw(st.integers(0, (p - 1) // 2)) for p in patch)
    overlap = tuple(draw(st.integers(2 * c, p - 1)) for c, p in zip(crop, patch, strict=True))
    blocks = tuple(draw(st.integers(1, 6)) for _ in range(axes))
    chunk = tuple(b * draw(st.integers(1, 4)) for b in blocks)
    channels = draw(st.integers(1, 2))
    values = np.random.default_rng(draw(st.integers(0, 99))).normal(size=(channels, *shape))
    return values.astype(np.float32), Patches(shape, patch, overlap, crop), chunk, blocks


@settings(max_examples=40)
@given(cases())
def test_the_identity_gives_the_array_back(case: Any) -> None:
    array, patches, chunk, blocks = case
    found = predict(array, patches, chunk, blocks)
    assert np.abs(found - array).max() < 1e-5


def test_what_has_no_weight_adds_nothing_even_if_it_is_infinite() -> None:
    patches = Patches((448, 448), (256, 256), (64, 64), (0, 0))

    def infinite_edges(given: np.ndarray) -> torch.Tensor:
        found = torch.full(given.shape, -torch.inf)
        found[..., 1:-1, 1:-1] = 1
        return found

    ones = np.ones((1, 448, 448), "float32")
    found = predict(ones, patches, (448, 448), (64, 64), infinite_edges)[0]
    assert np.abs(found[1:-1, 1:-1] - 1).max() < 1e-5
    assert np.isinf(found[[0, -1]]).all()


def test_an_argmax_of_nan_is_refused_with_the_voxel() -> None:
    array = np.random.default_rng(0).normal(size=(2, 20, 20)).astype("float32")
    patches = Patches((20, 20), (8, 8), (4, 4), (0, 0))
    assert predict(array, patches, (8, 20), (4, 20), outputs=2, labels=True).max() == 1
    array[1, 13, 5] = np.nan
    with pytest.raises(ModelError, match=r"NaN in voxel \(13, 5\), so that reduce='argmax'"):
        predict(array, patches, (8, 20), (4, 20), outputs=2, labels=True)


def network() -> nn.Module:
    """What a voxel becomes depends on its neighbours, and on where the patch ends."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 3, 3, padding=1))


@pytest.mark.nightly_variants(every=3)
@pytest.mark.parametrize("crop", [NO_CROP, (1, 1, 1)])
@pytest.mark.parametrize("chunk", [(4, 6, 6), (8, 12, 18), (24, 30, 30), (4, 30, 6), (20, 6, 30)])
def test_every_chunk_gives_what_a_sliding_window_over_the_whole_array_does(
    chunk: Sizes, crop: Sizes
) -> None:
    array = np.random.default_rng(0).normal(size=(2, 22, 27, 29)).astype(np.float32)
    patches = Patches(array.shape[1:], (6, 8, 9), (2, 4, 3), crop)
    module, cut = network(), middle(patches)

    @torch.no_grad()
    def outputs(given: np.ndarray) -> torch.Tensor:
        return module(torch.from_numpy(given).float())[(slice(None), slice(None), *cut)]

    expected = sliding_window(array, patches, lambda patch: outputs(patch[None])[0].numpy())
    found = predict(array, patches, chunk, (4, 6, 6), outputs, outputs=3)
    assert np.abs(found - expected).max() < 1e-5


def test_the_same_patches_are_the_same_bits_whatever_the_chunk() -> None:
    """If each goes through the network by itself, and so is not computed otherwise."""
    array = np.random.default_rng(0).normal(size=(2, 22, 27, 29)).astype(np.float32)
    patches = Patches(array.shape[1:], (6, 8, 9), (2, 4, 3), NO_CROP)
    module = network()

    @torch.no_grad()
    def outputs(given: np.ndarray) -> torch.Tensor:
        return module(torch.from_numpy(given))

    first, *others = (
        predict(array, patches, chunk, (4, 6, 6), outputs, outputs=3, batch=1)
        for chunk in [(4, 6, 6), (24, 30, 30), (8, 30, 12)]
    )
    assert all(np.array_equal(first, other) for other in others)


class Counting:
    """The identity plus one, which counts patches."""

    def __init__(self) -> None:
        self.patches: list[np.ndarray] = []

    def __call__(self, given: np.ndarray) -> torch.Tensor:
        self.patches += [*given]
        return torch.from_numpy(given + 1)


@pytest.mark.parametrize("chunk", [(4, 4), (8, 16), (16, 32)])
def test_a_patch_of_zeros_is_zero_without_the_network_whatever_the_chunk(chunk: Sizes) -> None:
    array = np.zeros((1, 16, 32), np.float32)
    array[0, 5, 20] = 3.0
    patches = Patches((16, 32), (4, 4), (0, 0), (0, 0))
    counting = Counting()
    found = predict(array, patches, chunk, (4, 4), counting)
    expected = np.zeros((16, 32))
    expected[4:8, 20:24] = 1
    expected[5, 20] = 4
    assert np.allclose(found[0], expected)
    assert len(counting.patches) == 1
    everywhere = predict(array, patches, chunk, (4, 4), Counting(), skip_zeros=False)
    assert np.allclose(everywhere, array + 1)


def test_beyond_the_edges_a_network_sees_a_mirror_image() -> None:
    array = np.arange(1, 13, dtype=np.float32).reshape(1, 3, 4)
    patches = Patches((3, 4), (5, 6), (4, 4), (1, 1))
    counting = Counting()

    def outputs(given: np.ndarray) -> torch.Tensor:
        return counting(given)[:, :, 1:-1, 1:-1]

    predict(array, patches, (3, 4), (3, 4), outputs)
    (seen,) = counting.patches
    assert np.array_equal(seen[0], np.pad(array[0], 1, mode="reflect"))


def test_no_more_rows_are_in_memory_than_a_patch_and_a_block() -> None:
    array = np.ones((1, 1000, 4), np.float32)
    target = InMemory(np.zeros_like(array))
    recipe = Recipe(Patches((1000, 4), (10, 4), (4, 0), (0, 0)), (8, 4), 1, 1, False, True)
    bounds = ((0, 1000), (0, 4))
    predict_chunk(recipe, bounds, InMemory(array).read, target.write, torch.from_numpy, "cpu")
    assert np.allclose(target.values, 1)
    assert target.largest == 8
