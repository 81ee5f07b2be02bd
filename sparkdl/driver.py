"""The driver's half of a run: an initial center in, rounds in between, a trained module out.

Knows nothing of Spark: whoever starts the workers is handed in as ``launch``.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from sparkdl.averager.center_update import Memory
from sparkdl.averager.kept import KeptModel, KeptState
from sparkdl.averager.membership import Tolerance, too_many_losses
from sparkdl.averager.progress import Progress
from sparkdl.averager.run_events import (
    EpochCounted,
    EpochValidated,
    NewRows,
    WorkersRestarted,
)
from sparkdl.averager.run_events import RunEvent as Event
from sparkdl.averager.saving import CheckpointPlan, Resumed
from sparkdl.averager.server import Averager
from sparkdl.callbacks.base import Callback, Calls, Training
from sparkdl.checkpoint.policy import CheckpointPolicy, require_same
from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.errors import (
    CollectiveError,
    ConfigError,
    DataError,
    ModelError,
    PreemptedError,
    SparkDLError,
    WorkerLostError,
)
from sparkdl.events import EpochSummary
from sparkdl.feed.columns import FeedSchema
from sparkdl.feed.facts import DataFacts, check_facts
from sparkdl.initial import drawn_apart
from sparkdl.measuring import Measuring
from sparkdl.protocols import (
    Layout,
    LossFunction,
    ModelBuilder,
    OptimizerBuilder,
    SchedulerBuilder,
)
from sparkdl.randomness import borrowed_random_numbers
from sparkdl.replica import Replica
from sparkdl.report import Recording, Setup
from sparkdl.training import has_ended, identity, require_progress, require_same_rows
from sparkdl.warm_start import WarmStart
from sparkdl.worker import Job

logger = logging.getLogger(__name__)

Launch = Callable[[Averager], AbstractContextManager[object]]
"""Starts the workers and, on leaving, sees that none is left; failures go to ``Averager.fail``."""


SIGTERM_S = 4.0
"""Seconds to wait for the next commit after SIGTERM; whoever sent it may kill us after ten."""


@dataclass(frozen=True)
class Outcome:
    """What a run leaves behind.

    Attributes:
        module: the model with the last center's parameters and buffers, on the CPU.
        history: one summary an epoch.
        recording: what the workers' time went into, and more to look at.
        stopped: why a callback has stopped the training, if one has.
    """

    module: nn.Module
    history: list[EpochSummary]
    recording: Recording
    stopped: str | None = None


def as_builder(model: nn.Module | ModelBuilder) -> ModelBuilder:
    """A function that builds a module of one's own: a copy of an instance, or the function given.

    Args:
        model: a module, or a function or class that takes no arguments and returns one.
    """
    if isinstance(model, nn.Module):
        return functools.partial(copy.deepcopy, model)
    return model


def build_replica(
    model: ModelBuilder,
    optimizer: OptimizerBuilder,
    loss: LossFunction,
    seed: int,
    scheduler: SchedulerBuilder | None = None,
    *,
    features_as_kwargs: bool = False,
) -> Replica:
    """Build a replica as every worker does, leaving the caller's random state as it was."""
    with borrowed_random_numbers(seed):
        return Replica(
            model(), optimizer, loss, scheduler=scheduler, features_as_kwargs=features_as_kwargs
        )


def first_replica(job: Job) -> Replica:
    """Build the replica with whose values a training starts: the same for the same seed.

    Raises:
        ModelError: the model can be built here, but not in a process of its own.
    """
    with drawn_apart(job.model, job.seed, job.deadline_s) as overwrite:
        # A schedule may turn momentum on, for which the optimizer then keeps state.
        replica = build_replica(job.model, job.optimizer, job.loss, job.seed, job.scheduler)
        overwrite(replica)
    return replica


