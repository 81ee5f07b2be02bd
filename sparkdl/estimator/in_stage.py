"""A fit whose run is served in the first task of the workers' own stage.

What comes back are bytes: a header, then the parameters and buffers of the trained module.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from sparkdl.averager.service.server import Averager, EdgeOptions
from sparkdl.callbacks import EarlyStopping, ModelCheckpoint, TimeBudget
from sparkdl.driver import Observers, Outcome, RunOptions, run
from sparkdl.errors import (
    CallbackError,
    ConfigError,
    DataError,
    TrainingError,
    WorkerLostError,
)
from sparkdl.estimator.checks.building import build
from sparkdl.estimator.checks.preflight import FitPlan
from sparkdl.estimator.checks.row_checks import Checked, RowChecks
from sparkdl.estimator.outputs import SharedParams
from sparkdl.feed.statistics.shards import NO_ROWS
from sparkdl.process.lazy_compiler import compiler_deferred
from sparkdl.redaction import shown
from sparkdl.report.recording import Recording
from sparkdl.spark.catalyst.jvm import setting, size_setting
from sparkdl.spark.closures.pickling import References, pickled
from sparkdl.spark.diagnostics.run_service import RunService
from sparkdl.spark.launch.answers import (
    Told,
    described,
    header_of,
    pieces,
    restored,
    show_told,
    understood,
)
from sparkdl.spark.launch.beside import FirstTask, RunInStage
from sparkdl.spark.launch.launcher import LEAVE_S
from sparkdl.spark.modules.shipping import ship
from sparkdl.spark.session.encryption import keeps_rows_in_memory

logger = logging.getLogger(__name__)

_BESIDE = (EarlyStopping, ModelCheckpoint, TimeBudget)
"""Callbacks that only decide, so that it does not matter where they do."""


def fit_in_stage(plan: FitPlan, params: SharedParams, module: nn.Module) -> tuple[Outcome, Checked]:
    """Train in a stage of its own, again if a worker was lost and another try is allowed.

    Args:
        plan: of the fit.
        params: the estimator.
        module: as it was built here; it receives the trained values.

    Returns:
        The outcome, and what only the rows could tell.

    Raises:
        SparkDLError: as ``driver.run``.
    """
    workers, allowed, losses = plan.workers, plan.job.max_failures, 0
    training = uuid.uuid4().hex
    # Spark ends all workers with one.
    job = replace(plan.job, max_failures=0, min_workers=1)
    away = replace(plan, job=job, workers=replace(workers, frame=None))  # type: ignore[arg-type]
    application = setting(workers.frame.sparkSession, "spark.app.id")
    while True:
        served = Served(away, params, application, training, again=losses > 0)
        try:
            return _received(_pieces_of(plan, served), plan, module)
        except WorkerLostError as error:
            losses += 1
            if losses > allowed:
                raise
            kept = plan.settings.checkpoint_path
            logger.warning(
                "%s; all workers start again %s",
                error,
                "from the beginning, as there is no checkpointPath"
                if kept is None
                else f"from the last checkpoint in {shown(kept)}, if there is one",
            )


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
    for each in plan.settings.driver_callbacks:
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
    if plan.settings.min_workers > 1:
        logger.warning(
            "minWorkers=%d has no effect with Spark Connect: Spark ends all workers if one is "
            "lost, and all start again",
            plan.settings.min_workers,
        )


@dataclass(frozen=True)
class Served:
    """Serves a fit in the first task; see ``launch.beside.Serve``.

    Attributes:
        plan: of the fit, without the DataFrame.
        params: the estimator.
        application: the one that trains.
        training: identifies this fit in its checkpoints.
        again: whether all workers are started again, because one was lost.
    """

    plan: FitPlan
    params: SharedParams
    application: str | None
    training: str
    again: bool

    def __call__(self, first: FirstTask) -> Iterator[bytes]:
        """Serve it; yields the header and the values."""
        told = Told()
        header: dict[str, Any] = {}
        values: Sequence[Tensor] = ()
        checks: RowChecks | None = None
        outcome: Outcome | None = None
        with told.noted(), torch.inference_mode(False), compiler_deferred():
            try:
                checks = self._checks()
                outcome = self._run(checks, first, told)
            except Exception as error:
                header["error"] = described(error)
                if isinstance(error, CallbackError):
                    outcome = error.model
        if outcome is not None and checks is not None:
            values = [each for _, each in _state_of(outcome.module)]
            header["outcome"] = {
                "recording": outcome.recording.as_json(),
                "stopped": outcome.stopped,
                "checked": checks.result().as_json(),
                "layout": _layout(_state_of(outcome.module)),
            }
        yield from pieces(header | told.header, map(_bytes_of, values))

    def _checks(self) -> RowChecks:
        job = self.plan.job
        replica = build(
            job.model,
            job.optimizer,
            job.loss,
            job.seed,
            clip_norm=job.clip_norm,
            features_as_kwargs=job.features_as_kwargs,
        )
        return RowChecks(replica, self.params)

    def _run(self, checks: RowChecks, first: FirstTask, told: Told) -> Outcome:
        plan, settings = self.plan, self.plan.settings

        @contextmanager
        def launch(averager: Averager) -> Iterator[None]:
            with (
                RunService(averager, None, told.show),
                first.workers(averager.address, averager.fail),
            ):
                yield

        checkpoints = settings.checkpoint_policy(self.application)
        if checkpoints is not None:
            # There is no JVM here; what pyarrow cannot open is refused by name.
            checkpoints = replace(checkpoints, open_elsewhere=None, training=self.training)
            if self.again and checkpoints.resume == "never":
                checkpoints = replace(checkpoints, resume="own")
        return run(
            plan.job,
            plan.workers.num_workers,
            launch,
            RunOptions(
                checkpoints=checkpoints,
                warm_start=plan.warm_start,
                edge=EdgeOptions(host=first.host, advertised_host=first.host),
            ),
            Observers(
                check=partial(checks.check, plan),
                callbacks=settings.driver_callbacks,
            ),
        )


def _pieces_of(plan: FitPlan, served: Served) -> Iterator[bytes]:
    """What a stage of workers answers; see ``RunInStage``."""
    workers, job = plan.workers, served.plan.job
    spark, used = workers.frame.sparkSession, References()
    in_memory = keeps_rows_in_memory(spark, workers.store_in)
    payload = pickled((job, workers.network, in_memory, served), used)
    return RunInStage(
        spark=spark,
        entry="sparkdl.spark.launch.task:run_worker_task",
        begin_s=job.deadline_s,
        payload=payload,
        further=(workers.device, True),
        tasks=workers.num_tasks,
        ranks_a_task=workers.ranks_a_task,
        device=workers.device,
        shipment=ship(used.names, spark) if workers.ship_modules else None,
        rows=workers,
    ).answered(LEAVE_S)


def _state_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and buffers of a module, each once, by name."""
    return [*module.named_parameters(), *module.named_buffers()]


