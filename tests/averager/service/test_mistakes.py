"""A mistake of the averager's own ends the run at once, with its name, whatever it is in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from crew import WAIT_S, Crew, crew, window
from every_row import every

from sparkdl.averager.coordination.coordinator import Coordinator
from sparkdl.averager.service.loop import Loop
from sparkdl.averager.values.center import Center
from sparkdl.errors import DisconnectedError, StoppedError, TrainingError


def mistake(*_: Any, **__: Any) -> Any:
    raise KeyError("a mistake")


def failure_of(workers: Crew) -> BaseException:
    error = workers.outcome.exception(WAIT_S)
    assert error is not None
    return error


def spoil_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on also what a failure leads to fails."""
    monkeypatch.setattr(Coordinator, "handle", mistake)


def spoil_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run fails, and then so does telling everyone."""
    monkeypatch.setattr(Center, "commit", mistake)
    monkeypatch.setattr(Loop, "part", mistake)


def spoil_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Center, "commit", mistake)


@every("spoil", [spoil_commits, spoil_decisions, spoil_the_end])
def test_the_driver_is_told(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[pytest.MonkeyPatch], None]
) -> None:
    with crew(1) as workers:
        spoil(monkeypatch)
        given = workers.exchange(window(0))
        error = failure_of(workers)
        assert isinstance(error, TrainingError)
        assert "KeyError('a mistake')" in str(error)
        assert given.exception(WAIT_S) is not None


def test_workers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with crew(2) as workers:
        spoil_commits(monkeypatch)
        given = [workers.exchange(window(rank)) for rank in range(2)]
        for each in given:
            error = each.exception(WAIT_S)
            assert isinstance(error, StoppedError)
            assert not isinstance(error, DisconnectedError)
            assert "KeyError('a mistake')" in str(error)
