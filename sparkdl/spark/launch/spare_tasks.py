"""Tasks that wait for a worker: where one runs, a worker can be added.

Spark starts executors on demand only while tasks wait for them, and ends those on which none runs.
So a run whose number of workers may grow has as many tasks as workers could be added. Each connects
to the driver once it has imported what a worker needs, and waits; when it ends, its slot and its
Python process are there for a worker.

    task                                driver
    {"spare": partition}        ------>
                                <------ {"go": true}, or the end of the connection
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from functools import partial
from typing import Any

import pyarrow as pa

from sparkdl.averager.headers import quoted
from sparkdl.averager.service.server import Averager
from sparkdl.errors import SparkDLError, StoppedError, TrainingError
from sparkdl.spark.catalyst.versions import on_tasks
from sparkdl.spark.cluster.run_jobs import JOB_END_S, RunJobs
from sparkdl.spark.launch.environments import task_of
from sparkdl.spark.launch.worker_rows import Workers
from sparkdl.transport.channel import HEADER, Channel, Conversation, LeftError
from sparkdl.transport.connecting import ServiceAddress
from sparkdl.transport.service import Service
from sparkdl.user_code.tracebacks import TRACEBACK_CHARACTERS, shortened

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""Seconds between two checks of whether all workers have joined."""
LEAVE_S = 0.3
"""Seconds that tasks have to end where others, for which there is no slot yet, are cancelled."""


class SpareTasks:
    """The tasks of one fit that wait for workers to be added; see ``driver.resizing.Slots``.

    Args:
        workers: what the workers' tasks are like.
        most: the largest number of workers.
    """

    def __init__(self, workers: Workers, most: int) -> None:
        self._workers, self._most = workers, most
        self._waiting: list[_Waiting] = []
        self._averager: Averager | None = None

    @property
    def free(self) -> int:
        """How many workers could start now."""
        return len(self._waiting) * self.ranks_a_task

    @property
    def ranks_a_task(self) -> int:
        """How many workers each task is."""
        return self._workers.ranks_a_task

    def give(self) -> None:
        """End one of the tasks, for the next attempt of a lost worker's."""
        averager = self._averager
        if averager is not None:
            averager.post(partial(self._end_one, averager))

    @contextmanager
    def waiting(self, averager: Averager) -> Iterator[None]:
        """Have tasks wait while an averager's workers train.

        They begin once all workers have joined: until then the slots are theirs.
        """
        missing = (self._most - averager.world_size) // self._workers.ranks_a_task
        if not missing:
            yield
            return
        spark, over = self._workers.frame.sparkSession, threading.Event()
        jobs = RunJobs(spark.sparkContext, "sparkdl: tasks that wait for workers to be added")
        task = task_of(f"{__name__}:wait_in_task", *astuple(averager.address))
        frame, profile = spark.range(0, missing, 1, missing), self._workers.profile

        def run() -> None:
            while len(averager.there) < averager.world_size:
                if over.wait(LOOK_S):
                    return
            on_tasks(frame, task, "id bigint", barrier=False, profile=profile).collect()

        def failed(error: Exception) -> None:
            if not over.is_set():
                logger.warning(
                    "no task waits for workers to be added any more until the next change: %s",
                    shortened(str(error), TRACEBACK_CHARACTERS),
                )

        averager.handlers["spare"] = partial(_Waiting, self._waiting, averager)
        self._averager = averager
        jobs.start(run, failed)
        try:
            yield
        finally:
            over.set()
            self._averager = None
            patience_s = JOB_END_S if len(self._waiting) == missing else LEAVE_S
            averager.post(partial(self._end_all, averager))
            jobs.end(patience_s)

    def _end_one(self, averager: Averager) -> None:
        if self._waiting:
            averager.part(self._waiting.pop().channel, {"go": True})

    def _end_all(self, averager: Averager) -> None:
        while self._waiting:
            self._end_one(averager)


class _Waiting:
    """One task that waits, at its connection; see ``service.Session``."""

    def __init__(self, waiting: list[_Waiting], service: Service, channel: Channel) -> None:
        self.channel, self._service, self._all = channel, service, waiting

    def conversation(self, first: dict[str, Any]) -> Conversation:
        """Count it from now on; it says nothing more."""
        self._all.append(self)
        said = yield HEADER
        raise TrainingError(f"a task that waits for a worker sent {quoted(said)}")

    def note_heartbeat(self) -> None:
        """Heartbeats do nothing: it may be silent for hours."""

    def left(self, error: LeftError) -> None:
        """Handle its leaving: its executor is gone, and Spark will start it again elsewhere."""

    def failed(self, error: SparkDLError) -> None:
        """Handle a message that no task sends."""
        logger.warning("%s", error)
        self._service.part(self.channel)

    def closed(self) -> None:
        """No longer count it."""
        if self in self._all:
            self._all.remove(self)


def wait_in_task(
    host: str,
    port: int,
    token: str,
    fingerprint: str | None,
    versions: dict[str, str],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Wait until the driver wants a worker in this place.

    Args:
        host: of the driver's address.
        port: of the driver's address.
        token: of the driver's address.
        fingerprint: of the driver's address.
        versions: of the packages that a worker needs; the task has compared them.
        batches: the task's only row.

    Returns:
        Nothing.
    """
    for _ in batches:  # or Spark does not use this process again
        pass
    importlib.import_module("sparkdl.spark.launch.task")
    address = ServiceAddress(host, port, token, fingerprint)
    try:
        connection = address.connect(-1, f"the averager at {address.uri}", None)
        try:
            connection.send_header({"spare": True})
            connection.receive_header()
        finally:
            connection.close()
    except StoppedError as error:
        logger.info("the run has ended: %s", error)
    return iter(())
