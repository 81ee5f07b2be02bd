"""What a client of the averager does: rounds beside training, and the time that it takes."""

from __future__ import annotations

import pytest
import torch
from crew import WAIT_S, Crew, crew, eventually, window
from every_row import every

from sparkdl.averager.client import AveragerClient
from sparkdl.averager.coordination.rank_states import RankState
from sparkdl.averager.headers import window_header
from sparkdl.averager.round_policy import RoundRobin
from sparkdl.averager.values.wire_format import (
    BFLOAT16_CHANGES,
    CHANGES,
    FULL_PRECISION,
    WireFormat,
)
from sparkdl.errors import DisconnectedError, NonFiniteError, WorkerError


def begun(
    workers: Crew, rank: int, value: float, step: int = 1
) -> tuple[AveragerClient, torch.Tensor]:
    client, state = workers.client(rank), torch.full((3,), value)
    client.begin_exchange([state], window(rank, step))
    return client, state


@every("wire_format", [FULL_PRECISION, BFLOAT16_CHANGES])
@every("local", [0.0, 0.25])
def test_what_was_trained_meanwhile_is_merged_with_the_center(
    wire_format: WireFormat, local: float
) -> None:
    with crew(2, wire_format=wire_format) as workers:
        (first, mine), (second, other) = (begun(workers, rank, 1.0 + 2 * rank) for rank in (0, 1))
        mine += 10  # it was 1 when it was sent, and the mean is 2
        first.end_exchange([mine], local)
        second.end_exchange([other], 0.0)
        assert mine.tolist() == [local * 11 + (1 - local) * 2] * 3
        assert other.tolist() == [2.0] * 3
        done = [workers.exchange(window(rank, 2), 4.0) for rank in (0, 1)]
        assert [each.result(WAIT_S) for each in done] == [[4.0] * 3] * 2


def test_what_is_sent_once_more_is_what_was_sent_first() -> None:
    with crew(2) as workers:
        client, state = begun(workers, 0, 5.0)
        workers.client(1)._connection.send_header(window_header(window(1)))
        entered = workers.averager.coordinator.round.entered
        assert eventually(lambda: len(entered) == 2)
        state.fill_(99.0)
        workers.lose(1)
        client.end_exchange([state], 0.0)
        assert state.tolist() == [5.0] * 3


def test_who_leaves_while_a_round_is_under_way_comes_back_behind_it() -> None:
    with crew(2) as workers:
        client, state = begun(workers, 0, 5.0)
        ranks = workers.averager.coordinator.round.ranks
        assert eventually(lambda: ranks.of(RankState.CONTRIBUTED) == {0})
        workers.lose(0)
        other, back = workers.exchange(window(1), 3.0), workers.join(0)
        assert other.result(WAIT_S) == [4.0] * 3  # what had arrived whole counts
        back.result(WAIT_S)
        assert workers.client(0) is not client
        both = [workers.exchange(window(rank, 2), 3.0) for rank in (0, 1)]
        assert [each.result(WAIT_S) for each in both] == [[3.0] * 3] * 2
        assert state.tolist() == [5.0] * 3


def test_a_connection_that_breaks_is_told_of_when_the_reply_is_wanted() -> None:
    with crew(2) as workers:
        client, state = begun(workers, 0, 5.0)
        client._own_connection.interrupt()
        with pytest.raises(DisconnectedError):
            client.end_exchange([state], 0.0)


def test_a_failure_is_told_of_behind_the_round_that_is_under_way() -> None:
    with crew(2) as workers:
        client, _ = begun(workers, 0, 5.0)
        failed = workers.call(
            client.report_failure,
            WorkerError("no more", rank=0, epoch=1, step=2, worker_traceback=""),
        )
        workers.exchange(window(1), 3.0).result(WAIT_S)
        failed.result(WAIT_S)
        with pytest.raises(WorkerError, match="no more"):
            workers.outcome.result(WAIT_S)


def test_what_is_not_finite_is_not_sent() -> None:
    with crew(2) as workers:
        with pytest.raises(NonFiniteError):
            begun(workers, 0, float("nan"))
        both = [workers.exchange(window(rank), 3.0) for rank in (0, 1)]
        assert [each.result(WAIT_S) for each in both] == [[3.0] * 3] * 2


def test_a_round_may_begin_before_others_let_the_worker_contribute() -> None:
    """Its first with any policy that is not in step; with one that holds windows, each."""
    with crew(2, wire_format=CHANGES, policy=RoundRobin(1)) as workers:
        for step in (1, 2):
            (second, other), (first, mine) = (begun(workers, rank, 1.0, step) for rank in (1, 0))
            first.end_exchange([mine], 0.0)
            second.end_exchange([other], 0.0)
            # Each change moves the center by half, the share of one of two.
            assert other.tolist() == [mine[0] + (0.5 if step == 1 else 0.0)] * 3
            assert other.tolist() == [1.0 if step == 1 else 1.25] * 3