def initial_center(replica: Replica, *, with_optimizer: bool) -> tuple[Layout, list[Tensor]]:
    """Take a replica's state as the first center, sharing its memory where dtypes allow.

    Args:
        replica: freshly built.
        with_optimizer: whether optimizer state is part of the center. It starts at zero and is
            not sent to anyone before the first round.
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
    *,
    host: str = "127.0.0.1",
    advertised_host: str | None = None,
    checkpoints: CheckpointPolicy | None = None,
    check: Callable[[DataFacts], None] = lambda facts: None,
    on_event: Callable[[Event], None] = lambda event: None,
    callbacks: Sequence[Callback] = (),
    warm_start: WarmStart | None = None,
    settings: Mapping[str, object] | None = None,
) -> Outcome:
    """Serve the rounds of one run from the initial center to the trained module.

    Args:
        job: what the workers train.
        world_size: number of workers.
        launch: starts them, given the averager.
        host: interface to bind the averager to.
        advertised_host: the name under which workers reach it.
        checkpoints: where to write checkpoints and whether to go on from one; none by default.
        check: called with what the workers found in their rows, before any of them trains on
            those; what it raises ends the run.
        on_event: called in this thread for the data's facts and each window and epoch reported.
        callbacks: called in this thread too, and may end the training.
        warm_start: values to begin with, which fit the model; of those that are frozen ``job`` has
            to see. By default those that the model is built with.
        settings: what else defines the training, by name, for those who look at it.

    Raises:
        ConfigError: the newest checkpoint is of another training or of other rows, another process
            writes checkpoints there, the strategy has state that no checkpoint holds, or metrics
            have no rows to be measured on.
        CheckpointError: the checkpoints cannot be read.
        ModelError: the optimizer cannot take a step, a worker has built other frozen parameters
            than the driver, or as ``first_replica`` does.
        DataError: the rows cannot be trained on.
        CallbackError: a callback failed.
        TrainingError: the run could not be finished; see ``errors``.
        SystemExit: the process was told to end by SIGTERM, and a checkpoint has been written.
    """
    replica = first_replica(job)
    if warm_start is not None:
        warm_start.apply(replica.module)
    measuring = Measuring.of(job, replica.schedule.mode)
    try:
        layout, center = initial_center(
            replica, with_optimizer=job.strategy.needs.exchanges_optimizer_state
        )
    except Exception as error:  # the user's optimizer may raise anything
        raise ModelError(
            f"the optimizer's step fails on zero gradients: {type(error).__name__}: {error}"
            f"{_which_optimizer(error, replica.module)}"
        ) from error
    plan, resumed = None, None
    with ExitStack() as held:
        if checkpoints is not None:
            if not job.strategy.needs.checkpointable:
                raise ConfigError(
                    f"{job.strategy} keeps state on its workers that no checkpoint holds. Leave "
                    "out checkpointPath, or shard_optimizer"
                )
            config = identity(job, world_size, replica, layout, warm_start)
            plan = _plan(checkpoints, job.epochs, config)
            held.enter_context(plan.store.held(checkpoints.application))
            resumed = _find(checkpoints, plan, job.epochs, world_size)
        update, memory, kept_model = job.strategy.center_update, None, None
        if resumed is not None:
            center, memory = resumed.read_center(layout, update)
            if callbacks or has_ended(resumed, job.epochs):
                kept_model = resumed.read_kept_model(layout)

        def open_averager(
            center: list[Tensor],
            memory: Memory | None,
            progress: Progress | None,
            kept: Mapping[int, KeptState],
            kept_model: KeptModel | None,
        ) -> Averager:
            return Averager(
                layout,
                center,
                world_size,
                job.strategy.wire_format,
                update=update,
                memory=memory,
                policy=job.strategy.round_policy,
                fragments=job.strategy.fragments,
                host=host,
                advertised_host=advertised_host,
                deadline_s=job.deadline_s,
                plan=plan,
                resumed=resumed,
                progress=progress,
                kept=kept,
                tolerance=Tolerance(job.survivable_losses, job.min_workers),
                tls=job.tls,
                frozen=replica.frozen.fingerprint,
                followed=bool(callbacks) or measuring is not None,
                measures=measuring is not None,
                metric=job.scheduler_metric,
                kept_model=kept_model,
            )

        progress = None if resumed is None else resumed.progress
        training = _training(job, world_size, progress, kept_model, plan, measuring)
        training.recording.setup = setup_of(job, replica, layout, settings or {})
        serve = _Serving(
            _Examiner(job, check, resumed),
            on_event,
            callbacks,
            training,
            job.schema,
            measuring,
        )
        averager = open_averager(center, memory, progress, {}, kept_model)
        losses: list[str] = []
        try:
            while not _finished(averager, launch, plan, serve, losses, job.resubmissions):
                averager = open_averager(
                    averager.center,
                    averager.memory,
                    averager.progress,
                    averager.kept,
                    averager.kept_model,
                )
            trained = serve.settle(averager)
            for values, tensor in zip(
                replica.segments(with_optimizer=False), trained, strict=False
            ):
                values.copy_(tensor)
            training.model = replica.release()
        except BaseException as error:
            training.recording.end("failed", averager.history, f"{type(error).__name__}: {error}")
            serve.calls.end(error)
            raise
        stopped = training.stopped
        training.recording.end(f"stopped: {stopped}" if stopped else "finished", averager.history)
        serve.calls.end(None)
        return Outcome(training.model, averager.history, training.recording, stopped)


def _which_optimizer(error: Exception, module: nn.Module) -> str:
    if "closure" in str(error):
        return ". It has to be one that steps without a closure, such as SGD or Adam"
    if any(getattr(layer, "sparse", False) for layer in module.modules()):
        return (
            ". One for sparse gradients alone has to leave each replica its own state, of which "
            "then no zero is needed: ParameterAveraging(average_optimizer_state=False)"
        )
    return ""


def _finished(
    averager: Averager,
    launch: Launch,
    plan: CheckpointPlan | None,
    serve: _Serving,
    losses: list[str],
    resubmissions: int,
) -> bool:
    """Serve the workers to the end; returns False if one was lost and all are to start again."""
    try:
        with _saved_on_sigterm(averager, plan), averager, launch(averager):
            serve(averager)
        return True
    except (WorkerLostError, CollectiveError) as error:
        if not resubmissions:
            raise
        losses.append(str(error))
        if len(losses) > resubmissions:
            raise too_many_losses(losses, resubmissions) from error
    except ConfigError as error:
        if not losses:
            raise
        raise WorkerLostError(
            f"{losses[-1]}; and the workers could not be started again: {error}"
        ) from error
    except SparkDLError as error:
        if losses:
            error.add_note(f"Before this all workers were started again: {'; '.join(losses)}")
        raise
    serve.tell(WorkersRestarted(losses[-1]))
    logger.warning(
        "%s; all workers are started again and go on from epoch %d, step %d",
        losses[-1],
        averager.progress.epoch,
        max(position.step for position in averager.progress.positions),
    )
    return False


def setup_of(job: Job, replica: Replica, layout: Layout, settings: Mapping[str, object]) -> Setup:
    """What is trained, and how, for those who look at it."""
    strategy = job.strategy
    parameters = list(replica.module.parameters())
    return Setup(
        model=type(replica.module).__name__,
        strategy=repr(strategy),
        period=getattr(strategy, "period", None),
        aggregation=getattr(strategy, "aggregation", None),
        collective=strategy.needs.collective,
        wire_dtype=getattr(strategy, "wire_dtype", None),
        epochs=job.epochs,
        batch_size=job.batch_size,
        parameters=sum(each.numel() for each in parameters),
        trained=sum(each.numel() for each in parameters if each.requires_grad),
        model_bytes=sum(
            segment.numel * segment.dtype.itemsize
            for segment in layout
            if segment.kind in ("parameters", "buffers")
        ),
        settings=settings,
    )


def _training(
    job: Job,
    world_size: int,
    progress: Progress | None,
    kept_model: KeptModel | None,
    plan: CheckpointPlan | None,
    measuring: Measuring | None,
) -> Training:
    """What callbacks see when a training begins or goes on."""
    history = () if progress is None else progress.history
    # Of an epoch behind which nothing was committed the workers validate once more.
    known = len(history) if progress is None or progress.rounds else len(history) - 1
    kept_epoch = None if kept_model is None else kept_model.epoch
    metrics = {} if measuring is None else measuring.higher_is_better
    history = history[: max(known, 0)]
    recording = Recording(world_size, history=history)
    return Training(
        job.epochs,
        history,
        kept_epoch,
        metrics,
        recording=recording,
        step=0 if progress is None else max(each.step for each in progress.positions),
        resumed=progress is not None,
        identity=None if plan is None else _name_of(plan),
        features_as_kwargs=job.features_as_kwargs,
    )


def _name_of(plan: CheckpointPlan) -> str:
    """The same for all fits that go on from each other's checkpoints."""
    told = json.dumps([plan.store.path, plan.config], sort_keys=True, default=repr)
    return hashlib.sha256(told.encode()).hexdigest()[:32]


