"""How many tasks a cluster can run at the same time, as all workers of a run must.

Runs of one application queue when together they need more slots than there are. Two runs that each
got some of the slots would wait for each other's, so the second one starts when the first has
ended. A tuner that fits several models at once (``CrossValidator(parallelism=4)``) need not know
how many of them fit.

A worker's task has as many GPUs as Spark's settings say, or one by its own request. A task with
several (``spark.task.resource.gpu.amount``) is as many ranks, each a process.
"""

from __future__ import annotations

import functools
import logging
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from pyspark.resource import ResourceProfile, ResourceProfileBuilder, TaskResourceRequests
from pyspark.sql import SparkSession

from sparkdl.errors import ConfigError
from sparkdl.spark.catalyst.cluster import (
    count_running_tasks,
    count_slots,
    executor_start_times,
)
from sparkdl.spark.catalyst.jvm import is_of_connect, is_true, setting

GPUS_AN_EXECUTOR = "spark.executor.resource.gpu.amount"
GPUS_A_TASK = "spark.task.resource.gpu.amount"
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The environment variable that says which GPUs CUDA shows a process."""


def ranks_a_task(spark: SparkSession, device: str) -> int:
    """How many workers each task is: one for each of its GPUs, if it has several and uses them.

    Args:
        spark: the session.
        device: what the user asks for: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
    """
    gpus = float(setting(spark, GPUS_A_TASK) or 0)
    return max(1, int(gpus)) if device in ("auto", "cuda") else 1


def gpu_profile(spark: SparkSession, device: str) -> ResourceProfile | None:
    """The request for one GPU per task, for the workers' stage only (stage-level scheduling).

    Executors with few GPUs and many cores would start a task on every core, several on one GPU.
    Setting ``spark.task.resource.gpu.amount=1`` avoids that for the whole application, whose other
    stages then leave cores idle.

    Args:
        spark: the session.
        device: what the user asks for: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Returns:
        None where tasks already have whole GPUs, are to have none, or Spark knows of none.
    """
    executors_have = float(setting(spark, GPUS_AN_EXECUTOR) or 0) >= 1
    tasks_have = float(setting(spark, GPUS_A_TASK) or 0) >= 1
    if device not in ("auto", "cuda") or not executors_have or tasks_have:
        return None
    cpus = int(setting(spark, "spark.task.cpus") or 1)
    return _one_gpu_a_task(setting(spark, "spark.app.id"), cpus)


@functools.lru_cache(maxsize=1)  # Spark keeps each profile for as long as the application runs
def _one_gpu_a_task(application: str | None, cpus: int) -> ResourceProfile:
    requests = TaskResourceRequests().cpus(cpus).resource("gpu", 1)
    return ResourceProfileBuilder().require(requests).build


logger = logging.getLogger(__name__)

EXECUTORS_START_S = 60.0
"""Seconds to wait for executors that the configuration asks for."""
LAST_EXECUTOR_S = 5.0
"""Seconds after which no further executor is expected, where the configuration does not say how
many there will be."""
_ON_DEMAND = "spark.dynamicAllocation.enabled"
_FEWEST_EXECUTORS = "spark.dynamicAllocation.minExecutors"
_MOST_EXECUTORS = "spark.dynamicAllocation.maxExecutors"
_OF_FUNCTIONS = "spark.sql.execution.pyspark.udf"
"""Where a session says by itself what ``spark.python.worker`` says for all of the application."""
OTHERS_END_S = 10.0
"""Seconds to wait for other jobs to give slots back, where workers have to start together."""


def most_slots(
    spark: SparkSession, profile: ResourceProfile | None = None, unknown: float = math.inf
) -> float:
    """Slots that there are, or that dynamic allocation would add for waiting tasks.

    Args:
        spark: the session.
        profile: what each task needs; what the session's settings say by default.
        unknown: returned where no executor is there to tell how many slots each will have.
    """
    slots = count_slots(spark, profile)
    if profile is not None or not is_true(spark, _ON_DEMAND):
        return slots
    executors, most = len(executor_start_times(spark)), setting(spark, _MOST_EXECUTORS)
    if most is None or _has_whole_hosts(spark):
        return math.inf
    return max(slots, int(most) * slots // executors) if executors and slots else unknown


def choose_num_workers(
    spark: SparkSession,
    wanted: int | None,
    profile: ResourceProfile | None = None,
    ranks_a_task: int = 1,
    name: str = "numWorkers",
) -> int:
    """The number of workers: what the user wants, by default as many as there are slots.

    Executors may still be starting. Those that the configuration asks for are waited for; where it
    does not say (a standalone cluster with only ``spark.cores.max``), executors are waited for as
    long as they keep registering.

    Args:
        spark: the session.
        wanted: the number the user wants; None for as many as there are slots.
        profile: what each worker's task needs; what the session's settings say by default.
        ranks_a_task: ranks per task.
        name: the name of the argument by which the user sets it.

    Raises:
        ConfigError: more workers are wanted than the cluster has slots, or a part of a task's; or
            Spark is set to copy or to kill workers.
    """
    if is_true(spark, "spark.speculation"):
        raise ConfigError(
            "spark.speculation is on: Spark would start second copies of workers that it finds "
            "slow. Set spark.speculation=false for this application"
        )
    _require_patience(spark)
    if wanted is not None and wanted % ranks_a_task:
        raise ConfigError(
            f"{name} is {wanted}, but {GPUS_A_TASK} is {ranks_a_task}, and each task runs one "
            f"worker per GPU. Set {name} to a multiple of {ranks_a_task}, or {GPUS_A_TASK}=1"
        )
    tasks, began = None if wanted is None else wanted // ranks_a_task, time.monotonic()
    slots = _wait_for_executors(spark, tasks, profile)
    if wanted is None:
        if slots < 1 and is_true(spark, _ON_DEMAND) and not _executors_asked_for(spark):
            raise ConfigError(
                "no executor is running, and dynamic allocation starts none before tasks wait for "
                f"it, so there are no slots to count: set {name}, or {_FEWEST_EXECUTORS}"
            )
        if slots < 1:
            raise ConfigError(
                f"the cluster has no free executor after {time.monotonic() - began:.0f} s, so no "
                "worker can start. Check the cluster's resources in the Spark UI"
                f"{_gpus_asked_for(spark)}"
            )
        return slots * ranks_a_task
    if wanted <= most_slots(spark, profile) * ranks_a_task:
        return wanted
    if profile is not None or ranks_a_task > 1:
        gpus = slots * ranks_a_task
        raise ConfigError(
            f"{name} is {wanted}, but the executors have {gpus} GPUs for tasks, and each "
            f"worker uses one. Set {name} to at most {gpus}, add executors, or use "
            "device='cpu'"
        )
    raise ConfigError(
        f"{name} is {wanted}, but the cluster has {slots} slots (concurrent tasks), and "
        f"all workers must run at the same time. Set {name} to at most {slots}, "
        "or add executors or cores (spark.executor.instances, spark.executor.cores; "
        f"spark.task.cpus cores make one slot){_gpus_asked_for(spark)}"
    )


def _require_patience(spark: SparkSession) -> None:
    """Refuse settings by which Spark kills workers in the middle of their work.

    Spark takes them to be idle, since it hears nothing of them before they have trained; what it
    says of the dead looks like a crash.
    """

    def found(name: str) -> str:
        own, general = f"{_OF_FUNCTIONS}.{name}", f"spark.python.worker.{name}"
        return (spark.conf.get(own, None) or setting(spark, general) or "").strip().lower()

    seconds = found("idleTimeoutSeconds")
    if found("killOnIdleTimeout") == "true" and seconds.lstrip("0").rstrip("s"):
        raise ConfigError(
            f"Spark is set to kill Python processes that it hears nothing of for {seconds} s, and "
            "workers say nothing to it until they have trained. Set "
            f"{_OF_FUNCTIONS}.killOnIdleTimeout=false: sparkdl has deadlines of its own"
        )


def _wait_for_executors(
    spark: SparkSession, wanted: int | None, profile: ResourceProfile | None
) -> int:
    """The number of slots, once there are as many as wanted or no more are expected."""
    expected, told = _executors_asked_for(spark), not is_of_connect(spark)
    if wanted is not None and is_true(spark, _ON_DEMAND):
        expected = 0  # more come once tasks wait
    needed = min(wanted or math.inf, float(setting(spark, "spark.cores.max") or "inf"))
    cores, cpus = (
        int(setting(spark, f"spark.{of}") or 1) for of in ("executor.cores", "task.cpus")
    )
    slots_of_all = expected * max(1, cores // cpus)
    unknown = math.isinf(expected)
    deadline = time.monotonic() + (EXECUTORS_START_S if told or not unknown else LAST_EXECUTOR_S)
    while (slots := count_slots(spark, profile)) < needed and time.monotonic() < deadline:
        started = executor_start_times(spark)
        silent = unknown and started and time.time() - max(started) > LAST_EXECUTOR_S
        # A client of Spark Connect is not told of executors: it counts by their slots.
        if silent or len(started) >= expected or (not started and slots >= slots_of_all):
            return count_slots(spark, profile)
        time.sleep(0.05)
    return slots


def _executors_asked_for(spark: SparkSession) -> float:
    """Executors that there will be; infinite where the configuration does not say.

    Of executors that come and go on demand, the fewest.
    """
    if is_true(spark, _ON_DEMAND):
        return int(setting(spark, _FEWEST_EXECUTORS) or 0)
    master, most = _master(spark), float(setting(spark, "spark.cores.max") or "inf")
    instances = setting(spark, "spark.executor.instances")
    if local_cluster := re.match(r"local-cluster\[\s*(\d+)", master):
        return min(int(local_cluster[1]), most)
    if instances and not _has_whole_hosts(spark):
        return min(int(instances), most // int(setting(spark, "spark.executor.cores") or 1))
    return 0 if master.startswith("local") else math.inf


def _has_whole_hosts(spark: SparkSession) -> bool:
    """Whether each executor has all cores of its host, and there are as many as hosts."""
    standalone = _master(spark).startswith("spark:")
    return standalone and setting(spark, "spark.executor.cores") is None


def _master(spark: SparkSession) -> str:
    own = None if is_of_connect(spark) else spark.sparkContext.master
    return own or setting(spark, "spark.master") or ""


def require_static_allocation(spark: SparkSession) -> None:
    """Check that a client's tasks can meet, as they do in Spark's barrier mode.

    Raises:
        ConfigError: dynamic allocation is on, which barrier mode does not support.
    """
    if is_true(spark, _ON_DEMAND):
        raise ConfigError(
            f"{_ON_DEMAND} is true, and training over Spark Connect needs barrier mode, which does "
            "not support it. Set it to false with a fixed number of executors "
            "(spark.executor.instances)"
        )


def require_free_slots(
    spark: SparkSession,
    needed: int,
    profile: ResourceProfile | None = None,
    ranks_a_task: int = 1,
) -> None:
    """Wait for slots that other jobs still hold, or that a lost executor had.

    Workers that have started would wait for the others, and hold their slots meanwhile. Under
    dynamic allocation Spark starts executors for the tasks that wait.

    Args:
        spark: the session.
        needed: tasks that must start at the same time.
        profile: what each of them needs; what the session's settings say by default.
        ranks_a_task: ranks per task, for messages.

    Raises:
        ConfigError: other jobs hold too many slots, or lost executors were not replaced.
    """
    if is_true(spark, _ON_DEMAND):
        return
    executors_due = time.monotonic() + EXECUTORS_START_S
    others_due = math.inf
    who = f"{needed * ranks_a_task} workers have to start together"
    if ranks_a_task > 1:
        who += f", {ranks_a_task} in each of {needed} tasks"
    while True:
        slots, running = count_slots(spark, profile), count_running_tasks(spark)
        if slots - running >= needed:
            return
        if slots >= needed:
            others_due = min(others_due, time.monotonic() + OTHERS_END_S)
        elif time.monotonic() >= executors_due:
            raise ConfigError(
                f"{who}, but the cluster has {slots} slots left, and no executor was started for "
                f"one that was lost in {EXECUTORS_START_S:.0f} s. See the Spark UI for the reason, "
                f"add executors, or set numWorkers to at most {slots * ranks_a_task}"
            )
        if time.monotonic() >= others_due:
            raise ConfigError(
                f"{who}, but other jobs hold {running} of the cluster's {slots} slots and did not "
                f"give them back in {OTHERS_END_S:.0f} s. Wait for them to end (the Spark UI shows "
                f"them), set numWorkers to at most {max(0, slots - running) * ranks_a_task}, or "
                "add executors"
            )
        time.sleep(0.1)


def _gpus_asked_for(spark: SparkSession) -> str:
    """What else a cluster must have for an executor to start; empty if nothing else."""
    gpus = setting(spark, GPUS_AN_EXECUTOR)
    return f". Each executor needs {gpus} GPUs ({GPUS_AN_EXECUTOR})" if gpus else ""


LOOK_S = 1.0
"""Seconds between two checks of how many slots there are; executors come and go."""


class SlotQueue:
    """Which runs hold slots and which wait, first come, first served."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        # The workers of each, and the thread that serves them.
        self._running: dict[object, tuple[int, int]] = {}
        self._waiting: deque[object] = deque()

    @contextmanager
    def take(self, workers: int, count_slots: Callable[[], float]) -> Iterator[None]:
        """Wait until the runs ahead leave enough slots, and hold those within the context.

        The caller has to know that the cluster has that many at all: with nobody ahead of it, a
        run starts at once.

        Args:
            workers: slots that the run needs.
            count_slots: counts the slots there are, including those taken.

        Raises:
            ConfigError: this thread serves the run that it would have to wait for.
        """
        ticket, thread = object(), threading.get_ident()
        with self._condition:
            if thread in (each for _, each in self._running.values()):
                # From a callback. Whoever is ahead may wait for this thread's own run, so nobody is
                # waited for.
                self._require_room(workers, count_slots)
                self._waiting.appendleft(ticket)
            else:
                self._waiting.append(ticket)
            try:
                if not self._may_start(ticket, workers, count_slots):
                    logger.warning(
                        "a run (workers: %d) is waiting for other runs of this application to free "
                        "enough slots",
                        workers,
                    )
                while not self._may_start(ticket, workers, count_slots):
                    self._condition.wait(LOOK_S)
                self._running[ticket] = workers, thread
            finally:
                self._waiting.remove(ticket)
                self._condition.notify_all()
        try:
            yield
        finally:
            with self._condition:
                del self._running[ticket]
                self._condition.notify_all()

    def _may_start(self, ticket: object, workers: int, count_slots: Callable[[], float]) -> bool:
        if self._waiting[0] is not ticket:
            return False
        taken = self._taken
        return not taken or taken + workers <= count_slots()

    def _require_room(self, workers: int, count_slots: Callable[[], float]) -> None:
        """Refuse a run that a callback starts, if it would wait for the callback's own."""
        free = count_slots() - self._taken
        if workers > free:
            raise ConfigError(
                f"a callback has started a run that needs slots for {workers} in the middle of its "
                f"own fit, whose workers keep theirs until it ends, and {max(0, free):.0f} are "
                "free: the two would wait for each other. Start it after fit has returned, or set "
                "a smaller numWorkers"
            )

    @property
    def _taken(self) -> int:
        return sum(workers for workers, _ in self._running.values())


_SLOT_QUEUE = SlotQueue()
"""The queue of this process's Spark application; there is never more than one."""


def queued(
    spark: SparkSession, workers: int, profile: ResourceProfile | None
) -> AbstractContextManager[None]:
    """Wait for the slots that a run needs, while other runs of this process hold them.

    Args:
        spark: the session.
        workers: slots that the run needs, at most as many as the cluster can have.
        profile: what each of them needs; None for what the session's settings say.
    """
    return _SLOT_QUEUE.take(workers, lambda: most_slots(spark, profile, 0))
