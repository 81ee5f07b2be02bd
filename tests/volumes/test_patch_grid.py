"""Patches cover the array, and chunks are whole blocks."""

from __future__ import annotations

import itertools

import pytest
from every_row import every_row
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.errors import ConfigError
from sparkdl.volumes.grid import (
    Patches,
    Sizes,
    chunks_of,
    default_blocks,
    default_chunk,
    require_chunk,
    starts_of,
)

LARGE = Patches((2000, 5000, 5000), (20, 256, 256), (4, 64, 64), (0, 0, 0))


@every_row(
    (10, 4, 3, (0, 3, 6)),
    (11, 4, 3, (0, 3, 6, 7)),
    (4, 4, 3, (0,)),
    (3, 4, 3, (0,)),
    (5, 4, 3, (0, 1)),
    (1, 1, 1, (0,)),
    (3, 1, 1, (0, 1, 2)),
)
def test_patches_begin_a_stride_apart_and_the_last_ends_at_the_edge(
    size: int, length: int, stride: int, starts: Sizes
) -> None:
    assert starts_of(size, length, stride) == starts


@given(
    st.integers(1, 60),
    st.integers(1, 20),
    st.integers(0, 19),
    st.integers(0, 59),
    st.integers(1, 60),
)
def test_the_patches_that_reach_into_an_interval_are_those_that_share_a_voxel_with_it(
    size: int, patch: int, overlap: int, lower: int, length: int
) -> None:
    lower, overlap = lower % size, overlap % patch
    upper = min(size, lower + length)
    patches = Patches((size, 1), (patch, 1), (overlap, 0), (0, 0))
    (starts, _) = patches.starts
    shared = [n for n, s in enumerate(starts) if {*range(s, s + patch)} & {*range(lower, upper)}]
    assert [*patches.reaching(0, (lower, upper))] == shared


def test_chunks_are_a_partition_of_the_array() -> None:
    chunks = chunks_of((5, 7, 4), (2, 3, 4))
    ranges = ([range(*along) for along in bounds] for bounds in chunks)
    met = [voxel for axes in ranges for voxel in itertools.product(*axes)]
    assert len(chunks) == 9
    assert len(met) == len(set(met)) == 5 * 7 * 4


@every_row(
    ((64, 128, 128), None),
    ((2000, 5000, 5000), None),
    ((2048, 8192, 8192), None),
    ((65, 128, 128), "no multiple of the output's blocks of"),
    ((64, 32, 128), "smaller than overlap"),
    ((2, 128, 128), "smaller than overlap"),
)
def test_a_chunk_of_ones_own_is_whole_blocks_and_at_least_the_overlap(
    chunk: Sizes, text: str | None
) -> None:
    blocks = (16, 64, 64)
    if text is None:
        require_chunk(chunk, blocks, LARGE)
        return
    with pytest.raises(ConfigError, match=text):
        require_chunk(chunk, blocks, LARGE)


@every_row(
    ((10, 20, 30), 96, (64, 192, 192), (10, 30, 30)),
    ((5000, 5000), 448, (896, 896), (448, 448)),
    ((2000, 5000, 5000), 20, (680, 768, 768), (20, 64, 64)),
    ((2000, 5000, 5000), 96, (60, 70, 200), (60, 70, 50)),
    ((2000, 5000, 5000), 96, (61, 7, 4096), (61, 7, 64)),
)
def test_blocks_are_near_a_cube_and_divide_the_chunk(
    shape: Sizes, depth: int, chunk: Sizes, blocks: Sizes
) -> None:
    assert default_blocks(shape, (depth, 1, 1), chunk) == tuple(map(min, shape, blocks))


@every_row(
    (LARGE, 1, 2, (2000, 768, 768)),
    (LARGE, 1, 100, (240, 768, 768)),
    (LARGE, 16, 2, (2000, 256, 256)),
    (Patches((20, 24, 28), (6, 8, 8), (2, 4, 4), (0, 0, 0)), 1, 2, (6, 1672, 1672)),
    (Patches((5000, 5000), (512, 512), (64, 64), (0, 0)), 1, 1, (1536, 32768)),
)
def test_a_chunk_that_nobody_chose_is_some_patches_across_and_leaves_several_for_each_slot(
    patches: Patches, outputs: int, slots: int, chunk: Sizes
) -> None:
    assert default_chunk(patches, outputs, slots) == chunk
    require_chunk(chunk, default_blocks(patches.shape, patches.patch, chunk), patches)
