"""``sparkdl.run``: a training function of the user's own on every worker, without torchrun."""

from __future__ import annotations

import queue
import time
import uuid
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from pyspark import InheritableThread
from pyspark.sql import SparkSession

from sparkdl.errors import ConfigError, DeadlineError, SparkDLError, TrainingError
from sparkdl.spark import bootstrap
from sparkdl.spark.board import Board
from sparkdl.spark.console import driver_hosts, echoes, show
from sparkdl.spark.encryption import encrypts_connections, require_no_plaintext
from sparkdl.spark.function_task import OUTPUT_DDL, Call, Script
from sparkdl.spark.launcher import JOB_END_S, LEAVE_S, as_training_error
from sparkdl.spark.network import network_of
from sparkdl.spark.session import require_classic_session
from sparkdl.spark.slots import (
    choose_num_workers,
    require_free_slots,
    require_static_allocation,
)
from sparkdl.version import __version__

JOIN_S = 120.0
"""Seconds for all workers to start, once there are slots for them."""


def run(
    train_fn: Callable[..., Any] | str,
    *args: Any,
    num_workers: int = 2,
    device: str = "auto",
    **kwargs: Any,
) -> list[Any]:
    """Run a function on several workers at once, each in a Spark task, as ranks of one group.

    Every rank finds the environment that torchrun makes (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
    ``MASTER_ADDR``, ...), so ``torch.distributed.init_process_group("gloo")`` works as it is.
    What the workers print appears in the driver, each line behind its rank.

    Args:
        train_fn: a function, or the path of a Python script.
        *args: its arguments; those of a script are passed as ``sys.argv``.
        num_workers: how many.
        device: ``auto`` (a GPU where Spark assigns or torch sees one), ``cpu``, ``cuda`` or
            ``cuda:N``; what ``sparkdl.current_worker().device`` says.
        **kwargs: the function's arguments by name.

    Returns:
        What the function returned, by rank; None for each run of a script. Results come back as
        pickles through Spark, as those of any PySpark function do.

    Raises:
        ConfigError: there is no session, too few slots, the script is not there, or Spark is to
            encrypt connections.
        WorkerError: the function raised on a worker; the message has the rank and its traceback.
        WorkerLostError: a worker's process ended.
        DeadlineError: the workers did not start.
    """
    spark = SparkSession.getActiveSession()
    if spark is None:
        raise ConfigError("there is no active Spark session; make one with sparkdl.create_session")
    require_classic_session(spark)
    if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1:
        raise ConfigError(f"num_workers must be a whole number >= 1, got {num_workers!r}")
    call = Call(_function(train_fn, kwargs), args, kwargs)
    require_static_allocation(spark)
    choose_num_workers(spark, num_workers)
    require_free_slots(spark, num_workers)
    require_no_plaintext(spark, False, "what sparkdl.run calls")
    tls = encrypts_connections(spark, False)
    with Board(num_workers, *driver_hosts(spark), tls=tls) as board:
        job = _Job(spark, board, call, device)
        try:
            _watch(board, job)
        except SparkDLError:
            job.end(patience_s=LEAVE_S)
            raise
        except BaseException:
            job.end(patience_s=0.0)
            raise
        return job.results()


class _Job:
    """The Spark job that runs the workers, in a thread of its own."""

    def __init__(self, spark: SparkSession, board: Board, call: Call, device: str) -> None:
        self._spark = spark
        self._board = board
        self._group = f"sparkdl-{uuid.uuid4().hex[:12]}"
        self._rows: list[Any] = []
        name = getattr(call.function, "__name__", getattr(call.function, "path", "a function"))
        self._description = f"sparkdl: run {name} on {board.world_size} workers"
        # The call is pickled by itself: what it imports may be missing on a worker, which is
        # the user's to see.
        payload = cloudpickle.dumps((network_of(spark), cloudpickle.dumps(call)))
        self._task = bootstrap.make_task(
            "sparkdl.spark.function_task:run_function_task",
            (payload, astuple(board.address), device, echoes(spark)),
            {"torch": str(torch.__version__), "sparkdl": __version__},
        )
        self._thread = InheritableThread(target=self._run, name=f"{self._group}-job", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether Spark has ended it."""
        return not self._thread.is_alive()

    def end(self, *, patience_s: float) -> None:
        """Let the workers leave by themselves, then kill them."""
        self._thread.join(patience_s)
        if self._thread.is_alive():
            self._spark.sparkContext.cancelJobGroup(self._group)
            self._thread.join(JOB_END_S)

    def results(self) -> list[Any]:
        """What the ranks have returned."""
        self._thread.join(JOB_END_S)
        return [cloudpickle.loads(row.result) for row in sorted(self._rows, key=lambda r: r.rank)]

    def _run(self) -> None:
        workers = self._board.world_size
        self._spark.sparkContext.setJobGroup(self._group, self._description, interruptOnCancel=True)
        try:
            tasks = self._spark.range(0, workers, 1, workers)
            self._rows = tasks.mapInArrow(self._task, OUTPUT_DDL, barrier=True).collect()
            self._board.fail(
                TrainingError("the Spark job ended before its workers did: one left without a word")
            )
        except Exception as error:  # whatever ends the Spark job ends the run
            self._board.fail(as_training_error(error))


def _watch(board: Board, job: _Job) -> None:
    """Show what the workers print until all have finished, or one has failed."""
    deadline = time.monotonic() + JOIN_S
    while True:
        try:
            event = board.events.get(timeout=0.2)
        except queue.Empty:
            event = None
        if event is not None:
            show(event.rank, event.lines, event.left_out)
            continue
        if board.failure is not None:
            raise board.failure
        if board.finished and job.ended:
            return
        if board.missing and time.monotonic() > deadline:
            raise DeadlineError(
                f"rank {', '.join(map(str, board.missing))} of {board.world_size} workers did not "
                f"start within {JOIN_S:g} s; all have to run at once: are other jobs using the "
                "cluster?"
            )


def _function(
    train_fn: Callable[..., Any] | str, kwargs: dict[str, Any]
) -> Callable[..., Any] | Script:
    if callable(train_fn):
        return train_fn
    path = Path(str(train_fn))
    if not isinstance(train_fn, (str, Path)) or not path.is_file():
        raise ConfigError(f"train_fn must be a function or the path of a script, got {train_fn!r}")
    if kwargs:
        raise ConfigError(
            f"a script takes no arguments by name, but was given {', '.join(sorted(kwargs))}. "
            "Pass them as text, for example '--lr=0.1'"
        )
    return Script(str(path.resolve()), path.read_text())
