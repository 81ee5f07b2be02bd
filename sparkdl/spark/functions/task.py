"""What a worker of ``sparkdl.run`` does: set up what torchrun would, and call the function."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import cloudpickle
import pyarrow as pa
import torch
import torch.distributed as dist

from sparkdl.collective import Network
from sparkdl.collective.group import ROLL_CALL_S, is_of_backend, leave_group
from sparkdl.collective.network import (
    Meeting,
    hang_up,
    interface_settings,
    local_address,
    meet,
    separate_groups,
)
from sparkdl.errors import DataError, DisconnectedError, StoppedError
from sparkdl.feed.feed import Feed, FeedOptions
from sparkdl.feed.schema import FeedSchema
from sparkdl.feed.shards import check_statistics
from sparkdl.process.interrupts import Interrupted
from sparkdl.process.lazy_compiler import defer_compiler
from sparkdl.reshuffle import RowExchange, RowServer
from sparkdl.reshuffle.exchange import Everyone
from sparkdl.spark.cluster.devices import choose_device
from sparkdl.spark.cluster.slots import VISIBLE
from sparkdl.spark.diagnostics.run_client import JOIN_S, Output, RunClient
from sparkdl.spark.functions.program import Script, enter, leaving_with_zero, run_script
from sparkdl.spark.functions.worker import FedRows, FunctionWorker, working_as
from sparkdl.spark.launch.assignment import Assignment
from sparkdl.spark.pickling import pickled_result
from sparkdl.spark.rows.scratch import row_directory
from sparkdl.transport.connecting import ServiceAddress
from sparkdl.user_code.needed_modules import advice
from sparkdl.user_code.tracebacks import TRACEBACK_CHARACTERS, message_of, text_of, traceback_of

logger = logging.getLogger(__name__)

STORE_TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others to form a group: torch's own default."""


@dataclass(frozen=True)
class Call:
    """What every worker runs."""

    function: Callable[..., Any] | Script
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class CallPlacement:
    """Where every worker runs it.

    Attributes:
        network: how the workers reach each other.
        directory: the working directory; None for the executor's.
        named: whether the user named it.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        echo: whether what is printed is also written to the process's own streams.
        tasks_are_nodes: whether a rank sees only its task of its host, and the task's GPUs, as with
            pyspark's TorchDistributor.
    """

    network: Network
    directory: str | None
    named: bool
    device: str
    echo: bool
    tasks_are_nodes: bool


@dataclass(frozen=True, kw_only=True)
class Feeding:
    """How every worker feeds its rows.

    Attributes:
        schema: what the columns become.
        seed: for the order of the rows.
        options: of the feed.
        in_memory: what demands that rows stay in memory; None if they may be on a disk.
    """

    schema: FeedSchema
    seed: int
    options: FeedOptions
    in_memory: str | None


def run_function_task(
    payload: bytes,
    address: tuple[str, int, str, str | None],
    assigned: Assignment,
    batches: Iterator[pa.RecordBatch],
) -> bytes | None:
    """Call the user's function as one of several ranks, in a process that ends with it.

    Args:
        payload: the pickled ``CallPlacement``, the ``Feeding`` or None, and the ``Call``, pickled
            separately; what follows is for others.
        address: the fields of the run service's ``ServiceAddress``.
        assigned: the rank, its cores and its GPU.
        batches: the rank's rows; meaningless without a ``Feeding``.

    Returns:
        The pickled result; None if the run has failed, and the driver knows why.

    Raises:
        DisconnectedError: the driver cannot be reached.
    """
    torch.set_num_threads(assigned.cores)
    try:
        with RunClient(ServiceAddress(*address), assigned.rank, JOIN_S) as driver:
            return _report_errors(
                driver, assigned.rank, lambda: _serve(payload, driver, assigned, batches)
            )
    except DisconnectedError:
        raise  # the driver knows nothing of this worker; Spark can tell it
    except StoppedError as error:
        logger.info("rank %d leaves: %s", assigned.rank, error)
        return None


def _serve(
    payload: bytes,
    driver: RunClient,
    assigned: Assignment,
    batches: Iterator[pa.RecordBatch],
) -> bytes:
    placement: CallPlacement
    feeding: Feeding | None
    placement, feeding, pickled_call, *_ = cloudpickle.loads(payload)
    if placement.tasks_are_nodes:
        _show_gpus(assigned, placement.device)
    device = choose_device(placement.device, assigned.gpu, assigned.rank)
    defer_compiler()
    with (
        _rows(feeding, batches, driver, assigned.rank, device, placement.network) as rows,
        _surroundings(placement, driver, assigned, device, rows) as met,
        Output(driver.send_lines) as output,
        output.capture(echo=placement.echo),
    ):
        enter(placement.directory, placement.named, assigned.rank, driver.gather)
        call: Call = cloudpickle.loads(pickled_call)
        _hold_groups()
        separate_groups()
        result = pickled_result(_call(call))
        _end_program()
        leave_group()
    # Not left to the end of the process: rank 0 keeps the store, which others may still need.
    hang_up({driver.address.host_and_port[1], met.master[1]})
    driver.say_returned()
    driver.finish()
    return result


