"""Recordings of runs, and what a report finds in them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from every_row import every_row
from hypothesis import given
from hypothesis import strategies as st
from recordings import Play, Played, busy_world

from sparkdl.averager.run_events import EpochValidated, WorkerLost, WorkerTimes
from sparkdl.phases import PHASES, PhaseTimes
from sparkdl.report.findings import findings, slowest
from sparkdl.report.page import render
from sparkdl.report.recording import FAILURES, LANES, Recording
from sparkdl.report.time_bins import BINS, TimeBins

STRETCHES = st.tuples(st.floats(0, 1e5), st.floats(0, 1e4), st.integers(0, 3), st.floats(0, 100))


@given(st.lists(STRETCHES, max_size=40))
def test_bins_hold_what_was_added_however_wide_they_become(
    stretches: list[tuple[float, float, int, float]],
) -> None:
    bins, expected = TimeBins.of(4), np.zeros(4)
    for began, length, which, value in stretches:
        bins.add(began, began + length, value, which)
        expected[which] += value
    np.testing.assert_allclose(bins.sums.sum(axis=0), expected, rtol=1e-9, atol=1e-12)
    assert bins.sums.shape == (BINS, 4)
    assert bins.used * bins.width_s >= bins.ended
    assert not bins.sums[bins.used + 1 :].any()


def test_values_lie_where_their_time_was() -> None:
    """A second of 2 and then one of 6, by bins of 1/64 s that become twice as wide once."""
    bins = TimeBins.of()
    bins.add(0.0, 1.0, 2.0)
    bins.add(1.0, 2.0, 6.0)
    bins.add(7.0, 7.0, 1.0)
    per_second = round(1 / bins.width_s)
    np.testing.assert_allclose(bins.sums[:per_second].sum(), 2.0)
    np.testing.assert_allclose(bins.sums[per_second : 2 * per_second].sum(), 6.0)
    np.testing.assert_allclose(bins.sums[2 * per_second :].sum(), 1.0)


def test_seconds_rows_and_bytes_are_added_up_by_worker(play: Play) -> None:
    recording = busy_world(play, 3, windows=10).recording
    expected = dict(zip(PHASES, (3.0, 2.0, 4.0, 3.0, 2.0, 0.0), strict=True))
    np.testing.assert_allclose(recording.seconds, [list(expected.values())] * 3)
    np.testing.assert_allclose(recording.before_training[:, :2], [[3.0, 1.0]] * 3)
    assert recording.rows.tolist() == [100] * 3
    assert recording.hosts == ["host-0", "host-1", "host-2"]
    assert recording.sent.tolist() == recording.received.tolist() == [11 * 4000] * 3
    # Seen by time: every second is in exactly one place.
    np.testing.assert_allclose(recording.lanes.sums.sum(axis=0), recording.seconds)
    assert recording.duration_s == pytest.approx(14.0)


def test_a_hundred_times_as_many_workers_and_rounds_take_no_more_room(play: Play) -> None:
    small, large = busy_world(play, 32, 10), busy_world(play, 1600, 10)
    for _ in range(2000):
        large.spend(7, compute=1.0)
        large.window(7)
        large.recording.note(WorkerLost(7, "gone"))
    assert large.recording.lanes.sums.shape == small.recording.lanes.sums.shape
    assert large.recording.lanes.sums.shape[1] <= LANES
    assert len(large.recording.failures) == FAILURES
    assert large.recording.num_failures == 2000
    assert len(json.dumps(large.recording.as_json())) < 2_000_000


def test_a_recording_comes_back_from_json_with_the_same_page(play: Play) -> None:
    played = busy_world(play, 3, windows=10)
    played.epoch(1)
    played.recording.note(WorkerLost(1, "gone <b>"))
    played.recording.end("finished")
    told = json.loads(json.dumps(played.recording.as_json()))
    back = Recording.from_json(told)
    assert render(back) == render(played.recording)
    assert back.as_json() == played.recording.as_json()


def test_a_worker_that_lies_about_its_clock_breaks_nothing(play: Play) -> None:
    played = busy_world(play, 2, windows=2)
    recording = played.recording
    for began, ended in [(-1e300, 1e300), (1e300, 1e300), (played.now, played.now + 1e12)]:
        recording.note(WorkerTimes(0, "x", PhaseTimes(began, ended, (1e300,) * 6, 1, 1, 0.0)))
    assert recording.lanes.ended <= recording.duration_s
    assert np.isfinite(recording.seconds).all()


def test_epochs_that_are_validated_later_get_their_loss(play: Play) -> None:
    played = play(1)
    played.epoch(1)
    known = replace(played.recording.history[0], validation_loss=0.5)
    played.recording.note(EpochValidated(known))
    assert played.recording.history == [known]


def test_windows_vary_by_what_their_worker_computed_over_its_mean(play: Play) -> None:
    """Not the first of an epoch, which warms up or follows a validation, nor a shorter last one."""
    played = play(2)
    assert [len(each) for each in played.recording.window_ratios(2)[:1]] == [0]
    seconds = {0: [9.0, 1.0, 3.0, 2.0], 1: [9.0, 10.0, 30.0, 20.0]}
    for epoch in (1, 2):
        for window in range(4):
            for rank in (0, 1):
                played.spend(rank, compute=seconds[rank][window], wait=0.5)
                played.window(rank, examples=10)
        for rank in (0, 1):
            played.spend(rank, compute=0.1)
            played.window(rank, examples=3)
        played.epoch(epoch)
        for rank in (0, 1):
            played.spend(rank, compute=5.0)
    ratios, steps = played.recording.window_ratios(2)
    np.testing.assert_allclose(sorted(ratios), [0.5] * 4 + [1.0] * 4 + [1.5] * 4)
    assert steps == 5


def world(play: Play, ranks: list[dict[str, float]], windows: int = 10, **setup: object) -> Played:
    """Each rank spends its seconds in every window."""
    played = play(len(ranks), **setup)
    for _ in range(windows):
        for rank, seconds in enumerate(ranks):
            played.spend(rank, f"host-{rank}", **seconds)
            played.window(rank)
    played.rows(*[100] * len(ranks))
    return played


def test_equal_workers_that_wait_wait_for_the_averager(play: Play) -> None:
    """The issue's own sentence: 58 % of a window of 1 s."""
    played = world(play, [{"compute": 0.42, "wait": 0.58}] * 4)
    first = findings(played.recording)[0]
    assert first.sentence == "58 % of the time workers wait for the averager."
    assert "aise period (it is 5), or aggregation='executors'" in first.advice
    assert first.share == pytest.approx(0.58)