def _bytes_of(values: Tensor) -> memoryview:
    """The bytes of a tensor, in its own memory if that is contiguous."""
    return values.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _received(pieces: Iterator[bytes], plan: FitPlan, module: nn.Module) -> tuple[Outcome, Checked]:
    """Read what ``Served`` has yielded; the values go into a module.

    Raises:
        SparkDLError: the run has failed.
    """
    with contextlib.closing(pieces):  # type: ignore[type-var] # it is a generator
        header = header_of(pieces)
        if header is None:  # Spark starts no task for what turns out empty while it plans
            raise DataError(NO_ROWS)
        show_told(header)
        result = None
        if "outcome" in header:
            with understood():
                recording, checked, stopped, layout = _outcome(header["outcome"], plan)
            state = _state_of(module)
            if layout != _layout(state):
                raise TrainingError(
                    "the model that came back has other parameters or buffers than the one that "
                    "was built here: does its builder depend on where it runs?"
                )
            _fill(pieces, [each for _, each in state])
            result = Outcome(module, list(recording.history), recording, stopped), checked
        for _ in pieces:  # none: the other tasks end meanwhile
            pass
    if "error" in header:
        error = restored(header["error"])
        if isinstance(error, CallbackError):
            error.model = result
        raise error
    assert result is not None
    return result


def _outcome(told: dict[str, Any], plan: FitPlan) -> tuple[Recording, Checked, str | None, Any]:
    """What a header says of the outcome; raises what ``understood`` takes."""
    stopped = told["stopped"]
    if not isinstance(stopped, (str, NoneType)):
        raise TypeError(f"the reason to stop is {stopped!r:.100}")
    checked = Checked.from_json(told["checked"], plan.job.schema)
    return Recording.from_json(told["recording"]), checked, stopped, told["layout"]


def _layout(state: Sequence[tuple[str, Tensor]]) -> list[list[Any]]:
    return [[name, str(each.dtype), list(each.shape)] for name, each in state]


def _fill(pieces: Iterator[bytes], values: Sequence[Tensor]) -> None:
    for each in values:
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
