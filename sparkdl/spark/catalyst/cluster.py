"""What Spark's scheduler knows of executors, jobs and tasks, and Hadoop of file systems."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pyspark.resource import ResourceProfile
from pyspark.sql import SparkSession

from sparkdl.spark.catalyst.jvm import SparkContext, is_of_connect, setting, with_fallback

_SPLITS = re.compile(r"\bsplits=(\d+)")
"""How an explained plan says into how many partitions a range is split."""


def _slots_of_cores(spark: SparkSession, profile: ResourceProfile | None = None) -> int:
    """By the executors' cores; where tasks need GPUs too, there may be fewer slots."""
    wanted = profile.taskResources.get("cpus") if profile is not None else None
    each = int(wanted.amount if wanted is not None else setting(spark, "spark.task.cpus") or 1)
    if not is_of_connect(spark):
        return spark.sparkContext.defaultParallelism // each
    # A range has as many partitions as there are cores, at least two.
    (row,) = spark.sql("EXPLAIN SELECT * FROM range(1)").collect()
    splits = _SPLITS.search(str(row[0]))
    return int(splits[1]) // each if splits else 0


@with_fallback(_slots_of_cores)
def count_slots(spark: SparkSession, profile: ResourceProfile | None = None) -> int:
    """Tasks that the executors registered now can run at the same time.

    Args:
        spark: the session.
        profile: what each task needs; what the session's settings say by default.
    """
    context = spark.sparkContext._jsc.sc()
    profiles = context.resourceProfileManager()
    if profile is None:
        return int(context.maxNumConcurrentTasks(profiles.defaultResourceProfile()))
    needed = profile._java_resource_profile
    profiles.addResourceProfile(needed)
    return int(context.maxNumConcurrentTasks(needed))


def _active_tasks(spark: SparkSession) -> int:
    """By the status tracker, which may be some seconds late."""
    tracker = spark.sparkContext.statusTracker()
    stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
    return sum(stage.numActiveTasks for stage in stages if stage is not None)


@with_fallback(_active_tasks)
def count_running_tasks(spark: SparkSession) -> int:
    """Tasks that run now, by the scheduler's own count."""
    counts = spark.sparkContext._jsc.sc().taskScheduler().runningTasksByExecutors().valuesIterator()
    running = 0
    while counts.hasNext():
        running += int(counts.next())
    return running


@with_fallback(lambda spark: [])
def executor_start_times(spark: SparkSession) -> list[float]:
    """When each executor registered, in seconds since the epoch; none where Spark does not say."""
    context = spark.sparkContext._jsc.sc()
    known, backend = context.statusStore().executorList(True), context.schedulerBackend()
    executors = [known.apply(index) for index in range(known.size())]
    return [
        one.addTime().getTime() / 1000
        for one in executors
        # The store keeps one that is told to end for seconds in which it counts for no slots.
        if one.id() != "driver" and backend.isExecutorActive(one.id())
    ]


def _jobs_in_group(context: SparkContext, tag: str, group: str) -> list[int]:
    return list(context.statusTracker().getJobIdsForGroup(group))


@with_fallback(_jobs_in_group)
def jobs_with_tag(context: SparkContext, tag: str, group: str) -> list[int]:
    """The numbers of the jobs that have a tag, or of all in their group where Spark has no tags."""
    return list(context._jsc.sc().statusTracker().getJobIdsForTag(tag))


@with_fallback(lambda context, stage: False)
def feeds_a_shuffle(context: SparkContext, stage: int) -> bool:
    """Whether a stage that is running writes a shuffle's files.

    Where Spark does not say, whoever asks tells stages apart by their numbers of tasks alone.
    """
    found = context._jsc.sc().dagScheduler().stageIdToStage().get(stage)
    return bool(found.isDefined() and found.get().getClass().getSimpleName() == "ShuffleMapStage")


@dataclass(frozen=True)
class FailedTask:
    """A task that failed, as Spark's status store has it."""

    number: int
    index: int
    host: str
    message: str


@with_fallback(lambda context, stage: [])
def failed_tasks(context: SparkContext, stage: int) -> list[FailedTask]:
    """The failed tasks of a stage's first attempt; none where Spark does not say."""
    tasks = context._jsc.sc().statusStore().taskList(stage, 0, 1 << 20)
    return [
        FailedTask(task.taskId(), task.index(), task.host(), task.errorMessage().get())
        for task in (tasks.apply(index) for index in range(tasks.size()))
        if task.status() == "FAILED" and task.errorMessage().isDefined()
    ]


def hadoop_files(path: str) -> tuple[Any, Any]:
    """Hadoop's file system for a path, and its class of paths; both in the driver's JVM."""
    context: Any = SparkContext.getOrCreate()
    paths = context._jvm.org.apache.hadoop.fs.Path
    return paths(path).getFileSystem(context._jsc.hadoopConfiguration()), paths
