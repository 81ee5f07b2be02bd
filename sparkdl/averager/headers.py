"""The headers that workers send, checked: a mistake by a token holder must not become a hang."""

from __future__ import annotations

import json
import reprlib
import socket
from dataclasses import asdict, fields
from typing import Any, TypeVar, cast

from sparkdl.errors import CollectiveError, DataError, NonFiniteError, TrainingError, WorkerError
from sparkdl.events import ValidationReport, WindowReport
from sparkdl.feed.shards import DataStatistics, ShardStatistics
from sparkdl.phases import PHASES, PhaseTimes
from sparkdl.transport.framing import MAX_HEADER_BYTES
from sparkdl.untrusted import read
from sparkdl.user_code.tracebacks import shortened

T = TypeVar("T")

MOST = 1e200
"""No contribution counts as much; sums and ratios of weights stay finite."""
ADDRESS_BYTES = 512
"""The longest address of a worker; a host's name has at most 253 characters."""
MAX_STATES_BYTES = 256 << 20
"""The most that all workers' metrics together may count in an epoch: the driver computes them in
memory. Scores and labels of 20 million held-out rows fit."""
SAFE_COLUMNS = 1000
"""Statistics of this many columns fit into a header, whatever they are."""
TEXT_CHARACTERS = 100_000
"""The longest text of an error in a header, which has room for ten such, each character escaped."""
_WHERE = ("rank", "epoch", "step")
_FAILURE: Any = {"message": str, "worker_traceback": str, "non_finite": bool}
_FAILURE |= dict.fromkeys(_WHERE, int)
_JOIN = {"join": int, "host": str, "attempt": int, "task": int, "frozen": str}


def failure_header(error: WorkerError | CollectiveError) -> dict[str, Any]:
    """What a worker sends when the user's code raised, or its exchange with others broke."""
    if isinstance(error, CollectiveError):
        broken = shortened(str(error), TEXT_CHARACTERS)
        return {"broken": broken, "missing": list(error.ranks)}
    return {
        "failure": {
            "message": shortened(str(error), TEXT_CHARACTERS),
            "worker_traceback": shortened(error.worker_traceback, TEXT_CHARACTERS),
            "non_finite": isinstance(error, NonFiniteError),
            **{name: getattr(error, name) for name in _WHERE},
        }
    }


def stopped_header(reason: str) -> dict[str, Any]:
    """What a worker is told at last, if the run has ended without it."""
    return {"stopped": shortened(reason, TEXT_CHARACTERS)}


def window_header(
    window: WindowReport, *, takes_reply: bool = True, worker_state: int = 0
) -> dict[str, Any]:
    """What a worker sends before a contribution.

    Args:
        window: what was trained on.
        takes_reply: whether the worker wants the result.
        worker_state: number of bytes that follow, for the averager to keep of the worker.
    """
    report = {each.name: getattr(window, each.name) for each in fields(window)}
    report["measured"] = dict(window.measured)
    return {"window": report, "takes_reply": takes_reply, "worker_state": worker_state}


def shard_header(shard: ShardStatistics) -> dict[str, Any]:
    """What a worker sends once it has read its rows.

    Raises:
        DataError: the rows have more columns than a header holds.
    """
    return _fitting({"shard": asdict(shard)}, len(shard.columns))


def _fitting(header: dict[str, Any], columns: int) -> dict[str, Any]:
    if columns > SAFE_COLUMNS and (size := len(json.dumps(header))) > MAX_HEADER_BYTES:
        raise DataError(
            f"the statistics of {columns} columns take {size} bytes, but a worker can send the "
            f"driver at most {MAX_HEADER_BYTES}, enough for about "
            f"{columns * MAX_HEADER_BYTES // size}. Put columns that belong together into one "
            "array column first, for example with F.array(...) or VectorAssembler"
        )
    return header


def statistics_header(statistics: DataStatistics) -> dict[str, Any]:
    """What a worker is told about all rows: as much as one worker reports about its own."""
    return _fitting({"statistics": asdict(statistics)}, len(statistics.columns))


def join_header(rank: int, attempt: int, task: int | None, frozen: str) -> dict[str, Any]:
    """What a worker on this host sends first; by default it is the only one of its task."""
    host, task = socket.gethostname(), rank if task is None else task
    return {"join": rank, "host": host, "attempt": attempt, "task": task, "frozen": frozen}


def read_join(header: dict[str, Any]) -> tuple[int, str, int, int, str]:
    """Rank, host, attempt, task and fingerprint of a joining worker.

    Raises:
        TrainingError: the header does not have them.
    """
    told = {"attempt": 0, "task": header.get("join"), "frozen": "", **header}
    try:
        rank, host, attempt, task, frozen = read(_JOIN, told).values()
    except TypeError as error:
        raise TrainingError(
            f"a connection starts with a rank and a host, not with {quoted(header)}"
        ) from error
    return rank, host, attempt, task, frozen


