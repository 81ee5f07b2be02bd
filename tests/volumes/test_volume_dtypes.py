"""What a model makes of a patch: dtypes, and how patches are blended."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from every_row import every, every_row
from hypothesis import given
from hypothesis import strategies as st
from tensorstore import bfloat16
from test_volume_stores import stored
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparkdl.errors import DataError
from sparkdl.protocols import ColumnSpec
from sparkdl.volumes.blend import MovingSum, weights_within
from sparkdl.volumes.chunk import Recipe, predict_chunk
from sparkdl.volumes.grid import Patches, chunks_of
from sparkdl.volumes.network import PatchModel
from sparkdl.volumes.store import Volume, created

BFLOAT16 = bfloat16.numpy_dtype
SHAPE = (10, 12, 14)
PATCHES = Patches(SHAPE, (5, 6, 7), (2, 4, 3), (1, 1, 1))


def of_all_sizes(dtype: Any) -> np.ndarray:
    """Values from one end of a dtype to the other, shape (2, *SHAPE)."""
    random, shape = np.random.default_rng(0), (2, *SHAPE)
    if dtype == "bool":
        return random.integers(0, 2, shape).astype(bool)
    if np.issubdtype(dtype, np.integer):
        limits = np.iinfo(dtype)
        return random.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    found: np.ndarray = (random.normal(size=shape) * 1e4).astype(dtype)
    found[0, 4, 5, 6], found[1, 9, 0, 13] = np.nan, np.inf
    return found


def predicted(
    path: Path, array: np.ndarray, driver: str, spec: ColumnSpec, output: str = "float32"
) -> np.ndarray:
    """What comes of an array, as numpy reads it, by a module that returns what it is given."""
    volume = Volume.opened(stored(path / "in", array, driver), 3)
    read = partial(volume.read, dtype=spec.dtype)
    place = {"driver": "zarr3", "kvstore": f"file://{path}/out.zarr", "dtype": output}
    target = created(place, volume, 2, labels=False, blocks=(5, 6, 7))
    taken: list[Tensor] = []

    def outputs(given: list[Tensor], _: Any) -> list[tuple[int, Tensor]]:
        taken.extend(given)
        return [(0, given[0] if given[0].is_floating_point() else given[0].float())]

    run: Any = SimpleNamespace(outputs=outputs)
    recipe = Recipe(PATCHES, target.blocks, 2, 4, labels=False, skip_zeros=True)
    network = partial(PatchModel(None, spec, None).outputs, run, kept=PATCHES.kept)
    for bounds in chunks_of(SHAPE, (5, 12, 14)):
        predict_chunk(recipe, bounds, read, target.write, network, "cpu")
    assert {each.dtype for each in taken} == {spec.dtype}
    return target._view.read().result()


@every(
    ("dtype", "drivers"),
    [
        *((dtype, ("zarr", "zarr3")) for dtype in ("bool", "float16", BFLOAT16)),
        ("int8", ("zarr", "zarr3", "n5", "neuroglancer_precomputed")),
        ("uint64", ("zarr", "zarr3", "n5", "neuroglancer_precomputed")),
        ("int16", ("n5",)),
        ("float64", ("n5",)),
    ],
)
def test_the_identity_gives_the_numbers_of_any_dtype_as_float32(
    tmp_path: Path, dtype: Any, drivers: tuple[str, ...]
) -> None:
    array = of_all_sizes(dtype)
    for driver in drivers:
        found = predicted(tmp_path / driver, array, driver, ColumnSpec("x", torch.float32, (2,)))
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, array.astype(np.float32), rtol=1e-5, err_msg=driver)


@every("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_module_is_given_the_dtype_of_its_example(tmp_path: Path, dtype: torch.dtype) -> None:
    array = of_all_sizes("int8")
    found = predicted(tmp_path, array, "zarr3", ColumnSpec("x", dtype, (2,)))
    np.testing.assert_allclose(found, array, rtol=1e-5)  # which each of them holds exactly


@every_row(
    ("uint16", 850, torch.uint8, "float32"),
    ("int16", -24, torch.uint8, "float32"),
    ("uint32", 2**31, torch.int32, "float32"),
    ("uint64", 2**63, torch.int64, "float32"),
    ("float32", 2.5, torch.uint8, "float32"),
    ("float32", np.nan, torch.int32, "float32"),
    ("float32", np.inf, torch.int32, "float32"),
    ("float32", 65526.0, torch.float16, "float32"),
    ("float64", 1e39, torch.float32, "float32"),
    ("uint8", 2, torch.bool, "float32"),
    ("float32", 100000.0, torch.float32, "float16"),
)
def test_a_number_that_a_dtype_cannot_hold_is_named_with_its_place(
    tmp_path: Path, dtype: str, value: Any, into: torch.dtype, output: str
) -> None:
    array = np.ones((2, *SHAPE), dtype)
    spec = ColumnSpec("x", into, (2,))
    np.testing.assert_allclose(predicted(tmp_path / "held", array, "zarr", spec), array, rtol=1e-5)
    array[1, 6:, 4, 5] = value
    narrow = output if output == "float16" else str(into).removeprefix("torch.")
    place = r"voxel \(6, 4, 5\) of channel 1"
    text = rf"holds {str(value).partition('e')[0]}.* \({dtype}\) in {place}, which {narrow} cannot"
    with pytest.raises(DataError, match=text):
        predicted(tmp_path, array, "zarr", spec, output)


def test_an_infinite_number_stays_one(tmp_path: Path) -> None:
    array = np.full((2, *SHAPE), np.inf, "float32")
    found = predicted(tmp_path, array, "zarr", ColumnSpec("x", torch.float16, (2,)), "float16")
    assert np.isinf(found).all()


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


def test_adding_a_patch_makes_no_copy_of_it() -> None:
    """A copy took seven times as long as the sum itself."""

    class Made(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and found.untyped_storage().data_ptr() not in there:
                self.largest = max(self.largest, found.numel())
            return found

    sums = MovingSum(4, ((0, 6), (0, 8)), 6, "cpu")
    values, weights = torch.ones(4, 6, 8), [(0, torch.ones(6)), (0, torch.ones(8))]
    there = {each.untyped_storage().data_ptr() for each in (values, sums._sums)}
    with Made() as made:
        sums.add(values, (0, 0), weights)
    assert made.largest == 6 * 8
    assert torch.equal(sums.take(6), values)
