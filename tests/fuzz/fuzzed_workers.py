"""Workers with the token that lie: to others that exchange rows, and to the driver of ``run``."""

from __future__ import annotations

import io
import random
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, redirect_stdout
from typing import Any

import numpy as np
import torch
from calling import Call, Message, any_way, conversation, mutated
from fuzzer import Fault, Target, require_threads_gone

from sparkdl.errors import SparkDLError
from sparkdl.feed.partition_store import PartitionStore
from sparkdl.protocols import UNKNOWN, ColumnSpec
from sparkdl.reshuffle import RowExchange, RowServer
from sparkdl.reshuffle.exchange import Everyone
from sparkdl.reshuffle.server import Offer, exchange_plan
from sparkdl.spark.diagnostics.console import Display
from sparkdl.spark.diagnostics.run_service import RunService
from sparkdl.transport.connecting import ServiceAddress
from sparkdl.transport.connection import Connection
from sparkdl.transport.port import Port
from sparkdl.transport.service import Service

WIDTH = 3
SPECS = (ColumnSpec("wide", torch.float32, (UNKNOWN,)), ColumnSpec("id", torch.int64))
KNOWN = tuple(spec.of_length(WIDTH) for spec in SPECS)
EPOCH = 2
DEADLINE_S = 1.0
IMPATIENT_S = 0.05
"""The patience of the worker that a liar fetches from: many ask for what never comes."""


