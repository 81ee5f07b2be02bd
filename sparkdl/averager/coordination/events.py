"""What the events of a run have in common: each has its time, and ends in decisions."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec

from sparkdl.averager.coordination.actions import Decision
from sparkdl.averager.coordination.membership import FencedError, Member
from sparkdl.errors import SparkDLError

if TYPE_CHECKING:
    from sparkdl.averager.coordination.coordinator import Coordinator

P = ParamSpec("P")
Event = Callable[Concatenate[float, P], list[Decision]]
"""An event as others tell of it: with the time, in seconds; never less than in the one before."""


def event(
    decide: Callable[Concatenate[Coordinator, P], None],
) -> Callable[Concatenate[Coordinator, float, P], list[Decision]]:
    """Make an event of a method: it is also given the time, and returns what was decided.

    Events of members that have lost their place are ignored, except ``finished``: they will not
    come back, because their work is done. An error ends the run. Once that has ended, whoever joins
    is refused, and a checkpoint may still be written.
    """
    name = decide.__name__.lstrip("_")

    @wraps(decide)
    def handled(
        self: Coordinator, now: float, /, *arguments: P.args, **options: P.kwargs
    ) -> list[Decision]:
        decided: list[Decision] = []
        self.do.decisions = decided
        if self.members.look(now):
            self.checkpoints.restart_clock()
        member = next((each for each in arguments if isinstance(each, Member)), None)
        if self.ended:
            if name == "joined" and member is not None:
                self._refuse(member, self.farewell)
            elif name == "checkpoint_ended":
                self.checkpoints.finish(saved=bool(options["saved"]))
            return decided
        if member is not None and name != "joined":
            if member.gone and name != "finished":
                return decided
            self.members.note_heartbeat(member.rank)
        certain = 0
        try:
            decide(self, *arguments, **options)
            certain = len(decided)
            if self.round.queue and not self.ended:
                self._enter_held()
        except SparkDLError as error:
            del decided[certain:]
            if isinstance(error, FencedError) and member is not None:
                self._refuse(member, str(error))
            else:
                self._fail(error)
        return decided

    handled.__name__ = name
    return handled
