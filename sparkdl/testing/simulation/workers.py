"""Simulated workers: real clients, whose training is made up, and which fail on command."""

from __future__ import annotations

import dataclasses
import json
import random
import threading
from collections.abc import Callable

import torch

from sparkdl.averager.client.client import AveragerClient
from sparkdl.averager.messages.run_events import Position
from sparkdl.errors import DisconnectedError, StoppedError
from sparkdl.events import ValidationReport, WindowReport
from sparkdl.feed.statistics.shards import ShardStatistics
from sparkdl.testing.simulation.center import Center, trained
from sparkdl.testing.simulation.network import Clock, Link, Stream, Wire
from sparkdl.testing.simulation.plan import Plan
from sparkdl.transport.connecting import ServiceAddress
from sparkdl.transport.connection import Connection

START_S = 1.0
RECONNECT_S = 0.05
DEADLINE_S = 1200.0
ADDRESS = ServiceAddress("tcp://simulated:1", "token")


class _Killed(BaseException):
    """The worker's process dies."""


class _Process:
    """A thread that runs only while the simulation waits for it, so only one ever does."""

    def __init__(self, live: Callable[[], None]) -> None:
        self.over = False
        self._live = live
        self._error: BaseException | None = None
        self._dies = False
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._run, name="sparkdl-simulated", daemon=True)
        self._thread.start()

    def go_on(self) -> None:
        """Have it run until it waits, unless it is over."""
        if self.over:
            return
        self._go.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """In its thread: wait for ``go_on``."""
        self._back.release()
        self._go.acquire()
        if self._dies:
            raise _Killed

    def kill(self) -> None:
        """End it where it waits."""
        self._dies = True
        self.go_on()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._dies:
                self._live()
        except _Killed:
            pass
        except BaseException as error:
            self._error = error
        self.over = True
        self._back.release()


class _Client(AveragerClient):
    """A client that connects in memory.

    Args:
        connect: opens a connection.
        rank: as for a client; all other arguments, too.
    """

    def __init__(self, connect: Callable[[], Link], rank: int, center: Center, **options: object):
        self._open = connect
        super().__init__(
            ADDRESS,
            rank,
            center.wire_format,
            fragments=center.fragments,
            deadline_s=DEADLINE_S,
            **options,  # type: ignore[arg-type]
        )

    def _connect(self) -> Connection:
        connection = Connection(self._open(), None, takes=self._takes)  # type: ignore[arg-type]
        connection.send_header(self._hello)
        return connection


