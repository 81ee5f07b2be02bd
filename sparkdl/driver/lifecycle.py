"""One run, from the initial center to the trained module."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from sparkdl.averager.coordination.membership import Tolerance, too_many_losses
from sparkdl.averager.coordination.run_state import Restart, RunSpec
from sparkdl.averager.run_events import WorkersRestarted
from sparkdl.averager.service.saving import CheckpointPlan, Snapshot
from sparkdl.averager.service.server import Averager, EdgeOptions
from sparkdl.averager.values.center import CenterSpec
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.driver.resizing import Resize, Slots
from sparkdl.driver.resuming import (
    SEVERAL,
    has_ended,
    identity,
    newest_checkpoint,
    plan_of,
    saved_on_sigterm,
)
from sparkdl.driver.serving import Measuring, Observers, Serving, setup_of, training_of
from sparkdl.errors import (
    CallbackError,
    CollectiveError,
    ConfigError,
    ModelError,
    SparkDLError,
    WorkerLostError,
)
from sparkdl.events import EpochSummary
from sparkdl.protocols import Layout, ModelBuilder
from sparkdl.replica import Replica
from sparkdl.replica.flat import has_gradient_hook
from sparkdl.replica.initial import WarmStart
from sparkdl.report import Recording
from sparkdl.user_code.tracebacks import add_note, message_of, text_of
from sparkdl.worker import Job

logger = logging.getLogger(__name__)

Launch = Callable[[Averager], AbstractContextManager[object]]
"""Starts the workers, and on exit ensures that none is left; failures go to ``Averager.fail``."""


@dataclass(frozen=True)
class Outcome:
    """What a run leaves behind.

    Attributes:
        module: the model with the last center's parameters and buffers, on the CPU.
        history: one summary per epoch.
        recording: what the workers' time went into, and other observations.
        stopped: why a callback stopped the training, if one did.
    """

    module: nn.Module
    history: list[EpochSummary]
    recording: Recording
    stopped: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where a run starts, and where it is served.

    Attributes:
        checkpoints: where to write checkpoints and whether to resume from one; none by default.
        warm_start: values to begin with, which fit the model; by default those that the model is
            built with. The job has to take care of the frozen ones.
        edge: where the averager listens, and its clock; whether it encrypts is the job's to say.
        slots: tells where workers could be added, if their number may change.
    """

    checkpoints: CheckpointPolicy | None = None
    warm_start: WarmStart | None = None
    edge: EdgeOptions = field(default_factory=EdgeOptions)
    slots: Slots | None = None


def as_builder(model: nn.Module | ModelBuilder) -> ModelBuilder:
    """A function that builds a fresh module: a copy of an instance, or the given function itself.

    Args:
        model: a module, or a function or class that takes no arguments and returns one.

    Raises:
        ModelError: the module has hooks on its parameters, which no copy would have.
    """
    if not isinstance(model, nn.Module):
        return model
    for name, each in model.named_parameters():
        if has_gradient_hook(each):
            raise ModelError(
                f"parameter '{name}' of the module that is given as model has a hook on its "
                "gradient, which torch copies with no parameter: the replicas would train without "
                "it. Give as model a class or function that registers the hook as it builds the "
                "module, or remove the hook"
            )
    return functools.partial(_copied, model)


def _copied(module: nn.Module) -> nn.Module:
    """A deep copy, whose parameters also have the attributes that optimizers may go by."""
    memo: dict[int, object] = {}  # an attribute may be another parameter
    copied = copy.deepcopy(module, memo)
    parameters = dict(copied.named_parameters())
    for name, each in module.named_parameters():
        if name in parameters:  # a module may say itself how it is copied
            parameters[name].__dict__.update(copy.deepcopy(each.__dict__, memo))
    return copied