class _Serving:
    """Looks at what the workers report, lets them train, and passes it on.

    Args:
        examine: looks at their rows.
        on_event: told of what is reported.
        callbacks: told of what concerns them.
        training: what they see.
        schema: the columns that are trained on.
        measuring: computes the metrics; None without any.

    Attributes:
        calls: to the callbacks.
    """

    def __init__(
        self,
        examine: _Examiner,
        on_event: Callable[[Event], None],
        callbacks: Sequence[Callback],
        training: Training,
        schema: FeedSchema,
        measuring: Measuring | None = None,
    ) -> None:
        self._schema = schema
        self._examine = examine
        self._measuring = measuring
        self._on_event = on_event
        self.calls = Calls(callbacks, training)

    def __call__(self, averager: Averager) -> None:
        """Serve the workers of an averager to the end."""
        for event in averager.events():
            try:
                self._note(averager, event)
            except SparkDLError as error:
                # Workers wait for the answer; the launch waits for them to leave.
                averager.fail(error)
                raise

    def tell(self, event: Event) -> None:
        """Pass on what has happened to whoever is told."""
        training = self.calls.training
        training.recording.note(event)
        if isinstance(event, DataFacts):
            lengths = [column.longest for column in event.columns]
            training.schema = self._schema.of_lengths(lengths)
        if training.schema is not None:  # times come while nobody knows what the rows are
            self._on_event(event)
        self.calls(event)

    def settle(self, averager: Averager) -> Sequence[Tensor]:
        """After the end, see that all is in a checkpoint; returns the model's segments."""
        training = self.calls.training
        if training.stopped is not None:
            logger.info("the training was stopped: %s", training.stopped)
        kept = averager.kept_model
        if training.stopped is not None or kept is not None:
            averager.save_center()
        if kept is None:
            return averager.center
        logger.info("the model of epoch %d is returned", kept.epoch)
        return kept.values

    def _note(self, averager: Averager, event: Event) -> None:
        if isinstance(event, NewRows):
            self._examine(DataFacts.of([replace(event.shard, complete=False)]))
            averager.approve(event.rank)
            return
        if isinstance(event, EpochCounted):
            assert self._measuring is not None
            averager.measured(event.epoch, self._measuring(event))
            return
        is_news = not isinstance(event, DataFacts) or self._examine(event)
        if is_news:
            self.tell(event)
        training = self.calls.training
        if isinstance(event, EpochValidated) and training.kept_epoch == event.summary.epoch:
            kept = averager.kept_model
            if kept is None or kept.epoch != event.summary.epoch:  # one of a checkpoint is the same
                averager.keep_model(event.summary.epoch)
        if training.stopped is not None:
            averager.stop(training.stopped)
        elif isinstance(event, DataFacts):
            averager.start()
        elif isinstance(event, EpochValidated):
            averager.approve_epoch(event.summary.epoch)