@contextmanager
def _rows(
    feeding: Feeding | None,
    batches: Iterator[pa.RecordBatch],
    driver: RunClient,
    rank: int,
    device: str,
    network: Network,
) -> Iterator[FedRows | None]:
    """Read the worker's rows, find out whether all workers' can be fed, and exchange them."""
    if feeding is None:
        for _ in batches:  # Spark reuses a Python process only if its input was read to the end
            pass
        yield None
        return
    with Feed(
        feeding.schema,
        batch_size=1,
        seed=feeding.seed,
        rank=rank,
        directory=row_directory(feeding.in_memory),
        device=device,
        options=feeding.options,
    ) as feed:
        statistics = driver.gather_statistics(feed.fill(batches))
        schema = feeding.schema
        check_statistics(statistics, schema.columns)
        feed.settle([column.longest for column in statistics.columns])
        if not feeding.options.exchange_rows:
            yield feed, statistics.shard_rows
            return
        token, tls = driver.address.token, driver.address.fingerprint is not None
        with RowServer(local_address(network), token, JOIN_S, tls=tls) as row_server:
            told = driver.gather({"row_server": row_server.address})
            everyone = Everyone.of(statistics.parts, [each.get("row_server") for each in told])
            exchange = RowExchange(
                rank=rank,
                server=row_server,
                token=token,
                everyone=lambda: everyone,
                specs=feeding.schema.stored,
                seed=feeding.seed,
                deadline_s=JOIN_S,
                tls=tls,
            )
            feed.reshuffle(1, exchange)
            # No worker may close its server before all have fetched their rows.
            now = driver.gather({"rows": feed.rows})
        yield feed, tuple(each["rows"] for each in now)


def _report_errors(driver: RunClient, rank: int, body: Callable[[], bytes]) -> bytes | None:
    try:
        return body()
    except (StoppedError, Interrupted):
        raise
    except BaseException as error:  # the user's code may raise anything
        of_exchange = isinstance(error, RuntimeError) and is_of_backend(error)
        if of_exchange:
            # The worker that broke the exchange reports first if it can: its error says more.
            time.sleep(ROLL_CALL_S)
        text = traceback_of(error)
        what = f"rank {rank} on {socket.gethostname()}: {message_of(error)}"
        if isinstance(error, ModuleNotFoundError):
            what = f"{what}\n{advice(error)}"
        if isinstance(error, DataError):
            driver.report_failure(text_of(error, TRACEBACK_CHARACTERS), text, of_data=True)
        else:
            driver.report_failure(f"{what}\n\n{text}", text, of_exchange=of_exchange)
        _end_program()
        return None


@contextmanager
def _surroundings(
    placement: CallPlacement,
    driver: RunClient,
    assigned: Assignment,
    device: str,
    rows: FedRows | None,
) -> Iterator[Meeting]:
    """Provide the variables that torchrun sets, the store behind them, and ``current_worker``."""
    rank, network = assigned.rank, placement.network
    met = meet(rank, driver.gather, device=device, network=network, timeout=STORE_TIMEOUT)
    settings = {
        **_torchrun_variables(met),
        **(_variables_of_task(assigned, met) if placement.tasks_are_nodes else {}),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(assigned.cores)),
        **interface_settings(torch.device(device), met.address),
    }
    if device == "cpu":
        # Like accelerate's own launcher: without it each rank would silently train alone.
        settings["ACCELERATE_USE_CPU"] = os.environ.get("ACCELERATE_USE_CPU", "true")
    worker = FunctionWorker(met, device, driver, rows, gpu=assigned.gpu)
    os.environ.update(settings)
    with working_as(worker):
        yield met


def _torchrun_variables(met: Meeting) -> dict[str, str]:
    hosts = list(dict.fromkeys(met.hosts))
    return {
        "MASTER_ADDR": met.master[0],
        "MASTER_PORT": str(met.master[1]),
        "RANK": str(met.rank),
        "WORLD_SIZE": str(met.world_size),
        "LOCAL_RANK": str(met.local_rank),
        "LOCAL_WORLD_SIZE": str(met.local_world_size),
        "GROUP_RANK": str(hosts.index(met.hosts[met.rank])),
        "GROUP_WORLD_SIZE": str(len(hosts)),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(met.rank),
        "ROLE_WORLD_SIZE": str(met.world_size),
        "TORCHELASTIC_RUN_ID": "sparkdl",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # The store already exists, on a port that can no longer be taken.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _variables_of_task(assigned: Assignment, met: Meeting) -> dict[str, str]:
    """The variables that pyspark's TorchDistributor sets differently, or in addition."""
    in_task = len(assigned.of_task)
    return {
        "LOCAL_RANK": str(assigned.rank % in_task),
        "LOCAL_WORLD_SIZE": str(in_task),
        "GROUP_RANK": str(assigned.task),
        "GROUP_WORLD_SIZE": str(met.world_size // in_task),
        "NODE_RANK": str(assigned.task),
    }


def _show_gpus(assigned: Assignment, device: str) -> None:
    """Make CUDA see the task's GPUs, in the order of its ranks, or none."""
    if device == "cpu":
        os.environ[VISIBLE] = ""
    elif assigned.gpu is not None:
        os.environ.setdefault(VISIBLE, ",".join(gpu for gpu in assigned.of_task if gpu))


_held: list[Any] = []
"""Every process group that the user has created."""


def _hold_groups() -> None:
    """Keep the groups that the user creates alive as long as the process.

    A DDP model that is the last to hold its group destroys it with Python's lock held, for which
    gloo's threads may be waiting; the user's models are freed when the function returns.
    """

    def holding(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def made(*args: Any, **kwargs: Any) -> Any:
            group = make(*args, **kwargs)
            _held.append(dist.group.WORLD if group is None else group)
            return group

        return made

    for name in ("init_process_group", "new_group"):
        setattr(dist, name, holding(getattr(dist, name)))


def _end_program() -> None:
    """Do what Python does at a program's end, while the driver still shows what is printed."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for non-daemon threads
    atexit._run_exitfuncs()


def _call(call: Call) -> Any:
    with leaving_with_zero():
        if not isinstance(call.function, Script):
            return call.function(*call.args, **call.kwargs)
        run_script(call.function, [str(argument) for argument in call.args])
    return None
