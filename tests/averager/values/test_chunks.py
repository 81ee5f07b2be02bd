"""Chunks cover the state; neither averager nor transport can unpickle what comes over the wire."""

from __future__ import annotations

import ast
from pathlib import Path

import torch
from every_row import every
from hypothesis import given
from hypothesis import strategies as st
from toys import DTYPES

import sparkdl
from sparkdl.averager.values.packing import (
    HELD_BYTES,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    chunk_bytes,
    plan_chunks,
    plan_fragments,
)
from sparkdl.protocols import Segment


@given(
    sizes=st.lists(st.tuples(st.integers(0, 50), st.sampled_from(DTYPES)), max_size=5),
    size=st.integers(1, 100),
)
def test_chunks_cover_every_element_once_and_in_order(
    sizes: list[tuple[int, torch.dtype]], size: int
) -> None:
    layout = tuple(Segment("parameters", dtype, numel) for numel, dtype in sizes)

    chunks = plan_chunks(layout, size)

    covered = [(c.segment, i) for c in chunks for i in range(c.start, c.stop)]
    assert covered == [(s, i) for s, (numel, _) in enumerate(sizes) for i in range(numel)]
    for chunk in chunks:
        itemsize = layout[chunk.segment].center_dtype.itemsize
        assert (chunk.stop - chunk.start) * itemsize <= max(size, itemsize)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 50), st.sampled_from(DTYPES)), max_size=5),
    size=st.integers(1, 100),
    fragments=st.integers(1, 9),
)
def test_fragments_cover_every_element_once_and_are_of_the_same_size(
    sizes: list[tuple[int, torch.dtype]], size: int, fragments: int
) -> None:
    layout = tuple(Segment("parameters", dtype, numel) for numel, dtype in sizes)
    plan = plan_fragments(layout, size, fragments)
    assert len(plan) == fragments
    covered = [(c.segment, i) for part in plan for c in part for i in range(c.start, c.stop)]
    everything = [(s, i) for s, (numel, _) in enumerate(sizes) for i in range(numel)]
    assert sorted(covered) == everything
    for segment, (numel, _) in enumerate(sizes):
        parts = [sum(c.stop - c.start for c in part if c.segment == segment) for part in plan]
        assert set(parts) <= {numel // fragments, -(-numel // fragments)}
        for chunk in (c for part in plan for c in part if c.segment == segment):
            itemsize = layout[segment].center_dtype.itemsize
            assert (chunk.stop - chunk.start) * itemsize <= max(size, itemsize)


@every("world_size", [1, 2, 8, 64, 256])
def test_chunks_of_all_workers_together_stay_within_their_budget(world_size: int) -> None:
    assert MIN_CHUNK_BYTES <= chunk_bytes(world_size) <= MAX_CHUNK_BYTES
    assert world_size * chunk_bytes(world_size) <= HELD_BYTES


@every("package", ["averager", "transport"])
def test_nothing_that_reads_the_wire_can_unpickle(package: str) -> None:
    """Reads the imports and calls: no pickle, no torch.load, no eval."""
    paths = sorted((Path(sparkdl.__file__).parent / package).rglob("*.py"))
    assert paths
    for path in paths:
        tree = ast.parse(path.read_text())
        imported = {
            name.name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in node.names
        } | {
            (node.module or "").split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
        }
        called = {
            getattr(node.func, "attr", getattr(node.func, "id", ""))
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
        }
        forbidden = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
        assert not imported & forbidden, path
        assert not called & {"load", "eval", "exec", "allow_pickle", "__import__"}, path
