"""``sparkdl.run``: a training function of the user's own on every worker, without torchrun."""

from __future__ import annotations

import logging
import os
import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from pyspark.sql import DataFrame, SparkSession

from sparkdl.errors import (
    ConfigError,
    DataError,
    DeadlineError,
    SparkDLError,
    TrainingError,
    WorkerLostError,
)
from sparkdl.feed.columns import FeedSchema
from sparkdl.feed.feed import FeedOptions
from sparkdl.feed.statistics_check import NO_ROWS
from sparkdl.protocols import SequenceInput
from sparkdl.spark.cluster.gpus import gpu_profile, ranks_a_task
from sparkdl.spark.cluster.network import network_of
from sparkdl.spark.cluster.run_jobs import RunJobs
from sparkdl.spark.cluster.slot_queue import queued
from sparkdl.spark.cluster.slots import (
    choose_num_workers,
    require_free_slots,
    require_static_allocation,
)
from sparkdl.spark.diagnostics.console import driver_hosts, echoes, show
from sparkdl.spark.diagnostics.run_client import JOIN_S
from sparkdl.spark.diagnostics.run_headers import Lines, Report, named
from sparkdl.spark.diagnostics.run_service import RunService
from sparkdl.spark.diagnostics.task_failures import end_of_a_rank, with_sparks_reason
from sparkdl.spark.diagnostics.watchdog import stacks_on_signal
from sparkdl.spark.functions.directory import Directory
from sparkdl.spark.functions.script import Script
from sparkdl.spark.functions.task import OUTPUT_DDL, Call, Feeding, Placement
from sparkdl.spark.launch.launcher import (
    JOB_END_S,
    LEAVE_S,
    as_training_error,
    rank_task,
)
from sparkdl.spark.launch.worker_rows import (
    Workers,
    delivered,
    names_others,
    run_on_rows,
    with_original_places,
)
from sparkdl.spark.modules.shipping import ship
from sparkdl.spark.rows.column_overrides import (
    GROUPS_WITHOUT_PADDING,
    ColumnOverrides,
    dtypes,
    names,
    pad_inputs,
    paddings,
    require_distinct,
    shapes,
)
from sparkdl.spark.rows.columns import input_column
from sparkdl.spark.rows.converters import in_bytes, one_of, optional_whole, whole
from sparkdl.spark.rows.delivery import SHUFFLES
from sparkdl.spark.rows.scratch import STORE_PLACES
from sparkdl.spark.session.encryption import (
    encrypts_connections,
    keeps_rows_in_memory,
    require_trusted_network,
)
from sparkdl.spark.session.session import current_session, require_classic_session
from sparkdl.spark.storage.hadoop_files import open_hadoop
from sparkdl.transport.service import Service
from sparkdl.user_code.references import pickled

logger = logging.getLogger(__name__)

RESULTS_S = 120.0
"""Seconds for Spark to bring what the workers have returned, once all of them have finished."""
REASON_S = 10.0
"""Seconds for Spark to say how a worker's process has ended that is lost."""
RETURNED_S = 10.0
"""Seconds after which it is told that some workers have returned and others have not."""

OnReport = Callable[[int, Mapping[str, float]], None]
"""(rank, numbers by name)."""


