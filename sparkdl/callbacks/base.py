"""What a callback is, what it sees of the fit, and how it is called.

All of it happens in the driver, in the thread that called ``fit``. Workers begin an epoch once
every callback has returned from the previous one's ``on_epoch``, so that what a callback decides
there applies to the model of exactly that epoch. Without callbacks they do not wait.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

from torch import nn

from sparkdl.averager.run_events import (
    CheckpointSaved,
    EpochValidated,
    RoundCommitted,
    RunEvent,
    TimePassed,
    WorkerLost,
    WorkersRestarted,
)
from sparkdl.errors import CallbackError, SetupError, SparkDLError
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.schema import FeedSchema
from sparkdl.feed.shards import DataStatistics
from sparkdl.redaction import without_credentials
from sparkdl.report.recording import Recording
from sparkdl.user_code.tracebacks import message_of
from sparkdl.worker_callback import Hooks

logger = logging.getLogger(__name__)

QUICK_S = 1.0
"""An observer whose error took longer than this many seconds is not tried again before the end."""


@dataclass(eq=False, repr=False)
class Training:
    """A fit in progress, as callbacks see it.

    Attributes:
        epochs: how many were asked for.
        history: the epochs that have ended, with the loss on held-out rows if there are any;
            includes those before a checkpoint.
        stopped: why a callback has ended the training; None if none has.
        kept_epoch: the epoch whose model the fit returns, if a callback has kept one, perhaps
            before a checkpoint.
        metrics: for each metric that is measured after every epoch, by name, whether a larger value
            is better; None if it does not say.
        began: when ``on_start`` was called, by ``time.monotonic``.
        recording: what the workers have reported so far, and what is trained.
        step: optimizer steps that are part of the center, counted on the worker that took the most.
        resumed: whether it resumes from a checkpoint.
        identity: the same in all fits that continue each other's checkpoints, and in no others;
            None without checkpoints.
        schema: the columns that are trained on, with the lengths found in the data; None before the
            data are known.
        features_as_kwargs: whether the model takes features by name as arguments, not as one dict.
        kept: what each callback keeps about this fit, since several fits may use one callback at
            the same time.
        model: the trained model, on the CPU and in evaluation mode; None before ``on_end``, and if
            the fit fails.
    """

    epochs: int
    history: list[EpochSummary] = field(default_factory=list)
    kept_epoch: int | None = None
    metrics: Mapping[str, bool | None] = field(default_factory=dict)
    _: KW_ONLY
    recording: Recording = field(default_factory=lambda: Recording(1))
    step: int = 0
    resumed: bool = False
    identity: str | None = None
    features_as_kwargs: bool = False
    stopped: str | None = field(default=None, init=False)
    schema: FeedSchema | None = field(default=None, init=False)
    kept: dict[Callback, Any] = field(default_factory=dict, init=False)
    model: nn.Module | None = field(default=None, init=False)
    began: float = field(default_factory=time.monotonic, init=False)

    def stop(self, reason: str) -> None:
        """End the training as soon as the callback returns; the fit returns the model so far.

        Called from ``on_epoch``, that is the epoch's model; from ``on_tick``, the next round's, for
        which workers that exchange among themselves do not wait for the epoch to end; from
        elsewhere, the last round's. Of several reasons, the first one counts.
        """
        if self.stopped is None:
            self.stopped = reason

    def keep_model(self) -> None:
        """Have the fit return the model of the epoch that has just ended, whatever follows.

        Call it in ``on_epoch``. The model is kept in the driver's memory and in checkpoints, one at
        a time: the last call counts.
        """
        self.kept_epoch = self.history[-1].epoch


class Callback(Hooks):
    """Called in the driver during a fit; override the methods of interest.

    An error in a method ends the fit and names the method; if the fit had succeeded and ``on_end``
    fails, the error has the model (``CallbackError.model``). A method that looks like a hook but is
    not one of these is refused.

    Attributes:
        observer: whether the training must not depend on it, as with reports and trackers: an error
            in any method but ``on_start`` is then a warning.
    """

    kind = "callbacks in the driver"
    observer: ClassVar[bool] = False
    methods = (
        "on_start",
        "on_tick",
        "on_round",
        "on_epoch",
        "on_checkpoint",
        "on_worker_lost",
        "on_end",
    )

    def on_start(self, training: Training, statistics: DataStatistics) -> None:
        """All rows are known, or each worker's first, and no one has trained on them yet.

        Args:
            training: the fit; its ``history`` has the epochs before a checkpoint.
            statistics: rows, held-out rows and what was found in each column.
        """

    def on_tick(self, training: Training) -> None:
        """Called about once a second from ``on_start`` to ``on_end``, whatever else happens.

        Args:
            training: the fit.
        """

    def on_round(self, training: Training, reports: Sequence[WindowReport]) -> None:
        """A round's contributions have become the center.

        Args:
            training: the fit.
            reports: what each contributor trained on, with rows and losses.
        """

    def on_epoch(self, training: Training, summary: EpochSummary) -> None:
        """An epoch has ended, and every worker has validated; none has begun the next one.

        Args:
            training: the fit; the last of its ``history`` is this epoch.
            summary: of the epoch.
        """

    def on_checkpoint(self, training: Training) -> None:
        """A checkpoint was written durably. One that cannot be written only leads to a warning."""

    def on_worker_lost(self, training: Training, rank: int | None, why: str) -> None:
        """A worker was lost, and the training goes on.

        The others go on until it is back; or, where workers need each other, all are started again
        from the last round. If the training cannot go on, ``on_end`` has the error.

        Args:
            training: the fit.
            rank: of the worker; None if it is only known that some worker was lost.
            why: the reason in words.
        """

    def on_end(self, training: Training, error: BaseException | None) -> None:
        """The training has ended, by itself, by a callback or by an error that ``fit`` raises.

        Args:
            training: the fit.
            error: what ended it; None if it succeeded.
        """


@dataclass(eq=False, repr=False)
class Calls:
    """Calls every callback of one fit when something happens.

    Attributes:
        callbacks: in the order in which they are called.
        training: what they see.
        clock: the time in seconds.
    """

    callbacks: Sequence[Callback]
    training: Training
    clock: Callable[[], float] = time.monotonic
    _started: bool = field(default=False, init=False)
    # Observers that have failed, and those among them that are left out until the end.
    _failing: set[int] = field(default_factory=set, init=False)
    _left_out: set[int] = field(default_factory=set, init=False)

    def __call__(self, event: RunEvent) -> None:
        """Tell the callbacks what has happened, if it concerns them.

        Raises:
            CallbackError: one of them failed.
        """
        training = self.training
        match event:
            case DataStatistics() if not self._started:
                self._started, training.began = True, time.monotonic()
                self._each("on_start", lambda each: each.on_start(training, event))
            case TimePassed() if self._started:
                self._each("on_tick", lambda each: each.on_tick(training))
            case RoundCommitted(_, reports):
                training.step = max([training.step, *(report.step for report in reports)])
                self._each("on_round", lambda each: each.on_round(training, reports))
            case EpochValidated(summary) if summary.epoch > len(training.history):
                training.history.append(summary)
                self._each("on_epoch", lambda each: each.on_epoch(training, summary))
            case WorkerLost(rank, why):
                self._tell_of_loss(rank, why)
            case WorkersRestarted(why, lost):
                for one in lost or (None,):
                    self._tell_of_loss(one, why)
            case CheckpointSaved():
                self._each("on_checkpoint", lambda each: each.on_checkpoint(training))

    def end(self, error: BaseException | None) -> None:
        """Tell the callbacks that the fit is over: all of them, as each may have files to close.

        Args:
            error: what ended the fit. It matters most to the user: failures of callbacks after it
                are only logged.

        Raises:
            CallbackError: the fit succeeded, and a callback failed; the first of several.
        """
        failures: list[SparkDLError] = []
        for callback in self.callbacks:
            try:
                self._call(callback, "on_end", lambda each: each.on_end(self.training, error))
            except SparkDLError as failed:
                failures.append(failed)
        raised = failures[0] if failures and error is None else None
        for failure in failures:
            if failure is not raised:
                logger.warning("%s", failure)
        if isinstance(raised, CallbackError):
            raise raised
        if raised is not None:
            raise CallbackError(f"a callback failed in on_end: {raised}") from raised

    def _tell_of_loss(self, rank: int | None, why: str) -> None:
        self._each("on_worker_lost", lambda each: each.on_worker_lost(self.training, rank, why))

    def _each(self, hook: str, call: Callable[[Callback], None]) -> None:
        for callback in self.callbacks:
            self._call(callback, hook, call)

    def _call(self, callback: Callback, hook: str, call: Callable[[Callback], None]) -> None:
        if id(callback) in self._left_out and hook != "on_end":
            return
        began = self.clock()
        try:
            call(callback)
        except Exception as error:  # the user's code may raise anything
            if callback.observer and hook != "on_start":
                self._warn(callback, hook, error, self.clock() - began)
                return
            if isinstance(error, SparkDLError):
                raise
            raise CallbackError(
                f"callback {type(callback).__name__} failed in {hook}: "
                f"{without_credentials(message_of(error))}"
            ) from error

    def _warn(self, callback: Callback, hook: str, error: Exception, seconds: float) -> None:
        """Say once, and again at the end, that an observer fails; the training goes on."""
        if id(callback) not in self._failing or hook == "on_end":
            logger.warning(
                "%s failed in %s, and the training goes on without it: %s",
                type(callback).__name__,
                hook,
                without_credentials(message_of(error)),
            )
        self._failing.add(id(callback))
        if seconds > QUICK_S:  # a server that cannot be reached: workers wait meanwhile
            self._left_out.add(id(callback))


def imported(module: str, *, package: str, extra: str, who: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: its full name.
        package: the package that has it, as it is imported.
        extra: the extra of sparkdl-torch that installs it.
        who: what needs it, for the message.

    Raises:
        SetupError: the package is not installed in the driver's Python.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise SetupError(
            f"{who} needs {package}, which the driver's Python does not have. Install it there, "
            f'not on the executors: pip install "sparkdl-torch[{extra}]"'
        ) from error