def initial_center(replica: Replica, *, with_optimizer: bool) -> tuple[Layout, list[Tensor]]:
    """Take a replica's state as the first center, sharing its memory where dtypes allow.

    Args:
        replica: the freshly built replica.
        with_optimizer: whether optimizer state is part of the center. It starts at zero and is sent
            to nobody before the first round.
    """
    layout = replica.layout(with_optimizer=with_optimizer)
    segments = replica.segments(with_optimizer=with_optimizer)
    center = [
        tensor.detach().to(segment.center_dtype)
        for tensor, segment in zip(segments, layout, strict=True)
    ]
    for tensor, segment in zip(center, layout, strict=True):
        if segment.kind == "optimizer":
            tensor.zero_()
    return layout, center


def run(
    job: Job,
    world_size: int,
    launch: Launch,
    options: RunOptions = RunOptions(),
    observers: Observers = Observers(),  # noqa: B008
) -> Outcome:
    """Serve the rounds of one run from the initial center to the trained module.

    Args:
        job: what the workers train.
        world_size: number of workers, in the beginning if it may change.
        launch: starts as many as the averager has, given that.
        options: where the run starts, and where it is served.
        observers: who follows it.

    Raises:
        ConfigError: the newest checkpoint belongs to another training or other rows, another
            process writes checkpoints there, the strategy has state that no checkpoint can hold, or
            there are no held-out rows for the metrics.
        CheckpointError: the checkpoints cannot be read.
        ModelError: the optimizer cannot take a step, a worker built different frozen parameters
            than the driver, or as in ``Job.replica``.
        DataError: the rows cannot be trained on.
        CallbackError: a callback failed; if that was at the end, ``model`` is the outcome.
        TrainingError: the run could not be finished; see ``errors``.
        SystemExit: the process received SIGTERM, and a checkpoint has been written.
    """
    checkpoints, warm_start = options.checkpoints, options.warm_start
    resize = None if options.slots is None else Resize(job, options.slots)
    replica = job.replica()
    if warm_start is not None:
        warm_start.apply(replica.module)
    measuring = Measuring.of(job, replica.schedule.mode)
    try:
        layout, center = initial_center(
            replica, with_optimizer=job.strategy.needs.exchanges_optimizer_state
        )
    except Exception as error:  # the user's optimizer may raise anything
        raise ModelError(
            f"the optimizer's step fails on zero gradients: {message_of(error)}"
            f"{_which_optimizer(error, replica.module)}"
        ) from error
    plan, resumed = None, None
    with ExitStack() as held:
        if checkpoints is not None:
            if not job.strategy.needs.checkpointable:
                raise ConfigError(
                    f"{job.strategy} keeps state on its workers that checkpoints do not include. "
                    "Leave out checkpointPath, or shard_optimizer"
                )
            workers = world_size if resize is None else SEVERAL
            config = identity(job, workers, replica, layout, warm_start)
            plan = plan_of(checkpoints, job.epochs, config)
            held.enter_context(plan.store.held(checkpoints.application))
            resumed = newest_checkpoint(checkpoints, plan, job.epochs, workers)
            if resumed is not None:
                same = resumed.saved.description.get("training", checkpoints.training)
                plan = replace(plan, policy=replace(checkpoints, training=same))
        update, memory, kept_model = job.strategy.center_update, None, None
        progress = None if resumed is None else resumed.progress
        if resumed is not None:
            center, memory = resumed.read_center(layout, update)
            if observers.callbacks or has_ended(resumed, job.epochs):
                kept_model = resumed.read_kept_model(layout)

        spec = RunSpec(
            world_size=world_size,
            deadline_s=job.deadline_s,
            checkpoints=plan,
            frozen=replica.frozen.fingerprint,
            followed=bool(observers.callbacks or resize) or measuring is not None,
            measures=measuring is not None,
            metric=job.scheduler_metric,
        )
        center_spec = CenterSpec(
            layout=layout,
            wire_format=job.strategy.wire_format,
            update=update,
            fragments=job.strategy.fragments,
        )

        def workers_of(snapshot: Snapshot) -> int:
            progress = snapshot.restart.progress
            return world_size if progress is None else len(progress.positions)

        def open_averager(snapshot: Snapshot) -> Averager:
            lost = 0 if resize is None else resize.losses
            own = replace(
                spec,
                policy=job.strategy.round_policy,
                world_size=workers_of(snapshot),
                tolerance=Tolerance(job.survivable_losses - lost, job.min_workers),
            )
            return Averager(own, center_spec, snapshot, replace(options.edge, tls=job.tls))

        first = Snapshot(
            center=center,
            memory=memory,
            restart=Restart(progress=progress),
            kept_model=kept_model,
            resumed=resumed,
        )
        if resize is not None and resumed is not None:
            first = resize.resumed(first, resumed, world_size)
        recording = Recording(workers_of(first), most=job.max_workers or 0)
        recording.setup = setup_of(job, replica, layout, observers.settings)
        training = training_of(job, recording, progress, kept_model, plan, measuring)
        serve = Serving(job, observers, training, resumed, measuring, resize)
        averager = open_averager(first)
        losses: list[str] = []
        try:
            while True:
                finished = _finished(averager, launch, plan, serve, losses, job.resubmissions)
                resized = None if resize is None else resize.take()
                if finished and resized is None:
                    break
                snapshot = averager.snapshot() if resized is None else resized
                averager = open_averager(snapshot)
                recording.resize(averager.world_size)
            trained = serve.settle(averager)
            for values, tensor in zip(
                replica.segments(with_optimizer=False), trained, strict=False
            ):
                values.copy_(tensor)
            training.model = replica.release()
        except BaseException as error:
            history = averager.progress.history
            recording.end("failed", history, message_of(error))
            serve.calls.end(error)
            raise
        stopped, history = training.stopped, averager.progress.history
        recording.end(f"stopped: {stopped}" if stopped else "finished", history)
        outcome = Outcome(training.model, list(history), recording, stopped)
        try:
            serve.calls.end(None)
        except CallbackError as error:
            error.model = outcome
            raise
        return outcome


