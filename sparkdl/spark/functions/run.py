"""``sparkdl.run``: the user's own training function on every worker, without torchrun.

A drop-in for ``pyspark.ml.torch.distributor.TorchDistributor``, executed by our launcher.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import cloudpickle
from pyspark.ml.torch import distributor as pyspark_distributor
from pyspark.sql import DataFrame, SparkSession

from sparkdl.arguments import require_seed, require_whole
from sparkdl.errors import ConfigError
from sparkdl.protocols import SequenceInput
from sparkdl.spark.arrival import Shipment
from sparkdl.spark.catalyst.jvm import is_of_connect
from sparkdl.spark.cluster.network import driver_ports
from sparkdl.spark.cluster.slots import (
    choose_num_workers,
    queued,
    require_free_slots,
    require_static_allocation,
)
from sparkdl.spark.diagnostics.console import display, driver_hosts, echoes
from sparkdl.spark.diagnostics.run_client import JOIN_S
from sparkdl.spark.diagnostics.run_service import OnReport, RunService
from sparkdl.spark.diagnostics.watchdog import watched
from sparkdl.spark.functions.program import Script, function_of
from sparkdl.spark.functions.serving import (
    RESULTS_S,
    results_of,
    serve_call,
    watch,
    with_rows,
    workers_of,
)
from sparkdl.spark.functions.task import Call, CallPlacement, Feeding
from sparkdl.spark.launch.beside import read_stage
from sparkdl.spark.launch.launcher import WorkerJob
from sparkdl.spark.launch.worker_rows import SHUFFLES, Workers
from sparkdl.spark.pickling import pickled_or_refused
from sparkdl.spark.required import require_frame, require_session
from sparkdl.spark.rows.column_overrides import GROUPS_WITHOUT_PADDING, ColumnOverrides, ImageScale
from sparkdl.spark.rows.converters import one_of, switch
from sparkdl.spark.rows.scratch import STORE_PLACES
from sparkdl.spark.session import encrypts_connections, require_trusted_network
from sparkdl.spark.shipping import ship
from sparkdl.transport.service import Service


def run(
    train_fn: Callable[..., Any] | str,
    *args: Any,
    num_workers: int = 2,
    device: str = "auto",
    df: DataFrame | None = None,
    columnShapes: dict[str, list[int | None]] | None = None,
    columnDtypes: dict[str, str] | None = None,
    imageCols: list[str] | None = None,
    imageSize: Sequence[int] | None = None,
    imageFit: str = "crop",
    imageScale: ImageScale | None = None,
    padCols: dict[str, float] | None = None,
    padInputs: dict[str, SequenceInput] | None = None,
    groupByLength: bool = False,
    shuffleRows: str = "exchange",
    shuffleSeed: int = 0,
    storeIn: str = "disk",
    on_report: OnReport | None = None,
    cwd: str | os.PathLike[str] | None = None,
    shipModules: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Run a function on several workers, each in a Spark task, as ranks of one group.

    A task that has several GPUs (``spark.task.resource.gpu.amount``) is that many workers, each in
    its own process.

    Every rank finds the environment that torchrun sets (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
    ``MASTER_ADDR``, ...), so ``torch.distributed.init_process_group("gloo")`` works unchanged. What
    the workers print appears in the driver, each line after its rank.

    Args:
        train_fn: a function, or the path of a Python script.
        *args: its arguments; those of a script are passed as ``sys.argv``.
        num_workers: how many; a multiple of the GPUs per task, if there are several.
        device: ``auto`` (a GPU where Spark assigns or torch sees one), ``cpu``, ``cuda`` or
            ``cuda:N``; what ``sparkdl.current_worker().device`` says.
        df: rows for the workers; ``sparkdl.current_worker().batches(size)`` gives each its part as
            tensors, one for each column: integers as int64, fractions as float32.
        columnShapes: like the estimator's Param: the shape of one row by column, for nested arrays,
            binary columns and images.
        columnDtypes: like the estimator's Param: the tensor's dtype by column.
        imageCols: like the estimator's Param: columns that hold images.
        imageSize: like the estimator's Param: height and width that images of any size are brought
            to.
        imageFit: like the estimator's Param: how, ``crop``, ``pad`` or ``stretch``.
        imageScale: like the estimator's Param: as what floats images are given, ``0..1``,
            ``0..255`` or (mean, std); as bytes if it is None.
        padCols: like the estimator's Param: columns of arrays of unequal length, each with the
            number that pads the shorter rows of a minibatch.
        padInputs: like the estimator's Param: what else ``batches`` gives for padded columns,
            ``padding_mask``, ``attention_mask`` or ``lengths``; a padding mask of each by default.
        groupByLength: like the estimator's Param: whether rows of about equal length share a
            minibatch.
        shuffleRows: like the estimator's Param: how the rows are spread over the workers,
            ``exchange``, ``spark`` or ``none``.
        shuffleSeed: for the order of the rows of ``df``; ``seed`` is left to the function.
        storeIn: like the estimator's Param: where each worker keeps its rows, ``disk`` or
            ``memory``.
        on_report: called in the driver with rank and numbers of each
            ``sparkdl.current_worker().report(...)``; by default they are printed.
        cwd: the working directory on the workers; by default the driver's, if all have it.
        shipModules: like the estimator's Param: whether modules of your own that the function or
            script needs are sent to the workers.
        **kwargs: the function's arguments by name.

    Returns:
        What the function returned, by rank; None for each run of a script. Results come back as
        pickles through Spark, like those of any PySpark function.

    Raises:
        ConfigError: there is no session, ``df`` is no DataFrame of one that runs, there are too few
            slots, the script is missing, or Spark is set to encrypt or authenticate connections.
        DataError: a column of ``df`` cannot become a tensor, or a row cannot.
        WorkerError: the function raised on a worker; the message has the rank and its traceback.
        WorkerLostError: a worker's process ended.
        DeadlineError: the workers did not start, or what they returned did not arrive.
    """
    if df is not None:
        require_frame(df, to_end="Run on", connect=True)
    spark = require_session(None if df is None else df.sparkSession, connect=True)
    num_workers = require_whole("num_workers", num_workers, 1)
    call = Call(function_of(train_fn, kwargs, "train_fn"), args, kwargs)
    images = (imageCols, imageSize, imageFit, imageScale)
    overrides = ColumnOverrides(columnShapes, columnDtypes, *images, padCols, padInputs)
    if groupByLength and not padCols:
        raise ConfigError(GROUPS_WITHOUT_PADDING)
    keeping = {
        "shuffle": one_of("shuffleRows", SHUFFLES)(shuffleRows),
        "seed": require_seed("shuffleSeed", shuffleSeed),
        "store_in": one_of("storeIn", STORE_PLACES)(storeIn),
        "group_by_length": switch("groupByLength")(groupByLength),
    }
    workers, feeding = workers_of(spark, num_workers, device, shipModules), None
    if df is not None:
        workers, feeding = with_rows(workers, df, overrides, **keeping)
    return run_call(call, workers, feeding, cwd, on_report)


