"""How many GPUs a worker's task has: as Spark's settings say, or one by its own request.

A task with several GPUs (``spark.task.resource.gpu.amount``) is as many ranks, each a process.
"""

from __future__ import annotations

import functools

from pyspark.resource import ResourceProfile, ResourceProfileBuilder, TaskResourceRequests
from pyspark.sql import SparkSession

from sparkdl.spark.catalyst.jvm import setting

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
