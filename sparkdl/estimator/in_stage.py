"""A fit of Spark Connect: its run is served in the first task of the workers' own stage.

What comes back are bytes: a header, then the parameters and buffers of the trained module. Nothing
in them runs code here: the header's pickle may only name classes of a few plain kinds.
"""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparkdl import errors
from sparkdl.averager.service.loop import EdgeOptions
from sparkdl.callbacks import EarlyStopping, ModelCheckpoint, TimeBudget
from sparkdl.checkpoint.policy import OtherTrainingError
from sparkdl.driver import Launch, Observers, Outcome, RunOptions, run
from sparkdl.encodings import Encoding
from sparkdl.errors import (
    CallbackError,
    ConfigError,
    DataError,
    SparkDLError,
    TrainingError,
    WorkerLostError,
)
from sparkdl.estimator.checks.building import build
from sparkdl.estimator.checks.preflight import FitPlan
from sparkdl.estimator.checks.row_checks import Checked, RowChecks
from sparkdl.estimator.outputs import SharedParams
from sparkdl.feed.statistics.shards import NO_ROWS
from sparkdl.process.lazy_compiler import compiler_deferred
from sparkdl.report.recording import Recording, TimeBins
from sparkdl.spark.catalyst.jvm import setting
from sparkdl.spark.diagnostics.console import Display, Show
from sparkdl.spark.launch.beside import PIECE_BYTES, run_in_stage
from sparkdl.user_code.tracebacks import traceback_of

logger = logging.getLogger(__name__)

_BESIDE = (EarlyStopping, ModelCheckpoint, TimeBudget)
"""Callbacks that only decide, so that it does not matter where they do."""
MOST_LINES = 10_000
"""The most lines that come back of what workers print; their executors' logs have all."""
_LENGTH = struct.Struct("<q")
_PLAIN = {
    "builtins": {"frozenset", "set"},
    "collections": {"OrderedDict", "deque"},
    "numpy": {"dtype", "ndarray"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.numeric": {"_frombuffer"},
}
"""What a header may name besides our own classes and torch's dtypes."""


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
    require_in_stage(plan)
    workers, allowed, losses = plan.workers, plan.job.max_failures, 0
    # Spark ends all workers with one.
    job = replace(plan.job, max_failures=0, min_workers=1)
    away = replace(plan, job=job, workers=replace(workers, frame=None))  # type: ignore[arg-type]
    application = setting(workers.frame.sparkSession, "spark.app.id")
    while True:
        served = Served(away, params, application, again=losses > 0)
        try:
            return _received(run_in_stage(workers, job, served), module)
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
                else f"from the last checkpoint in {kept}, if there is one",
            )


def require_in_stage(plan: FitPlan) -> None:
    """Refuse what needs a driver that executors can reach.

    Raises:
        ConfigError: there is such a thing.
    """
    for each in plan.settings.driver_callbacks:
        if type(each) not in _BESIDE:
            raise ConfigError(
                f"{type(each).__name__} runs in the driver between rounds, but over Spark Connect "
                "those are out of this program's reach. Use EarlyStopping, ModelCheckpoint or "
                "TimeBudget, which run beside rank 0, a WorkerCallback, or a session in the driver "
                "(spark-submit)"
            )


@dataclass(frozen=True)
class Served:
    """Serves a fit in the first task; see ``launch.beside.Serve``.

    Attributes:
        plan: of the fit, without the DataFrame.
        params: the estimator.
        application: the one that trains.
        again: whether all workers are started again, because one was lost.
    """

    plan: FitPlan
    params: SharedParams
    application: str | None
    again: bool

    def __call__(self, launch: Callable[[Show], Launch], edge: EdgeOptions) -> Iterator[bytes]:
        """Serve it; yields the header and the values."""
        told = _Told()
        header: dict[str, Any] = {}
        values: Sequence[Tensor] = ()
        checks: RowChecks | None = None
        outcome: Outcome | None = None
        with told.noted(), torch.inference_mode(False), compiler_deferred():
            try:
                checks = self._checks()
                outcome = self._run(checks, launch(told.show), edge)
            except SparkDLError as error:
                header["error"] = _described(error)
                if isinstance(error, CallbackError):
                    outcome = error.model
            except Exception as error:  # the client has to know, whatever it is
                told_all = f"the averager failed beside rank 0: {traceback_of(error)}"
                header["error"] = _described(TrainingError(told_all))
        if outcome is not None and checks is not None:
            values = [each for _, each in _state_of(outcome.module)]
            outcome.recording.setup = replace(outcome.recording.setup, settings={})
            header["outcome"] = (
                outcome.history,
                outcome.recording,
                outcome.stopped,
                checks.result(),
                _layout(_state_of(outcome.module)),
            )
        header |= {"lines": told.lines, "logged": told.logged}
        yield from _pieces(header, values)

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

    def _run(self, checks: RowChecks, launch: Launch, edge: EdgeOptions) -> Outcome:
        plan, settings = self.plan, self.plan.settings
        checkpoints = settings.checkpoint_policy(self.application)
        if checkpoints is not None:
            # There is no JVM here; what pyarrow cannot open is refused by name.
            resume = "auto" if self.again else checkpoints.resume
            checkpoints = replace(checkpoints, open_elsewhere=None, resume=resume)
        return run(
            plan.job,
            plan.workers.num_workers,
            launch,
            RunOptions(checkpoints=checkpoints, warm_start=plan.warm_start, edge=edge),
            Observers(check=partial(checks.check, plan), callbacks=settings.driver_callbacks),
        )


