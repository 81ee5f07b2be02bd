"""A run of a Spark Connect client: one gang-scheduled stage, with the averager beside rank 0.

Executors cannot reach a client, so the process of the first task does what a driver does elsewhere,
and the ranks of that task have processes of their own:

    first task: serves the run     other tasks
    allGather(address)  <--------> allGather("")     who listens where, and the token
    rounds              <--------> train
    rows with the result           rows with what the ranks return

The rows go to the client once the first task has ended. It then ends the stage, whatever the other
tasks do, unless it awaits what they return.

What the first task answers is a header, then bytes. They travel as rows of the stage's own output,
and nowhere else: the text of an error may quote what a stranger has written. The header is JSON
whose every field is checked, so nothing in it runs code.
"""

from __future__ import annotations

import json
import logging
import struct
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from typing_extensions import Self

from sparkdl import errors
from sparkdl.checkpoint.policy import OtherTrainingError
from sparkdl.errors import CallbackError, DataError, SparkDLError, TrainingError
from sparkdl.feed.shards import NO_ROWS
from sparkdl.spark.arrival import Shipment
from sparkdl.spark.diagnostics.console import Display
from sparkdl.spark.diagnostics.run_service import OnReport
from sparkdl.spark.launch import stage_task
from sparkdl.spark.launch.environments import task_of
from sparkdl.spark.launch.launcher import LEAVE_S, as_training_error
from sparkdl.spark.launch.stage_task import END_OF_ANSWER, SERVICE_ROW
from sparkdl.spark.launch.worker_rows import Workers, run_tasks
from sparkdl.spark.sending import send
from sparkdl.untrusted import read
from sparkdl.user_code.tracebacks import add_note, message_of, traceback_of

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
"""The most bytes in a row."""
MAX_LINES = 10_000
"""The most lines that come back of what workers print; their executors' logs have all."""
MAX_HEADER_BYTES = 256 << 20
"""The largest header: lines, history and recorded times take a few MB."""
_LENGTH = struct.Struct("<q")
_ERRORS = {
    each.__name__: each
    for each in (*vars(errors).values(), OtherTrainingError)
    if isinstance(each, type) and issubclass(each, SparkDLError)
}
_FIELDS: Any = {
    "rank": int,
    "epoch": int,
    "step": int,
    "worker_traceback": str,
    "ranks": tuple[int, ...],
    "holder": str,
}
"""What the fields of errors hold."""
_LOGS: Any = {
    "lines": list[tuple[int, list[str], int]],
    "logged": list[tuple[str, int, str]],
    "reports": list[tuple[int, dict[str, float]]],
}
"""What ``ForwardedLogs`` keep: by rank, with how many lines were left out; by logger; by rank."""

T = TypeVar("T")


def read_stage(
    workers: Workers,
    entry: str,
    payload: bytes,
    take: Callable[[dict[str, Any], Iterator[bytes]], T],
    *,
    begin_s: float,
    patience_s: float = LEAVE_S,
    shipment: Shipment | None,
    apart: bool = False,
    on_report: OnReport | None = None,
) -> tuple[T, dict[int, bytes | None]]:
    """Run a stage that serves its own run, and read what comes back.

    Args:
        workers: the Spark side of the run.
        entry: what each rank runs; see ``assignment.run_ranks``.
        payload: its first argument, a pickled tuple whose last value is a ``stage_task.Serve``. The
            second is the address of whatever that serves.
        take: is given what ``Serve`` has returned, even if the run has failed.
        begin_s: seconds for the first task to begin to serve, which may have to build a model.
        patience_s: seconds that the other tasks have once the first has answered.
        shipment: the user's own modules.
        apart: whether the only rank of a task gets a process of its own too; in the first task it
            does.
        on_report: called with what the workers have reported.

    Returns:
        What ``take`` returns, and what ranks have returned.

    Raises:
        WorkerLostError: a task was lost, and all others with it.
        SetupError: the executors' Python lacks something.
        SparkDLError: the run has failed; the ``model`` of a CallbackError is what ``take`` returns.
    """
    spark, tag = workers.frame.sparkSession, f"sparkdl-{uuid.uuid4().hex}"
    results = dict[int, bytes | None]()
    # The others leave by themselves, which keeps their processes for the session's next job.
    stuck = threading.Timer(patience_s, spark.interruptTag, (tag,))
    name, sent = f"{stage_task.__name__}:run_stage_task", send(spark, payload)
    counts, modules = (workers.num_tasks, workers.ranks_a_task), shipment and tuple(shipment)
    task = task_of(name, entry, sent, *counts, apart, begin_s, modules)

    def answer() -> Iterator[bytes]:
        try:
            for row in run_tasks(workers, task, lambda frame: frame.toLocalIterator()):
                if row.rank != SERVICE_ROW:
                    results[row.rank] = None if row.result is None else bytes(row.result)
                elif row.result != END_OF_ANSWER:
                    yield bytes(row.result)
                else:
                    stuck.start()
        except Exception as error:
            if stuck.ident is None:
                raise as_training_error(error) from error
            logger.info("the stage did not end by itself: %s", message_of(error))

    spark.addTag(tag)
    try:
        received = answer()
        header = header_of(received)
        if header is None:  # Spark starts no task for what turns out empty while it plans
            raise DataError(NO_ROWS)
        if "error" in header:
            stuck.interval = LEAVE_S
        replay_logs(header, on_report)
        taken = take(header, received)
        for _ in received:  # none: the other tasks end meanwhile
            pass
    finally:
        stuck.cancel()
        spark.removeTag(tag)
        # Does nothing to a stage that has ended. A server that has gone cannot be asked, and what
        # that did to the run, or the run's result, matters more.
        with suppress(Exception):
            spark.interruptTag(tag)
    if "error" in header:
        error = restored_error(header["error"])
        if isinstance(error, CallbackError):
            error.model = taken
        raise error
    return taken, results