def read_row_server(header: dict[str, Any], rank: int) -> object:
    """Where others fetch a worker's rows, for them to interpret; None if they do not.

    Raises:
        TrainingError: it is too long for an address, and it would be sent to all workers.
    """
    address = header.get("row_server")
    if address is not None and len(json.dumps(address)) > ADDRESS_BYTES:
        raise TrainingError(
            f"rank {rank} sent {quoted(address)} as the address of its rows, which is too long"
        )
    return address


def read_gather(header: dict[str, Any], rank: int, world_size: int) -> Any:
    """What a worker gives in a gather, for all others to know.

    Raises:
        TrainingError: it is so much that all workers' shares would exceed a header.
    """
    size = len(json.dumps(header["gather"]))
    share = (MAX_HEADER_BYTES - len('{"gathered": []}')) // world_size - len(", ")
    if size > share:
        raise TrainingError(
            f"rank {rank} would share {size} bytes with all {world_size} workers, but each may "
            f"share {share}, because everyone receives what all have shared. Use fewer workers, "
            "or fewer columns: put those that belong together into one array column"
        )
    return header["gather"]


def require_share_of_states(size: int, report: ValidationReport, world_size: int) -> None:
    """Check that a worker may send what its metrics counted after an epoch.

    Args:
        size: how many bytes it is.
        report: the report, which says on how many rows.
        world_size: number of workers from which the driver has to hold as much.

    Raises:
        DataError: it is more than a worker's share of the driver's memory.
    """
    most = MAX_STATES_BYTES // world_size
    if size > most:
        raise DataError(
            f"the metrics accumulated {size} bytes on this worker's {report.examples} held-out "
            f"rows, but each of {world_size} workers may send the driver at most {most}. Metrics "
            "that keep every score (AUROC, average precision) take a fixed size with "
            "thresholds=200; or hold out fewer rows"
        )


def read_size(
    header: dict[str, Any], rank: int, limit: int, field: str = "worker_state", default: Any = None
) -> int:
    """The size in bytes of what a worker is about to send.

    Raises:
        TrainingError: the header does not say, or more than ``limit``.
    """
    size = header.get(field, default)
    if type(size) is not int or not 0 <= size <= limit:
        what = field.replace("_", " ")
        raise TrainingError(f"rank {rank} sent {quoted(header)} instead of its {what}")
    return size


def read_epoch_losses(header: dict[str, Any], rank: int) -> tuple[int, int]:
    """For how many epochs a worker knows the loss, and for how many it asks for it.

    Raises:
        TrainingError: the header does not say.
    """
    known, epochs = header.get("known"), header.get("epoch_losses")
    if type(known) is not int or type(epochs) is not int or not 0 <= known < epochs:
        raise TrainingError(f"rank {rank} sent an invalid request for losses: {quoted(header)}")
    return known, epochs


def raise_reported_failure(header: dict[str, Any]) -> None:
    """Raise the error that a worker reports, if the header is such a report.

    Raises:
        WorkerError: it is one; NonFiniteError if the contribution was not finite.
        CollectiveError: the worker's exchange with the others broke.
        TrainingError: it looks like one, but is malformed.
    """
    if isinstance(header.get("broken"), str):
        missing = header.get("missing")
        ranks = missing if isinstance(missing, list) else []
        known = tuple(rank for rank in ranks if type(rank) is int and rank >= 0)
        raise CollectiveError(header["broken"], ranks=known)
    if "failure" not in header:
        return
    failure = received(_FAILURE, header["failure"], None)
    kind = NonFiniteError if failure.pop("non_finite") else WorkerError
    raise kind(failure.pop("message"), **failure)


def received(hint: type[T], value: Any, rank: int | None) -> T:
    """What a worker has sent, as what a type hint says; see ``read``.

    Raises:
        TrainingError: it is something else, or cannot be its own; the message shows it.
    """
    try:
        found = read(hint, value, whole=True)
        if getattr(found, "rank", rank) != rank or not _is_possible(found):
            raise TypeError("no worker of that rank has such numbers")
    except TypeError as error:
        sender = "a worker" if rank is None else f"rank {rank}"
        raise TrainingError(
            f"{sender} sent a header that no worker sends: {quoted(value)}"
        ) from error
    return cast(T, found)


def _is_possible(found: Any) -> bool:
    if isinstance(found, WindowReport):
        counts = found.examples, found.group_weight or 0, found.counted or 0
        return not found.staleness and all(0 <= count < MOST for count in counts)
    if isinstance(found, PhaseTimes):
        lengths = found.ended - found.began, found.uncertainty, *found.seconds
        return len(found.seconds) == len(PHASES) and all(0 <= each < MOST for each in lengths)
    return True


def quoted(value: Any) -> str:
    """What was sent, abridged if it is long: the message goes to every worker and into the log."""
    brief = reprlib.Repr()
    brief.maxdict, brief.maxstring, brief.maxother = 20, 80, 80
    return brief.repr(value)
