"""The one exception tree: everything this package raises on purpose.

SparkDLError
  ConfigError        an argument, Param or configuration value is wrong        (also ValueError)
    InUseError       another process is writing there now
  DataError          the DataFrame's columns or values do not fit               (also ValueError)
  ModelError         the model, loss or optimizer fails before training starts
  CheckpointError    a checkpoint or saved model cannot be written or read
  CallbackError      a callback failed, and with it the fit
  SetupError         Java, Python packages or versions are missing or differ
  TrainingError      training started and could not be finished
    WorkerError      the user's code raised on a worker; carries its traceback
      NonFiniteError a contribution holds NaN or infinity
    WorkerLostError  a worker's process or connection went away
    PreemptedError   the driver was told to stop (SIGTERM) in the middle of training
    CollectiveError  the workers' exchange among themselves broke
    DeadlineError    someone did not answer within the time allowed        (also TimeoutError)
    StoppedError     the averager ended the run; seen on workers only
      DisconnectedError  a connection to the averager broke; seen on workers only
      RowsLostError      Spark no longer delivers a worker's rows; seen on workers only
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class SparkDLError(Exception):
    """Base of every exception that sparkdl raises on purpose."""


class ConfigError(SparkDLError, ValueError):
    """An argument, Param or configuration value is wrong; the message says which and what fits."""


class InUseError(ConfigError):
    """Another process is writing there now; the message says which.

    Attributes:
        holder: which process, on which host, and since when.
    """

    def __init__(self, message: str, holder: str) -> None:
        super().__init__(message)
        self.holder = holder

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.holder)


class DataError(SparkDLError, ValueError):
    """Columns or values of the DataFrame do not fit; the message names the column and the fix."""


class ModelError(SparkDLError):
    """The model, loss or optimizer cannot be shipped or fails on a batch before training starts."""


class CheckpointError(SparkDLError):
    """A checkpoint or saved model cannot be written or read; the message says which and why."""


class CallbackError(SparkDLError):
    """A callback failed, and with it the fit; the message names the callback and its method.

    Attributes:
        model: what ``fit`` would have returned, if it was the callback's ``on_end`` that failed
            after a training that succeeded; else None.
    """

    model: Any = None


class SetupError(SparkDLError):
    """Java, a Python package or a version is missing, or differs between driver and executors."""


class TrainingError(SparkDLError):
    """Training started and could not be finished."""


class WorkerError(TrainingError):
    """The user's code raised on a worker.

    Attributes:
        rank: the worker's rank.
        epoch: epoch counted from 1, 0 before the first step.
        step: the worker's optimizer steps since the start, 0 before the first.
        worker_traceback: the traceback as the worker printed it.
    """

    def __init__(
        self, message: str, *, rank: int, epoch: int, step: int, worker_traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.epoch = epoch
        self.step = step
        self.worker_traceback = worker_traceback

    def __reduce__(self) -> tuple[object, ...]:
        fields = {
            "rank": self.rank,
            "epoch": self.epoch,
            "step": self.step,
            "worker_traceback": self.worker_traceback,
        }
        return _rebuild_worker_error, (type(self), str(self), fields)


def _rebuild_worker_error(
    kind: type[WorkerError], message: str, fields: dict[str, object]
) -> WorkerError:
    """WorkerError's fields are keyword-only, while default unpickling is positional."""
    return kind(message, **fields)  # type: ignore[arg-type]


class NonFiniteError(WorkerError):
    """A worker's parameters, buffers or optimizer state hold NaN or infinity."""


class _LossError(TrainingError):
    """Workers are missing.

    Attributes:
        ranks: the missing workers' ranks, as far as they are known.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class WorkerLostError(_LossError):
    """A worker's process or its connection went away in the middle of training."""


class CollectiveError(_LossError):
    """The workers' exchange among themselves broke; the message names who did not take part."""


class DeadlineError(TrainingError, TimeoutError):
    """Someone did not answer within the time allowed; the message names who, and in which phase."""


class PreemptedError(TrainingError):
    """The driver was told to stop (SIGTERM); it wrote a checkpoint first."""


class StoppedError(TrainingError):
    """The averager ended the run; raised on workers that leave through no fault of their own."""


class DisconnectedError(StoppedError):
    """A worker's connection to the averager, or to another worker, broke; it may reconnect.

    Attributes:
        retry: whether connecting once more may succeed.
    """

    def __init__(self, message: str, *, retry: bool = True) -> None:
        super().__init__(message)
        self.retry = retry


class RowsLostError(StoppedError):
    """Spark no longer delivers a worker's rows; its task fails, and Spark's own error says why."""


@contextmanager
def required(needed: str, extra: str) -> Iterator[None]:
    """Import a package that an extra installs, inside a ``with`` block.

    Args:
        needed: what needs the package, ending with its name, for the message.
        extra: the extra of sparkdl-torch.

    Raises:
        SetupError: it is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise SetupError(
            f"{needed}, which is not installed here: pip install 'sparkdl-torch[{extra}]'"
        ) from error
