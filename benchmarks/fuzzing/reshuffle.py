"""Rows that another worker sends, and what it has told about itself before."""

from __future__ import annotations

import queue
import random
import secrets
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fuzzing.averager import _memory
from fuzzing.calling import Call, Message, Place, any_way, conversation
from fuzzing.loop import Fault, Target, require_threads_gone
from fuzzing.mutation import mutated
from sparkdl.collective import Network
from sparkdl.errors import SparkDLError
from sparkdl.feed.shuffle import exchange_plan
from sparkdl.feed.store import PartitionStore
from sparkdl.protocols import UNKNOWN, ColumnSpec
from sparkdl.reshuffle import Reshuffle

SPECS = (ColumnSpec("wide", torch.float32, (UNKNOWN,)), ColumnSpec("id", torch.int64))
WIDTH = 3
DEADLINE_S = 1.0


class ReshuffleTarget(Target):
    """A worker without rows that is to receive half of another's; it gets them, or an error."""

    name = "reshuffle"
    reads = ("reshuffle.py", "feed/store.py", "transport/connection.py")

    def __enter__(self) -> ReshuffleTarget:
        self._pool = ThreadPoolExecutor(1)
        self._folder = Path(tempfile.mkdtemp(prefix="fuzzing-", dir=_memory()))
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        shutil.rmtree(self._folder)

    def attempt(self, draw: random.Random) -> bool:
        """One exchange."""
        rows, tls = draw.choice([2, 7, 40]), draw.random() < 0.1
        told: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": 1,
            "fingerprint": "0" * 64 if tls else None,
            "rows": rows,
            "shapes": [[WIDTH], []],
        }
        lies = draw.random() < 0.2
        said = mutated(draw, told) if lies else told
        listening: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

        def gather(mine: dict[str, Any]) -> list[Any]:
            listening.put(mine)
            return [mine, said]

        token = secrets.token_urlsafe(16)
        received = PartitionStore(self._folder)
        exchange = Reshuffle(
            rank=0,
            network=Network(host="127.0.0.1"),
            token=token,
            gather=gather,
            specs=SPECS,
            seed=draw.randrange(4),
            deadline_s=DEADLINE_S,
            tls=tls,
        )
        done = self._pool.submit(
            exchange, PartitionStore(self._folder), torch.arange(0), received, epoch=2
        )
        mine = listening.get(timeout=10)
        assert mine is not None
        place = Place(mine["host"], mine["port"], token, mine["fingerprint"])
        try:
            wrong = self._send(draw, place, rows, exchange.seed)
            done.result(timeout=15)
            kept = received.slice(0, received.rows)
            if not lies and not wrong and not torch.equal(kept[1], _ids(received.rows)):
                raise Fault("rows were taken in that are not those that were sent")
        except SparkDLError as error:
            if not wrong and not lies:
                raise Fault("an exchange in which nothing was wrong failed") from error
            raise
        finally:
            received.close()
            require_threads_gone()
        return True

    @staticmethod
    def _send(draw: random.Random, place: Place, rows: int, seed: int) -> bool:
        """Send what is due, made wrong; returns whether it was."""
        count = int(exchange_plan([0, rows], seed=seed, epoch=2)[1, 0])
        messages: list[Message] = [{"rows_of": 1}]
        messages += [np.zeros((count, WIDTH), np.float32).tobytes(), _ids(count).numpy().tobytes()]
        stranger = draw.random() < 0.1
        octets, wrong = conversation(draw, messages)
        try:
            if stranger:
                with Call(place, any_way(draw)) as line:
                    line.send(line.proof(line.hello(), "wrong") + octets)
                    line.answer()
            with Call(place, any_way(draw)) as line:
                line.send(line.proof(line.hello()) + octets)
                line.answer()
        except OSError:
            return True  # what it was told had made it leave before
        return wrong


def _ids(count: int) -> torch.Tensor:
    return torch.arange(count)
