"""The averager's edge in virtual time: what ``loop.py`` and ``conversation.py`` do with sockets."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from sparkdl.averager.coordination import decisions as do
from sparkdl.averager.coordination import events as on
from sparkdl.averager.coordination.coordinator import Coordinator
from sparkdl.averager.coordination.events import Member
from sparkdl.averager.messages.progress import Position, Progress
from sparkdl.averager.values.center_update import Contributions
from sparkdl.errors import SparkDLError
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.statistics.shards import DataStatistics, ShardStatistics
from sparkdl.testing.simulation.values import Center, Sum, trained
from sparkdl.testing.simulation.workers import Clock, Link, Message


class Observer(Protocol):
    """Is told what the averager does, and checks it."""

    def before(self, event: on.Event) -> None:
        """Called when an event is about to be decided on."""

    def decided(self, decisions: Sequence[do.Decision]) -> None:
        """Called when decisions have been made."""

    def committed(self, windows: Sequence[WindowReport]) -> None:
        """Called when a round has been committed."""

    def epoch_ended(self, summary: EpochSummary) -> None:
        """Called when an epoch has ended."""

    def statistics_known(self, statistics: DataStatistics) -> None:
        """Called when the driver has learned the statistics of the rows."""

    def write(self, progress: Progress, states: Mapping[int, Position]) -> None:
        """Called to write a checkpoint."""


class Conversation:
    """One connection, as the averager sees it.

    Args:
        link: the link to the worker.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.member: Member | None = None
        self.inbox: deque[Message] = deque()
        self.sum: Sum | None = None
        self.pauses = False
        # Chunks of a contribution that has started over, in flight or waiting for their turn.
        self.to_discard = 0
        self.received = 0
        self.waiting_chunk: tuple[int, int] | None = None
        self.owes_worker_state = False
        self.closed = False


def _windows_of(decisions: Iterable[do.Decision]) -> Iterator[WindowReport]:
    """The leading run of windows among the decisions' reports."""
    for decision in decisions:
        if not isinstance(decision, do.Report) or not isinstance(decision.event, WindowReport):
            return
        yield decision.event


