"""What a thousand strangers do to a port: how long a worker takes to join, and what a fit loses.

The strangers are connections that prove nothing and come back as soon as they are closed; some say
nothing, some send a byte every second. They come from a process of their own with the lowest
priority, as if from another machine. ``join``: meanwhile a worker connects to the port, by TCP,
locally and over TLS. ``fit``: one worker, a process, trains the network of the other benchmarks
with a round after every minibatch; epochs with the strangers at its averager alternate with epochs
of the same fit while the strangers are at a port of another process, because the half of a core
that they themselves take is not the port's doing. Epochs without any strangers are shown as well.
"""

import contextlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, Self

import recovery
import torch
from harness import FOLDER, Claim, parse, parser, report, show

from sparkdl.averager import Averager
from sparkdl.driver import Observers, run
from sparkdl.events import EpochSummary
from sparkdl.strategies import ParameterAveraging
from sparkdl.testing.world import _processes
from sparkdl.transport import local
from sparkdl.transport.connecting import introduced, reach
from sparkdl.transport.connection import Connection
from sparkdl.transport.port import Port

sys.path.append(str(FOLDER.parent / "tests"))
from support.flood import Flood

STRANGERS = 1_000
HOST, TOKEN = "127.0.0.1", "the job's secret"
KINDS = ("tcp", "local", "tls")
DRIPS = {"silent": None, "dripping": 1.0}
ELSEWHERE = " elsewhere"
DEADLINE_S = 60.0
SETTLE_S = 1.0
JOINS_S = 2.0
ROWS = 4_500
SLOWER = 1.05


class Attack:
    """A process that floods an address on command; a context manager."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_attack, args=(theirs,))

    def __enter__(self) -> Self:
        self._process.start()
        self._hear()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(None)
        self._process.join(DEADLINE_S)

    def begin(self, address: tuple[str, int] | bytes, drip_s: float | None) -> None:
        """Open the connections."""
        self._pipe.send((address, drip_s))

    def begin_elsewhere(self, drip_s: float | None) -> None:
        """Open them to a port in the strangers' own process."""
        self._pipe.send((None, drip_s))

    def end(self) -> int:
        """Close them; returns how often the port closed one since they were opened."""
        self._pipe.send(None)
        return self._hear()

    def _hear(self) -> int:
        if not self._pipe.poll(DEADLINE_S):
            raise TimeoutError("the strangers said nothing")
        return int(self._pipe.recv())


def _attack(pipe: Pipe) -> None:
    os.nice(19)
    pipe.send(0)
    with contextlib.closing(Port(HOST, TOKEN, _greet)) as own:
        while (told := pipe.recv()) is not None:
            address, drip_s = told
            with Flood(address or (HOST, own.number), STRANGERS, drip_s=drip_s) as flood:
                pipe.recv()
            pipe.send(flood.closed)


def _greet(connection: Connection) -> None:
    connection.send_header({"welcome": True})


def join_seconds(attack: Attack, kind: str, drip_s: float | None, joins: int) -> list[float]:
    """Seconds that each of some workers takes, one after another, to be let in and greeted."""
    port = Port(HOST, TOKEN, _greet, encrypted=kind == "tls")
    address = (HOST, port.number)
    connect = partial(introduced, 0, "the driver", address, TOKEN, port.fingerprint, DEADLINE_S)
    seconds = []
    try:
        name = local.name_of(HOST, port.number, TOKEN)
        attack.begin(name if kind == "local" and name is not None else address, drip_s)
        time.sleep(SETTLE_S)
        with contextlib.ExitStack() as stack:
            if kind == "tcp":  # otherwise the shorter local way would be taken
                stack.callback(setattr, local, "HAS_LOCAL_NAMES", local.HAS_LOCAL_NAMES)
                local.HAS_LOCAL_NAMES = False
            for _ in range(joins):
                started = time.monotonic()
                connection = reach(connect, DEADLINE_S)
                connection.receive_header()
                seconds.append(time.monotonic() - started)
                connection.close()
        attack.end()
    finally:
        port.close()
    return seconds


def epoch_seconds(attack: Attack, turns: int) -> tuple[dict[str, list[float]], float]:
    """Seconds of a fit's epochs by what the strangers do, and how many are closed per second.

    Epochs in which they come or go are not counted.
    """
    contenders = ["alone", *[f"{name}{place}" for name in DRIPS for place in (ELSEWHERE, "")]]
    plan = [name for _ in range(turns) for name in contenders for _ in range(2)]
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    closed, flooded_s, since = 0, 0.0, 0.0
    address: list[tuple[str, int]] = []

    def take(event: object) -> None:
        nonlocal closed, flooded_s, since
        if not isinstance(event, EpochSummary):
            return
        if event.epoch > 1 and plan[event.epoch - 1] == plan[event.epoch - 2]:
            seconds[plan[event.epoch - 1]].append(event.seconds)
        before, after = plan[event.epoch - 1], (*plan, "alone")[event.epoch]
        if before == after:
            return
        if before != "alone":
            ended = attack.end()
            if before in DRIPS:
                closed += ended
                flooded_s += time.monotonic() - since
        if after in DRIPS:
            since = time.monotonic()
            attack.begin(address[0], DRIPS[after])
        elif after != "alone":
            attack.begin_elsewhere(DRIPS[after.removesuffix(ELSEWHERE)])

    with tempfile.TemporaryDirectory() as folder:
        job = recovery.job(len(plan), ParameterAveraging(1))
        start = _processes(job, recovery.shards(ROWS * recovery.WORKERS)[:1], Path(folder))

        @contextmanager
        def launch(averager: Averager) -> Iterator[None]:
            address.append(averager.address.host_and_port)
            with start(averager):
                yield

        run(job, 1, launch, observers=Observers(on_event=take))
    return seconds, closed / flooded_s


def main() -> None:
    """Measures both and reports."""
    parsed = parse(parser(__doc__), repeats=20, quick_repeats=3)
    torch.set_num_threads(1)
    with Attack() as attack:
        joins = {
            f"{kind}, {name}": join_seconds(attack, kind, drip_s, min(5, parsed.repeats))
            for kind in KINDS
            for name, drip_s in DRIPS.items()
        }
        for name, values in joins.items():
            show(f"a worker joins, {name} strangers", values)
        epochs, closed_per_s = epoch_seconds(attack, parsed.repeats)
    for name, values in epochs.items():
        show(f"an epoch, {name}", values)
    print(f"{closed_per_s:.0f} strangers a second were closed and came back")
    medians = {name: statistics.median(values) for name, values in epochs.items()}
    for name, median in medians.items():
        print(f"an epoch, {name} / alone: {median / medians['alone']:.3f}")
    claims = [
        Claim(
            name=f"an epoch with {STRANGERS:,} {name} strangers / with these at another port",
            ratio=medians[name] / medians[name + ELSEWHERE],
            target=SLOWER,
        )
        for name in DRIPS
    ]
    slowest = max(value for values in joins.values() for value in values)
    claims.append(Claim(name="seconds that a worker takes to join", ratio=slowest, target=JOINS_S))
    detail: dict[str, Any] = {
        "join_s": joins,
        "epoch_s": epochs,
        "closed_per_s": round(closed_per_s),
    }
    report("strangers", claims, detail)


if __name__ == "__main__":
    main()