class _Examiner:
    """Looks at what the workers found in their rows, before they train on them.

    Args:
        job: what is trained.
        check: the caller's own checks.
        resumed: the checkpoint with which this process began, if there was one.
    """

    def __init__(
        self, job: Job, check: Callable[[DataFacts], None], resumed: Resumed | None
    ) -> None:
        self._epochs = job.epochs
        self._columns = job.schema.columns
        self._check = check
        self._resumed = resumed
        self._first: DataFacts | None = None
        self._begun = False

    def __call__(self, facts: DataFacts) -> bool:
        """Raise what is wrong with the rows; returns whether it is the first look at them.

        Args:
            facts: what was found, perhaps only in some rows, or by one worker.
        """
        if not facts.complete:
            if self._first is not None:
                return False  # all rows were seen before the workers were started again
            check_facts(facts, self._columns)
            self._check(facts)
            is_news, self._begun = not self._begun, True
            return is_news
        if self._first is None:
            check_facts(facts, self._columns)
            self._check(facts)
            if self._resumed is not None:
                require_same_rows(self._resumed, facts.lasting(), self._columns)
                if has_ended(self._resumed, self._epochs):
                    logger.warning(
                        "the training in %s has ended with epoch %d: its model is returned as it "
                        "is, without another step. To train anew give another checkpointPath, or "
                        "start anew with resume='never'",
                        self._resumed.saved.directory,
                        self._epochs,
                    )
            self._first = facts
            return True
        if repr(self._first.lasting()) != repr(facts.lasting()):
            raise DataError(
                f"the workers were started again and read other rows than before ({facts.rows} "
                f"rows now, {self._first.rows} then, or others): the DataFrame is not the same "
                "each time it is computed (rand() without a seed, a limit, a changing source?). "
                "Persist or write it first"
            )
        return False


