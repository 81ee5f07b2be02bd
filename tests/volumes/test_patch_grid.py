"""Patches cover the array, chunks are whole blocks, and a chosen chunk fits into the memory."""

from __future__ import annotations

import math

import pytest
from every_row import every
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.errors import ConfigError
from sparkdl.volumes.grid import (
    Chunks,
    Patches,
    Sizes,
    chosen_chunk,
    chunk_bytes,
    default_blocks,
    require_chunk,
    starts_of,
)

LARGE = Patches((2000, 5000, 5000), (20, 256, 256), (4, 64, 64), (0, 0, 0))


@every(
    ("size", "length", "stride", "starts"),
    [
        (10, 4, 3, (0, 3, 6)),
        (11, 4, 3, (0, 3, 6, 7)),
        (4, 4, 3, (0,)),
        (3, 4, 3, (0,)),
        (5, 4, 3, (0, 1)),
        (1, 1, 1, (0,)),
        (3, 1, 1, (0, 1, 2)),
    ],
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
    chunks = Chunks((5, 7, 4), (2, 3, 4))
    met = [
        (z, y, x)
        for number in range(len(chunks))
        for (z, y, x) in [
            (z, y, x)
            for z in range(*chunks[number][0])
            for y in range(*chunks[number][1])
            for x in range(*chunks[number][2])
        ]
    ]
    assert len(chunks) == 9
    assert len(met) == len(set(met)) == 5 * 7 * 4


@every(
    ("patch", "overlap", "crop"),
    [((4, 4), (4, 2), (0, 0)), ((4, 4), (2, 5), (0, 0)), ((8, 8), (2, 4), (2, 2))],
)
def test_patches_that_would_leave_gaps_or_never_end_are_refused(
    patch: Sizes, overlap: Sizes, crop: Sizes
) -> None:
    with pytest.raises(ConfigError, match="leave gaps or never end"):
        Patches((100, 100), patch, overlap, crop)


@every(
    ("chunk", "text"),
    [
        ((64, 128, 128), None),
        ((2000, 5000, 5000), None),
        ((2048, 8192, 8192), None),
        ((65, 128, 128), "no multiple of the output's blocks of"),
        ((64, 32, 128), "smaller than overlap"),
        ((2, 128, 128), "smaller than overlap"),
    ],
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


def test_a_chunk_may_be_as_small_as_a_small_array() -> None:
    small = Patches((3, 10, 10), (8, 8, 8), (6, 4, 4), (0, 0, 0))
    require_chunk((3, 10, 10), (3, 5, 5), small)


@every(
    ("shape", "stride", "chunk", "blocks"),
    [
        ((2000, 5000, 5000), (16, 192, 192), None, (16, 64, 64)),
        ((2000, 5000, 5000), (20, 7, 193), None, (20, 63, 193)),
        ((10, 20, 30), (16, 192, 192), None, (10, 20, 30)),
        ((5000, 5000), (896, 896), None, (448, 448)),
        ((5000, 5000), (1, 1), None, (1, 512)),
        ((2000, 5000, 5000), (20, 7, 193), (60, 70, 200), (60, 70, 50)),
        ((2000, 5000, 5000), (20, 7, 193), (61, 7, 4096), (61, 7, 64)),
    ],
)
def test_blocks_are_near_a_cube_and_fit_the_chunk_or_the_stride(
    shape: Sizes, stride: Sizes, chunk: Sizes | None, blocks: Sizes
) -> None:
    assert default_blocks(shape, stride, chunk) == blocks


@settings(max_examples=20)
@given(
    st.sampled_from([1, 2, 7, 100]),
    st.integers(128, 4096),
    st.sampled_from([1, 3, 12]),
    st.sampled_from([(16, 64, 64), (5, 100, 30), (64, 64, 64)]),
)
def test_a_chosen_chunk_fits_and_is_whole_blocks(
    slots: int, mebibytes: int, outputs: int, blocks: Sizes
) -> None:
    def memory(chunk: Sizes) -> int:
        return chunk_bytes(
            LARGE, blocks, chunk, read_bytes=1, read_blocks=(64, 64, 64), outputs=outputs
        )

    chunk = chosen_chunk(LARGE, blocks, slots, mebibytes << 20, memory)
    assert memory(chunk) <= mebibytes << 20
    assert all(size % block == 0 for size, block in zip(chunk, blocks, strict=True))
    require_chunk(chunk, blocks, LARGE)


def test_more_memory_computes_fewer_patches_twice() -> None:
    def patches_computed(mebibytes: int) -> int:
        blocks = (16, 64, 64)
        chunk = chosen_chunk(
            LARGE,
            blocks,
            2,
            mebibytes << 20,
            lambda chunk: chunk_bytes(
                LARGE, blocks, chunk, read_bytes=1, read_blocks=(1, 64, 64), outputs=3
            ),
        )
        chunks = Chunks(LARGE.shape, chunk)
        return sum(
            math.prod(len(LARGE.reaching(axis, each)) for axis, each in enumerate(chunks[number]))
            for number in range(len(chunks))
        )

    needed = math.prod(map(len, LARGE.starts))
    assert 3 * needed > patches_computed(256) > patches_computed(2048) > needed


def test_a_small_array_is_shared_out_among_all_slots() -> None:
    patches = Patches((320, 64, 64), (16, 16, 16), (4, 4, 4), (0, 0, 0))
    chunk = chosen_chunk(patches, (12, 12, 12), 2, 1 << 30, lambda chunk: 0)
    assert len(Chunks(patches.shape, chunk)) in range(2, 17, 2)


def test_a_budget_without_room_for_one_block_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"takes 300 MiB, and.* 200 are left for it besides"):
        chosen_chunk(LARGE, (16, 64, 64), 2, 200 << 20, lambda chunk: 300 << 20)
    least = chosen_chunk(LARGE, (16, 64, 64), 2, 200 << 20, lambda chunk: 300 << 20, must_fit=False)
    assert least == (16, 64, 64)