def test_who_works_longest_is_waited_for_and_named(play: Play) -> None:
    """Three wait 0.6 s of each second for the fourth: 1.8 of 4."""
    ranks = [{"compute": 0.4, "wait": 0.6}] * 3 + [{"compute": 1.0}]
    played = world(play, ranks)
    first = next(each for each in findings(played.recording) if "wait" in each.sentence)
    assert first.sentence.startswith("45 % of the time workers wait for each other: rank 3 on host")
    assert "host is slower" in first.advice
    assert slowest(played.recording) == (3, pytest.approx(1.0 / 0.55))


@pytest.mark.parametrize("ranks", [2, 100])  # of many, several share a line of the timeline
def test_who_was_lost_is_waited_for_and_not_the_averager(play: Play, ranks: int) -> None:
    """Rank 1 is not there for 6 of 10 s, for which all others wait."""
    played = play(ranks)
    for _ in range(4):
        for rank in range(ranks):
            played.spend(rank, f"host-{rank}", compute=0.5)
            played.window(rank)
    together = -(-ranks // 32)  # workers on a line of the timeline
    gone = range(together, 2 * together) if together > 1 else [1]
    for rank in gone:
        played.recording.note(WorkerLost(rank, "its host was taken away"))
        played.at[rank] += 6.0
    for rank in set(range(ranks)) - set(gone):
        played.spend(rank, f"host-{rank}", wait=6.0)
    for rank in range(ranks):
        played.spend(rank, f"host-{rank}", compute=0.5)
    first = next(each for each in findings(played.recording) if "wait" in each.sentence)
    who = "rank 1 on host-1, until it was" if ranks == 2 else f"{together} workers, until they were"
    assert f"workers wait, most of it for {who} back" in first.sentence
    assert "Failures" in first.advice


def test_uneven_rows_are_told_from_a_slow_host(play: Play) -> None:
    played = world(play, [{"compute": 0.4, "wait": 0.6}] * 3 + [{"compute": 1.0}])
    for _ in range(20):
        played.window(3)
    first = next(each for each in findings(played.recording) if "wait" in each.sentence)
    assert "2.0 times as many rows" in first.advice
    assert "shuffleRows='exchange'" in first.advice


@every_row(
    ({"compute": 9, "wait": 1}, {}, ["90 %", "forward, backward", "more workers"]),
    (
        {"compute": 2, "exchange": 8},
        {"model_bytes": 12_300_000},
        ["80 %", "12.3 MB", "bfloat16"],
    ),
    ({"compute": 2, "decode": 8}, {}, ["80 %", "minibatches", "batchSize"]),
    (
        {"compute": 2, "wait": 8},
        {"aggregation": None, "period": None, "collective": True},
        ["80 %", "wait for the other workers", "ParameterAveraging"],
    ),
    ({"compute": 2, "read": 8}, {"epochs": 1}, ["80 %", "rows were read", "Parquet"]),
)
def test_the_largest_share_comes_first_with_what_would_help(
    play: Play, seconds: dict[str, float], setup: dict[str, object], words: list[str]
) -> None:
    said = str(findings(world(play, [seconds] * 2, **setup).recording)[0])
    assert all(word in said for word in words), said


def test_a_start_that_takes_longest_is_said(play: Play) -> None:
    played = play(1)
    played.now += 60
    played.at = [played.now]
    played.spend(0, compute=20.0)
    found = {round(each.share, 6): str(each) for each in findings(played.recording)}
    assert "75 % of the time (60.0 s) passed before the first worker" in found[0.75]


def test_before_anybody_has_told_nothing_is_made_up(play: Play) -> None:
    assert "No worker has reported yet" in findings(play(3).recording)[0].sentence