@contextmanager
def _saved_on_sigterm(averager: Averager, plan: CheckpointPlan | None) -> Iterator[None]:
    """On SIGTERM write a checkpoint, then exit as a terminated process does.

    The next commit is waited for, because there the workers' own states belong to the center; if it
    does not come in time, the last one is written without them. A handler of the user's stays.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if plan is None or not in_main_thread or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    told_to_end = PreemptedError("the driver received SIGTERM")
    timer = threading.Timer(SIGTERM_S, averager.fail, [told_to_end])
    timer.name, timer.daemon = "sparkdl-sigterm", True

    def on_sigterm(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        averager.save_and_fail(told_to_end)
        timer.start()

    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    except PreemptedError:
        averager.save_center()
        logger.warning("received SIGTERM; the training can go on from %s", plan.store.path)
        sys.exit(128 + signal.SIGTERM)
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _plan(policy: CheckpointPolicy, epochs: int, config: Mapping[str, Any]) -> CheckpointPlan:
    """When and where checkpoints are written, and what the training is that they are of."""
    return CheckpointPlan(
        store=CheckpointStore(
            policy.path, keep_last=policy.keep_last, open_elsewhere=policy.open_elsewhere
        ),
        every=policy.every,
        every_rounds=policy.every_rounds,
        last_epoch=epochs,
        config=config,
    )


def _find(
    policy: CheckpointPolicy, plan: CheckpointPlan, epochs: int, world_size: int
) -> Resumed | None:
    """The newest checkpoint, if it is to be used and fits, but for its rows."""
    saved = plan.store.newest() if policy.resume == "auto" else None
    if saved is None:
        return None
    resumed = Resumed.of(saved)
    require_same(saved.directory, saved.description["config"], plan.config)
    require_progress(resumed, epochs, world_size)
    if not has_ended(resumed, epochs):
        logger.info("training goes on from %s", saved.directory)
    return resumed
