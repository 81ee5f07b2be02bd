"""A fit whose run is served in the first task of the workers' own stage.

What comes back are bytes: a header, then the parameters and buffers of the trained module.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparkdl.averager.service.server import Averager, EdgeOptions
from sparkdl.callbacks import EarlyStopping, ModelCheckpoint, TimeBudget
from sparkdl.driver import Outcome
from sparkdl.errors import CallbackError, ConfigError, TrainingError, WorkerLostError
from sparkdl.estimator.checks.building import build
from sparkdl.estimator.checks.preflight import FitPlan
from sparkdl.estimator.checks.row_checks import Checked, RowChecks, run_checked
from sparkdl.process.lazy_compiler import compiler_deferred
from sparkdl.redaction import shown
from sparkdl.report.recording import Recording
from sparkdl.spark.catalyst.jvm import size_setting
from sparkdl.spark.diagnostics.run_service import RunService
from sparkdl.spark.launch.beside import ForwardedLogs, error_fields, read_stage, readable
from sparkdl.spark.launch.stage_task import StartWorkers
from sparkdl.spark.shipping import ship
from sparkdl.untrusted import read
from sparkdl.user_code.needed_modules import pickled

logger = logging.getLogger(__name__)

_BESIDE = (EarlyStopping, ModelCheckpoint, TimeBudget)
"""Callbacks that only decide, so that it does not matter where they do."""
_OUTCOME: Any = {
    "recording": object,
    "stopped": str | None,
    "checked": object,
    "layout": list[object],
}


def fit_in_stage(plan: FitPlan, module: nn.Module) -> tuple[Outcome, Checked]:
    """Train in a stage of its own, again if a worker was lost and another try is allowed.

    Args:
        plan: of the fit.
        module: as it was built here; it receives the trained values.

    Returns:
        The outcome, and what only the rows could tell.

    Raises:
        SparkDLError: as ``driver.run``.
    """
    workers, allowed, losses = plan.workers, plan.job.max_failures, 0
    spark = workers.frame.sparkSession
    checkpoints = plan.checkpoints
    if checkpoints is not None:
        # Executors have no JVM; what pyarrow cannot open is refused by name.
        checkpoints = replace(checkpoints, open_elsewhere=None, training=uuid.uuid4().hex)
    # Spark ends all workers with one.
    job = replace(plan.job, max_failures=0, min_workers=1)
    there = replace(workers, frame=None, profile=None)  # type: ignore[arg-type]
    remote = replace(plan, job=job, workers=there)
    while True:
        serve, names = partial(_serve, replace(remote, checkpoints=checkpoints)), set[str]()
        sent = (job, workers.network, workers.in_memory, workers.device, True, serve)
        payload = pickled(sent, names)
        try:
            result, _ = read_stage(
                workers,
                "sparkdl.spark.launch.task:run_worker_task",
                payload,
                partial(_received, plan, module),
                begin_s=job.deadline_s,
                shipment=ship(names, spark) if workers.ship_modules else None,
            )
            assert result is not None
            return result
        except WorkerLostError as error:
            losses += 1
            if losses > allowed:
                raise
            goes_on = "from the beginning, as there is no checkpointPath"
            if checkpoints is not None:
                goes_on = f"from the last checkpoint in {shown(checkpoints.path)}, if there is one"
                if checkpoints.resume == "never":
                    checkpoints = replace(checkpoints, resume="own")
            logger.warning("%s; all workers start again %s", error, goes_on)


def require_in_stage(plan: FitPlan, module: nn.Module) -> None:
    """Refuse what needs a driver that executors can reach, and warn of what has no effect.

    Args:
        plan: of the fit.
        module: whose values are to come back.

    Raises:
        ConfigError: there is such a thing, or Spark would not let the values pass.
    """
    spark = plan.workers.frame.sparkSession
    instead = "a session in the driver (spark-submit)"
    for each in plan.settings.driver_callbacks():
        if type(each) not in _BESIDE:
            raise ConfigError(
                f"{type(each).__name__} runs in the driver between rounds, but with Spark Connect "
                "those are out of this program's reach. Use EarlyStopping, ModelCheckpoint or "
                f"TimeBudget, which run beside rank 0, a WorkerCallback, or {instead}"
            )
    wanted = sum(each.nbytes for _, each in _state_of(module))
    most = size_setting(spark, "spark.driver.maxResultSize", "1g")
    if 0 < most < wanted:
        raise ConfigError(
            f"the model has {wanted / 1e6:.0f} MB of parameters and buffers. With Spark Connect "
            "they come back as the result of a Spark job, for which spark.driver.maxResultSize "
            f"allows {most / 1e6:.0f} MB: set it to more, and spark.driver.memory to several times "
            f"as much, or use {instead}"
        )
    if plan.job.min_workers > 1:
        logger.warning(
            "minWorkers=%d has no effect with Spark Connect: Spark ends all workers if one is "
            "lost, and all start again",
            plan.job.min_workers,
        )


def _serve(
    plan: FitPlan, host: str, workers: StartWorkers, logs: ForwardedLogs
) -> tuple[dict[str, Any], Iterable[memoryview]]:
    """Serve a fit in the first task; the last arguments are those of a ``stage_task.Serve``.

    Args:
        plan: of the fit, without the DataFrame.
        host: this one's name.
        workers: starts them.
        logs: keeps what they print.

    Returns:
        What ``_received`` reads.
    """

    @contextmanager
    def launch(averager: Averager) -> Iterator[None]:
        with RunService(averager, None, logs.show), workers(averager.address, averager.fail):
            yield

    header, edge = dict[str, Any](), EdgeOptions(host=host, advertised_host=host)
    with torch.inference_mode(False), compiler_deferred():
        checks = RowChecks(build(plan.job))
        try:
            outcome, checked = run_checked(plan, checks, launch, edge)
        except CallbackError as error:
            if error.model is None:
                raise
            (outcome, checked), header["error"] = error.model, error_fields(error)
    state = _state_of(outcome.module)
    header["outcome"] = {
        "recording": outcome.recording.as_json(),
        "stopped": outcome.stopped,
        "checked": checked.as_json(),
        "layout": _layout(state),
    }
    return header, [_bytes_of(each) for _, each in state]


def _received(
    plan: FitPlan, module: nn.Module, header: dict[str, Any], pieces: Iterator[bytes]
) -> tuple[Outcome, Checked] | None:
    """Read what ``_serve`` has returned; the values go into a module. None if it has failed."""
    if "outcome" not in header:
        return None
    with readable():
        fields = read(_OUTCOME, header["outcome"])
        recording = Recording.from_json(fields["recording"])
        checked = Checked.from_json(fields["checked"], plan.job.schema)
    state = _state_of(module)
    if fields["layout"] != _layout(state):
        raise TrainingError(
            "the model that came back has other parameters or buffers than the one that was built "
            "here: does its builder depend on where it runs?"
        )
    for _, each in state:
        whole = each.detach().contiguous()  # its own memory, if it is contiguous
        view, at = _bytes_of(whole), 0
        while at < len(view):
            piece = next(pieces, b"")
            if not 0 < len(piece) <= len(view) - at:
                raise TrainingError(
                    f"the model came back in part: a parameter or buffer of {len(view)} bytes has "
                    f"{at}, and the next piece {len(piece)}"
                )
            view[at : at + len(piece)] = piece
            at += len(piece)
        each.data.copy_(whole)
    return Outcome(module, list(recording.history), recording, fields["stopped"]), checked


def _state_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and buffers of a module, each once, by name."""
    return [*module.named_parameters(), *module.named_buffers()]


def _bytes_of(values: Tensor) -> memoryview:
    """The bytes of a tensor, in its own memory if that is contiguous."""
    return values.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _layout(state: Sequence[tuple[str, Tensor]]) -> list[list[Any]]:
    return [[name, str(each.dtype), list(each.shape)] for name, each in state]
