"""One round after another: who is active, who is through, and what a loss means for the sum."""

from __future__ import annotations

from collections.abc import Iterable

from decisions import report

from sparkdl.averager.coordination.events import Member, WindowClosed
from sparkdl.averager.coordination.rank_states import Move, RankState
from sparkdl.averager.coordination.round import Loss, Round


def admitted(world_size: int) -> Round:
    """Everyone was let in, and has taken the center."""
    this = Round(range(world_size))
    let_in(this, range(world_size))
    return this


def let_in(this: Round, ranks: Iterable[int]) -> None:
    """They join, report their rows, are let in, and take the center."""
    for rank in ranks:
        this.ranks.move(rank, Move.JOIN)
        this.ranks.move(rank, Move.READ)
        this.admit([rank])
        this.ranks.move(rank, Move.TAKE)


def enter(this: Round, each: WindowClosed) -> bool:
    """A worker closes a window, and begins to contribute."""
    this.hold(each)
    return this.enter(each)


def receiving(this: Round) -> set[int]:
    return set(this.ranks.of(RankState.RECEIVING))


def window(rank: int, *, last: bool = False, gone: bool = False) -> WindowClosed:
    return WindowClosed(Member(rank, f"host-{rank}", gone=gone), report(rank, last=last))


def contribute(this: Round, windows: Iterable[WindowClosed]) -> None:
    for each in windows:
        enter(this, each)
        this.finish(each.member.rank)


def test_only_those_who_were_let_in_are_waited_for() -> None:
    this = Round(range(3))
    let_in(this, [0, 2])
    assert (this.ranks.active, this.pending) == ({0, 2}, {0, 1, 2})
    contribute(this, [window(0), window(2)])
    assert this.is_complete


def test_the_first_to_enter_opens_the_sum() -> None:
    this = admitted(2)
    assert [enter(this, window(1)), enter(this, window(0))] == [True, False]
    assert this.is_open


def test_it_is_complete_when_everyone_active_has_finished_and_not_before() -> None:
    this = admitted(2)
    assert not this.is_complete
    enter(this, window(0))
    this.finish(0)
    enter(this, window(1))
    assert not this.is_complete
    this.finish(1)
    assert this.is_complete


def test_a_lost_rank_that_had_contributed_does_not_stand_for_one_who_has_yet_to() -> None:
    this = admitted(3)
    contribute(this, [window(0)])
    this.lose(0)
    contribute(this, [window(1)])
    assert this.leave_out() == []
    assert not this.is_complete
    contribute(this, [window(2)])
    assert this.is_complete


def test_nobody_is_enough_for_a_round_to_be_complete() -> None:
    this = Round(range(2))
    assert not this.is_complete


def test_a_commit_has_the_windows_by_rank_and_begins_the_next() -> None:
    this = admitted(3)
    windows = {rank: window(rank) for rank in (2, 0, 1)}
    contribute(this, windows.values())
    assert this.commit() == [windows[0], windows[1], windows[2]]
    assert this.committed_windows == [windows[0], windows[1], windows[2]]
    assert this.release() == [windows[0], windows[1], windows[2]]
    assert receiving(this) == {0, 1, 2}
    assert (this.is_open, this.entered, this.group) == (False, {}, set())
    assert this.ranks.active == {0, 1, 2}


def test_a_last_window_ends_the_epoch_of_its_rank_only() -> None:
    this = admitted(2)
    last = window(0, last=True)
    contribute(this, [last, window(1)])
    this.commit()
    this.release()
    assert (this.ranks.active, this.pending, receiving(this)) == ({1}, {1}, {1})
    assert this.ranks.windows_of(RankState.THROUGH) == [last]
    contribute(this, [window(1)])
    assert this.is_complete


def test_at_the_epochs_end_all_are_active_again_and_those_who_wait_read_the_center() -> None:
    this = admitted(2)
    lasts = [window(0, last=True), window(1, last=True)]
    contribute(this, lasts)
    this.commit()
    assert this.pending == set()
    assert this.end_epoch() == lasts
    assert (this.ranks.active, this.pending, receiving(this)) == ({0, 1}, {0, 1}, {0, 1})
    assert not this.ranks.of(RankState.THROUGH)
    assert not this.is_complete


def test_who_was_lost_is_not_active_in_the_next_epoch_but_waited_for_at_its_end() -> None:
    this = admitted(2)
    contribute(this, [window(0, last=True), window(1, last=True)])
    this.commit()
    this.lose(1)
    assert this.end_epoch()[0].member.rank == 0
    assert (this.ranks.active, this.pending) == ({0}, {0, 1})


def test_whoever_is_gone_neither_reads_nor_waits() -> None:
    this = admitted(3)
    windows = [window(0), window(1, last=True), window(2)]
    contribute(this, windows)
    for rank in (0, 1):
        this.lose(rank)
        windows[rank].member.gone = True
    this.commit()
    this.release()
    assert (receiving(this), this.pending) == ({2}, {0, 2})
    assert not this.ranks.of(RankState.THROUGH)


class TestLoss:
    """What the loss of a rank means for the sum."""

    def test_between_two_rounds_it_means_nothing(self) -> None:
        assert admitted(2).lose(0) is Loss.NOTHING

    def test_of_one_who_has_yet_to_enter_the_sum_goes_on_without_it(self) -> None:
        this = admitted(2)
        enter(this, window(0))
        this.finish(0)
        assert this.lose(1) is Loss.SKIPPED
        assert this.is_complete

    def test_in_the_middle_of_a_contribution_the_sum_is_broken(self) -> None:
        this = admitted(2)
        enter(this, window(0))
        assert this.lose(0) is Loss.BROKEN

    def test_of_one_whose_contribution_is_whole_it_counts(self) -> None:
        this = admitted(2)
        whole = window(0)
        contribute(this, [whole])
        assert this.lose(0) is Loss.NOTHING
        whole.member.gone = True
        contribute(this, [window(1)])
        assert [each.member.rank for each in this.commit()] == [0, 1]

    def test_whoever_reads_or_waits_is_forgotten_but_for_what_is_pending(self) -> None:
        this = admitted(2)
        contribute(this, [window(0, last=True), window(1)])
        this.commit()
        this.release()
        this.ranks.move(1, Move.TAKE)
        this.hold(window(1))
        for rank in (0, 1):
            this.lose(rank)
        assert this.ranks.of(RankState.AWAY) == {0, 1}
        assert this.ranks.active == this.ranks.admitted == set()
        assert this.ranks.windows == {}
        assert this.pending == {1}


def test_to_start_over_forgets_the_sum_and_tells_whoever_is_left_to_contribute_again() -> None:
    this = admitted(3)
    windows = [window(0), window(1), window(2)]
    contribute(this, windows[:2])
    enter(this, windows[2])
    this.lose(1)
    windows[1].member.gone = True
    assert this.start_over() == (windows[0].member, windows[2].member)
    assert (this.is_open, this.entered, this.group) == (False, {}, set())
    assert not this.is_complete
    contribute(this, [window(0), window(2)])
    assert this.is_complete


def test_who_comes_back_has_to_say_once_more_that_it_is_through() -> None:
    this = admitted(2)
    contribute(this, [window(0, last=True), window(1)])
    this.commit()
    this.lose(0)
    let_in(this, [0])
    assert (this.ranks.active, this.pending) == ({0, 1}, {0, 1})
