"""The headers that workers send, checked: a mistake by a token holder must not become a hang."""

from __future__ import annotations

import dataclasses
import json
import math
import reprlib
import socket
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from sparkdl.errors import CollectiveError, DataError, NonFiniteError, TrainingError, WorkerError
from sparkdl.events import ValidationReport, WindowReport, are_measured
from sparkdl.feed.statistics.column import COUNTS, ColumnStatistics, RowLocation
from sparkdl.feed.statistics.shards import DataStatistics, ShardStatistics
from sparkdl.phases import PHASES, PhaseTimes
from sparkdl.transport.framing import MAX_HEADER_BYTES
from sparkdl.user_code.tracebacks import shortened

Types = dict[str, tuple[type, ...]]
"""The fields of a message by name, each with the types that it may have."""


def _json_types(hint: Any) -> tuple[type, ...]:
    """As what a field with a type hint arrives."""
    if get_origin(hint) in (Union, UnionType):
        return tuple(kind for each in get_args(hint) for kind in _json_types(each))
    if get_origin(hint) is tuple:
        return (list,)
    if get_origin(hint) is Literal:
        return (str,)
    if dataclasses.is_dataclass(hint):
        return (dict,)
    if get_origin(hint) is not None:
        return (dict,)
    return (float, int) if hint is float else (hint,)


def types_of(kind: type, *left_out: str) -> Types:
    """The fields of a dataclass with the types that they have in JSON."""
    hints = get_type_hints(kind)
    return {name: _json_types(hint) for name, hint in hints.items() if name not in left_out}


_WINDOW_TYPES = types_of(WindowReport, "staleness")
_VALIDATION_TYPES = types_of(ValidationReport)
_SHARD_TYPES = types_of(ShardStatistics)
_PHASES_TYPES = types_of(PhaseTimes)
_COLUMN_TYPES = types_of(ColumnStatistics)
_PLACE_TYPES = [int, int]
_INTEGERS = range(-(1 << 63), 1 << 64)
"""Integers that fit in 64 bits. JSON may hold ones too large for a float, so sums would fail."""
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
_FAILURE_TYPES: Types = {
    "message": (str,),
    "non_finite": (bool,),
    "rank": (int,),
    "epoch": (int,),
    "step": (int,),
    "worker_traceback": (str,),
}


