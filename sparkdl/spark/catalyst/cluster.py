"""What Spark's scheduler knows of executors, jobs and tasks, and Hadoop of file systems."""

from __future__ import annotations

from typing import Any

from pyspark import SparkContext
from pyspark.resource import ResourceProfile
from pyspark.sql import SparkSession

from sparkdl.spark.catalyst.fallback import with_fallback


def _slots_of_cores(spark: SparkSession, profile: ResourceProfile | None = None) -> int:
    """By the executors' cores; where tasks need GPUs too, there may be fewer slots."""
    context = spark.sparkContext
    cores = context.getConf().get("spark.task.cpus", "1")
    wanted = profile.taskResources.get("cpus") if profile is not None else None
    return context.defaultParallelism // int(wanted.amount if wanted is not None else cores or 1)


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


def _unknown_times(spark: SparkSession) -> list[float]:
    return []


@with_fallback(_unknown_times)
def executor_start_times(spark: SparkSession) -> list[float]:
    """When each executor registered, in seconds since the epoch; none where Spark does not say."""
    known = spark.sparkContext._jsc.sc().statusStore().executorList(True)
    executors = [known.apply(index) for index in range(known.size())]
    return [one.addTime().getTime() / 1000 for one in executors if one.id() != "driver"]


def hadoop_files(path: str) -> tuple[Any, Any]:
    """Hadoop's file system for a path, and its class of paths; both in the driver's JVM."""
    context: Any = SparkSession.builder.getOrCreate().sparkContext
    paths = context._jvm.org.apache.hadoop.fs.Path
    return paths(path).getFileSystem(context._jsc.hadoopConfiguration()), paths


def is_stopped(context: SparkContext) -> bool:
    """Whether a context was stopped, also from the JVM's side."""
    java = context._jsc
    return java is None or bool(java.sc().isStopped())
