"""Rows that are fetched from a liar, rows that a liar fetches, and what was said before that."""

from __future__ import annotations

import random
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import torch

from fuzzing.calling import Call, Message, Place, any_way, conversation
from fuzzing.loop import Fault, Target, require_threads_gone
from fuzzing.mutation import mutated
from sparkdl.errors import SparkDLError
from sparkdl.feed.store.partition_store import PartitionStore
from sparkdl.protocols import UNKNOWN, ColumnSpec
from sparkdl.reshuffle import RowExchange, RowServer
from sparkdl.reshuffle.exchange import Everyone
from sparkdl.reshuffle.server import Offer, exchange_plan
from sparkdl.transport.connection import Connection
from sparkdl.transport.port import Port

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
    reads = (
        "reshuffle/exchange.py",
        "reshuffle/server.py",
        "feed/store/partition_store.py",
        "feed/store/rows.py",
        "transport/connection.py",
    )

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
        count = int(exchange_plan([0, rows], seed=seed, epoch=EPOCH)[1, 0])
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
                exchange = self._part(server, token, tls, seed, [0, rows], [server.address, said])
                done = self._pool.submit(
                    exchange, PartitionStore(self._folder), None, received, EPOCH
                )
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
        server: RowServer, token: str, tls: bool, seed: int, rows: list[int], told: list[Any]
    ) -> RowExchange:
        return RowExchange(
            rank=0,
            server=server,
            token=token,
            everyone=lambda: Everyone(rows, told),
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
        counts = [rows - rows // 2, rows // 2]
        with RowServer("127.0.0.1", token, IMPATIENT_S, tls=tls) as server:
            server.offer(EPOCH, Offer(store, None, counts, (1, EPOCH, 0), keep=True))
            host, port, fingerprint = server.address
            place = Place(host, port, token, fingerprint)
            with Call(place, any_way(draw)) as line:
                line.send(line.proof(line.hello(), "wrong" if stranger else None) + octets)
                answer = line.answer()
            if stranger and answer not in (b"", bytes(32)):
                raise Fault("who does not know the token was answered")
            got = PartitionStore(self._folder)
            with closing(got), RowServer("127.0.0.1", token, DEADLINE_S, tls=tls) as other:
                fetched = RowExchange(
                    rank=1,
                    server=other,
                    token=token,
                    everyone=lambda: Everyone([rows, 0], [server.address, other.address]),
                    specs=SPECS,
                    seed=1,
                    deadline_s=DEADLINE_S,
                    tls=tls,
                )
                fetched(PartitionStore(self._folder), None, got, EPOCH)
                if got.rows != counts[1]:
                    raise Fault(f"{got.rows} rows were fetched of {counts[1]}")
        return not wrong


def _ids(count: int) -> torch.Tensor:
    return torch.arange(count)