class Averager:
    """Decisions, links and a center.

    Args:
        coordinator: the decisions.
        center: the center that the rounds change.
        chunks: the number of messages that make up a contribution.
        pass_s: how long it takes for what it found at one look, in seconds.
        clock: the run's clock.
        observer: checks what happens.

    Attributes:
        ended: whether the run is over.
        failure: why it failed.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        center: Center,
        chunks: int,
        pass_s: float,
        clock: Clock,
        observer: Observer,
    ) -> None:
        self.coordinator = coordinator
        self.center = center
        self.ended = False
        self.failure: SparkDLError | None = None
        self._chunks, self._pass_s = chunks, pass_s
        self._clock = clock
        self._observer = observer
        self._conversations: dict[Member, Conversation] = {}
        self._waiting: dict[int, Conversation] = {}
        self._events: deque[on.Event] = deque()
        self._busy = False
        self._arrived: deque[tuple[Conversation, Message]] = deque()
        self._paused_until = 0.0
        self._saving: Progress | None = None
        self._states: dict[int, Position] = {}
        # The members that are being sent the center.
        self._reading: set[Member] = set()
        # The center from which each rank goes on, and the number of updates before it.
        self._begun: dict[int, tuple[float, int]] = {}
        self._updates = 0

    def begin(self) -> None:
        """Start the clock's ticks."""
        self._clock.after(self.coordinator.members.tick_s, self._tick)

    def pause(self, seconds: float) -> None:
        """Do nothing for a while; what arrives is handled afterwards."""
        self._paused_until = max(self._paused_until, self._clock.now + seconds)

    def accept(self, link: Link) -> None:
        """Accept a worker's connection."""
        conversation = Conversation(link)
        link.to_averager = lambda message: self._arrive(conversation, message)

    @property
    def remembered(self) -> int:
        """How many things are remembered that eventually have to be forgotten."""
        this = self.coordinator.round
        waiting = this.entered, this.late, this.queue, this.ranks.windows
        return len(self._conversations) + sum(map(len, waiting))

    def knows(self, rank: int) -> bool:
        """Whether a worker of that rank is connected and has introduced itself."""
        return any(member.rank == rank for member in self._conversations)

    def tell(self, event: on.Event) -> None:
        """Have an event decided on, along with everything that follows from it."""
        if self._clock.now < self._paused_until:
            self._clock.at(self._paused_until, lambda: self.tell(event))
            return
        self._events.append(event)
        if not self._busy:
            self._decide_on_all()

    def _decide_on_all(self) -> None:
        self._busy = True  # what is told meanwhile is decided on here
        while self._events and not self.ended:
            self._decide(self._events.popleft())
        self._busy = False

    def _decide(self, event: on.Event) -> None:
        self._observer.before(event)
        decisions = self.coordinator.handle(event, self._clock.now)
        for index, decision in enumerate(decisions):
            if isinstance(decision, do.Commit):
                windows = list(_windows_of(decisions[index + 1 :]))
                self._commit(decision.contributions, windows)
            else:
                self._carry_out(decision)
        self._observer.decided(decisions)

    def _commit(self, contributions: Contributions, windows: Sequence[WindowReport]) -> None:
        """Change the center, and check that it is what the windows give."""
        weighted = [window for window in windows if window.weight]
        assert contributions.weights == tuple(window.weight for window in weighted)
        values, staleness = {}, 0
        for window in weighted:
            center, updates = self._begun[window.rank]
            values[window.rank] = trained(center, window.rank, window.epoch, window.step_of_epoch)
            assert window.staleness == self._updates - updates
            staleness = max(staleness, window.staleness)
        assert contributions.staleness == staleness
        assert not staleness or not self.coordinator.round.policy.in_step
        before = self.center.value
        self.center.commit(contributions)
        self.center.require(before, contributions, values)
        self._updates += bool(weighted)
        self._observer.committed(windows)

    def _sent_to(self, member: Member) -> float:
        value = self.center.send_to(member.rank)
        self._begun[member.rank] = value, self._updates
        return value

    def _tick(self) -> None:
        if self._clock.now < self._paused_until:
            # It comes after everything that has arrived in the meantime.
            self._clock.at(self._paused_until + 1e-6, self._tick)
            return
        self._clock.after(self.coordinator.members.tick_s, self._tick)
        self.tell(on.Tick())

    # What workers say.

    def _arrive(self, conversation: Conversation, message: Message) -> None:
        self._arrived.append((conversation, message))
        if self._clock.now < self._paused_until:
            if len(self._arrived) == 1:
                self._clock.at(self._paused_until, self._look_at_what_arrived)
        elif len(self._arrived) == 1:
            self._look_at_what_arrived()

    def _look_at_what_arrived(self) -> None:
        if self._clock.now < self._paused_until:
            self._clock.at(self._paused_until, self._look_at_what_arrived)
            return
        # As in the service's thread: first, everyone is listened to; then it is decided on it all.
        was_busy, self._busy = self._busy, True
        while self._arrived:
            conversation, message = self._arrived[0]
            conversation.inbox.append(message)
            self._listen(conversation)
            self._arrived.popleft()
        self._busy = was_busy
        if not self._busy:
            self._decide_on_all()
            self.pause(self._pass_s)

    def _listen(self, conversation: Conversation) -> None:
        while conversation.inbox and not conversation.pauses and not conversation.closed:
            message = conversation.inbox.popleft()
            if conversation.member is not None:
                self.coordinator.heartbeat(conversation.member, self._clock.now)
            self._handle(conversation, message)

    def _handle(self, conversation: Conversation, message: Message) -> None:
        member = conversation.member
        match message:
            case ("join", rank, attempt):
                conversation.member = Member(rank, f"host-{rank}", attempt)
                self._conversations[conversation.member] = conversation
                self.tell(on.Joined(conversation.member))
                return
        if member is None:
            return  # it broke before it had joined
        match message:
            case ("gone",):
                self.tell(on.Lost(member, "ended its connection"))
                self._close(member)
            case ("shard", rank, held_out, row_server):
                self.tell(
                    on.RowsFound(member, ShardStatistics(10 + rank, (), held_out), row_server)
                )
            case ("window", report):
                conversation.pauses = bool(report.weight)
                conversation.received = 0
                self.tell(on.WindowClosed(member, report))
            case ("chunk", index, value):
                self._chunk(conversation, index, value)
            case ("worker state", position):
                assert conversation.owes_worker_state, "a state arrived that nobody asked for"
                conversation.owes_worker_state = False
                self._states[member.rank] = position
                self.tell(on.WorkerStateWritten(member))
            case ("gather", value):
                self.tell(on.Gave(member, value))
            case ("validated", report):
                self.tell(on.Validated(member, report))
            case ("losses", known, epochs):
                self.tell(on.EpochLossesWanted(member, known, epochs))
            case ("finish",):
                self.tell(on.Finished(member))

    def _chunk(self, conversation: Conversation, index: int, value: int) -> None:
        total, member = conversation.sum, conversation.member
        assert member is not None
        if conversation.to_discard:
            conversation.to_discard -= 1
            return
        assert total is not None
        conversation.received += 1
        if total.turn(index) != member.rank:
            conversation.waiting_chunk = index, value
            conversation.pauses = True
            self._waiting[member.rank] = conversation
            return
        self._add(conversation, index, value)

    def _add(self, conversation: Conversation, index: int, value: int) -> None:
        total, member = conversation.sum, conversation.member
        assert total is not None
        assert member is not None
        total.add(member.rank, index, value)
        if index + 1 == self._chunks:
            conversation.sum = None
            self.tell(on.Contributed(member))
        if total is self.center.sum:
            self._pass_turn(index)

    def _pass_turn(self, index: int) -> None:
        rank = None if self.center.sum is None else self.center.sum.turn(index)
        conversation = None if rank is None else self._waiting.get(rank)
        if conversation is None or conversation.waiting_chunk is None:
            return
        if conversation.waiting_chunk[0] == index:
            assert rank is not None
            del self._waiting[rank]
            chunk, conversation.waiting_chunk = conversation.waiting_chunk, None
            conversation.pauses = False
            self._add(conversation, *chunk)
            self._clock.after(0.0, lambda: self._listen(conversation))

    # What is decided.

    def _carry_out(self, decision: do.Decision) -> None:
        match decision:
            case do.Welcome(member):
                committed = self.coordinator.committed
                position, ended = committed.positions[member.rank], committed.at_end_of_epoch
                welcome = ("welcome", position, self._sent_to(member), ended)
                self._send(member, welcome, taken=True)
            case do.Reply(member, final, _, worker_state):
                if worker_state:
                    self._await_worker_state(member)
                reply = ("reply", self._sent_to(member), final, worker_state)
                self._send(member, reply, taken=True)
            case do.Tell(members, gathered):
                for each in members:
                    self._send(each, ("gathered", gathered))
            case do.TellEpochLosses(member, losses):
                self._send(member, ("losses", losses))
            case do.AskWorkerState(member):
                self._await_worker_state(member)
                self._send(member, ("ask worker state",))
            case do.Receive(member, weight, staleness):
                self._receive(member, weight, staleness)
            case do.OpenSum(ranks):
                assert not self._reading, f"what {self._reading} are being sent is overwritten"
                self.center.open_sum(ranks)
            case do.Skip(rank):
                assert self.center.sum is not None
                self.center.sum.declare(rank, 0)
                for index in range(self._chunks):
                    self._pass_turn(index)
            case do.StartOver(members):
                self._start_over(members)
            case do.Drop(member):
                self._close(member)
            case do.Dismiss(member):
                self._send(member, ("finished",))
                self._close(member)
            case do.Refuse(member):
                self._send(member, ("stopped",))
                self._close(member)
            case do.BeginCheckpoint(progress):
                self._saving, self._states = progress, {}
            case do.WriteCheckpoint():
                assert self._saving is not None
                self._observer.write(self._saving, self._states)
            case do.Report(DataStatistics() as statistics):
                self._observer.statistics_known(statistics)
            case do.Report(EpochSummary() as summary):
                self.center.start_epoch()
                self._observer.epoch_ended(summary)
            case do.End(failure):
                self.ended, self.failure = True, failure

    # Decisions may concern a worker that has left until its loss is decided on.

    def _await_worker_state(self, member: Member) -> None:
        conversation = self._conversations.get(member)
        if conversation is not None:
            conversation.owes_worker_state = True

    def _send(self, member: Member, message: Message, *, taken: bool = False) -> None:
        conversation = self._conversations.get(member)
        if conversation is None:
            return
        seconds = conversation.link.down(message)
        if taken:
            self._reading.add(member)
            self._clock.after(seconds, lambda: self._taken(conversation, member))

    def _taken(self, conversation: Conversation, member: Member) -> None:
        if not conversation.closed:
            self._reading.discard(member)
            self.tell(on.Taken(member))

    def _receive(self, member: Member, weight: float, staleness: int) -> None:
        conversation = self._conversations.get(member)
        if conversation is None:
            return
        assert self.center.sum is not None
        assert staleness == self._updates - self._begun[member.rank][1]
        self.center.sum.declare(member.rank, weight, staleness)
        conversation.sum = self.center.sum
        conversation.pauses = False
        self._clock.after(0.0, lambda: self._listen(conversation))

    def _start_over(self, members: Sequence[Member]) -> None:
        self.center.sum = None
        self._waiting = {}
        for member in members:
            conversation = self._conversations.get(member)
            self._send(member, ("again",))
            if conversation is not None and conversation.sum is not None:
                conversation.sum = None
                conversation.to_discard = self._chunks - conversation.received
                conversation.waiting_chunk = None
                conversation.pauses = False
                self._clock.after(0.0, lambda each=conversation: self._listen(each))  # type: ignore[misc]

    def _close(self, member: Member) -> None:
        conversation = self._conversations.pop(member, None)
        if conversation is not None:
            conversation.closed = True
            self._reading.discard(member)
            conversation.link.close()
            if self._waiting.get(member.rank) is conversation:
                del self._waiting[member.rank]