class _Told(logging.Handler):
    """What workers print and what is logged while a run is served, for the client to show."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[tuple[int, list[str], int]] = []
        self.logged: list[tuple[str, int, str]] = []
        self._left = MOST_LINES

    def show(self, rank: int, lines: Sequence[str], left_out: int) -> None:
        """Keep a rank's lines; see ``console.Show``."""
        kept = list(lines[: self._left])
        self._left -= len(kept)
        left_out += len(lines) - len(kept)
        if self.lines and self.lines[-1][0] == rank and not kept:
            left_out += self.lines.pop()[2] if not self.lines[-1][1] else 0
        self.lines.append((rank, kept, left_out))

    def emit(self, record: logging.LogRecord) -> None:
        """Called for each record."""
        if len(self.logged) < MOST_LINES:
            self.logged.append((record.name, record.levelno, record.getMessage()))

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Keep what this package logs meanwhile."""
        ours = logging.getLogger("sparkdl")
        ours.addHandler(self)
        try:
            yield
        finally:
            ours.removeHandler(self)


def _state_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and buffers of a module, each once, by name."""
    return [*module.named_parameters(), *module.named_buffers()]


def _pieces(header: dict[str, Any], values: Sequence[Tensor]) -> Iterator[bytes]:
    """A header with its length before it, then the bytes of the values, cut small."""
    octets = pickle.dumps(header, protocol=5)
    yield _LENGTH.pack(len(octets))
    for start in range(0, len(octets), PIECE_BYTES):
        yield octets[start : start + PIECE_BYTES]
    for each in values:
        view = _bytes_of(each.detach().contiguous())
        for start in range(0, len(view), PIECE_BYTES):
            yield bytes(view[start : start + PIECE_BYTES])


def _bytes_of(values: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return values.reshape(-1).view(torch.uint8).numpy().data


def _received(pieces: Iterator[bytes], module: nn.Module) -> tuple[Outcome, Checked]:
    """Read what ``Served`` has yielded; the values go into a module.

    Raises:
        SparkDLError: the run has failed.
    """
    with contextlib.closing(pieces):  # type: ignore[type-var] # it is a generator
        header = _header(pieces)
        for rank, lines, left_out in header["lines"]:
            Display("the executor's log")(rank, lines, left_out)
        for name, level, message in header["logged"]:
            logging.getLogger(name).log(level, "%s", message)
        result = None
        if "outcome" in header:
            history, recording, stopped, checked, told = header["outcome"]
            state = _state_of(module)
            if told != _layout(state):
                raise TrainingError(
                    "the model that came back has other parameters or buffers than the one that "
                    "was built here: does its builder depend on where it runs?"
                )
            _fill(pieces, [each for _, each in state])
            result = Outcome(module, history, recording, stopped), checked
        for _ in pieces:  # none: the other tasks end meanwhile
            pass
    if "error" in header:
        error = _restored(header["error"])
        if isinstance(error, CallbackError):
            error.model = result
        raise error
    assert result is not None
    return result


def _layout(state: Sequence[tuple[str, Tensor]]) -> list[tuple[str, str, list[int]]]:
    return [(name, str(each.dtype), list(each.shape)) for name, each in state]


def _header(pieces: Iterator[bytes]) -> Any:
    first = next(pieces, None)
    if first is None:  # Spark starts no task for what turns out empty while it plans
        raise DataError(NO_ROWS)
    (length,) = _LENGTH.unpack(first)
    octets = bytearray()
    while len(octets) < length:
        octets += next(pieces)
    return _Plain(io.BytesIO(octets)).load()


def _fill(pieces: Iterator[bytes], values: Sequence[Tensor]) -> None:
    for each in values:
        whole = torch.empty_like(each, memory_format=torch.contiguous_format)
        view, at = _bytes_of(whole), 0
        while at < len(view):
            piece = next(pieces)
            view[at : at + len(piece)] = piece
            at += len(piece)
        each.data.copy_(whole)


class _Plain(pickle.Unpickler):
    """Takes values that are plain, from a server that need not be trusted with more."""

    def find_class(self, module: str, name: str) -> Any:
        """Called for every class or function that a pickle names."""
        if name in _PLAIN.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.startswith("sparkdl."):
            found = super().find_class(module, name)
            plain = is_dataclass(found) or found in (Recording, TimeBins)
            if isinstance(found, type) and (plain or issubclass(found, (Encoding, Enum))):
                return found
        raise TrainingError(f"what came back from the executors names {module}.{name}")


_ERRORS = {
    each.__name__: each
    for each in (*vars(errors).values(), OtherTrainingError)
    if isinstance(each, type) and issubclass(each, SparkDLError)
}
_FIELDS = ("rank", "epoch", "step", "worker_traceback", "ranks", "holder")


def _described(error: SparkDLError) -> dict[str, Any]:
    kind = next(each.__name__ for each in type(error).__mro__ if each.__name__ in _ERRORS)
    fields = {name: getattr(error, name) for name in _FIELDS if hasattr(error, name)}
    notes = getattr(error, "__notes__", [])
    return {"kind": kind, "message": str(error), "notes": notes, "fields": fields}


def _restored(told: dict[str, Any]) -> SparkDLError:
    kind = _ERRORS[told["kind"]]
    error = kind.__new__(kind, told["message"])
    for name, value in told["fields"].items():
        setattr(error, name, value)
    for note in told["notes"]:
        error.add_note(note)
    return error
