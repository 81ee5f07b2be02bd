"""The weighted sum: right to rounding, the same bits whatever the order of arrival."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparkdl.averager.accumulator import Accumulator
from sparkdl.averager.wire import plan_chunks
from sparkdl.errors import DeadlineError, StoppedError
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
    return Accumulator(LAYOUT, [s.dtype for s in LAYOUT], CHUNKS, total, ranks)


def add(
    accumulator: Accumulator, rank: int, index: int, values: Tensor, *, deadline_s: float
) -> None:
    """Add a chunk that has arrived already."""

    def receive(into: Tensor) -> None:
        assert into.dtype is values.dtype
        assert into.shape == values.shape
        into.copy_(values)

    scratch = torch.empty(64, dtype=torch.uint8)
    accumulator.add(rank, index, receive, scratch, deadline_s)


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
    delays: dict[int, list[float]] | None = None,
) -> tuple[bool, list[Tensor]]:
    """Add every rank's state in a thread of its own, pausing before chunks as told."""
    total = empty_total()
    accumulator = make_accumulator(total, sorted(examples))
    errors: list[BaseException] = []

    def contribute(rank: int) -> None:
        try:
            pauses = (delays or {}).get(rank, [])
            for pause in pauses[:1]:
                time.sleep(pause)
            accumulator.declare(rank, examples[rank])
            if not examples[rank]:
                return
            for index, chunk in enumerate(CHUNKS):
                if index < len(pauses):
                    time.sleep(pauses[index])
                add(accumulator, rank, index, chunk.of(states[rank]).clone(), deadline_s=10)
        except BaseException as error:  # shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=contribute, args=(rank,)) for rank in examples]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert errors == []
    return accumulator.finish(), total


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


weights_of_ranks = st.lists(st.integers(0, 1000), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(weights=weights_of_ranks, seed=st.integers(0, 1000))
def test_the_mean_is_the_weighted_mean_in_float64(weights: list[int], seed: int) -> None:
    examples = dict(enumerate(weights))
    states = {rank: random_state(seed + rank) for rank in examples}

    formed, total = accumulate(states, examples)

    assert formed is any(weights)
    if formed:
        for mean, expected, segment in zip(
            total, mean_by_hand(states, examples), LAYOUT, strict=True
        ):
            assert mean.dtype is segment.center_dtype
            tolerance = 1e-13 if segment.dtype is torch.float64 else 1e-6
            np.testing.assert_allclose(mean.numpy(), expected, rtol=0, atol=tolerance * 1000)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), weights=st.lists(st.integers(0, 50), min_size=2, max_size=5).filter(any))
def test_the_bits_do_not_depend_on_the_order_of_arrival(
    data: st.DataObject, weights: list[int]
) -> None:
    examples = dict(enumerate(weights))
    states = {rank: random_state(rank) for rank in examples}
    pauses = st.lists(st.sampled_from([0.0, 0.0, 0.0, 0.002, 0.005]), max_size=len(CHUNKS))
    delays = {rank: data.draw(pauses, label=f"rank {rank}") for rank in examples}

    _, undisturbed = accumulate(states, examples)
    _, disturbed = accumulate(states, examples, delays)

    assert all(torch.equal(a, b) for a, b in zip(undisturbed, disturbed, strict=True))


@pytest.mark.parametrize("contributor", [0, 1, 2])
def test_a_single_contribution_passes_bit_for_bit(contributor: int) -> None:
    examples = {rank: 17 if rank == contributor else 0 for rank in range(3)}
    state = random_state(1)

    formed, total = accumulate({contributor: state}, examples)

    assert formed
    for mean, values in zip(total, state, strict=True):
        assert mean.numpy().tobytes() == values.numpy().tobytes()


@pytest.mark.parametrize("empty", [{0}, {1}, {2}, {0, 1}, {1, 2}, {0, 2}])
def test_ranks_without_examples_do_not_count(empty: set[int]) -> None:
    examples = {rank: 0 if rank in empty else rank + 2 for rank in range(3)}
    states = {rank: random_state(rank) for rank in range(3)}

    _, total = accumulate(states, examples)

    for mean, expected in zip(total, mean_by_hand(states, examples), strict=True):
        np.testing.assert_allclose(mean.numpy(), expected, rtol=1e-6, atol=1e-5)


