"""Events and phases of a run."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from summed import sums_of

from sparkdl import phases
from sparkdl.events import EpochSummary, WindowReport, summarize_epoch
from sparkdl.phases import COMPUTE, DECODE, EXCHANGE, PHASES, PhaseClock


class Hand:
    """A clock that goes on when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    hand = Hand()
    monkeypatch.setattr(phases, "time", hand)
    return hand


@given(st.lists(st.tuples(st.sampled_from(range(len(PHASES))), st.integers(0, 1000))))
def test_what_is_counted_adds_up_to_the_time_that_went_by(steps: list[tuple[int, int]]) -> None:
    hand = Hand()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phases, "time", hand)
        clock = PhaseClock()
        expected = [0.0] * len(PHASES)
        for phase, seconds in steps:
            clock.switch(phase)
            hand.now += seconds
            expected[phase] += seconds
        times = clock.take()
    assert list(times.seconds) == expected
    assert times.ended - times.began == sum(expected)


def test_an_error_ends_the_phase_in_which_it_happens(hand: Hand) -> None:
    clock = PhaseClock()
    with contextlib.suppress(ZeroDivisionError), clock.phase(EXCHANGE):
        hand.now += 1
        raise ZeroDivisionError
    hand.now += 2
    assert clock.take().seconds == (0, 0, 0, 0, 1, 2)


def test_what_makes_items_is_counted_and_what_uses_them_is_not(hand: Hand) -> None:
    clock = PhaseClock()
    closed = []

    def items() -> Iterator[int]:
        try:
            for item in range(3):
                hand.now += 1
                yield item
        finally:
            closed.append(True)

    with clock.phase(COMPUTE):
        for item in clock.each(DECODE, items()):
            hand.now += 10
            if item == 1:
                break
    assert closed == [True]
    assert clock.take().seconds == (0, 2, 20, 0, 0, 0)


@given(
    ahead=st.floats(-1e6, 1e6),
    trips=st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=8),
)
def test_the_drivers_clock_is_known_to_half_of_the_fastest_round_trip(
    ahead: float, trips: list[tuple[float, float]]
) -> None:
    """Whatever the ways there and back take: Cristian's bound."""
    hand = Hand()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phases, "time", hand)
        clock = PhaseClock()
        for there, back in trips:
            asked = hand.now
            theirs = asked + there + ahead
            hand.now += there + back
            clock.compare(asked, theirs, hand.now)
        times = clock.take()
    bound = min(there + back for there, back in trips) / 2
    assert times.uncertainty == pytest.approx(bound, abs=1e-9)
    assert abs(times.ended - (hand.now + ahead)) <= bound + 1e-6


def window(rank: int, step: int, examples: int, loss_sum: float) -> WindowReport:
    said = {"rank": rank, "epoch": 2, "step": step, "last": False}
    return WindowReport(examples=examples, loss_sum=loss_sum, **said)


def test_the_loss_is_the_mean_over_rows_and_not_over_windows() -> None:
    windows = [window(0, 5, 90, 90 * 1.0), window(1, 5, 10, 10 * 2.0)]
    summary = summarize_epoch(2, sums_of(windows), rounds=7, seconds=4.0, workers=2)
    told = {"epoch": 2, "rounds": 7, "seconds": 4.0, "workers": 2}
    assert summary == EpochSummary(loss=1.1, examples=100, **told)
    assert summary.examples_per_second == 25.0


@given(
    losses=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), shuffle_seed=st.integers(0, 99)
)
def test_the_bits_do_not_depend_on_the_order_in_which_the_ranks_report(
    losses: list[float], shuffle_seed: int
) -> None:
    windows = [window(i % 3, i // 3, 1 + i, loss) for i, loss in enumerate(losses)]
    ranks = [each.rank for each in windows]
    of_rank = {rank: iter([w for w in windows if w.rank == rank]) for rank in ranks}
    random.Random(shuffle_seed).shuffle(ranks)
    shuffled = sums_of(next(of_rank[rank]) for rank in ranks)
    first, second = (summarize_epoch(2, s, 1, 1.0, 2) for s in (sums_of(windows), shuffled))
    assert first == second


def test_an_epoch_without_examples_has_no_loss_and_one_in_no_time_an_infinite_rate() -> None:
    summary = summarize_epoch(1, sums_of([window(0, 0, 0, 0.0)]), 1, 1.0, 1)
    assert math.isnan(summary.loss)
    assert summary.examples == 0
    summary = EpochSummary(epoch=1, loss=0.0, examples=3, rounds=1, seconds=0.0)
    assert summary.examples_per_second == float("inf")