class ReshuffleTarget(Target):
    """One of two workers in an exchange; it must end with the other's rows, or with an error."""

    name = "reshuffle"

    def __enter__(self) -> ReshuffleTarget:
        self._pool = self.enter_context(ThreadPoolExecutor(1))
        self._folder = self.folder()
        return self

    def attempt(self, draw: random.Random) -> bool:
        """One exchange."""
        tls, token = draw.random() < 0.1, secrets.token_urlsafe(16)
        try:
            if draw.random() < 0.5:
                return self._fetch_from_liar(draw, token, tls)
            return self._serve_liar(draw, token, tls)
        finally:
            require_threads_gone()

    def _fetch_from_liar(self, draw: random.Random, token: str, tls: bool) -> bool:
        """Rank 0, which has no rows, fetches half of rank 1's."""
        rows, seed = draw.choice([2, 7, 40]), draw.randrange(4)
        count = int(exchange_plan([rows], 2, seed=seed, epoch=EPOCH)[0, 0])
        messages: list[Message] = [
            {"rows": count, "shapes": [[WIDTH], []]},
            np.zeros((count, WIDTH), np.float32).tobytes(),
            _ids(count).numpy().tobytes(),
        ]
        octets, wrong = conversation(draw, messages)
        over = threading.Event()

        def answer(connection: Connection) -> None:
            connection._send(octets)
            if draw.random() < 0.98:
                connection.end_sending()
            over.wait(DEADLINE_S + 5)

        liar = Port("127.0.0.1", token, answer, encrypted=tls)
        told: Any = ["127.0.0.1", liar.number, liar.fingerprint]
        lies = draw.random() < 0.2
        said = mutated(draw, told) if lies else told
        received = PartitionStore(self._folder)
        try:
            with RowServer("127.0.0.1", token, DEADLINE_S, tls=tls) as server:
                everyone = Everyone([[(0, 0)], [(1, rows)]], [server.address, said])
                part = self._part(0, server, token, tls, seed, everyone)
                none = PartitionStore(self._folder)
                done = self._pool.submit(part, none, None, received, EPOCH)
                done.result(timeout=15)
            kept = received.take(torch.arange(received.rows))
            if not lies and not wrong and not torch.equal(kept[1], _ids(count)):
                raise Fault("rows were taken in that are not those that were sent")
        except SparkDLError as error:
            if not wrong and not lies:
                raise Fault("an exchange in which nothing was wrong failed") from error
            raise
        finally:
            over.set()
            liar.close()
            received.close()
        return True

    @staticmethod
    def _part(
        rank: int, server: RowServer, token: str, tls: bool, seed: int, everyone: Everyone
    ) -> RowExchange:
        return RowExchange(
            rank=rank,
            server=server,
            token=token,
            everyone=lambda: everyone,
            specs=SPECS,
            seed=seed,
            deadline_s=DEADLINE_S,
            tls=tls,
        )

    def _serve_liar(self, draw: random.Random, token: str, tls: bool) -> bool:
        """Rank 0 serves its rows; whatever was said before, rank 1 can fetch those it is due."""
        rows, stranger = draw.choice([2, 7, 40]), draw.random() < 0.1
        octets, wrong = conversation(draw, [{"rows_for": 1, "epoch": EPOCH}, {"taken": True}])
        store = PartitionStore(self._folder)
        store.append(KNOWN, [torch.zeros(rows, WIDTH), _ids(rows)])
        counts = np.array([[rows - rows // 2, rows // 2]])
        with RowServer("127.0.0.1", token, IMPATIENT_S, tls=tls) as server:
            server.offer(EPOCH, Offer(store, None, counts, [(1, EPOCH, 0)], keep=True))
            place = ServiceAddress(*server.address[:2], token, server.address[2])
            with Call(place, any_way(draw)) as line:
                line.send(line.proof(line.hello(), "wrong" if stranger else None) + octets)
                answer = line.answer()
            if stranger and answer not in (b"", bytes(32)):
                raise Fault("who does not know the token was answered")
            got = PartitionStore(self._folder)
            with closing(got), RowServer("127.0.0.1", token, DEADLINE_S, tls=tls) as other:
                told = [server.address, other.address]
                part = self._part(1, other, token, tls, 1, Everyone([[(0, rows)], []], told))
                part(PartitionStore(self._folder), None, got, EPOCH)
                if got.rows != rows // 2:
                    raise Fault(f"{got.rows} rows were fetched of {rows // 2}")
        return not wrong


def _ids(count: int) -> torch.Tensor:
    return torch.arange(count)


class RunTarget(Target):
    """A whole run of one or two workers; once they have left, it has finished, failed or waits."""

    name = "run"

    def attempt(self, draw: random.Random) -> bool:
        """One run."""
        workers = draw.choice([1, 1, 2])
        proved = True
        with ExitStack() as stack:
            service = stack.enter_context(Service("127.0.0.1", encrypted=draw.random() < 0.1))
            run = stack.enter_context(RunService(service, workers, Display("its log")))
            stack.enter_context(_shown(run))
            place = run.address
            lines = [stack.enter_context(Call(place, any_way(draw))) for _ in range(workers)]
            steps = [draw.choice(["gather", "lines", "report", "stacks"]) for _ in range(3)]
            fails = draw.random() < 0.1
            # A worker that has to wait for others sends nothing more before it has heard of them.
            wrong = workers > 1 and steps.count("gather") > 1
            for rank, line in enumerate(lines):
                octets, changed = conversation(draw, _messages(steps, rank, fails=fails))
                known = draw.random() > 0.05
                wrong, proved = wrong or changed or fails, proved and known
                line.send(line.proof(line.hello(), None if known else "wrong") + octets)
                if not known:
                    line.answer()
            if not proved:
                # Workers that wait for one that never came.
                stack.close()
            for line in lines if proved else []:
                line.answer()
            failure, finished, missing = run.failure, run.all_finished, run.missing
        require_threads_gone()
        # A rank that has not said who it is may still come; the driver's watch limits how long.
        if proved and failure is None and not finished and not missing:
            raise Fault("a run is neither finished nor failed, though its workers have left")
        if proved and not wrong and not finished:
            raise Fault("a run in which nothing was wrong failed", repr(failure))
        if failure is not None:
            raise failure
        return finished


def _messages(steps: list[str], rank: int, *, fails: bool) -> list[Message]:
    told: dict[str, Message] = {
        "gather": {"gather": {"host": "h", "port": 5}},
        "lines": {"lines": ["one", "two"], "left_out": 0},
        "report": {"report": {"loss": 0.5, "step": 3}},
        "stacks": {"stacks": "thread MainThread, most recent call last:\n  File ..."},
    }
    failure: Message = {"failure": {"message": "m", "traceback": "t"}}
    failure["failure"] |= {"of_data": False, "of_exchange": False}
    leaves: Message = failure if fails else {"finish": True}
    return [{"attend": rank, "host": "h", "pid": 1}, *(told[step] for step in steps), leaves]


@contextmanager
def _shown(run: RunService) -> Iterator[None]:
    """Show meanwhile what is reported, as the driver does: a worker waits for it."""
    over = threading.Event()

    def show() -> None:
        while not over.is_set():
            run.show_next(0.02)

    thread = threading.Thread(target=show, name="shows")
    with redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")):
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
