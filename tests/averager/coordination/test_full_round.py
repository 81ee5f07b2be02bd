"""What part of a full round a round is, against everyone's windows written down one by one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from every_row import every
from summed import sums_of

from sparkdl.averager.coordination.full_round import FullRound
from sparkdl.events import WindowReport

WINDOW = 10


def windows_of(rank: int, rows: int, weight_of_a_row: int | None = None) -> list[WindowReport]:
    """A rank's windows of an epoch."""
    sizes = [min(WINDOW, rows - start) for start in range(0, rows, WINDOW)] or [0]
    return [
        WindowReport(
            rank=rank,
            epoch=1,
            step=number,
            examples=size,
            loss_sum=0.0,
            last=number == len(sizes),
            group_weight=None if weight_of_a_row is None else size * weight_of_a_row,
        )
        for number, size in enumerate(sizes, 1)
    ]


def in_step(rows: list[int]) -> list[list[WindowReport]]:
    """The rounds of an epoch of equally fast workers."""
    of_ranks = [windows_of(rank, each) for rank, each in enumerate(rows)]
    longest = max(map(len, of_ranks))
    return [[own[k] for own in of_ranks if k < len(own)] for k in range(longest)]


@every("rows", [[40], [40, 40], [40, 33, 21], [7, 3, 100], [0, 25, 5]])
def test_rounds_of_everyone_who_has_rows_left_are_full_ones_from_the_first_epoch_on(
    rows: list[int],
) -> None:
    full = FullRound(len(rows))
    for _ in range(3):
        assert [full.share(windows) for windows in in_step(rows)] == [1.0] * len(in_step(rows))
        full.end_epoch()


@every("rows", [[40, 40, 40, 40], [40, 33, 21], [7, 3, 100], [0, 25, 5]])
@every("seed", range(5))
def test_in_any_order_a_window_alone_has_the_share_that_it_has_among_everyones(
    rows: list[int], seed: int
) -> None:
    """From the second epoch on, when it is known how many rows each has."""
    full, draw = FullRound(len(rows)), random.Random(seed)
    expected = {
        (window.rank, window.step): window.examples / sum(each.examples for each in windows)
        for windows in in_step(rows)
        for window in windows
        if window.examples
    }
    for epoch in range(1, 4):
        left = [windows_of(rank, each) for rank, each in enumerate(rows)]
        while ranks := [rank for rank, own in enumerate(left) if own]:
            window = left[draw.choice(ranks)].pop(0)
            share = full.share([window])
            if window.examples and epoch > 1:
                assert share == pytest.approx(expected[window.rank, window.step])
        full.end_epoch()


def test_in_the_first_epoch_of_equal_ranks_too() -> None:
    full = FullRound(4)
    for rank in range(4):
        for window in windows_of(rank, 40):
            assert full.share([window]) == pytest.approx(1 / 4)


def test_a_round_of_some_has_the_sum_of_their_shares_late_or_not() -> None:
    full = FullRound(4)
    early, late = windows_of(0, 40), windows_of(3, 40)
    assert full.share([early[0], windows_of(1, 40)[0], windows_of(2, 40)[0]]) == 3 / 4
    assert full.share([early[1], late[0]]) == 1 / 2
    assert full.share([late[1]]) == 1 / 4


def test_the_weights_that_contributions_carry_count_and_not_their_rows() -> None:
    """Rank 1's rows weigh three times as much; who is missing counts as the mean row so far."""
    full = FullRound(2)
    light, heavy = windows_of(0, 20, 1), windows_of(1, 20, 3)
    assert full.share([light[0], heavy[0]]) == 1.0
    assert full.share([heavy[1]]) == pytest.approx(30 / (30 + 10 * (10 + 30 + 30) / 30))


def test_windows_without_any_weight_change_nothing_and_are_rows_that_were_there() -> None:
    full = FullRound(2)
    nothing = replace(windows_of(0, 20)[0], group_weight=0)
    assert full.share([nothing]) == 1.0
    assert full.share([windows_of(0, 20)[1]]) == pytest.approx(10 / (10 + 10 * 10 / 20))


def test_it_goes_on_with_the_windows_of_an_epoch_that_was_interrupted() -> None:
    rows = [40, 20]
    before = in_step(rows)[:2]
    assert FullRound(2, sums_of(before[0] + before[1])).share([windows_of(0, 40)[2]]) == 1.0
    assert FullRound(2, sums_of(before[0])).share([windows_of(0, 40)[1]]) == pytest.approx(1 / 2)


def test_a_rank_that_has_other_rows_than_in_the_epoch_before_is_believed() -> None:
    full = FullRound(2)
    for rows in ([40, 20], [40, 40], [40, 20]):
        for windows in in_step(rows):
            assert full.share(windows) == 1.0
        full.end_epoch()