def run_call(
    call: Call,
    workers: Workers,
    feeding: Feeding | None = None,
    cwd: str | os.PathLike[str] | None = None,
    on_report: OnReport | None = None,
    *,
    tasks_are_nodes: bool = False,
) -> list[Any]:
    """Do what ``run`` does, with arguments that have been checked.

    Args:
        call: what every worker runs.
        workers: the Spark side of the run.
        feeding: how the workers feed their rows, if they have any.
        cwd: see ``run``.
        on_report: see ``run``.
        tasks_are_nodes: see ``CallPlacement``.

    Returns:
        See ``run``.
    """
    spark, num_workers = workers.frame.sparkSession, workers.num_workers
    profile, ranks = workers.profile, workers.ranks_a_task
    if is_of_connect(spark):
        require_static_allocation(spark)
    name = "num_processes" if tasks_are_nodes else "num_workers"
    choose_num_workers(spark, num_workers, profile, ranks, name)
    require_trusted_network(spark, False, "what sparkdl.run calls")
    tls, tasks = encrypts_connections(spark, False), workers.num_tasks
    called = getattr(call.function, "__name__", getattr(call.function, "path", "a function"))
    # The call is pickled separately: a worker may lack what it imports, which the user must be
    # told.
    names: set[str] = set()
    placement = CallPlacement(
        network=workers.network,
        directory=_directory(cwd),
        named=cwd is not None,
        device=workers.device,
        echo=echoes(spark),
        tasks_are_nodes=tasks_are_nodes,
    )
    parts = (placement, feeding, _pickled(call, called, names))
    entry = "sparkdl.spark.functions.task:run_function_task"
    shipment = _shipment(spark, call, names) if workers.ship_modules else None
    if is_of_connect(spark):
        serve = partial(serve_call, num_workers, tls, on_report is not None)
        with queued(spark, tasks, profile):
            _, delivered = read_stage(
                workers,
                entry,
                cloudpickle.dumps((*parts, serve)),
                lambda header, pieces: None,
                begin_s=JOIN_S,
                patience_s=RESULTS_S,
                shipment=shipment,
                apart=True,
                on_report=on_report,
            )
        return results_of(delivered, num_workers)
    host, advertised = driver_hosts(spark)
    with (
        queued(spark, tasks, profile),
        Service(
            host, advertised_host=advertised, encrypted=tls, ports=driver_ports(spark)
        ) as connections,
        RunService(connections, num_workers, display(spark), on_report) as service,
    ):
        require_free_slots(spark, tasks, profile, ranks)
        job = WorkerJob(
            replace(workers, description=f"sparkdl: run {called} on {num_workers} workers"),
            cloudpickle.dumps(parts),
            entry,
            service.address,
            shipment,
            service.fail,
            apart=True,
            ended_early="the Spark job ended before its workers did: one exited without reporting "
            "why",
            unexplained=". The executor's log says why; a process killed for memory needs more "
            "spark.executor.memoryOverhead",
        )
        with job, watched(service, service.stacks, job.jobs, spark.sparkContext, tasks):
            watch(service, job.jobs)
        return results_of({row.rank: row.result for row in job.yielded()}, num_workers)


