"""Contributions add up in rank order, in memory of a budget, and what is not finite is found."""

from __future__ import annotations

import ast
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from every_row import every
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from toys import DTYPES

import sparkdl
from sparkdl.averager.values.accumulator import Accumulator
from sparkdl.averager.values.replica_codec import count_non_finite, looks_finite, require_finite
from sparkdl.averager.values.wire_format import (
    HELD_BYTES,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    AsDtype,
    chunk_bytes,
    plan_chunks,
    plan_fragments,
)
from sparkdl.errors import NonFiniteError
from sparkdl.events import WindowReport
from sparkdl.protocols import Layout, Segment

LAYOUT: Layout = (
    Segment("parameters", torch.float32, 7),
    Segment("parameters", torch.float64, 3),
    Segment("buffers", torch.float32, 4),
    Segment("buffers", torch.int64, 2),
)
CHUNKS = plan_chunks(LAYOUT, size=12)


def make_accumulator(total: list[Tensor], ranks: Sequence[int]) -> Accumulator:
    """Of ``LAYOUT``, every segment arriving in the replica's own dtype."""
    return Accumulator(LAYOUT, [AsDtype(s.dtype) for s in LAYOUT], CHUNKS, total, ranks)


def add(accumulator: Accumulator, rank: int, index: int, values: Tensor) -> None:
    """Add a chunk that has arrived, where the averager would have received it."""
    assert accumulator.turn(index) == rank
    place = accumulator.in_place(rank, index)
    if place is None:
        accumulator.add(rank, index, values.clone())
    else:
        assert (place.dtype, place.shape) == (values.dtype, values.shape)
        place.copy_(values)
        accumulator.add(rank, index, None)


def random_state(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(s.numel, generator=generator, dtype=torch.float64).mul(100).to(s.dtype)
        for s in LAYOUT
    ]


def empty_total() -> list[Tensor]:
    return [torch.full((s.numel,), 99, dtype=s.center_dtype) for s in LAYOUT]


def accumulate(
    states: dict[int, list[Tensor]],
    examples: dict[int, int],
    order: random.Random | None = None,
    scales: Mapping[int, float] = MappingProxyType({}),
) -> list[Tensor]:
    """Add every rank's state; with ``order``, whoever can go on does so at random."""
    total = empty_total()
    accumulator = make_accumulator(total, sorted(examples))
    for rank, weight in examples.items():
        accumulator.declare(rank, weight, scales.get(rank, 1.0))
    at = {rank: 0 for rank, weight in examples.items() if weight}
    while at:
        able = [rank for rank, index in at.items() if accumulator.turn(index) == rank]
        rank = order.choice(able) if order is not None else min(able)
        add(accumulator, rank, at[rank], CHUNKS[at[rank]].of(states[rank]))
        at[rank] += 1
        if at[rank] == len(CHUNKS):
            del at[rank]
    accumulator.finish()
    return total


def mean_by_hand(states: dict[int, list[Tensor]], examples: dict[int, int]) -> list[np.ndarray]:
    contributors = [rank for rank in sorted(examples) if examples[rank]]
    means = []
    for index, segment in enumerate(LAYOUT):
        values = [states[rank][index].numpy() for rank in contributors]
        weights = [float(examples[rank]) for rank in contributors]
        if segment.dtype.is_floating_point:
            means.append(np.average(np.asarray(values, np.float64), axis=0, weights=weights))
        else:
            means.append(values[0])
    return means


def reference_bits(states: dict[int, list[Tensor]], examples: dict[int, int]) -> list[bytes]:
    """What numpy gives if it adds in the order of the ranks and divides once."""
    contributors = [rank for rank in sorted(examples) if examples[rank]]
    weights = [examples[rank] / examples[contributors[0]] for rank in contributors]
    bits = []
    for index, segment in enumerate(LAYOUT):
        values = [states[rank][index].numpy() for rank in contributors]
        total = values[0].copy()
        if segment.dtype.is_floating_point:
            for weight, each in zip(weights[1:], values[1:], strict=True):
                total += each * total.dtype.type(weight)
            total /= sum(weights)
        bits.append(total.tobytes())
    return bits