def _which_optimizer(error: Exception, module: nn.Module) -> str:
    if "closure" in text_of(error):
        return ". Use one that steps without a closure, such as SGD or Adam"
    if any(getattr(layer, "sparse", False) for layer in module.modules()):
        return (
            ". An optimizer for sparse gradients only has to keep its state on each replica: "
            "ParameterAveraging(average_optimizer_state=False)"
        )
    return ""


def _finished(
    averager: Averager,
    launch: Launch,
    plan: CheckpointPlan | None,
    serve: Serving,
    losses: list[str],
    resubmissions: int,
) -> bool:
    """Serve the workers to the end; returns False if one was lost and all have to restart.

    Callbacks are told of the loss first, and may end the training there.
    """
    try:
        with saved_on_sigterm(averager, plan), averager, launch(averager):
            serve(averager)
        return True
    except (WorkerLostError, CollectiveError) as error:
        if not resubmissions:
            raise
        losses.append(str(error))
        everyone = range(len(averager.progress.positions))
        lost = tuple(rank for rank in everyone if rank in error.ranks)
        if len(losses) > resubmissions:
            raise too_many_losses(losses, resubmissions) from error
    except ConfigError as error:
        if not losses:
            raise
        raise WorkerLostError(
            f"{losses[-1]}; and the workers could not be restarted: {error}"
        ) from error
    except SparkDLError as error:
        if losses:
            add_note(error, f"Before this, all workers were restarted: {'; '.join(losses)}")
        raise
    serve.tell(WorkersRestarted(losses[-1], lost))
    if serve.calls.training.stopped is not None:
        return True
    logger.warning(
        "%s; restarting all workers from epoch %d, step %d",
        losses[-1],
        averager.progress.epoch,
        max(position.step for position in averager.progress.positions),
    )
    return False
