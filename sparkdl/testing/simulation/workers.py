"""Simulated workers: they talk like real ones, over links with delays, and fail on command."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from sparkdl.averager.messages.progress import Position
from sparkdl.events import ValidationReport, WindowReport
from sparkdl.testing.simulation.plan import Plan
from sparkdl.testing.simulation.values import trained

Message = tuple[Any, ...]
"""A message's kind, and its contents."""

START_S = 1.0
RECONNECT_S = 0.05


class Clock:
    """A queue of timed calls; those due at the same time run in the order of their scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Schedule a call after some seconds."""
        self.at(self.now + seconds, call)

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Schedule a call at a time; one in the past goes behind all others that are due."""
        self._count += 1
        heapq.heappush(self._due, (max(time, self.now), self._count, call))

    def step(self) -> bool:
        """Make the call that is due first; returns whether there was one."""
        if not self._due:
            return False
        at, _, call = heapq.heappop(self._due)
        self.now = at
        call()
        return True

    def forget(self) -> None:
        """Drop all scheduled calls."""
        self._due.clear()


class Link:
    """One connection: what is sent arrives later, in order, or never.

    Args:
        clock: the run's clock.
        draw: draws the delays.
        delay_s: the longest delay.
        rank: the rank of the worker at its end.
        attempt: the attempt of the worker's task.
    """

    def __init__(
        self, clock: Clock, draw: random.Random, delay_s: float, rank: int, attempt: int
    ) -> None:
        self.rank = rank
        self.attempt = attempt
        self.to_averager: Callable[[Message], None] = lambda message: None
        self.to_worker: Callable[[Message], None] = lambda message: None
        self._clock = clock
        self._draw = draw
        self._delay_s = delay_s
        self._last_up = self._last_down = 0.0
        self._worker_receives = True
        self._averager_receives = True

    def up(self, message: Message) -> None:
        """The worker sends."""
        self._last_up = max(self._last_up, self._clock.now + self._draw.random() * self._delay_s)
        self._clock.at(
            self._last_up,
            lambda: self.to_averager(message) if self._averager_receives else None,
        )

    def down(self, message: Message) -> float:
        """The averager sends; returns the seconds until all of it is on its way."""
        self._last_down = max(
            self._last_down, self._clock.now + self._draw.random() * self._delay_s
        )
        self._clock.at(
            self._last_down, lambda: self.to_worker(message) if self._worker_receives else None
        )
        return (self._last_down - self._clock.now) * self._draw.random()

    def break_off(self, *, noticed_after_s: float = 0.0) -> None:
        """Cut the worker off; the averager learns of it after everything already sent."""
        self._worker_receives = False
        self._last_up = max(self._last_up, self._clock.now + noticed_after_s)
        self.up(("gone",))

    def close(self) -> None:
        """The averager has closed it."""
        self._averager_receives = False
        self.down(("closed",))


class Worker:
    """One rank, through all its attempts.

    Args:
        rank: its rank.
        plan: the run's plan.
        clock: the run's clock.
        draw: draws its speed and its links' delays.
        connect: opens a link to the averager.
        attempt: the attempt of its task.
    """

    def __init__(
        self,
        rank: int,
        plan: Plan,
        clock: Clock,
        draw: random.Random,
        connect: Callable[[Link], None],
        attempt: int = 0,
    ) -> None:
        self.rank = rank
        self.attempt = attempt
        self._plan = plan
        self._clock = clock
        self._draw = draw
        self._connect = connect
        self._link: Link | None = None
        self._stalled_until = 0.0
        self._position = Position()
        self._center = 0
        self._window: WindowReport | None = None
        self._losses: tuple[float, ...] = ()
        self._finished = False
        # What was scheduled in an attempt, or on a link, that is over does not happen.
        self._life = 0
        self._soon(START_S * draw.random(), self._join)

    def strike(self, *, restart_s: float | None, noticed_after_s: float = 0.0) -> None:
        """Break the connection, if there is one, or kill the process.

        Args:
            restart_s: seconds until another attempt starts; None if the process lives.
            noticed_after_s: seconds until the averager notices.
        """
        if restart_s is None and self._link is None:
            return
        self._life += 1
        if self._link is not None:
            self._link.break_off(noticed_after_s=noticed_after_s)
            self._link = None
        if restart_s is None:
            self._go_on_without_link()
        elif self._may_return:
            self.attempt += 1
            self._stalled_until = 0.0
            self._soon(START_S + restart_s, self._join)

    def stall(self, seconds: float) -> None:
        """Do nothing for a while."""
        self._stalled_until = max(self._stalled_until, self._clock.now + seconds)

    @property
    def _may_return(self) -> bool:
        return self._plan.max_failures > 0 and not self._finished

    def _soon(self, seconds: float, call: Callable[[], None]) -> None:
        life = self._life

        def happen() -> None:
            if life != self._life:
                return
            if self._clock.now < self._stalled_until:
                self._clock.at(self._stalled_until, happen)
            else:
                call()

        self._clock.after(seconds, happen)

    def _go_on_without_link(self) -> None:
        if self._may_return:
            self._soon(RECONNECT_S, self._join)

    def _join(self) -> None:
        link = Link(self._clock, self._draw, self._plan.delay_s, self.rank, self.attempt)
        self._link = link
        life = self._life
        link.to_worker = lambda message: self._soon(0.0, lambda: self._handle(message, life))
        self._connect(link)
        link.up(("join", self.rank, self.attempt))
        row_server = self.rank if self._plan.exchanges_rows else None
        shard = ("shard", self.rank, int(self._plan.validates), row_server)
        self._soon(self._draw.random(), lambda: link.up(shard))

    def _handle(self, message: Message, life: int) -> None:
        if life != self._life:
            return
        match message:
            case ("welcome", position, center, epoch_ended):
                self._position, self._center = position, center
                self._losses = ()
                self._validate(epoch_ended)
            case ("losses", losses):
                self._losses += losses
                mean = (len(self._plan.windows) - 1) / 2
                assert self._losses == tuple(e + mean for e in range(1, self._position.epoch))
                self._start_epoch()
            case ("gathered", values):
                assert values == tuple(range(len(values)))
                self._train()
            case ("reply", center, final, worker_state):
                self._take(center, final, worker_state)
            case ("again",):
                self._contribute()
            case ("ask worker state",):
                self._send_worker_state()
            case ("closed",):
                self._life += 1
                self._link = None
                self._go_on_without_link()
            case ("stopped",) | ("finished",):
                self._finished = True
                self._life += 1
                self._link = None

    def _validate(self, epoch_ended: bool) -> None:
        """Report what was found after an epoch, and wait for what all found."""
        ended = self._position.epoch - 1
        if not self._plan.validates or not ended:
            self._start_epoch()
            return
        assert self._link is not None
        if epoch_ended:
            report = ValidationReport(
                rank=self.rank, epoch=ended, examples=1, loss_sum=ended + self.rank, weight=1.0
            )
            self._link.up(("validated", report))
        if ended < self._plan.epochs:
            self._link.up(("losses", len(self._losses), ended))
        else:
            self._start_epoch()

    def _start_epoch(self) -> None:
        if self._plan.gathers and self._position.epoch <= self._plan.epochs:
            assert self._link is not None
            self._link.up(("gather", self.rank))
        else:
            self._train()

    def _train(self) -> None:
        """Train the next window; if none is left, say so with one that weighs nothing."""
        if self._position.epoch > self._plan.epochs:
            self._finish()
            return
        windows = self._plan.windows[self.rank]
        done = self._position.step_of_epoch
        trains = done < windows
        self._window = WindowReport(
            rank=self.rank,
            epoch=self._position.epoch,
            step=self._position.step + trains,
            examples=10 + self.rank if trains else 0,
            loss_sum=0.0,
            last=done + trains == windows,
            step_of_epoch=done + trains,
        )
        seconds = 2 * self._draw.random() * self._plan.window_s if trains else 0.0
        self._soon(seconds, self._contribute)

    def _contribute(self) -> None:
        window, link = self._window, self._link
        assert window is not None
        assert link is not None
        link.up(("window", window))
        if window.weight:
            value = trained(self._center, self.rank, window.epoch, window.step_of_epoch)
            for index in range(self._plan.chunks):
                link.up(("chunk", index, value))

    def _take(self, center: int, final: bool, worker_state: bool) -> None:
        assert self._window is not None
        self._center = center
        self._position = Position.after(self._window)
        if final:
            self._position = self._position.next_epoch()
        if worker_state:
            self._send_worker_state()
        if final:
            self._validate(True)
        else:
            self._train()

    def _send_worker_state(self) -> None:
        """Send what a checkpoint needs to go on from: here, how far this worker has come."""
        assert self._window is not None
        assert self._link is not None
        self._link.up(("worker state", Position.after(self._window)))

    def _finish(self) -> None:
        assert self._link is not None
        self._link.up(("finish",))