def failure_header(error: WorkerError | CollectiveError) -> dict[str, Any]:
    """What a worker sends when the user's code raised, or its exchange with others broke."""
    if isinstance(error, CollectiveError):
        broken = shortened(str(error), TEXT_CHARACTERS)
        return {"broken": broken, "missing": list(error.ranks)}
    return {
        "failure": {
            "message": shortened(str(error), TEXT_CHARACTERS),
            "non_finite": isinstance(error, NonFiniteError),
            "rank": error.rank,
            "epoch": error.epoch,
            "step": error.step,
            "worker_traceback": shortened(error.worker_traceback, TEXT_CHARACTERS),
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
    fields = {name: getattr(window, name) for name in _WINDOW_TYPES}
    fields["measured"] = dict(window.measured)
    return {"window": fields, "takes_reply": takes_reply, "worker_state": worker_state}


def shard_header(shard: ShardStatistics) -> dict[str, Any]:
    """What a worker sends once it has read its rows.

    Raises:
        DataError: the rows have more columns than a header holds.
    """
    header = {"shard": dataclasses.asdict(shard)}
    columns = len(shard.columns)
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
    everything = ShardStatistics(
        statistics.rows,
        statistics.columns,
        statistics.held_out,
        statistics.weight,
    )
    return {"shard_rows": list(statistics.shard_rows), **shard_header(everything)}


def read_statistics(header: dict[str, Any]) -> DataStatistics:
    """The rows of all workers.

    Raises:
        TrainingError: the header does not describe them.
    """
    everything, rows = read_shard(header, None), header.get("shard_rows")
    if not isinstance(rows, list) or not all(type(count) is int and count >= 0 for count in rows):
        raise TrainingError(f"the driver sent {rows!r} instead of the workers' row counts")
    return DataStatistics(tuple(rows), everything.columns, everything.held_out, everything.weight)


def join_header(rank: int, attempt: int, task: int | None, frozen: str) -> dict[str, Any]:
    """What a worker on this host sends first; by default it is the only one of its task."""
    host, task = socket.gethostname(), rank if task is None else task
    return {"join": rank, "host": host, "attempt": attempt, "task": task, "frozen": frozen}


def read_join(header: dict[str, Any]) -> tuple[int, str, int, int, str]:
    """Rank, host, attempt, task and fingerprint of a joining worker.

    Raises:
        TrainingError: the header does not have them.
    """
    rank, host = header.get("join"), header.get("host")
    attempt, task = header.get("attempt", 0), header.get("task", rank)
    frozen = header.get("frozen", "")
    numbers = all(type(each) is int and each in _INTEGERS for each in (rank, attempt, task))
    if not numbers or not isinstance(host, str) or not isinstance(frozen, str):
        shown = _quoted(header)
        raise TrainingError(f"a connection starts with a rank and a host, not with {shown}")
    return cast(int, rank), host, attempt, cast(int, task), frozen


def read_shard(header: dict[str, Any], rank: int | None) -> ShardStatistics:
    """What a worker found in its rows.

    Raises:
        TrainingError: the header does not say.
    """
    fields = checked(header.get("shard"), _SHARD_TYPES, rank)
    columns = [checked(column, _COLUMN_TYPES, rank) for column in fields["columns"]]
    counts = [column[name] for column in columns for name in COUNTS]
    if min([fields["rows"], fields["held_out"], fields["skipped"], *counts]) < 0:
        shown = _quoted(fields)
        raise TrainingError(f"rank {rank} reported negative counts for its rows: {shown}")
    for column in columns:
        column["places"] = {k: _place(place, rank) for k, place in column["places"].items()}
    fields["columns"] = tuple(ColumnStatistics(**column) for column in columns)
    fields["weight"] = float(fields["weight"])
    return ShardStatistics(**fields)


def read_row_server(header: dict[str, Any], rank: int) -> object:
    """Where others fetch a worker's rows, for them to interpret; None if they do not.

    Raises:
        TrainingError: it is too long for an address, and it would be sent to all workers.
    """
    address = header.get("row_server")
    if address is not None and len(json.dumps(address)) > ADDRESS_BYTES:
        raise TrainingError(
            f"rank {rank} sent {_quoted(address)} as the address of its rows, which is too long"
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


def read_window(header: dict[str, Any], rank: int) -> WindowReport:
    """The report of a contribution.

    Raises:
        TrainingError: the header is not one, or belongs to another rank.
    """
    fields = checked(header.get("window"), _WINDOW_TYPES, rank)
    counts = fields["examples"], fields["group_weight"] or 0, fields["counted"] or 0
    possible = all(0 <= count < MOST for count in counts) and are_measured(fields["measured"])
    if not possible or fields["rank"] != rank:
        raise TrainingError(
            f"rank {rank} sent the report of a window that cannot be its own: {fields}"
        )
    return WindowReport(**fields)


def phases_header(times: PhaseTimes) -> dict[str, Any]:
    """What a worker sends along with a report about where its time went."""
    return {"phases": dataclasses.asdict(times)}


def read_phases(header: dict[str, Any], rank: int) -> PhaseTimes | None:
    """Where a worker's time went; None if it does not say.

    Raises:
        TrainingError: the header says something other than times.
    """
    if "phases" not in header:
        return None
    fields = checked(header["phases"], _PHASES_TYPES, rank)
    seconds = fields.pop("seconds")
    times = [fields["began"], fields["ended"], fields["uncertainty"], *seconds]
    if (
        len(seconds) != len(PHASES)
        or not all(type(each) in (float, int) and math.isfinite(each) for each in times)
        or min(fields["sent"], fields["received"], fields["uncertainty"], *seconds) < 0
        or fields["ended"] < fields["began"]
    ):
        raise TrainingError(f"rank {rank} sent impossible times: {_quoted(header['phases'])}")
    return PhaseTimes(seconds=tuple(map(float, seconds)), **fields)


def read_worker_state(header: dict[str, Any], rank: int, limit: int) -> int:
    """The size in bytes of the state that a worker is about to send.

    Raises:
        TrainingError: the header does not say, or more than ``limit``.
    """
    size = header.get("worker_state")
    if type(size) is not int or not 0 <= size <= limit:
        raise TrainingError(f"rank {rank} sent {_quoted(header)} instead of its worker state")
    return size


def validation_header(report: ValidationReport, states: int = 0) -> dict[str, Any]:
    """What a worker sends about its held-out rows.

    Args:
        report: the loss.
        states: number of bytes that follow, with what its metrics counted.
    """
    return {"validation": dataclasses.asdict(report), "states": states}


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


def read_states_size(header: dict[str, Any], rank: int, world_size: int) -> int:
    """The size in bytes of the metrics' states that a worker is about to send.

    Raises:
        TrainingError: the header does not say, or more than its share.
    """
    size = header.get("states", 0)
    if type(size) is not int or not 0 <= size <= MAX_STATES_BYTES // world_size:
        raise TrainingError(f"rank {rank} sent {_quoted(header)} instead of its metrics' states")
    return size


def read_validation(header: dict[str, Any], rank: int) -> ValidationReport:
    """The report of an epoch's held-out rows.

    Raises:
        TrainingError: the header is not one, or belongs to another rank.
    """
    fields = checked(header.get("validation"), _VALIDATION_TYPES, rank)
    if fields["examples"] < 0 or fields["rank"] != rank:
        raise TrainingError(
            f"rank {rank} sent a validation report that cannot be its own: {fields}"
        )
    return ValidationReport(**fields)


def read_epoch_losses(header: dict[str, Any], rank: int) -> tuple[int, int]:
    """For how many epochs a worker knows the loss, and for how many it asks for it.

    Raises:
        TrainingError: the header does not say.
    """
    known, epochs = header.get("known"), header.get("epoch_losses")
    if type(known) is not int or type(epochs) is not int or not 0 <= known < epochs:
        raise TrainingError(f"rank {rank} sent an invalid request for losses: {_quoted(header)}")
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
    fields = checked(header["failure"], _FAILURE_TYPES, None)
    kind = NonFiniteError if fields.pop("non_finite") else WorkerError
    raise kind(fields.pop("message"), **fields)


def _place(place: Any, rank: int | None) -> RowLocation:
    if (
        not isinstance(place, list)
        or [type(number) for number in place] != _PLACE_TYPES
        or not all(number in _INTEGERS for number in place)
    ):
        shown = _quoted(place)
        raise TrainingError(f"rank {rank} sent {shown} instead of a partition and a row")
    return place[0], place[1]


def checked(fields: Any, types: Types, rank: int | None) -> dict[str, Any]:
    """The fields of a message, which are those of a table and of its types.

    Raises:
        TrainingError: they are not; it shows them.
    """
    if (
        not isinstance(fields, dict)
        or fields.keys() != types.keys()
        or not all(type(fields[name]) in types[name] for name in types)
        or not all(n in _INTEGERS for n in fields.values() if type(n) is int)
    ):
        sender = "a worker" if rank is None else f"rank {rank}"
        raise TrainingError(f"{sender} sent a header that no worker sends: {_quoted(fields)}")
    return fields


def _quoted(value: Any) -> str:
    """What was sent, abridged if it is long: the message goes to every worker and into the log."""
    brief = reprlib.Repr()
    brief.maxdict, brief.maxstring, brief.maxother = 20, 80, 80
    return brief.repr(value)
