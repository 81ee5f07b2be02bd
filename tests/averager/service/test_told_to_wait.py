"""Who has contributed is told that the run goes on, for as long as another trains."""

from __future__ import annotations

from decisions import Run, started
from every_row import every

from sparkdl.averager.coordination import decisions as do
from sparkdl.averager.coordination import events as on


@every("trains", [0, 1])
def test_whoever_trains_the_others_are_told(trains: int) -> None:
    """Also those whose turn to add has not come, for a lower rank has not contributed."""
    run: Run = started(3, deadline_s=8)
    others = [rank for rank in range(3) if rank != trains]
    for rank in others:
        run.close(rank)
    if trains:
        run.tell(on.Contributed(run.members[0]))
    for _ in range(10):
        run.coordinator.heartbeat(run.members[trains], run.now)
        (told,) = run.wait(2)
        assert isinstance(told, do.SayWaiting)
        assert set(told.members) == {run.members[rank] for rank in others}
