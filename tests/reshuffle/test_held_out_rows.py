"""Exchanges within a training: held-out rows, and workers that are lost."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from every_row import every_row
from interruptions import same_bits
from support.replay import recorded_commits, relative_difference, replay
from torch import Tensor, nn
from toys import classification, make_job, mlp, relative_error, schema
from waiting import eventually

from sparkdl.averager.client import AveragerClient
from sparkdl.events import ValidationReport
from sparkdl.feed.feed import FeedOptions
from sparkdl.feed.order import HELD_OUT
from sparkdl.protocols import ColumnSpec
from sparkdl.reshuffle.exchange import RowExchange
from sparkdl.strategies import GradientAllReduce, ParameterAveraging
from sparkdl.testing import batches_of, run_world
from sparkdl.worker import Job, loop

pytestmark = pytest.mark.usefixtures("nobody_stays")

HELD = ColumnSpec("held", torch.bool)
EXCHANGED = FeedOptions(exchange_rows=True)


def sorted_job(
    held_out: Sequence[int], trained: Sequence[int], **changes: Any
) -> tuple[Job, list[list[pa.RecordBatch]], tuple[np.ndarray, np.ndarray]]:
    """A job, its shards, and the features and targets of all rows that are held out.

    Args:
        held_out: how many rows of each rank are.
        trained: how many are not.
    """
    data = classification([h + t for h, t in zip(held_out, trained, strict=True)])
    shards, chosen = [], []
    for rank, count in enumerate(held_out):
        features, targets = data.shard(rank)
        mark = np.arange(len(targets)) < count
        shards.append(batches_of(7, features=features, label=targets, held=mark))
        chosen.append((features[mark], targets[mark]))
    columns = dataclasses.replace(schema(), validation=HELD)
    changes = {"schema": columns, "epochs": 2, "feed": EXCHANGED, **changes}
    job = make_job(changes.pop("model", mlp()), **changes)
    features, targets = (np.concatenate(each) for each in zip(*chosen, strict=True))
    return job, shards, (features, targets)


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[ValidationReport]:
    """What workers in threads of this process tell of their held-out rows."""
    told: list[ValidationReport] = []
    report = AveragerClient.report_validation

    def telling(self: AveragerClient, found: ValidationReport, states: bytes = b"") -> None:
        told.append(found)
        report(self, found, states)

    monkeypatch.setattr(AveragerClient, "report_validation", telling)
    return told


def loss_by_torch(module: torch.nn.Module, rows: tuple[np.ndarray, np.ndarray]) -> float:
    with torch.no_grad():
        outputs = module.eval()(torch.from_numpy(rows[0]))
    return float(torch.nn.functional.cross_entropy(outputs, torch.from_numpy(rows[1])))


@pytest.mark.parametrize(
    ("feed", "validated"),
    [(EXCHANGED, [10, 10, 11]), (FeedOptions(), [0, 0, 31])],
    ids=["exchanged", "not exchanged"],
)
def test_workers_validate_on_as_many_rows_each_wherever_the_rows_were_if_they_exchange_them(
    reports: list[ValidationReport], feed: FeedOptions, validated: list[int]
) -> None:
    job, shards, rows = sorted_job([0, 31, 0], [25, 4, 20], feed=feed)
    outcome = run_world(job, shards)
    by_epoch = [sorted(r.examples for r in reports if r.epoch == epoch) for epoch in (1, 2)]
    assert by_epoch == [validated] * 2
    last = outcome.history[-1]
    assert last.validation_examples == 31
    assert last.validation_loss == pytest.approx(loss_by_torch(outcome.module, rows), rel=1e-9)


def test_spreading_rows_to_validate_with_changes_nothing_of_the_model() -> None:
    job, shards, _ = sorted_job([0, 31], [25, 4])
    without = dataclasses.replace(job, schema=schema())
    kept = [
        [batch.filter(pc.invert(batch["held"])).select(["features", "label"]) for batch in shard]
        for shard in shards
    ]
    assert same_bits(run_world(job, shards), run_world(without, kept))


def test_an_indicator_that_is_true_of_no_row_holds_none_out(
    reports: list[ValidationReport],
) -> None:
    job, shards, _ = sorted_job([0, 0], [9, 8])
    history = run_world(job, shards).history
    assert [report.examples for report in reports] == [0] * 4
    assert [epoch.validation_loss for epoch in history] == [None] * 2


def test_who_has_validated_first_serves_its_rows_until_the_last_has_fetched_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finished, fetch_once, finish = threading.Event(), RowExchange._fetch_once, AveragerClient.finish

    def late(self: RowExchange, peer: int, epoch: int, *rest: Any) -> None:
        if epoch == HELD_OUT:
            finished.wait(1.0)  # what must not happen before
        fetch_once(self, peer, epoch, *rest)

    def finishing(self: AveragerClient) -> None:
        finish(self)
        finished.set()

    monkeypatch.setattr(RowExchange, "_fetch_once", late)
    monkeypatch.setattr(AveragerClient, "finish", finishing)
    job, shards, rows = sorted_job([31, 0], [4, 25], epochs=1)  # rank 0 has nothing to fetch
    outcome = run_world(job, shards)
    (epoch,) = outcome.history
    assert epoch.validation_examples == 31
    assert epoch.validation_loss == pytest.approx(loss_by_torch(outcome.module, rows), rel=1e-9)


def dying(folder: Path, validation: int) -> Callable[[], torch.nn.Module]:
    """Builds the model; rank 1's process ends itself in one of its validations, counted from 1."""

    def build() -> torch.nn.Module:
        if multiprocessing.current_process().name == "rank 1":
            evaluate, counted, mark = loop._validate, itertools.count(1), folder / "died"
            if mark.exists():
                time.sleep(1.0)  # enough for the others to be through with rounds of the next epoch

            def dies(*arguments: Any) -> ValidationReport:
                if next(counted) == validation and not mark.exists():
                    mark.touch()
                    time.sleep(0.5)  # enough for the others to fetch their rows from this one
                    os.kill(os.getpid(), signal.SIGKILL)
                return evaluate(*arguments)

            loop._validate = dies
        return mlp()

    return build


