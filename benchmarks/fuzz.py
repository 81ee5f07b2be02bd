"""A hundred thousand random or mutated calls on the averager: nothing may give way.

Without the token: random bytes, broken proofs, halves of a handshake, while a training runs on the
same port; it has to end in the same bits as one that was left alone. With the token, on averagers
of their own, for a worker's mistake ends its run: random and mutated headers and values, in and out
of order. Every run must end in an error of ours or go on, within its time; no thread, no memory and
no value of the center may be left changed by what was not accepted.
"""

import gc
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Claim, parse, parser, report
from torch import nn

from sparkdl.averager.address import AveragerAddress
from sparkdl.averager.attendance import NewRows
from sparkdl.averager.codec import FullPrecision
from sparkdl.averager.connection import Connection, ConnectionLostError, SilenceError
from sparkdl.averager.headers import shard_header, window_header
from sparkdl.averager.server import Averager
from sparkdl.driver import Outcome, run
from sparkdl.errors import SparkDLError, TrainingError
from sparkdl.events import WindowReport
from sparkdl.feed.columns import FeedSchema
from sparkdl.feed.facts import ColumnFacts, ShardFacts
from sparkdl.protocols import ColumnSpec, Segment
from sparkdl.strategies import ParameterAveraging
from sparkdl.testing import batches_of
from sparkdl.testing.world import _threads
from sparkdl.worker import Job

CENTER = 5
LAYOUT = (Segment("parameters", torch.float32, CENTER),)
Message = dict[str, Any] | torch.Tensor
SHARD = ShardFacts(3, (ColumnFacts(smallest=0.5, largest=2),))
WINDOW = WindowReport(
    rank=0, epoch=1, step=1, examples=2, loss_sum=0.5, last=False, step_of_epoch=1
)
CONTRIBUTION: list[Message] = [
    window_header(WINDOW, own_state=12),
    torch.zeros(12, dtype=torch.uint8),
    torch.ones(CENTER),
]
JOINS: list[Message] = [{"join": 0, "host": "h", "attempt": 0}, {"reading": 5}]
LEAVES: list[Message] = [{"own_state": 10}, {"gather": {"a": 1}}, {"failure": {"message": "m"}}]
CONVERSATIONS: list[list[Message]] = [
    [*JOINS, shard_header(SHARD), *CONTRIBUTION, *CONTRIBUTION, *LEAVES],
    [
        *JOINS,
        shard_header(replace(SHARD, complete=False)),
        *CONTRIBUTION,
        {"reading": 6},
        shard_header(SHARD),
        {"rows": True},
        *LEAVES,
    ],
]
ODD = [None, True, -1, 1 << 70, 1e300, float("nan"), "", "x" * 1000, [], {}, [[[[]]]], b"".hex()]


def job() -> Job:
    return Job(
        model=partial(nn.Linear, 4, 2),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        strategy=ParameterAveraging(2),
        schema=FeedSchema(
            (ColumnSpec("features", torch.float32, (4,)),), ColumnSpec("label", torch.int64)
        ),
        epochs=30,
        batch_size=4,
        seed=1,
        deadline_s=60.0,
    )


def train(fuzz: "Strangers | None", folder: Path) -> Outcome:
    generator = np.random.default_rng(0)
    shards = [
        batches_of(
            20,
            features=generator.normal(size=(40, 4)).astype(np.float32),
            label=generator.integers(0, 2, 40),
        )
        for _ in range(2)
    ]
    start = _threads(job(), shards, folder)

    @contextmanager
    def launch(averager: Averager) -> Iterator[None]:
        with start(averager):
            if fuzz is not None:
                fuzz.address = averager.address
            yield

    return run(job(), 2, launch)


class Strangers(threading.Thread):
    """Calls without the token, on whatever averager is there."""

    def __init__(self, seed: int, calls: int) -> None:
        super().__init__(daemon=True)
        self.address: AveragerAddress | None = None
        self.calls = self.accepted = 0
        self._random = random.Random(seed)
        self._wanted = calls

    def run(self) -> None:
        while self.calls < self._wanted:
            if self.address is None:
                time.sleep(0.01)
                continue
            with suppress(OSError):
                self._call(self.address)

    def _call(self, address: AveragerAddress) -> None:
        draw = self._random
        with socket.create_connection(address.host_and_port, timeout=2) as line:
            self.calls += 1
            hello = line.recv(40)
            kind = draw.randrange(4)
            if kind == 0:
                line.sendall(draw.randbytes(draw.randrange(1, 300)))
            elif kind == 1:
                line.sendall(draw.randbytes(64))
            elif kind == 2:
                line.sendall(hello * 2)
            answer = line.recv(64) if kind == 1 and draw.random() < 0.2 else b""
            self.accepted += bool(answer)