def _directory(wanted: str | os.PathLike[str] | None) -> str | None:
    """The directory that the user named, or the driver's own; None if that was deleted."""
    if wanted is not None:
        return os.path.abspath(wanted)
    try:
        return os.getcwd()
    except OSError:
        return None


def _shipment(spark: SparkSession, call: Call, names: set[str]) -> Shipment | None:
    """The modules of the user's own that a call needs."""
    script = call.function if isinstance(call.function, Script) else None
    names |= set() if script is None else script.imports()
    return ship(names, spark, [] if script is None else [str(Path(script.path).parent)])


def _pickled(call: Call, name: str, names: set[str]) -> bytes:
    """Pickle what every worker runs.

    Raises:
        ConfigError: it cannot be pickled; the message names the variable or argument at fault.
    """
    parts = {name: call.function}
    with suppress(TypeError, ValueError):  # its arguments do not fit, or nobody knows them
        if not isinstance(call.function, Script):
            bound = signature(call.function).bind(*call.args, **call.kwargs)
            parts |= {f"the argument '{each}'": value for each, value in bound.arguments.items()}
    parts |= {f"the argument {index}": each for index, each in enumerate(call.args, 1)}
    parts |= {f"the argument '{each}'": value for each, value in call.kwargs.items()}
    return pickled_or_refused(call, parts, names, ConfigError)


class TorchDistributor(pyspark_distributor.TorchDistributor):
    """pyspark's class with the same constructor and methods, whose ``run`` starts in a second.

    On the cluster (``local_mode=False``) ``run`` calls the function in a process forked for it,
    shows what the ranks print, and raises what they raise: where pyspark's returns None after a
    script has failed, this raises ``WorkerError``. Each Spark task is a node, as with pyspark's:
    ``LOCAL_RANK`` counts the ranks of a task, which see the task's GPUs, or none with
    ``use_gpu=False``. ``local_mode=True`` is left to pyspark.
    """

    def run(self, train_object: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Run a function or a script on ``num_processes`` workers.

        Args:
            train_object: the function, or the path of the script.
            *args: its arguments.
            **kwargs: the function's arguments by name.

        Returns:
            What the function returned on rank 0; None for a script.

        Raises:
            WorkerError: it raised on a worker.
            WorkerLostError: a worker's process ended.
            ConfigError: too few slots.
        """
        if self.local_mode:
            return super().run(train_object, *args, **kwargs)
        require_session(self.spark, connect=True)
        self._check_encryption()
        call = Call(function_of(train_object, kwargs, "train_object"), args, kwargs)
        processes = require_whole("num_processes", self.num_processes, 1)
        device = "cuda" if self.use_gpu else "cpu"
        workers = workers_of(self.spark, processes, device, ship_modules=True)
        return run_call(call, workers, tasks_are_nodes=True)[0]
