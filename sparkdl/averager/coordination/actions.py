"""Events of a run, and what is decided on them: calls to the outside, recorded in order.

While an event is decided on, nothing is carried out. Whoever has told the coordinator of the event
makes the calls afterwards: ``service/server.py`` with sockets, others in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec

from sparkdl.averager.coordination.membership import FencedError, Member
from sparkdl.averager.run_events import Progress, RunEvent
from sparkdl.averager.values.center_update import Contributions
from sparkdl.errors import SparkDLError
from sparkdl.feed.shards import DataStatistics

if TYPE_CHECKING:
    from sparkdl.averager.coordination.coordinator import Coordinator


class Decision(NamedTuple):
    """A call of a method of ``Actions``.

    Attributes:
        action: the method's name.
        arguments: its positional arguments.
        options: its keyword arguments.
    """

    action: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class Actions:
    """What can be decided; each does nothing here, for those who need not do all of it."""

    # At a worker's connection.

    def welcome(self, member: Member) -> None:
        """Send a worker its position and the center; ``taken`` has to follow."""

    def send_gathered(
        self, members: tuple[Member, ...], gathered: tuple[object, ...], *, commit: bool
    ) -> None:
        """Send workers what all gave, by rank.

        Args:
            members: the workers.
            gathered: what they gave.
            commit: whether to ask them for a commit, if they can make one at this step.
        """

    def send_epoch_losses(self, member: Member, losses: tuple[float, ...]) -> None:
        """Send a worker the losses of epochs that it does not know yet."""

    def receive(self, member: Member, weight: float, staleness: int) -> None:
        """Add a worker's contribution to the sum; ``contributed`` has to follow.

        Args:
            member: the worker.
            weight: how much the contribution counts, in rows as a rule.
            staleness: how often the center has been updated since the worker received it.
        """

    def start_over(self, members: tuple[Member, ...]) -> None:
        """Forget the sum; have workers, even those still sending, contribute the same again."""

    def reply(self, member: Member, *, final: bool, values: bool, worker_state: bool) -> None:
        """Send a worker the result of its round; ``taken`` has to follow.

        Args:
            member: the worker.
            final: whether to send it the epoch's final center in place of the round's result.
            values: whether it wants the values; otherwise it is only told of the commit.
            worker_state: whether to ask for its state for a checkpoint of this commit;
                ``worker_state_written`` then has to follow.
        """

    def ask_worker_state(self, member: Member) -> None:
        """Have a worker that waits for an epoch's end send its state for a checkpoint now."""

    def say_waiting(self, members: tuple[Member, ...]) -> None:
        """Tell workers waiting for others that the run goes on."""

    def drop(self, member: Member, why: str) -> None:
        """End a worker's connection; ``why`` follows its name in messages."""

    def refuse(self, member: Member, reason: str) -> None:
        """Tell a worker why it cannot take part, and end its connection."""

    def dismiss(self, member: Member) -> None:
        """End the connection of a worker that has finished."""

    # With the center.

    def open_sum(self, ranks: tuple[int, ...]) -> None:
        """Begin a round's sum, in the order of ``ranks``."""

    def skip(self, rank: int) -> None:
        """Let a rank contribute nothing to the sum."""

    def commit(self, contributions: Contributions) -> None:
        """Let the sum change the center; without contributions it is unchanged."""

    def begin_checkpoint(self, progress: Progress, statistics: DataStatistics) -> None:
        """Copy the center, which is about to change, for a checkpoint of what has been committed.

        Args:
            progress: how far the training has come.
            statistics: of the rows.
        """

    def write_checkpoint(self) -> None:
        """Write the rest of the checkpoint, now that every worker's state is in.

        ``checkpoint_ended`` has to follow.
        """

    # In the driver.

    def report(self, event: RunEvent) -> None:
        """Tell the driver of something."""

    def end(self, failure: SparkDLError | None, stopped: str | None) -> None:
        """End the run.

        Args:
            failure: why it failed, which every worker is told; None if all have finished.
            stopped: why it was stopped, if it was, which every worker is told.
        """


class Recorder(Actions):
    """Records the calls in place of making them.

    Attributes:
        decisions: the calls so far, in order.
    """

    def __init__(self) -> None:
        self.decisions: list[Decision] = []


def _recording(action: str) -> Callable[..., None]:
    def record(self: Recorder, *arguments: Any, **options: Any) -> None:
        self.decisions.append(Decision(action, arguments, options))

    return record


for _action in [each for each in vars(Actions) if not each.startswith("_")]:
    setattr(Recorder, _action, _recording(_action))


def carry_out(decisions: list[Decision], actions: Actions) -> None:
    """Make the calls."""
    for action, arguments, options in decisions:
        getattr(actions, action)(*arguments, **options)


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
