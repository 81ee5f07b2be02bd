"""The start of a run, and where a worker may stand."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

from decided import Told, do
from decisions import Run, expect_failure, only, report, shard, started
from every_row import every, every_row

from sparkdl.averager.coordination.membership import Member
from sparkdl.averager.coordination.rank_states import BEFORE, Ranks, RankState, Window
from sparkdl.errors import DeadlineError, ModelError, SparkDLError, StoppedError, TrainingError
from sparkdl.events import ValidationReport
from sparkdl.feed.column_statistics import ColumnStatistics
from sparkdl.feed.shards import DataStatistics


def joined(world_size: int, **options: object) -> Run:
    run = Run(world_size, **options)  # type: ignore[arg-type]
    for rank in run.ranks:
        assert run.join(rank) == []
    return run


def test_nobody_is_let_start_before_the_driver_says_so() -> None:
    run = joined(2)
    assert run.read(0) == []
    told = DataStatistics(
        (1, 1), (ColumnStatistics(),), parts=tuple(((n, 1, 0, 0.0),) for n in (0, 1))
    )
    assert run.read(1) == [do.report(told)]
    assert run.start() == [do.welcome(run.members[0]), do.welcome(run.members[1])]


def test_the_statistics_have_the_rows_by_rank_and_the_columns_added_whatever_the_order() -> None:
    run = joined(3)
    run.read(2, shard(7, nulls=2))
    run.read(0, shard(5, nulls=1))
    statistics = DataStatistics(
        (5, 0, 7),
        (ColumnStatistics(nulls=3),),
        parts=tuple(((rank, rows, 0, 0.0),) for rank, rows in enumerate((5, 0, 7))),
    )
    assert run.read(1, shard(0)) == [do.report(statistics)]


@every_row(
    (Run(2), lambda run: run.join(2), TrainingError, "rank 2 on host-2 joined a run of 2 w"),
    (Run(2), lambda run: run.join(-1), TrainingError, "rank -1 on host--1 joined a run of 2 w"),
    (
        joined(1),
        lambda run: run.join(0, host="second-host"),
        TrainingError,
        "rank 0 joined from second-host.*from host-0",
    ),
    (Run(2), lambda run: run.join(1, frozen="f2"), ModelError, "rank 1 on host-1 built"),
    (
        Run(2, frozen="f1"),
        lambda run: run.join(0, frozen="f1") + run.join(1, frozen="f2"),
        ModelError,
        "rank 1 on host-1 built",
    ),
    (
        joined(2),
        lambda run: run.read(0) + run.read(1, shard(3, columns=2)),
        TrainingError,
        "rank 1 has 2 columns, unlike the others",
    ),
    (started(1), lambda run: run.read(0), TrainingError, "rank 0 reported its rows twice"),
)
def test_who_cannot_be_of_this_run_ends_it(
    run: Run, act: Callable[[Run], list[Told]], error: type[SparkDLError], words: str
) -> None:
    expect_failure(run, act(run), error, words)


class TestActingBeforeBeingLetStart:
    """Whoever acts as if it had been let start ends the run, in words."""

    @every("is_started", [False, True])
    @every(
        "act",
        [
            ("window_closed", report(0)),
            ("gave", "a value"),
            ("finished",),
            ("validated", ValidationReport(rank=0, epoch=1, examples=1, loss_sum=0.0, weight=1.0)),
        ],
    )
    def test_it_is_refused(self, act: tuple[Any, ...], is_started: bool) -> None:
        run = started(2, max_failures=1) if is_started else joined(2)
        if is_started:
            run.lose(0)
            run.join(0, attempt=1, host="host-0")
        event, *arguments = act
        decisions = run.tell(event, run.members[0], *arguments)
        words = "rank 0 on host-0 behaves as if it had been told to start, but it has not"
        expect_failure(run, decisions, TrainingError, words)


class TestDeadlines:
    """Whose fault it is that the workers do not start."""

    def test_a_rank_that_never_joins_is_named(self) -> None:
        run = Run(3, deadline_s=10)
        run.join(0)
        run.join(2)
        run.read(0)
        run.read(2)
        assert only(do.end, run.wait(9)) == []
        words = r"^rank 1 did not start \(2 of 3 workers did, and .* within 10 s"
        expect_failure(run, run.wait(1), DeadlineError, words)
        assert "rank 0" not in str(run.failure)

    def test_ranks_that_joined_but_read_nothing_are_named_with_their_hosts(self) -> None:
        run = joined(3, deadline_s=0.25)
        run.read(1)
        words = r"^rank 0 on host-0, rank 2 on host-2 did not receive .* rows within 0\.25 s"
        expect_failure(run, run.wait(0.25), DeadlineError, words)

    def test_a_reader_that_gives_signs_of_life_is_not_overdue(self) -> None:
        run = joined(2, deadline_s=10)
        run.read(0)
        for _ in range(8):
            assert only(do.end, run.wait(9)) == []
            run.coordinator.heartbeat(run.members[1], run.now)
        assert only(do.report, run.read(1)) != []

    def test_workers_whose_turn_to_start_has_yet_to_come_are_not_overdue(self) -> None:
        run = Run(2, deadline_s=10)
        run.join(0)
        run.read(0)
        for _ in range(3):
            assert only(do.end, run.wait(9)) == []
            run.tell("expect_workers")
        expect_failure(run, run.wait(10), DeadlineError, "^rank 1 did not start")

    def test_who_waits_for_the_start_is_told_now_and_then_that_it_goes_on(self) -> None:
        run = joined(2, deadline_s=8)
        run.read(0)
        for _ in range(4):
            run.coordinator.heartbeat(run.members[1], run.now)
            assert run.wait(2) == [do.say_waiting((run.members[0],))]


class TestAfterTheEnd:
    """The first reason counts, and nothing is decided any more."""

    def test_the_first_failure_is_the_one_that_counts(self) -> None:
        run = Run(2)
        first = TrainingError("first")
        run.tell("fail", first)
        assert run.tell("fail", TrainingError("second")) == []
        assert run.failure is first

    def test_a_failure_after_everyone_finished_is_none(self) -> None:
        run = started(1)
        assert run.finish(0) == [do.dismiss(run.members[0]), do.end(None)]
        assert run.tell("fail", TrainingError("late")) == []
        assert run.failure is None

    def test_whoever_joins_then_is_told_why_the_run_ended(self) -> None:
        run = Run(2)
        run.tell("fail", StoppedError("rank 1 is gone"))
        late = run.join(0)
        assert late == [do.refuse(run.members[0], "the run ended: rank 1 is gone")]


PAGE = Path(__file__).resolve().parents[3] / "docs" / "architecture.md"
WAYS = {
    RankState.AWAY: [],
    RankState.READING: [RankState.READING],
    RankState.READY: [RankState.READING, RankState.READY],
    RankState.RECEIVING: [RankState.READING, RankState.READY, RankState.RECEIVING],
}
for before, after in [
    (RankState.RECEIVING, RankState.TRAINING),
    (RankState.TRAINING, RankState.CLOSED),
    (RankState.CLOSED, RankState.CONTRIBUTING),
    (RankState.CONTRIBUTING, RankState.CONTRIBUTED),
    (RankState.CONTRIBUTED, RankState.AT_BARRIER),
    (RankState.CONTRIBUTED, RankState.THROUGH),
    (RankState.TRAINING, RankState.FINISHED),
]:
    WAYS[after] = [*WAYS[before], after]


def brought_to(state: RankState) -> Ranks:
    """Rank 0 of two, the usual way."""
    ranks = Ranks(range(2))
    for after in WAYS[state]:
        ranks.move(0, after)
        if after is RankState.CLOSED:
            ranks.windows[0] = Window(Member(0, "host"), report(0))
    return ranks


def drawing() -> str:
    """The table as the page shows it."""
    rows = ["| A worker is | and was before |", "|---|---|"]
    for after, before in BEFORE.items():
        names = ", ".join(state.value for state in RankState if state in before)
        rows.append(f"| {after.value} | {names} |")
    return "\n".join(rows)


def test_the_page_shows_the_table() -> None:
    page = PAGE.read_text()
    begin, end = "<!-- begin: states of a rank -->\n", "\n<!-- end: states of a rank -->"
    shown = page.partition(begin)[2].partition(end)[0]
    assert shown == drawing(), f"it should be:\n{drawing()}"


def test_what_the_table_has_happens_and_nothing_else() -> None:
    wrong = []
    for state, after in product(RankState, RankState):
        ranks = brought_to(state)
        expected = after if state in BEFORE[after] else None
        try:
            ranks.move(0, after)
        except TrainingError as error:
            words = f"rank 0 cannot be {after.value} now: it is {state.value}"
            happened = expected is None and str(error) == words and ranks[0] is state
        else:
            happened = ranks[0] is expected
        if not happened:
            wrong.append((state, after))
    assert not wrong


def test_who_is_admitted_active_or_waits_follows_from_the_state() -> None:
    wrong = []
    outside = {RankState.AWAY, RankState.READING, RankState.READY}
    for state in RankState:
        ranks = brought_to(state)
        admitted = set() if state in outside else {0}
        active = set() if state is RankState.THROUGH else admitted
        waits = state.value in ("closed", "contributing", "contributed", "at barrier", "through")
        if (ranks.admitted, ranks.active) != (admitted, active):
            wrong.append(state)
        if (
            bool(ranks.windows) is not waits
            or 0 not in ranks.of(state)
            or len([each for each in RankState if 0 in ranks.of(each)]) != 1
        ):
            wrong.append(state)
    assert not wrong