def run(
    train_fn: Callable[..., Any] | str,
    *args: Any,
    num_workers: int = 2,
    device: str = "auto",
    df: DataFrame | None = None,
    columnShapes: dict[str, list[int | None]] | None = None,
    columnDtypes: dict[str, str] | None = None,
    imageCols: list[str] | None = None,
    padCols: dict[str, float] | None = None,
    padInputs: dict[str, SequenceInput] | None = None,
    groupByLength: bool = False,
    shuffleRows: str = "exchange",
    shuffleSeed: int = 0,
    memoryBudget: int | None = None,
    storeIn: str = "disk",
    on_report: OnReport | None = None,
    cwd: str | os.PathLike[str] | None = None,
    shipModules: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Run a function on several workers at once, each in a Spark task, as ranks of one group.

    A task that has several GPUs (``spark.task.resource.gpu.amount``) is as many workers, each in a
    process of its own.

    Every rank finds the environment that torchrun makes (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
    ``MASTER_ADDR``, ...), so ``torch.distributed.init_process_group("gloo")`` works as it is.
    What the workers print appears in the driver, each line behind its rank.

    Args:
        train_fn: a function, or the path of a Python script.
        *args: its arguments; those of a script are passed as ``sys.argv``.
        num_workers: how many; a multiple of the GPUs a task, if those are several.
        device: ``auto`` (a GPU where Spark assigns or torch sees one), ``cpu``, ``cuda`` or
            ``cuda:N``; what ``sparkdl.current_worker().device`` says.
        df: rows for the workers; ``sparkdl.current_worker().batches(size)`` gives each its part as
            tensors, one for each column: integers as int64, fractions as float32.
        columnShapes: as the estimator's Param: the shape of one row by column, for nested arrays,
            matrices, binary columns and images.
        columnDtypes: as the estimator's Param: the tensor's dtype by column.
        imageCols: as the estimator's Param: binary columns that hold encoded images.
        padCols: as the estimator's Param: columns of arrays of unequal length, by each the number
            that shorter rows of a minibatch are padded with.
        padInputs: as the estimator's Param: what else ``batches`` gives of padded columns,
            ``padding_mask``, ``attention_mask`` or ``lengths``; a padding mask of each by default.
        groupByLength: as the estimator's Param: whether rows of about equal length share a
            minibatch.
        shuffleRows: as the estimator's Param: how the rows are spread over the workers,
            ``exchange``, ``spark`` or ``none``. All workers run at once, for which Spark gives each
            task one partition: of other numbers it makes as many by its shuffle.
        shuffleSeed: of the orders in which the rows of ``df`` come; a ``seed`` is the function's.
        memoryBudget: as the estimator's Param: MiB of its stored rows that a worker keeps mapped;
            None for no limit.
        storeIn: as the estimator's Param: where each worker keeps its rows, ``disk`` or ``memory``.
        on_report: called in the driver with rank and numbers of each
            ``sparkdl.current_worker().report(...)``; by default they are printed.
        cwd: the working directory on the workers; by default the driver's, where all have it.
        shipModules: as the estimator's Param: whether modules of your own that the function or
            script needs are sent to the workers.
        **kwargs: the function's arguments by name.

    Returns:
        What the function returned, by rank; None for each run of a script. Results come back as
        pickles through Spark, as those of any PySpark function do.

    Raises:
        ConfigError: there is no session, too few slots, the script is not there, or Spark is to
            encrypt or authenticate connections.
        DataError: a column of ``df`` cannot become a tensor, or a row cannot.
        WorkerError: the function raised on a worker; the message has the rank and its traceback.
        WorkerLostError: a worker's process ended.
        DeadlineError: the workers did not start, or what they returned did not arrive.
    """
    spark = df.sparkSession if df is not None else current_session()
    if spark is None:
        raise ConfigError("there is no active Spark session; make one with sparkdl.create_session")
    require_classic_session(spark)
    if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1:
        raise ConfigError(f"num_workers must be a whole number >= 1, got {num_workers!r}")
    call = Call(function_of(train_fn, kwargs, "train_fn"), args, kwargs)
    declared = ColumnOverrides(
        shapes(columnShapes),
        dtypes(columnDtypes),
        names("imageCols")(imageCols),
        paddings(padCols),
        pad_inputs(padInputs),
    )
    if groupByLength and not padCols:
        raise ConfigError(GROUPS_WITHOUT_PADDING)
    keeping = _Keeping(shuffleRows, shuffleSeed, memoryBudget, storeIn, groupByLength)
    rows = None if df is None else _rows_of(df, declared, num_workers, device, keeping)
    placement = Placement(
        network=network_of(spark),
        directory=Directory.of_driver(cwd),
        device=device,
        echo=echoes(spark),
    )
    return run_call(
        spark,
        call,
        placement,
        num_workers,
        rows=rows,
        on_report=on_report,
        ship_modules=shipModules,
    )


def run_call(
    spark: SparkSession,
    call: Call,
    placement: Placement,
    num_workers: int,
    *,
    rows: Rows | None = None,
    on_report: OnReport | None = None,
    ship_modules: bool = True,
    name: str = "num_workers",
) -> list[Any]:
    """Do what ``run`` does, with arguments that were looked at.

    Args:
        spark: the session.
        call: what every worker runs.
        placement: where every worker runs it.
        num_workers: how many.
        rows: for the workers.
        on_report: as ``run`` takes it.
        ship_modules: whether modules of the user's own are sent to the workers.
        name: of the argument with which the user has said how many.

    Returns:
        As ``run`` does.
    """
    require_static_allocation(spark)
    profile, ranks = gpu_profile(spark, placement.device), ranks_a_task(spark, placement.device)
    choose_num_workers(spark, num_workers, profile, ranks, name)
    require_trusted_network(spark, False, "what sparkdl.run calls")
    tls = encrypts_connections(spark, False)
    host, advertised = driver_hosts(spark)
    with (
        queued(spark, num_workers // ranks, profile),
        Service(host, advertised_host=advertised, encrypted=tls) as connections,
        RunService(connections, num_workers, open_uri=open_hadoop) as service,
    ):
        require_free_slots(spark, num_workers // ranks, profile, ranks)
        job = _Job(spark, service, call, placement, rows, ship_modules)
        try:
            with stacks_on_signal(service.stacks):
                _watch(service, job, on_report or _show_report)
        except SparkDLError as error:
            lost = isinstance(error, WorkerLostError)
            job.end(patience_s=REASON_S if lost else LEAVE_S)
            known = job.explained(error)
            if known is error:
                raise
            raise known from error
        except BaseException:
            job.end(patience_s=0.0)
            raise
        return job.results()


@dataclass(frozen=True)
class _Keeping:
    """How the workers get and keep their rows, as the user said it."""

    shuffle: str
    seed: int
    memory_budget: int | None
    store_in: str
    group_by_length: bool

    def __post_init__(self) -> None:
        one_of("shuffleRows", SHUFFLES)(self.shuffle)
        whole("shuffleSeed")(self.seed)
        optional_whole("memoryBudget", 1)(self.memory_budget)
        one_of("storeIn", STORE_PLACES)(self.store_in)


@dataclass(frozen=True)
class Rows:
    """A DataFrame for the workers, and what they do with it."""

    workers: Workers
    feeding: Feeding


def _rows_of(
    df: DataFrame, declared: ColumnOverrides, num_workers: int, device: str, keeping: _Keeping
) -> Rows:
    columns = tuple(input_column(df, name, "df") for name in df.columns)
    if not columns:
        raise DataError("df has no columns: there is nothing to feed")
    declared.require_known(df.columns)
    specs = tuple(declared.spec(c, c.default_dtype(torch.float32)) for c in columns)
    require_distinct(specs)
    for column, spec in zip(columns, specs, strict=True):
        logger.info("column '%s' (%s) becomes %s", column.name, column.type_name, spec.dtype)
    ranks = ranks_a_task(df.sparkSession, device)
    tasks = num_workers // ranks
    delivery, replanned = delivered(df, tasks, ranks, keeping.shuffle, "sparkdl.run")
    workers = Workers(
        frame=df if replanned is None else replanned.frame,
        columns=columns,
        num_workers=num_workers,
        delivery=delivery,
        device=device,
        description="",
        network=network_of(df.sparkSession),
        store_in=keeping.store_in,
        ranks_a_task=ranks,
        replanned=replanned,
    )
    feeding = Feeding(
        schema=FeedSchema(specs, label=(), by_name=True),
        seed=keeping.seed,
        options=FeedOptions(
            exchange_rows=delivery.exchanged,
            resident_bytes=in_bytes(keeping.memory_budget),
            group_by_length=keeping.group_by_length,
        ),
        in_memory=keeps_rows_in_memory(df.sparkSession, keeping.store_in),
    )
    return Rows(workers, feeding)


class _Job:
    """The Spark job that runs the workers, in a thread of its own."""

    def __init__(
        self,
        spark: SparkSession,
        service: RunService,
        call: Call,
        placement: Placement,
        rows: Rows | None,
        ship_modules: bool,
    ) -> None:
        self._spark = spark
        self._profile = gpu_profile(spark, placement.device)
        self._ranks_a_task = ranks = ranks_a_task(spark, placement.device)
        self._tasks = service.world_size // ranks
        self._input = rows
        self._service = service
        self._rows: list[Any] = []
        self._error: SparkDLError | None = None
        name = getattr(call.function, "__name__", getattr(call.function, "path", "a function"))
        description = f"sparkdl: run {name} on {service.world_size} workers"
        self._jobs = RunJobs(spark.sparkContext, description)
        # The call is pickled by itself: what it imports may be missing on a worker, which is
        # the user's to see.
        feeding = None if rows is None else rows.feeding
        names: set[str] = set()
        payload = cloudpickle.dumps((placement, feeding, pickled(call, names)))
        shipment = None
        if ship_modules:
            script = call.function if isinstance(call.function, Script) else None
            names |= set() if script is None else script.imports()
            first = [] if script is None else [str(Path(script.path).parent)]
            shipment = ship(names, spark.sparkContext, first)
        self._task = rank_task(
            "sparkdl.spark.functions.task:run_function_task",
            (payload, astuple(service.address)),
            ranks,
            shipment,
            apart=True,
        )
        self._thread = self._jobs.start(self._run)

    @property
    def ended(self) -> bool:
        """Whether Spark has ended it."""
        return not self._thread.is_alive()

    @property
    def makes_rows(self) -> bool:
        """Whether Spark plans or computes the rows, which may take any time."""
        if self._input is None:
            return False
        tracker = self._spark.sparkContext.statusTracker()
        jobs = self._jobs.infos()
        stages = [tracker.getStageInfo(stage) for job in jobs for stage in job.stageIds]
        return not jobs or any(stage.numActiveTasks for stage in stages if stage)

    def end(self, *, patience_s: float) -> None:
        """Let the workers leave by themselves, then kill them."""
        self._thread.join(patience_s)
        if self._thread.is_alive():
            self._jobs.cancel()
            self._thread.join(JOB_END_S)

    def explained(self, error: SparkDLError) -> SparkDLError:
        """An error that ended the run, with what Spark knows of lost workers and of rows."""
        if isinstance(error, DataError) and self._input is not None:
            workers, seed = self._input.workers, self._input.feeding.seed
            if names_others(str(error), workers):
                error.args = (with_original_places(str(error), workers, seed, self._jobs),)
            return error
        if not isinstance(error, WorkerLostError) or error is self._error:
            return error
        if end := end_of_a_rank(str(self._error)):
            return WorkerLostError(f"{error}: {end}")
        spark, group = self._spark, self._jobs.group
        return with_sparks_reason(error, spark, group, self._ranks_a_task) or WorkerLostError(
            f"{error}. The executor's log says why; a process killed for memory needs more "
            "spark.executor.memoryOverhead"
        )

    def results(self) -> list[Any]:
        """What the ranks have returned.

        Raises:
            TrainingError: it was lost on its way.
        """
        if self._error is not None:
            raise self._error
        return [cloudpickle.loads(row.result) for row in sorted(self._rows, key=lambda r: r.rank)]

    def _run(self) -> None:
        try:
            if self._input is None:
                tasks = self._spark.range(0, self._tasks, 1, self._tasks)
                self._rows = tasks.mapInArrow(
                    self._task, OUTPUT_DDL, barrier=True, profile=self._profile
                ).collect()
            else:
                workers, seed = self._input.workers, self._input.feeding.seed
                self._rows = run_on_rows(workers, seed, self._task, OUTPUT_DDL, barrier=True)
                if not self._rows:
                    # Spark starts no task for what it finds to be empty while it plans.
                    self._service.fail(DataError(NO_ROWS))
            self._service.fail(
                TrainingError("the Spark job ended before its workers did: one left without a word")
            )
        except Exception as error:  # whatever ends the Spark job ends the run
            self._error = as_training_error(error)
            self._service.fail(self._error)


def _watch(service: RunService, job: _Job, on_report: OnReport) -> None:
    """Show what the workers print and report until all have finished, or one has failed."""
    deadline = time.monotonic() + JOIN_S
    results_due: float | None = None
    tell_of_returned = True
    while True:
        try:
            event = service.events.get(timeout=0.2)
        except queue.Empty:
            event = None
        if isinstance(event, Lines):
            show(event.rank, event.lines, event.left_out)
        elif isinstance(event, Report):
            on_report(event.rank, event.metrics)
        elif tell_of_returned and (behind := _left_behind(service)):
            logger.warning("%s", behind)
            tell_of_returned = False
        elif service.failure is not None:
            raise service.failure
        elif service.all_finished:
            if job.ended:
                return
            results_due = results_due or time.monotonic() + RESULTS_S
            if time.monotonic() > results_due:
                raise DeadlineError(
                    f"all {service.world_size} workers have finished, but Spark's job did not "
                    f"bring what they returned within {RESULTS_S:g} s. Is it very large? Write it "
                    "to a file and return its path. Spark's UI says which tasks are left"
                )
        elif service.missing and job.makes_rows:
            deadline = time.monotonic() + JOIN_S
        elif service.missing and time.monotonic() > deadline:
            raise DeadlineError(
                f"rank {', '.join(map(str, service.missing))} of {service.world_size} workers did "
                f"not start within {JOIN_S:g} s; all have to run at once: are other jobs using the "
                "cluster? An executor that cannot reach the driver says so in its log"
            )


def _left_behind(service: RunService) -> str:
    """Who still runs though others have returned a while ago, and where; empty if nobody does."""
    returned, running = service.left_behind(RETURNED_S)
    tops = service.stacks.tops(running) if running else {}
    if not tops:
        return ""
    where = "; ".join(f"{named([rank])} is still running, in {top}" for rank, top in tops.items())
    return f"{named(returned)} has returned; {where}"


def _show_report(rank: int, metrics: Mapping[str, float]) -> None:
    show(rank, [", ".join(f"{name} {value:g}" for name, value in metrics.items())], 0)


def function_of(
    train: Callable[..., Any] | str, kwargs: Mapping[str, Any], name: str
) -> Callable[..., Any] | Script:
    """What the user has given to be run.

    Args:
        train: the function, or the path of a script.
        kwargs: its arguments by name.
        name: of the argument that it was given for.

    Raises:
        ConfigError: it is neither, or a script with arguments by name.
    """
    if callable(train):
        return train
    if not isinstance(train, (str, os.PathLike)):
        raise ConfigError(f"{name} must be a function or the path of a script, got {train!r}")
    path = Path(train)
    if not path.is_file():
        raise ConfigError(
            f"{name} must be a function or the path of a script, and there is no file {path} "
            f"(looked for in {Path.cwd()})"
        )
    if kwargs:
        raise ConfigError(
            f"a script takes no arguments by name, but was given {', '.join(sorted(kwargs))}. "
            "Pass them as text, for example '--lr=0.1'"
        )
    return Script(str(path.resolve()), path.read_bytes())
