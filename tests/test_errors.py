"""The exception tree, and errors surviving the way through pickle."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from sparkdl import errors
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
    SparkDLError,
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    SetupError,
    TrainingError,
    WorkerLostError,
    DeadlineError,
    PreemptedError,
    StoppedError,
    DisconnectedError,
    RowsLostError,
]


def test_every_error_is_a_sparkdl_error_with_a_docstring() -> None:
    found = inspect.getmembers(errors, inspect.isclass)
    classes = [kind for _, kind in found if kind.__module__ == errors.__name__]
    assert len(classes) >= 11
    for kind in classes:
        assert issubclass(kind, SparkDLError)
        assert kind.__doc__


@pytest.mark.parametrize(
    ("kind", "parents"),
    [
        (ConfigError, (ValueError,)),
        (DataError, (ValueError,)),
        (DeadlineError, (TrainingError, TimeoutError)),
        (WorkerError, (TrainingError,)),
        (NonFiniteError, (WorkerError,)),
        (WorkerLostError, (TrainingError,)),
        (StoppedError, (TrainingError,)),
    ],
)
def test_errors_are_caught_by_their_parents(
    kind: type[Exception], parents: tuple[type[Exception], ...]
) -> None:
    assert all(issubclass(kind, parent) for parent in parents)


@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.__name__)
def test_plain_errors_survive_pickling(kind: type[Exception]) -> None:
    again = pickle.loads(pickle.dumps(kind("what happened")))
    assert type(again) is kind
    assert str(again) == "what happened"


@pytest.mark.parametrize("kind", [WorkerLostError, CollectiveError])
def test_who_was_lost_survives_pickling(kind: type[WorkerLostError]) -> None:
    again = pickle.loads(pickle.dumps(kind("their host is gone", ranks=(2, 3))))
    assert (str(again), again.ranks) == ("their host is gone", (2, 3))


@pytest.mark.parametrize("kind", [WorkerError, NonFiniteError])
@pytest.mark.parametrize("duplicate", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
def test_a_workers_error_survives_pickling_with_its_place_and_traceback(
    kind: type[WorkerError], duplicate: object
) -> None:
    error = kind("what happened", rank=3, epoch=2, step=17, worker_traceback="Traceback ...")
    again = duplicate(error)  # type: ignore[operator]
    assert type(again) is kind
    assert str(again) == "what happened"
    assert (again.rank, again.epoch, again.step) == (3, 2, 17)
    assert again.worker_traceback == "Traceback ..."
