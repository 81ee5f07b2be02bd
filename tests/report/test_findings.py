"""What bounds a training, said of trainings of which it is known."""

from __future__ import annotations

import pytest
from every_row import every
from recordings import Play, Played

from sparkdl.averager.messages.run_events import WorkerLost
from sparkdl.report.findings import findings, slowest


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
    assert first.sentence.startswith(
        "45 % of the time workers wait for each other: rank 3 on host-3"
    )
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


def test_a_loss_that_nobody_waited_for_is_not_blamed(play: Play) -> None:
    played = world(play, [{"compute": 0.42, "wait": 0.58}] * 4)
    played.recording.note(WorkerLost(1, "its connection broke"))
    assert "wait for the averager" in findings(played.recording)[0].sentence


def test_uneven_rows_are_told_from_a_slow_host(play: Play) -> None:
    played = world(play, [{"compute": 0.4, "wait": 0.6}] * 3 + [{"compute": 1.0}])
    for _ in range(20):
        played.window(3)
    first = next(each for each in findings(played.recording) if "wait" in each.sentence)
    assert "2.0 times as many rows" in first.advice
    assert "shuffleRows='exchange'" in first.advice


@every(
    ("seconds", "setup", "words"),
    [
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
        ({"compute": 2, "read": 8}, {"epochs": 1}, ["80 %", "rows were read", "streamFirstEpoch"]),
    ],
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