class ForwardedLogs(logging.Handler):
    """Keeps for the client what workers print and report, and what this package logs meanwhile."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.header: dict[str, list[Any]] = {"lines": [], "logged": [], "reports": []}
        self._left = MAX_LINES

    def __enter__(self) -> Self:
        logging.getLogger("sparkdl").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("sparkdl").removeHandler(self)

    def show(self, rank: int, lines: Sequence[str], left_out: int) -> None:
        """Keep a rank's lines; see ``console.Show``."""
        kept, shown = list(lines[: self._left]), self.header["lines"]
        self._left -= len(kept)
        left_out += len(lines) - len(kept)
        if not kept and shown and shown[-1][0] == rank and not shown[-1][1]:
            left_out += shown.pop()[2]
        shown.append((rank, kept, left_out))

    def report(self, rank: int, metrics: Mapping[str, float]) -> None:
        """Keep what a rank reports; see ``run_service.OnReport``."""
        self.header["reports"].append((rank, dict(metrics)))

    def emit(self, record: logging.LogRecord) -> None:
        """Called for each record."""
        if len(self.header["logged"]) < MAX_LINES:
            self.header["logged"].append((record.name, record.levelno, record.getMessage()))


def replay_logs(header: dict[str, Any], on_report: OnReport | None = None) -> None:
    """Show in the client what ``ForwardedLogs`` have kept.

    Raises:
        TrainingError: the header does not hold it.
    """
    with readable():
        logs = read(_LOGS, {field: header[field] for field in _LOGS})
    display = Display("the executor's log")
    for rank, lines, left_out in logs["lines"]:
        display(rank, lines, left_out)
    for name, level, text in logs["logged"]:
        logging.getLogger(name).log(level, "%s", text)
    if on_report is not None:
        for rank, metrics in logs["reports"]:
            on_report(rank, metrics)


def pieces(header: dict[str, Any], values: Iterable[memoryview] = ()) -> Iterator[bytes]:
    """A header with its length before it, then the values, cut small."""
    content = json.dumps(header).encode()
    yield _LENGTH.pack(len(content))
    for view in (memoryview(content), *values):
        for start in range(0, len(view), PIECE_BYTES):
            yield bytes(view[start : start + PIECE_BYTES])


def header_of(pieces: Iterator[bytes]) -> dict[str, Any] | None:
    """Read a header; None if nothing came.

    Raises:
        TrainingError: it is not one.
    """
    first, content = next(pieces, None), bytearray()
    if first is None:
        return None
    with readable():
        (length,) = _LENGTH.unpack(first)
        if not 0 <= length <= MAX_HEADER_BYTES:
            raise ValueError(f"its header would have {length} bytes")
    while len(content) < length and (piece := next(pieces, None)):
        content += piece
    with readable():
        if len(content) != length:
            raise ValueError(f"its header has {len(content)} of {length} bytes")
        header = json.loads(content)
        if not isinstance(header, dict):
            raise ValueError(f"its header is {header!r:.100}")
    return header


@contextmanager
def readable() -> Iterator[None]:
    """Read fields of a header, and say of one that is not as the first task sends it whose it is.

    Raises:
        TrainingError: there is such a field.
    """
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
        struct.error,
    ) as error:
        raise TrainingError(
            "the first task, which serves the workers, sent an answer that cannot be read: "
            f"{message_of(error)}. Do the executors have this version of sparkdl-torch?"
        ) from error


def error_fields(error: Exception) -> dict[str, Any]:
    """An error in plain values, for ``restored_error``."""
    if not isinstance(error, SparkDLError):  # the client has to know, whatever it is
        error = TrainingError(f"the run service beside rank 0 failed: {traceback_of(error)}")
    kind = next(each.__name__ for each in type(error).__mro__ if each.__name__ in _ERRORS)
    fields = {name: getattr(error, name) for name in _FIELDS if hasattr(error, name)}
    notes = getattr(error, "__notes__", [])
    return {"kind": kind, "message": str(error), "notes": notes, "fields": fields}


def restored_error(told: dict[str, Any]) -> SparkDLError:
    """The error that was described.

    Raises:
        TrainingError: nothing describes one.
    """
    with readable():
        kind, fields = _ERRORS[told["kind"]], told["fields"]
        message, *notes = read(list[str], [told["message"], *told["notes"]])
        error = kind.__new__(kind, message)
        for name, value in fields.items():
            setattr(error, name, read(_FIELDS[name], value))
    for note in notes:
        add_note(error, note)
    return error