@pytest.mark.gate
@pytest.mark.parametrize(
    "strategy", [ParameterAveraging(2), GradientAllReduce()], ids=["alone", "all"]
)
@pytest.mark.parametrize("validation", [1, 2], ids=["first", "last"])
def test_a_worker_that_is_killed_while_it_validates_gets_the_same_rows_again(
    tmp_path: Path, validation: int, strategy: Any
) -> None:
    changes: dict[str, Any] = {"strategy": strategy, "max_failures": 1}
    model = dying(tmp_path, validation)
    job, shards, rows = sorted_job([0, 31, 0], [25, 4, 20], model=model, **changes)
    outcome = run_world(job, shards, ranks_as="processes")
    assert (tmp_path / "died").exists()
    assert [epoch.validation_examples for epoch in outcome.history] == [31] * 2
    last = outcome.history[-1].validation_loss
    assert last == pytest.approx(loss_by_torch(outcome.module, rows), rel=1e-9)


cloudpickle.register_pickle_by_value(sys.modules[__name__])


SIZES = [40, 0, 21]


class Dies(nn.Module):
    """Ends rank 1's process once, at a moment of its life."""

    def __init__(self, folder: Path, moment: str) -> None:
        super().__init__()
        self.net = mlp()
        self.mark = str(folder / "died")
        self.moment = moment
        self.passes = 0

    def forward(self, features: Tensor) -> Tensor:
        self.passes += 1
        if self.moment == "after" and self.passes == 5:
            self.die()
        return self.net(features)

    def die(self) -> None:
        if multiprocessing.current_process().name == "rank 1" and not os.path.exists(self.mark):
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)


