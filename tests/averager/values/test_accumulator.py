"""The weighted sum: right to rounding, the same bits whatever the order of arrival."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from every_row import every
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparkdl.averager.values.accumulator import Accumulator, RankOrder
from sparkdl.averager.values.packing import AsDtype, plan_chunks
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
@given(weights=weights_of_ranks, seed=st.integers(0, 1000))
def test_the_mean_is_the_weighted_mean_in_float64(weights: list[int], seed: int) -> None:
    examples = {rank * rank: weight for rank, weight in enumerate(weights, 1)}
    states = {rank: random_state(seed + rank) for rank in examples}

    total = accumulate(states, examples)

    for mean, expected, segment in zip(total, mean_by_hand(states, examples), LAYOUT, strict=True):
        assert mean.dtype is segment.center_dtype
        tolerance = 1e-13 if segment.dtype is torch.float64 else 1e-6
        np.testing.assert_allclose(mean.numpy(), expected, rtol=0, atol=tolerance * 1000)


@settings(max_examples=60, deadline=None)
@given(weights=weights_of_ranks, order=st.randoms(use_true_random=False))
def test_the_bits_do_not_depend_on_the_order_of_arrival(
    weights: list[int], order: random.Random
) -> None:
    examples = dict(enumerate(weights))
    states = {rank: random_state(rank) for rank in examples}
    assert bits_of(accumulate(states, examples, order)) == bits_of(accumulate(states, examples))


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


@every("contributor", [0, 1, 2])
def test_a_single_contribution_passes_bit_for_bit(contributor: int) -> None:
    examples = {rank: 17 if rank == contributor else 0 for rank in range(3)}
    state = random_state(1)
    assert bits_of(accumulate({contributor: state}, examples)) == bits_of(state)


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


class TestInPlace:
    """The first contribution arrives where the sum is formed, if it needs no conversion."""

    @every(("empty", "first"), [([], 0), ([0], 1)])
    def test_that_of_the_first_does(self, empty: list[int], first: int) -> None:
        total = empty_total()
        accumulator = make_accumulator(total, [0, 1])
        accumulator.declare(first, 1)
        for rank in empty:
            accumulator.declare(rank, 0)
        place = accumulator.in_place(first, 0)
        assert place is not None
        assert place.data_ptr() == total[0].data_ptr()

    def test_that_of_another_does_not(self) -> None:
        accumulator = make_accumulator(empty_total(), [0, 1])
        for rank in (0, 1):
            accumulator.declare(rank, 1)
        assert accumulator.in_place(1, 0) is None
        add(accumulator, 0, 0, random_state(0)[0][:3])
        assert accumulator.in_place(1, 0) is None
        assert accumulator.in_place(0, 1) is not None

    def test_that_of_another_type_does_not(self) -> None:
        layout = (Segment("parameters", torch.float32, 2),)
        total, chunks = [torch.empty(2)], plan_chunks(layout, size=64)
        accumulator = Accumulator(layout, [AsDtype(torch.bfloat16)], chunks, total, [0])
        accumulator.declare(0, 1)
        assert accumulator.in_place(0, 0) is None


class TestTurns:
    """Each chunk is added by one rank after another."""

    def test_every_chunk_has_its_own_turn(self) -> None:
        order = RankOrder([1, 4], 2)
        assert [order.turn(0), order.turn(1)] == [1, 1]
        order.advance(0)
        assert [order.turn(0), order.turn(1)] == [4, 1]
        order.advance(0)
        assert [order.turn(0), order.turn(1)] == [None, 1]

    def test_whoever_skips_has_no_turn(self) -> None:
        order = RankOrder([0, 1, 2], 1)
        order.skip(0)
        order.skip(2)
        assert order.turn(0) == 1
        order.advance(0)
        assert order.turn(0) is None