def insider(draw: random.Random) -> tuple[int, str]:
    """One run whose only worker has the token and sends nonsense; returns calls and what failed."""
    calls, started = 0, time.monotonic()
    with (
        Averager(LAYOUT, [torch.ones(CENTER)], 1, FullPrecision(), deadline_s=2.0) as averager,
        ThreadPoolExecutor(1) as pool,
    ):
        driver = pool.submit(drive, averager)
        line = Connection(socket.create_connection(averager.address.host_and_port, 5), 2.0)
        try:
            line.introduce(averager.address.token)
            conversation = draw.choice(CONVERSATIONS)
            for message in conversation[: draw.randrange(1, 1 + len(conversation))]:
                calls += 1
                _send(line, draw, message)
            # Closing at once would take back what the averager has not read yet.
            line._socket.shutdown(socket.SHUT_WR)
            while line._socket.recv(1 << 16):
                pass
        except (ConnectionLostError, SilenceError, TrainingError, OSError):
            pass
        line.close()
        with suppress(TimeoutError):
            driver.result(timeout=0.02)
        averager.fail(TrainingError("over"))  # dropped if the run has ended
        wrong = driver.result(timeout=30)
        if not all(torch.isfinite(averager.center[0])):
            wrong = "a center that is not finite"
    if time.monotonic() - started > 10:
        wrong = "a run that hung"
    return calls, wrong


def drive(averager: Averager) -> str:
    """Be the driver of a run; returns what it should not have met."""
    try:
        for event in averager.events():
            averager.start()
            if isinstance(event, NewRows):
                averager.approve(event.rank)
    except SparkDLError:
        pass
    except Exception as error:  # that is what is looked for
        return f"{type(error).__name__}: {error}"
    return ""


def _send(line: Connection, draw: random.Random, message: Message) -> None:
    """Send a message, most often as it should be."""
    kind = draw.randrange(12)
    if kind == 0:
        line._socket.sendall(draw.randbytes(draw.randrange(1, 100)))
    elif kind == 1:
        line.send_values(torch.rand(draw.choice([0, 1, CENTER, 1000])))
    elif isinstance(message, torch.Tensor):
        line.send_values(message)
    elif kind == 2:
        line.send_header({draw.choice(list(message)): draw.choice(ODD)})
    elif kind == 3:
        inner = {
            key: dict(value) if isinstance(value, dict) else value for key, value in message.items()
        }
        fields = next((v for v in inner.values() if isinstance(v, dict)), inner)
        fields[draw.choice(list(fields))] = draw.choice(ODD)
        line.send_header(inner)
    else:
        line.send_header(message)


def resident_mb() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--calls", type=int, default=100_000)
    options.add_argument("--seed", type=int, default=1)
    parsed = parse(options, repeats=1)
    calls = 2_000 if parsed.quick else parsed.calls
    torch.set_num_threads(1)
    folder = Path(os.environ.get("TMPDIR", "/tmp"))
    alone = list(train(None, folder).module.state_dict().values())
    strangers = Strangers(parsed.seed, calls // 2)
    strangers.start()
    trainings = same = 0
    draw = random.Random(parsed.seed)
    memory: list[float] = []
    while strangers.is_alive():
        bits = list(train(strangers, folder).module.state_dict().values())
        trainings += 1
        same += all(torch.equal(a, b) for a, b in zip(bits, alone, strict=True))
        strangers.address = None
        memory.append(resident_mb())
    print(f"{strangers.calls} calls without the token beside {trainings} trainings, {same} right")
    insiders, failures = 0, []
    while insiders < calls - calls // 2:
        made, wrong = insider(draw)
        insiders += made
        failures += [wrong] if wrong else []
        if insiders % 100 < made:
            memory.append(resident_mb())
    print(f"{insiders} calls with the token; unexpected: {failures[:5] or 'none'}")
    left = [t.name for t in threading.enumerate() if t.name.startswith("sparkdl")]
    early = max(memory[: max(1, len(memory) // 5)])
    late = memory[-1]
    right = same == trainings and not failures and not strangers.accepted and not left
    print(f"memory {early:.0f} MB early, {late:.0f} MB late; threads left: {left or 'none'}")
    report(
        "fuzz",
        [
            Claim(name="all as it should be", ratio=float(right), target=1.0, at_least=True),
            Claim(name="memory, late / early", ratio=late / early, target=1.05),
        ],
        {
            "calls_without_token": strangers.calls,
            "calls_with_token": insiders,
            "accepted_without_token": strangers.accepted,
            "trainings": trainings,
        },
    )


if __name__ == "__main__":
    main()