def dying_in_an_exchange(folder: Path, moment: str) -> Callable[[], nn.Module]:
    """Builds the model, and where the moment is one of the exchange's lies in wait for it."""

    def build() -> nn.Module:
        model = Dies(folder, moment)
        if moment == "before":
            _call_before(RowExchange, "__call__", lambda *_: model.die())
        if moment == "in":
            _call_before(RowExchange, "_answer", lambda *_: model.die())
        return model

    return build


def _call_before(kind: type, name: str, deed: Callable[..., None]) -> None:
    method = getattr(kind, name)

    def called(self: Any, *args: Any) -> Any:
        deed(self, *args)
        return method(self, *args)

    # In a rank's process, which nobody else uses.
    if multiprocessing.current_process().name.startswith("rank"):
        setattr(kind, name, called)


@pytest.mark.nightly_variants
@pytest.mark.parametrize("moment", ["before", "in", "after"])
def test_a_worker_that_is_killed_comes_back_to_the_same_rows(tmp_path: Path, moment: str) -> None:
    shards = classification(SIZES).shards()
    changes: dict[str, Any] = {"strategy": ParameterAveraging(2), "epochs": 3, "max_failures": 1}
    job = make_job(dying_in_an_exchange(tmp_path, moment), feed=EXCHANGED, **changes)
    with recorded_commits() as commits:
        outcome = run_world(job, shards, ranks_as="processes")
    assert Path(tmp_path, "died").exists()
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3
    assert relative_difference(outcome.module, replay(job, shards, commits)) < 1e-6


def test_a_worker_that_is_killed_is_back_in_time_for_one_that_still_fetches_its_rows(
    tmp_path: Path,
) -> None:
    """Rank 0 has contributed to a round meanwhile, which rank 2 cannot take part in before."""
    died = tmp_path / "died"

    def build() -> nn.Module:
        model = Dies(tmp_path, "after")
        model.passes = 4

        def until_it_is_gone(self: RowExchange, peer: int, *args: Any) -> None:
            if multiprocessing.current_process().name == "rank 2" and peer == 1:
                eventually(died.exists, 20)
                time.sleep(1)  # rank 0 contributes

        _call_before(RowExchange, "_fetch", until_it_is_gone)
        return model

    shards = classification([40, 12, 21]).shards()
    job = make_job(build, strategy=ParameterAveraging(2), epochs=2, max_failures=1, feed=EXCHANGED)
    with recorded_commits() as commits:
        outcome = run_world(job, shards, ranks_as="processes")
    assert died.exists()
    assert [row.examples for row in outcome.history] == [73] * 2
    assert relative_difference(outcome.module, replay(job, shards, commits)) < 1e-6


@every_row(
    ({}, 3),
    ({"exchange_rows": True}, 3),
    ({"exchange_rows": True, "keep_exchanged": False}, 0),
    ({"exchange_rows": True, "reshuffle_every": 1}, 0),
    ({"reshuffle_every": 1}, 0),
)
def test_a_worker_comes_back_alone_only_if_others_still_have_what_they_gave_it(
    options: dict[str, Any], survivable: int
) -> None:
    job = make_job(mlp(), max_failures=3, feed=FeedOptions(**options))
    assert (job.survivable_losses, job.resubmissions) == (survivable, 3 - survivable)


@pytest.mark.nightly
@pytest.mark.parametrize("moment", ["before", "in", "after"])
def test_workers_that_cannot_come_back_alone_all_start_again(tmp_path: Path, moment: str) -> None:
    shards = classification(SIZES).shards()
    how: dict[str, Any] = {"strategy": GradientAllReduce(), "epochs": 2, "feed": EXCHANGED}
    undisturbed = make_job(lambda: Dies(tmp_path, "never"), **how)
    expected = run_world(undisturbed, shards, ranks_as="processes")
    job = make_job(dying_in_an_exchange(tmp_path, moment), max_failures=1, **how)
    outcome = run_world(job, shards, ranks_as="processes")
    assert Path(tmp_path, "died").exists()
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 2
    assert relative_error(outcome.module, expected.module) < 1e-6