def bits_of(total: list[Tensor]) -> list[bytes]:
    return [values.numpy().tobytes() for values in total]


weights_of_ranks = st.lists(st.integers(0, 1000), min_size=1, max_size=5).filter(any)


@settings(max_examples=60, deadline=None)
@given(
    # Relative weights that are powers of two round nothing, be a product fused with its sum or not.
    weights=st.lists(st.sampled_from([0, 3, 3, 6, 12]), min_size=1, max_size=6).filter(any),
    order=st.randoms(use_true_random=False),
    seed=st.integers(0, 1000),
)
def test_the_bits_are_those_of_a_sum_in_the_order_of_the_ranks(
    weights: list[int], order: random.Random, seed: int
) -> None:
    examples = dict(enumerate(weights))
    states = {rank: random_state(seed + rank) for rank in examples}
    assert bits_of(accumulate(states, examples, order)) == reference_bits(states, examples)


@settings(max_examples=60, deadline=None)
@given(weights=weights_of_ranks, seed=st.integers(0, 1000))
def test_values_that_are_scaled_count_by_their_whole_weight(weights: list[int], seed: int) -> None:
    examples = dict(enumerate(weights))
    scales = {rank: 1 / (1 + (seed + rank) % 4) for rank in examples}
    states = {rank: random_state(seed + rank) for rank in examples}
    scaled = {
        rank: [
            values * scales[rank] if values.is_floating_point() else values
            for values in states[rank]
        ]
        for rank in states
    }

    total = accumulate(states, examples, scales=scales)

    for mean, expected in zip(total, mean_by_hand(scaled, examples), strict=True):
        np.testing.assert_allclose(mean.numpy(), expected, rtol=0, atol=1e-3)


@every("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types_are_summed_in_float32(dtype: torch.dtype) -> None:
    layout = (Segment("parameters", dtype, 2),)
    chunks = plan_chunks(layout, size=64)
    total = [torch.empty(2, dtype=torch.float32)]
    accumulator = Accumulator(layout, [AsDtype(dtype)], chunks, total, range(256))
    for rank in range(256):
        accumulator.declare(rank, 1)
        # 256 additions of 1 + 1/128 in bfloat16 itself would stop growing at 256.
        add(accumulator, rank, 0, torch.tensor([1 + 1 / 128, 300.0], dtype=dtype))
    accumulator.finish()

    assert total[0].tolist() == [1 + 1 / 128, 300.0]


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


WINDOW = WindowReport(rank=3, epoch=2, step=7, examples=4, loss_sum=8.0, last=False)


@settings(max_examples=40, deadline=None)
@given(
    bad=st.lists(st.sampled_from([math.nan, math.inf, -math.inf]), max_size=5),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
)
def test_every_value_that_is_not_finite_is_counted(bad: list[float], dtype: torch.dtype) -> None:
    values = torch.full((1000,), 60_000.0).to(dtype)  # whose sum is more than float16 holds
    for place, value in enumerate(bad):
        values[place * 137] = value
    assert count_non_finite(values) == len(bad)
    assert looks_finite(values) == (not bad)


@pytest.mark.filterwarnings("error")
def test_nobody_is_warned_of_large_values() -> None:
    assert count_non_finite(torch.full((5,), 3e30)) == 0


def test_what_one_has_is_told_from_what_all_have_agreed_on() -> None:
    values = torch.tensor([1.0, math.nan])
    with pytest.raises(NonFiniteError, match=r"^rank 3 has 1 NaN .* epoch 2, step 7 .*: 2\)"):
        require_finite(values, WINDOW)
    with pytest.raises(NonFiniteError, match=r"^rank 3 has 1 NaN"):
        require_finite(values, replace(WINDOW, group_weight=1))
    agreed = WindowReport(
        rank=0, epoch=2, step=7, examples=4, loss_sum=8.0, last=True, group_weight=12
    )
    with pytest.raises(NonFiniteError, match=r"^rank 0, which reports for all workers averaged"):
        require_finite(values, agreed)
