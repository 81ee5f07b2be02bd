"""Epoch summaries: sums over windows, independent of the order in which they arrived."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from summed import sums_of

from sparkdl.events import EpochSummary, WindowReport, summarize_epoch


def window(rank: int, step: int, examples: int, loss_sum: float) -> WindowReport:
    return WindowReport(
        rank=rank, epoch=2, step=step, examples=examples, loss_sum=loss_sum, last=False
    )


def test_the_loss_is_the_mean_over_rows_and_not_over_windows() -> None:
    windows = [window(0, 5, 90, 90 * 1.0), window(1, 5, 10, 10 * 2.0)]
    summary = summarize_epoch(2, sums_of(windows), rounds=7, seconds=4.0)
    assert summary == EpochSummary(epoch=2, loss=1.1, examples=100, rounds=7, seconds=4.0)
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
    assert summarize_epoch(2, sums_of(windows), 1, 1.0) == summarize_epoch(2, shuffled, 1, 1.0)


def test_windows_without_examples_do_not_change_the_loss() -> None:
    windows = [window(0, 0, 0, 0.0), window(1, 3, 4, 2.0)]
    assert summarize_epoch(2, sums_of(windows), 1, 1.0).loss == 0.5


def test_an_epoch_without_examples_has_no_loss() -> None:
    summary = summarize_epoch(1, sums_of([window(0, 0, 0, 0.0)]), 1, 1.0)
    assert math.isnan(summary.loss)
    assert summary.examples == 0


def test_an_epoch_in_no_time_has_an_infinite_rate() -> None:
    summary = EpochSummary(epoch=1, loss=0.0, examples=3, rounds=1, seconds=0.0)
    assert summary.examples_per_second == float("inf")


def test_events_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        window(0, 0, 0, 0.0).rank = 3  # type: ignore[misc]
