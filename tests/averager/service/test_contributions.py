"""What a contribution weighs, whom it stands for, and what never gets into the sum."""

from __future__ import annotations

import math

import pytest
import torch
from crew import WAIT_S, crew, eventually, window
from every_row import every

from sparkdl.averager.client.client import _Again
from sparkdl.averager.messages.headers import window_header
from sparkdl.averager.values import replica_codec
from sparkdl.averager.values.wire_format import BFLOAT16_CHANGES, FULL_PRECISION, WireFormat
from sparkdl.errors import NonFiniteError
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.transport.framing import octets_of, values_prefix


def test_a_contribution_weighs_what_it_stands_for_and_rows_count_where_they_were() -> None:
    stand_for: list[dict[str, int]] = [{"group_weight": 6, "examples": 1}, {"group_weight": 0}, {}]
    with crew(3) as workers:
        rounds = [
            workers.exchange(window(rank, last=True, **fields), rank + 1.0)
            for rank, fields in enumerate(stand_for)
        ]
        # (6 * 1 + 2 * 3) / 8
        assert [one.result(WAIT_S) for one in rounds] == [[1.5] * 3] * 3
        for rank in range(3):
            workers.client(rank).finish()
        events = workers.outcome.result(WAIT_S)
    assert [each.examples for each in events if isinstance(each, WindowReport)] == [1, 2, 2]
    (summary,) = (each for each in events if isinstance(each, EpochSummary))
    assert (summary.examples, summary.loss) == (5, 0.6)


@every("wire_format", [FULL_PRECISION, BFLOAT16_CHANGES])
def test_rounds_without_any_weight_change_nothing(wire_format: WireFormat) -> None:
    def exchanged(step: int, value: float, **fields: object) -> list[list[float]]:
        rounds = [
            workers.exchange(window(rank, step, **fields), value)  # type: ignore[arg-type]
            for rank in range(2)
        ]
        return [reply.result(WAIT_S) for reply in rounds]

    with crew(2, wire_format=wire_format, center=1.0) as workers:
        assert exchanged(1, 7.0, examples=0) == [[1.0] * 3] * 2
        assert exchanged(2, 3.0) == [[3.0] * 3] * 2
        assert exchanged(3, 7.0, examples=0) == [[3.0] * 3] * 2
        assert exchanged(4, 7.0, group_weight=0) == [[3.0] * 3] * 2
        assert exchanged(5, 4.0, last=True) == [[4.0] * 3] * 2


@every("bad", [math.nan, -math.inf])
@every("rank", [0, 1])
@every("wire_format", [FULL_PRECISION, BFLOAT16_CHANGES])
def test_what_is_not_finite_never_reaches_the_center_and_is_said_whose_it_is(
    wire_format: WireFormat, rank: int, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker looks at what it sends; one that does not know how to still has the token."""
    monkeypatch.setattr(replica_codec, "require_finite", lambda values, report: None)
    with crew(2, wire_format=wire_format, center=1.0) as workers:
        workers.exchange(window(rank, 4), bad)
        workers.exchange(window(1 - rank, 4), 2.0)
        error = workers.outcome.exception(WAIT_S)
        assert isinstance(error, NonFiniteError)
        assert (error.rank, error.epoch, error.step) == (rank, 1, 4)
        assert f"rank {rank} has 3 NaN or infinite values" in str(error)
        assert workers.averager.center.values[0].tolist() == [1.0] * 3


def test_what_is_on_its_way_into_a_sum_that_is_forgotten_goes_nowhere() -> None:
    with crew(2, max_failures=5) as workers:
        for segment in workers.averager.center._spare:
            segment.fill_(float("nan"))  # what lies there is nobody's contribution
        octets = bytes(octets_of(torch.full((3,), 7.0)))
        for rank in (0, 1):
            connection = workers.client(rank)._own_connection
            connection.send_header(window_header(window(rank)))
            connection._send(bytes(values_prefix(len(octets))) + octets[:5])
        entered = workers.averager.coordinator.round.entered
        assert eventually(lambda: len(entered) == 2)
        workers.client(1)._own_connection.close()
        first = workers.client(0)._own_connection
        with pytest.raises(_Again):
            first.receive_header()
        first._send(octets[5:])
        assert workers.exchange(window(0), 7.0).result(WAIT_S) == [7.0] * 3
