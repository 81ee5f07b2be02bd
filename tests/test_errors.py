"""The exception tree, and errors surviving the way through pickle."""

from __future__ import annotations

import copy
import pickle
from typing import Any

from sparkdl.errors import (
    CheckpointError,
    CollectiveError,
    ConfigError,
    DataError,
    DeadlineError,
    DisconnectedError,
    ModelError,
    NonFiniteError,
    PreemptedError,
    RowsLostError,
    SetupError,
    SparkDLError,
    StoppedError,
    TrainingError,
    WorkerError,
    WorkerLostError,
)

PLAIN = [
    *(SparkDLError, CheckpointError, ConfigError, DataError, ModelError, SetupError),
    *(TrainingError, WorkerLostError, DeadlineError, PreemptedError, StoppedError),
    *(DisconnectedError, RowsLostError),
]


def test_errors_are_caught_by_their_parents() -> None:
    for kind, parents in (
        (ConfigError, (ValueError,)),
        (DataError, (ValueError,)),
        (DeadlineError, (TrainingError, TimeoutError)),
        (WorkerError, (TrainingError,)),
        (NonFiniteError, (WorkerError,)),
        (WorkerLostError, (TrainingError,)),
        (StoppedError, (TrainingError,)),
    ):
        assert {*parents} <= {*kind.__mro__}, kind


def test_errors_survive_pickling_with_all_that_they_say() -> None:
    place: Any = {"rank": 3, "epoch": 2, "step": 17, "worker_traceback": "Traceback ..."}
    errors: list[tuple[SparkDLError, tuple[str, ...]]] = [
        *((kind("what happened"), ()) for kind in PLAIN),
        *((kind("gone", ranks=(2, 3)), ("ranks",)) for kind in (WorkerLostError, CollectiveError)),
        *((kind("what happened", **place), (*place,)) for kind in (WorkerError, NonFiniteError)),
    ]
    lost = []
    for error, attributes in errors:
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            same = type(again) is type(error) and str(again) == str(error)
            if not (same and all(getattr(again, n) == getattr(error, n) for n in attributes)):
                lost.append(repr(again))
    assert not lost, "\n".join(lost)
