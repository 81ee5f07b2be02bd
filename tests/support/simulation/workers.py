"""Simulated workers: real clients, whose training is made up, and which fail on command."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from support.simulation.network import Link, Wire
from support.simulation.plan import Plan

from sparkdl.averager.client import AveragerClient
from sparkdl.averager.run_events import Position
from sparkdl.averager.values.center import CenterSpec
from sparkdl.errors import DisconnectedError, StoppedError
from sparkdl.events import ValidationReport, WindowReport
from sparkdl.feed.shards import ShardStatistics
from sparkdl.planner.simulation.engine import Clock
from sparkdl.transport.connection import Connection

START_S = 1.0
RECONNECT_S = 0.05
DEADLINE_S = 1200.0
PRIME = (1 << 61) - 1


def trained(center: float, rank: int, epoch: int, window: int) -> float:
    """A replica after a window that began with ``center``.

    It spreads like a hash: anything added twice, left out, added to another sum or trained from an
    old center shows.
    """
    return (center * 31 + rank * 1_000_003 + epoch * 10_007 + window * 101 + 7) % PRIME


class _Killed(BaseException):
    """The worker's process dies."""


class _Process:
    """A thread that runs only while the simulation waits for it, so only one ever does."""

    def __init__(self, live: Callable[[], None]) -> None:
        self._live = live
        self._error: BaseException | None = None
        self._over = self._dies = False
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        threading.Thread(target=self._run, name="sparkdl-simulated", daemon=True).start()

    def go_on(self, *, dies: bool = False) -> None:
        """Have it run until it waits, or end where it waits, unless it is over."""
        self._dies = dies
        if not self._over:
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

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._dies:
                self._live()
        except _Killed:
            pass
        except BaseException as error:
            self._error = error
        self._over = True
        self._back.release()


@dataclass(eq=False)
class Worker:
    """One rank, through all its attempts; and where its client connects.

    Attributes:
        rank: its rank.
        plan: the run's plan.
        center: how the averager's center is laid out, and travels.
        clock: the run's clock.
        draw: draws its speed and its links' delays.
        accept: has the averager accept a connection.
        attempt: the attempt of its task.
    """

    rank: int
    plan: Plan
    center: CenterSpec
    clock: Clock
    draw: random.Random
    accept: Callable[[Link], None]
    attempt: int = 0

    uri = "tcp://simulated:1"

    def __post_init__(self) -> None:
        self._link: Link | None = None
        self._process: Any = None
        self._stalled_until = 0.0
        self._finished = False
        self._state = b""
        # What was to end a wait that is over does not happen.
        self._waits = 0
        self.clock.after(START_S * self.draw.random(), self._end_of_wait())

    def strike(self, restart_s: float | None = None, noticed_after_s: float = 0.0) -> None:
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
                self.clock.after(0.0, self._end_of_wait())
            return
        self.kill()
        if self._may_return:
            self.attempt += 1
            self._stalled_until = 0.0
            self.clock.after(START_S + restart_s, self._end_of_wait())

    def stall(self, seconds: float) -> None:
        """Do nothing for a while."""
        self._stalled_until = max(self._stalled_until, self.clock.now + seconds)

    def kill(self) -> None:
        """End the process; the averager learns nothing from it."""
        self._waits += 1
        if self._process is not None:
            self._process.go_on(dies=True)
            self._process = None

    def connect(self, rank: int, name: str, silence_s: float, takes: Any) -> Connection:
        """Connect its client, as a ``ServiceAddress`` does."""
        self._link = Link(self.clock, self.draw, self.plan.delay_s, self._wait_for)
        self.accept(self._link)
        return Connection(self._link, None, takes=takes)  # type: ignore[arg-type]

    @property
    def _may_return(self) -> bool:
        return self.plan.max_failures > 0 and not self._finished

    # Waiting.

    def _end_of_wait(self) -> Callable[[], None]:
        """What ends the present wait, unless it is over or the worker stalls."""
        waits = self._waits

        def go_on() -> None:
            if waits != self._waits:
                return
            if self.clock.now < self._stalled_until:
                self.clock.at(self._stalled_until, go_on)
                return
            self._waits += 1
            if self._process is None:
                self._process = _Process(self._live)
            self._process.go_on()

        return go_on

    def _sleep(self, seconds: float) -> None:
        self.clock.after(seconds, self._end_of_wait())
        self._process.wait()

    def _wait_for(self, wire: Wire) -> None:
        wire.on_arrival = self._end_of_wait()
        self._process.wait()

    # In its process.

    def _live(self) -> None:
        plan = self.plan
        client = AveragerClient(
            self,  # type: ignore[arg-type]
            self.rank,
            self.center.wire_format,
            fragments=self.center.fragments,
            deadline_s=DEADLINE_S,
            attempt=self.attempt,
            worker_state=lambda: self._state,
            restart_state=(lambda: self._state) if plan.resubmissions or plan.deals else None,
            now=self.clock,
        )
        while not self._finished:
            try:
                self._train(client)
                self._finished = True
            except DisconnectedError:
                self._link = None
                if not self._may_return:
                    return
                self._sleep(RECONNECT_S)
                client.reconnect()
            except StoppedError:
                self._finished = True

    def _train(self, client: AveragerClient) -> None:
        plan, layout = self.plan, self.center.layout
        replica = [torch.zeros(each.numel, dtype=torch.float64) for each in layout]
        self._sleep(self.draw.random())  # it reads its rows
        shard = ShardStatistics(10 + self.rank, (), int(plan.validates))
        row_server = [self.rank] if plan.exchanges_rows else None
        position = client.start(shard, replica, layout, row_server)
        if client.resumes:
            kept = client.resume(replica)
            state = Position(**json.loads(kept)) if kept else position
            if position == client.since:  # one rank's, for all
                state = position
            assert position in (state, state.next_epoch()), f"{position} was kept with {state}"
        epoch_ended = client.epoch_ended
        while True:
            self._validate(client, position.epoch - 1, epoch_ended=epoch_ended)
            if position.epoch > plan.epochs:
                break
            if client.asks_leave:
                client.epoch_losses(position.epoch - 1)
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
        windows = self.plan.windows_in(position.epoch)[self.rank]
        done = position.step_of_epoch
        trains = done < windows
        done += trains
        window = WindowReport(
            rank=self.rank,
            epoch=position.epoch,
            step=position.step + trains,
            examples=10 + self.rank if trains else 0,
            loss_sum=0.0,
            last=done == windows,
            step_of_epoch=done,
        )
        if trains:
            self._sleep(2 * self.draw.random() * self.plan.window_s)
            fragment = client.next_fragment
            for segment in replica:
                begun = segment[fragment].item()
                segment[fragment] = trained(begun, self.rank, window.epoch, window.step_of_epoch)
        self._state = json.dumps(asdict(Position.after(window))).encode()
        client.exchange(replica, window)
        return Position.after(window), window.last

    def _validate(self, client: AveragerClient, ended: int, *, epoch_ended: bool) -> None:
        """Report what was found after an epoch, and wait for what all found."""
        if not self.plan.validates or not ended:
            return
        if epoch_ended:
            told = {"rank": self.rank, "epoch": ended, "examples": 1, "weight": 1.0}
            client.report_validation(ValidationReport(**told, loss_sum=ended + self.rank))
        if ended < self.plan.epochs:
            losses, epochs = client.epoch_losses(ended), range(1, ended + 1)
            means = [(len(self.plan.windows_in(epoch)) - 1) / 2 for epoch in epochs]
            assert list(losses) == [sum(each) for each in zip(epochs, means, strict=True)]
