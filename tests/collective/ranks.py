"""Ranks as real processes that find each other through queues, without an averager."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import sys
import traceback
from collections.abc import Callable
from typing import Any

import cloudpickle
from forked import FORKED

from sparkdl.collective import Collective, join_collective

cloudpickle.register_pickle_by_value(sys.modules[__name__])


TIMEOUT_S = 300.0


class Gathering:
    """One end of a pipe to the parent, which plays the averager."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe

    def __call__(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        self.pipe.send(("gather", value))
        return self.pipe.recv()


def _rank(payload: bytes, rank: int, pipe: Any, deadline_s: float) -> None:
    body = cloudpickle.loads(payload)
    gather = Gathering(pipe)
    try:
        with join_collective(rank, gather, device="cpu", deadline_s=deadline_s) as collective:
            result = body(collective, gather)
        pipe.send(("result", result))
    except Exception as error:
        pipe.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


def run_ranks(
    world_size: int, body: Callable[[Collective, Gathering], Any], *, deadline_s: float = 120.0
) -> list[Any]:
    """Run ``body`` on every rank; returns results by rank, errors as ``("error", text)``.

    A rank that is killed gives ``("killed", exit code)``.
    """
    pipes, processes = [], []
    for rank in range(world_size):
        mine, theirs = FORKED.Pipe()
        arguments = (cloudpickle.dumps(body), rank, theirs, deadline_s)
        process = FORKED.Process(target=_rank, args=arguments, daemon=True)
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    try:
        return _serve(pipes, processes)
    finally:
        for process in processes:
            process.join(TIMEOUT_S)
            if process.is_alive():
                process.kill()


def _serve(pipes: list[Any], processes: list[Any]) -> list[Any]:
    outcomes: dict[int, Any] = {}
    given: dict[int, dict[str, Any]] = {}
    while len(outcomes) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in outcomes]
        ready = multiprocessing.connection.wait(waiting, TIMEOUT_S)
        assert ready, f"nothing was heard for {TIMEOUT_S} s; outcomes so far: {outcomes}"
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                kind, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                processes[rank].join(TIMEOUT_S)
                outcomes[rank] = ("killed", processes[rank].exitcode)
                continue
            if kind == "gather":
                given[rank] = value
            else:
                outcomes[rank] = value if kind == "result" else ("error", value)
        if len(given) == len(pipes):
            answer = [given[rank] for rank in sorted(given)]
            given.clear()
            for pipe in pipes:
                pipe.send(answer)
    return [outcomes[rank] for rank in sorted(outcomes)]
