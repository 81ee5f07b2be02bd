"""Serving the workers of ``sparkdl.run`` until they finish: in the driver, or beside rank 0.

A DataFrame's rows for the workers of a function.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import cloudpickle
import torch
from pyspark.sql import DataFrame, SparkSession

from sparkdl.errors import ConfigError, DataError, DeadlineError
from sparkdl.feed.feed import FeedOptions
from sparkdl.feed.schema import FeedSchema
from sparkdl.spark.cluster.network import network_of
from sparkdl.spark.cluster.run_jobs import RunJobs
from sparkdl.spark.cluster.slots import gpu_profile, ranks_a_task
from sparkdl.spark.diagnostics.run_client import JOIN_S
from sparkdl.spark.diagnostics.run_service import RunService, named
from sparkdl.spark.functions.task import Feeding
from sparkdl.spark.launch.beside import ForwardedLogs
from sparkdl.spark.launch.stage_task import StartWorkers
from sparkdl.spark.launch.worker_rows import Workers
from sparkdl.spark.rows.column_overrides import ColumnOverrides, require_distinct
from sparkdl.spark.rows.columns import input_columns
from sparkdl.spark.session import keeps_rows_in_memory
from sparkdl.transport.service import Service
from sparkdl.user_code.tracebacks import message_of

logger = logging.getLogger(__name__)


def workers_of(spark: SparkSession, num_workers: int, device: str, ship_modules: bool) -> Workers:
    """The Spark side of a run without rows; see ``run`` for the arguments."""
    ranks = ranks_a_task(spark, device)
    tasks = max(1, num_workers // ranks)
    return Workers(
        frame=spark.range(0, tasks, 1, tasks),
        columns=(),
        num_workers=num_workers,
        shuffle="none",
        device=device,
        description="",
        network=network_of(spark),
        ranks_a_task=ranks,
        profile=gpu_profile(spark, device),
        ship_modules=ship_modules,
    )


def with_rows(
    workers: Workers,
    df: DataFrame,
    overrides: ColumnOverrides,
    *,
    shuffle: str,
    seed: int,
    store_in: str,
    group_by_length: bool,
) -> tuple[Workers, Feeding]:
    """Inspect the DataFrame that ``sparkdl.run`` was given; see there for the arguments.

    Raises:
        ConfigError: an override does not fit.
        DataError: a column cannot become a tensor.
    """
    columns = tuple(input_columns(df, df.columns, "df"))
    if not columns:
        raise DataError("df has no columns: there is nothing to feed")
    overrides.require_known(df.columns)
    specs = tuple(overrides.spec(column, torch.float32) for column in columns)
    require_distinct(specs)
    for column, spec in zip(columns, specs, strict=True):
        logger.info("column '%s' (%s) becomes %s", column.name, column.type_name, spec.dtype)
    in_memory = keeps_rows_in_memory(df.sparkSession, store_in)
    workers = replace(workers, frame=df, columns=columns, shuffle=shuffle, in_memory=in_memory)
    feeding = Feeding(
        schema=FeedSchema(specs, label=(), by_name=True),
        seed=seed,
        options=FeedOptions(
            exchange_rows=workers.exchanged,
            group_by_length=group_by_length,
        ),
        in_memory=in_memory,
    )
    return workers, feeding


RESULTS_S = 120.0
"""Seconds for Spark to deliver what the workers returned, once all of them have finished."""
RETURNED_S = 10.0
"""Seconds after which to report that some workers have returned, or save, and others do not."""


def serve_call(
    num_workers: int,
    tls: bool,
    reports: bool,
    host: str,
    workers: StartWorkers,
    logs: ForwardedLogs,
) -> tuple[dict[str, Any], Iterable[memoryview]]:
    """Serve the workers beside rank 0; the last arguments are those of a ``stage_task.Serve``.

    Args:
        num_workers: how many.
        tls: whether connections are encrypted.
        reports: whether the caller wants the workers' reports, which are shown otherwise.
        host: this one's name.
        workers: starts them.
        logs: keeps what they print and report.

    Returns:
        Nothing: what they return comes by itself.
    """
    with (
        Service(host, advertised_host=host, encrypted=tls) as opened,
        RunService(opened, num_workers, logs.show, logs.report if reports else None) as service,
        workers(service.address, service.fail),
    ):
        watch(service, None)
    return {}, ()


def results_of(delivered: Mapping[int, bytes | None], num_workers: int) -> list[Any]:
    """What workers have returned, by rank.

    Raises:
        DeadlineError: it did not all arrive.
        ConfigError: it exists only on workers, as a model within a process group does.
    """
    results = [delivered.get(rank) for rank in range(num_workers)]
    if None in results:
        raise _undelivered(num_workers, "before it ended, and the driver's log may say why")
    try:
        return [cloudpickle.loads(each) for each in results if each is not None]
    except Exception as error:  # any __setstate__ may raise anything
        raise ConfigError(
            f"what the workers returned cannot be read in the driver: {message_of(error)}. Return "
            "numbers, CPU tensors or a state_dict(), of a DistributedDataParallel that of its "
            ".module"
        ) from error


def _undelivered(num_workers: int, when: str) -> DeadlineError:
    return DeadlineError(
        f"all {num_workers} workers have finished, but Spark's job did not "
        f"deliver what they returned {when}. Is it very large? "
        "Write it to a file and return its path. Spark's UI shows which tasks are "
        "left"
    )


def watch(service: RunService, jobs: RunJobs | None) -> None:
    """Show what the workers print and report until all have finished, or one has failed.

    Args:
        service: the one that the workers are connected to.
        jobs: those that run them; None beside rank 0, where what they return is delivered later.

    Raises:
        DeadlineError: workers did not start, or what they returned did not arrive.
        SparkDLError: whatever ended the run.
    """
    results_due: float | None = None
    tell_of_returned = True
    while True:
        if service.show_next(0.2) and not service.missing:
            continue
        if tell_of_returned and (behind := _stragglers(service)):
            logger.warning("%s", behind)
            tell_of_returned = False
        elif service.failure is not None:
            raise service.failure
        elif service.all_finished:
            if jobs is None or jobs.ended:
                return
            results_due = results_due or time.monotonic() + RESULTS_S
            if time.monotonic() > results_due:
                raise _undelivered(service.world_size or 0, f"within {RESULTS_S:g} s")
        elif service.late:
            service.fail(
                DeadlineError(
                    f"rank {', '.join(map(str, service.missing))} of {service.world_size} workers "
                    f"did not start within {JOIN_S:g} s, and all have to start: are "
                    "other jobs using the cluster, or executors still being started (set "
                    "spark.dynamicAllocation.minExecutors)? One that cannot reach the driver says "
                    "so in its log"
                )
            )


def _stragglers(service: RunService) -> str:
    """Which ranks run long after others have returned or saved, and where; empty if none do."""
    ahead, running = service.stragglers(RETURNED_S)
    tops = service.stacks.tops(running) if running else {}
    if not tops:
        return ""
    where = "; ".join(f"{named([rank])} is still running, in {top}" for rank, top in tops.items())
    return f"{ahead}; {where}"