class Worker:
    """One rank, through all its attempts.

    Args:
        rank: its rank.
        plan: the run's plan.
        center: the averager's center, of which it knows the layout and the format.
        clock: the run's clock.
        draw: draws its speed and its links' delays.
        accept: has the averager accept a connection.
        attempt: the attempt of its task.
    """

    def __init__(
        self,
        rank: int,
        plan: Plan,
        center: Center,
        clock: Clock,
        draw: random.Random,
        accept: Callable[[Stream], None],
        attempt: int = 0,
    ) -> None:
        self.rank = rank
        self.attempt = attempt
        self._plan, self._center, self._clock, self._draw = plan, center, clock, draw
        self._accept = accept
        self._link: Link | None = None
        self._process: _Process | None = None
        self._stalled_until = 0.0
        self._finished = False
        self._state = b""
        # What was to end a wait that is over does not happen.
        self._waits = 0
        self._start_after(START_S * draw.random())

    def strike(self, *, restart_s: float | None, noticed_after_s: float = 0.0) -> None:
        """Break the connection, if there is one, or kill the process.

        Args:
            restart_s: seconds until another attempt starts; None if the process lives.
            noticed_after_s: seconds until the averager notices.
        """
        link, self._link = self._link, None
        if link is not None:
            link.break_off(noticed_after_s=noticed_after_s)
        if restart_s is None:
            if link is not None:
                # It notices at once, and not after its window.
                self._clock.after(0.0, self._end_of_wait())
            return
        self.kill()
        if self._may_return:
            self.attempt += 1
            self._stalled_until = 0.0
            self._start_after(START_S + restart_s)

    def stall(self, seconds: float) -> None:
        """Do nothing for a while."""
        self._stalled_until = max(self._stalled_until, self._clock.now + seconds)

    def kill(self) -> None:
        """End the process; the averager learns nothing from it."""
        self._waits += 1
        if self._process is not None:
            self._process.kill()
            self._process = None

    @property
    def _may_return(self) -> bool:
        return self._plan.max_failures > 0 and not self._finished

    # Waiting.

    def _start_after(self, seconds: float) -> None:
        self._waits += 1
        self._clock.after(seconds, self._end_of_wait())

    def _end_of_wait(self) -> Callable[[], None]:
        """What ends the present wait, unless it is over or the worker stalls."""
        waits = self._waits

        def go_on() -> None:
            if waits != self._waits:
                return
            if self._clock.now < self._stalled_until:
                self._clock.at(self._stalled_until, go_on)
                return
            self._waits += 1
            if self._process is None:
                self._process = _Process(self._live)
            self._process.go_on()

        return go_on

    def _sleep(self, seconds: float) -> None:
        self._clock.after(seconds, self._end_of_wait())
        self._wait()

    def _wait_for(self, wire: Wire) -> None:
        wire.on_arrival = self._end_of_wait()
        self._wait()

    def _wait(self) -> None:
        assert self._process is not None
        self._process.wait()

    # In its process.

    def _connect(self) -> Link:
        link = Link(self._clock, self._draw, self._plan.delay_s, self._wait_for)
        self._link = link
        self._accept(link.stream)
        return link

    def _live(self) -> None:
        client = _Client(
            self._connect,
            self.rank,
            self._center,
            attempt=self.attempt,
            worker_state=lambda: self._state,
            restart_state=(lambda: self._state) if self._plan.resubmissions else None,
            now=lambda: self._clock.now,
        )
        while True:
            try:
                self._train(client)
                self._finished = True
                return
            except DisconnectedError:
                self._link = None
                if not self._may_return:
                    return
                self._sleep(RECONNECT_S)
                client.reconnect()
            except StoppedError:
                self._finished = True
                return

    def _train(self, client: AveragerClient) -> None:
        plan, replica = self._plan, self._center.replica()
        self._sleep(self._draw.random())  # it reads its rows
        shard = ShardStatistics(10 + self.rank, (), int(plan.validates))
        row_server = [self.rank] if plan.exchanges_rows else None
        position = client.start(shard, replica, self._center.layout, row_server)
        assert position is not None
        if client.resumes:
            self._check_kept(client.resume(replica), position)
        epoch_ended = client.epoch_ended
        while True:
            self._validate(client, position.epoch - 1, epoch_ended=epoch_ended)
            if position.epoch > plan.epochs:
                break
            if plan.gathers:
                gathered = client.gather({"rank": self.rank})
                assert [each["rank"] for each in gathered] == list(range(len(gathered)))
            last = False
            while not last:
                position, last = self._train_window(client, replica, position)
            position, epoch_ended = position.next_epoch(), True
        client.finish()

    def _train_window(
        self, client: AveragerClient, replica: list[torch.Tensor], position: Position
    ) -> tuple[Position, bool]:
        """Train the next window; if none is left, say so with one that weighs nothing."""
        windows, done = self._plan.windows[self.rank], position.step_of_epoch
        trains = done < windows
        window = WindowReport(
            rank=self.rank,
            epoch=position.epoch,
            step=position.step + trains,
            examples=10 + self.rank if trains else 0,
            loss_sum=0.0,
            last=done + trains == windows,
            step_of_epoch=done + trains,
        )
        if trains:
            self._sleep(2 * self._draw.random() * self._plan.window_s)
            fragment = client.next_fragment
            for segment in replica:
                begun = segment[fragment].item()
                segment[fragment] = trained(begun, self.rank, window.epoch, window.step_of_epoch)
        self._state = json.dumps(dataclasses.asdict(Position.after(window))).encode()
        client.exchange(replica, window)
        return Position.after(window), window.last

    def _validate(self, client: AveragerClient, ended: int, *, epoch_ended: bool) -> None:
        """Report what was found after an epoch, and wait for what all found."""
        if not self._plan.validates or not ended:
            return
        if epoch_ended:
            loss_sum = ended + self.rank
            client.report_validation(
                ValidationReport(
                    rank=self.rank, epoch=ended, examples=1, loss_sum=loss_sum, weight=1.0
                )
            )
        if ended < self._plan.epochs:
            mean = (len(self._plan.windows) - 1) / 2
            losses = client.epoch_losses(ended)
            assert list(losses) == [epoch + mean for epoch in range(1, ended + 1)]

    def _check_kept(self, kept: bytes, position: Position) -> None:
        """Check that what was kept of this worker belongs to where it goes on."""
        if kept:
            state = Position(**json.loads(kept))
            assert position in (state, state.next_epoch()), f"{position} was kept with {state}"