def test_ranks_need_not_be_consecutive() -> None:
    examples = {1: 3, 4: 5, 9: 2}
    states = {rank: random_state(rank) for rank in examples}

    _, total = accumulate(states, examples)

    for mean, expected in zip(total, mean_by_hand(states, examples), strict=True):
        np.testing.assert_allclose(mean.numpy(), expected, rtol=1e-6, atol=1e-5)


def test_without_any_examples_there_is_no_mean() -> None:
    formed, _ = accumulate({}, {0: 0, 1: 0})
    assert not formed


def test_integers_are_those_of_the_first_contributor() -> None:
    examples = {0: 0, 1: 5, 2: 50}
    states = {rank: random_state(rank) for rank in examples}

    _, total = accumulate(states, examples)

    assert torch.equal(total[3], states[1][3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types_are_summed_in_float32(dtype: torch.dtype) -> None:
    layout = (Segment("parameters", dtype, 2),)
    chunks = plan_chunks(layout, size=64)
    total = [torch.empty(2, dtype=torch.float32)]
    accumulator = Accumulator(layout, [dtype], chunks, total, range(256))
    for rank in range(256):
        accumulator.declare(rank, 1)
        # 256 additions of 1 + 1/128 in bfloat16 itself would stop growing at 256.
        add(accumulator, rank, 0, torch.tensor([1 + 1 / 128, 300.0], dtype=dtype), deadline_s=1)
    accumulator.finish()

    assert total[0].tolist() == [1 + 1 / 128, 300.0]


def test_equal_weights_are_not_rounded() -> None:
    """Weights are relative to the first's: 49 examples each add plainly, and are divided once."""
    layout = (Segment("parameters", torch.float64, 1),)
    total = [torch.empty(1, dtype=torch.float64)]
    chunks = plan_chunks(layout, size=64)
    accumulator = Accumulator(layout, [torch.float64], chunks, total, [0, 1, 2])
    for rank, value in enumerate([0.1, 0.2, 0.3]):
        accumulator.declare(rank, 49)
        add(accumulator, rank, 0, torch.tensor([value], dtype=torch.float64), deadline_s=1)

    assert total[0].item() == (0.1 + 0.2 + 0.3) / 3


def test_the_first_contribution_arrives_where_the_sum_is_formed() -> None:
    total = empty_total()
    accumulator = make_accumulator(total, [0, 1])
    accumulator.declare(0, 1)
    places: list[int] = []
    scratch = torch.empty(64, dtype=torch.uint8)

    accumulator.add(0, 0, lambda into: places.append(into.data_ptr()), scratch, 1.0)

    assert places == [total[0].data_ptr()]


def test_stop_wakes_whoever_waits_for_a_turn() -> None:
    accumulator = make_accumulator(empty_total(), [0, 1])
    accumulator.declare(1, 4)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            add(accumulator, 1, 0, random_state(1)[0][:3], deadline_s=30)
        except StoppedError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.05)
    accumulator.stop()
    waiting.join(5)

    assert not waiting.is_alive()
    assert len(raised) == 1


def test_an_overdue_turn_names_both_ranks_and_the_chunk() -> None:
    accumulator = make_accumulator(empty_total(), [0, 1])
    accumulator.declare(1, 4)
    expected = f"rank 1 waited .* for rank 0 to send chunk 1 of {len(CHUNKS)}"
    with pytest.raises(DeadlineError, match=expected):
        add(accumulator, 1, 0, random_state(1)[0][:3], deadline_s=0.05)


def test_an_overdue_turn_blames_the_rank_that_is_absent_and_not_one_that_waits_itself() -> None:
    """Ranks 1 and 2 are there, rank 0 is not: rank 2's turn is overdue because of rank 0."""
    accumulator = make_accumulator(empty_total(), [0, 1, 2])
    values = random_state(1)[0][:3]
    for rank in (1, 2):
        accumulator.declare(rank, 4)

    def wait_as_rank_1() -> None:
        with pytest.raises(StoppedError):
            add(accumulator, 1, 0, values, deadline_s=30)

    waiting = threading.Thread(target=wait_as_rank_1)
    waiting.start()
    try:
        with pytest.raises(DeadlineError, match="for rank 0"):
            add(accumulator, 2, 0, values, deadline_s=0.2)
    finally:
        accumulator.stop()
        waiting.join(5)
