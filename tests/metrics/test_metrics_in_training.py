"""Metrics of each epoch of a training: in the history, for callbacks, for learning rates."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import sklearn.metrics as sk
import torch
from every_row import every_row
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
)
from toys import classification, held_out, held_out_schema, make_job, mlp, schema

from sparkdl.callbacks import Callback, EarlyStopping, ModelCheckpoint, Training
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.errors import ConfigError, DisconnectedError, WorkerError
from sparkdl.events import EpochSummary
from sparkdl.metrics import Metrics
from sparkdl.protocols import ColumnSpec
from sparkdl.strategies import GradientAllReduce, ParameterAveraging
from sparkdl.testing import Shard, run_world
from sparkdl.worker import Job

SIZES = [24, 0, 15]
CLASSES = 3
MAKERS = {
    "accuracy": MulticlassAccuracy(CLASSES, average="micro"),
    "auroc": partial(MulticlassAUROC, CLASSES),
    "confusion": partial(MulticlassConfusionMatrix, CLASSES),
}


def probabilities(outputs: Any, targets: Any) -> tuple[Any, Any]:
    return outputs.softmax(1), targets


def measured_job(makers: Any = MAKERS, **changes: Any) -> tuple[Job, list[Shard]]:
    """A job whose workers hold every third of their rows out, if they have any, and the rows."""
    metrics = Metrics.of(makers, probabilities)
    job = make_job(mlp(), schema=held_out_schema(), metrics=metrics, **changes)
    return job, held_out(SIZES).shards()


def told(scores: np.ndarray, targets: np.ndarray) -> dict[str, Any]:
    """What scikit-learn says of it, as ``MAKERS`` would."""
    return {
        "accuracy": pytest.approx(sk.accuracy_score(targets, scores.argmax(1)), rel=1e-6),
        "auroc": pytest.approx(sk.roc_auc_score(targets, scores, multi_class="ovr"), rel=1e-6),
        "confusion": sk.confusion_matrix(targets, scores.argmax(1)).tolist(),
    }


def expected(module: torch.nn.Module) -> dict[str, Any]:
    data = classification(SIZES)
    held = np.concatenate([np.arange(size) % 3 == 0 for size in SIZES])
    with torch.no_grad():
        scores = module(torch.tensor(data.features[held])).softmax(1).numpy()
    return told(scores, data.targets[held])


class WeightedAccuracy(Metric):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("right", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("all", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, predictions: Any, labels: Any, sample_weight: Any = None) -> None:
        weights = torch.ones(len(labels)) if sample_weight is None else sample_weight
        self.right += weights[predictions.argmax(1) == labels].sum()
        self.all += weights.sum()

    def compute(self) -> Any:
        return self.right / self.all


class Epochs(Callback):
    def __init__(self) -> None:
        self.seen: list[EpochSummary] = []

    def on_epoch(self, training: Training, summary: EpochSummary) -> None:
        assert training.history[-1] is summary
        self.seen.append(summary)


@pytest.mark.parametrize(
    ("strategy", "ranks_as"),
    [
        (ParameterAveraging(2), "threads"),
        pytest.param(GradientAllReduce(), "processes", marks=pytest.mark.nightly),
    ],
    ids=["averaging", "all-reduce"],
)
def test_they_are_what_scikit_learn_says_of_all_held_out_rows(strategy: Any, ranks_as: Any) -> None:
    epochs = Epochs()
    job, shards = measured_job(epochs=2, strategy=strategy, deadline_s=120.0)
    outcome = run_world(job, shards, ranks_as=ranks_as, callbacks=[epochs])
    assert outcome.history[-1].metrics == expected(outcome.module)
    assert epochs.seen == outcome.history
    once = run_world(replace(job, epochs=1), shards, ranks_as=ranks_as)
    assert once.history[0].metrics == expected(once.module) == outcome.history[0].metrics
    # Measuring changes no step.
    plain = run_world(replace(job, metrics=None), shards, ranks_as=ranks_as).module
    assert all(map(torch.equal, plain.parameters(), outcome.module.parameters()))


def test_weights_are_given_to_metrics_that_take_them_and_to_no_others() -> None:
    job, shards = measured_job({**MAKERS, "weighted": WeightedAccuracy}, epochs=1)
    weights = np.random.default_rng(3).uniform(0.1, 5.0, sum(SIZES)).astype(np.float32)
    columns = replace(job.schema, weight=ColumnSpec("w", torch.float32))
    names, left, weighed = [spec.name for spec in columns.columns], weights, []
    for size, batches in zip(SIZES, shards, strict=True):
        own, left = pa.array(left[:size]), left[size:]
        rows = (
            pa.Table.from_batches(batches).append_column("w", own).select(names) if size else None
        )
        weighed.append(rows.to_batches(max_chunksize=10) if rows else [])
    outcome = run_world(replace(job, schema=columns), weighed)
    held = np.concatenate([np.arange(size) % 3 == 0 for size in SIZES])
    data = classification(SIZES)
    with torch.no_grad():
        found = outcome.module(torch.tensor(data.features[held])).argmax(1).numpy()
    wanted = sk.accuracy_score(data.targets[held], found, sample_weight=weights[held])
    measured = dict(outcome.history[-1].metrics)
    assert measured.pop("weighted") == pytest.approx(wanted, rel=1e-6)
    assert measured == expected(outcome.module)
    without = run_world(job, shards)
    alike = without.history[-1].metrics
    assert alike["weighted"] == pytest.approx(alike["accuracy"], rel=1e-6)


def test_a_resumed_training_has_the_same_ones(tmp_path: Path) -> None:
    job, shards = measured_job(epochs=4)
    straight = run_world(job, shards)
    policy = CheckpointPolicy(path=str(tmp_path))
    run_world(replace(job, epochs=2), shards, checkpoints=policy)
    resumed = run_world(job, shards, checkpoints=policy)
    again = run_world(job, shards, checkpoints=policy)
    for outcome in (resumed, again):
        assert [e.metrics for e in outcome.history] == [e.metrics for e in straight.history]
    # Who comes without those metrics goes on all the same; of the last epoch nobody had told.
    without = run_world(replace(job, metrics=None, epochs=5), shards, checkpoints=policy).history
    assert [e.metrics for e in without[:3]] == [e.metrics for e in straight.history[:3]]
    callbacks = [EarlyStopping("accuracy")]
    with pytest.raises(ConfigError, match="epoch 4 has no 'accuracy': it was trained without"):
        run_world(replace(job, epochs=6), shards, checkpoints=policy, callbacks=callbacks)


def test_a_worker_that_is_lost_while_others_wait_counts_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sparkdl.averager.client import AveragerClient

    job, shards = measured_job(epochs=3, max_failures=3)
    straight = run_world(job, shards)
    report, lost, lock = AveragerClient.report_validation, [], threading.Lock()

    def lose(self: AveragerClient, found: Any, states: bytes = b"") -> None:
        with lock:
            due = found.rank == 2 and found.epoch in (1, 3) and found.epoch not in lost
            lost.extend([found.epoch] if due else [])
        if due and found.epoch == 1:
            raise DisconnectedError("made up, before it was told")
        report(self, found, states)
        if due:
            raise DisconnectedError("made up, after it was told")

    monkeypatch.setattr(AveragerClient, "report_validation", lose)
    found = run_world(job, shards)
    assert lost == [1, 3]
    assert [e.metrics for e in found.history] == [e.metrics for e in straight.history]


class Scripted(MeanMetric):
    """Comes to what is wanted after each epoch, for there is one of it an epoch."""

    higher_is_better = None
    values: list[float] = []  # noqa: RUF012

    def compute(self) -> Any:
        return torch.tensor(self.values.pop(0))

    def update(self, *given: Any) -> None:
        super().update(1.0)


class Larger(Scripted):
    higher_is_better = True
    values: list[float] = []  # noqa: RUF012


def test_early_stopping_and_the_best_model_follow_a_metric() -> None:
    job, shards = measured_job({"mine": Larger}, epochs=9)
    Larger.values[:] = [0.1, 0.5, float("nan"), 0.4, 0.3, 0.2]
    stopped = run_world(job, shards, callbacks=[EarlyStopping("mine", patience=3)])
    assert len(stopped.history) == 5
    assert stopped.stopped == "mine has not risen above 0.5 (epoch 2) for 3 epochs"
    best = run_world(replace(job, epochs=2, metrics=None), shards).module
    assert all(map(torch.equal, best.parameters(), stopped.module.parameters()))
    Scripted.values[:] = [0.3, 0.1, 0.2]
    job, shards = measured_job({"mine": Scripted}, epochs=3)
    lowest = run_world(job, shards, callbacks=[ModelCheckpoint("mine", mode="min")])
    assert all(map(torch.equal, best.parameters(), lowest.module.parameters()))


def test_a_learning_rate_follows_a_metric_and_so_does_a_resumed_one(tmp_path: Path) -> None:
    plateau = partial(ReduceLROnPlateau, mode="max", patience=0, factor=0.1)
    following = {"scheduler": plateau, "scheduler_metric": "mine"}
    job, shards = measured_job({"mine": Larger}, epochs=4, **following)
    Larger.values[:] = [0.1, 0.2, 0.1, 0.1]
    found = run_world(job, shards).module
    # 0.1, 0.1, 0.1, 0.01: the metric falls after the third epoch.
    by_hand = make_job(mlp(), schema=job.schema, scheduler=_tenth_at_the_fourth, epochs=4)
    oracle = run_world(by_hand, shards).module
    assert all(map(torch.equal, oracle.parameters(), found.parameters()))
    policy = CheckpointPolicy(path=str(tmp_path))
    Larger.values[:] = [0.1, 0.2, 0.1, 0.1]
    run_world(replace(job, epochs=3), shards, checkpoints=policy)
    other = replace(job, scheduler_metric=None)
    with pytest.raises(ConfigError, match="scheduler metric"):
        run_world(other, shards, checkpoints=policy)
    Larger.values[:] = [0.1, 0.2, 0.1, 0.1]  # the first is now of the third, measured once more
    resumed = run_world(job, shards, checkpoints=policy).module
    assert all(map(torch.equal, oracle.parameters(), resumed.parameters()))


def _tenth_at_the_fourth(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [3], gamma=0.1)


@every_row(
    (EarlyStopping("auroc"), "follows 'auroc', which is not measured; there are validation_l"),
    (EarlyStopping("accuracy", mode="min"), "a larger 'accuracy' is better: leave mode out"),
    (ModelCheckpoint("confusion"), "does not say whether a larger value is better"),
    (ModelCheckpoint("confusion", mode="max"), "came to .* in epoch 1; only a metric with a"),
)
def test_what_cannot_be_followed_is_refused(callback: Any, words: str) -> None:
    makers = {name: MAKERS[name] for name in ("accuracy", "confusion")}
    job, shards = measured_job(makers)
    with pytest.raises(ConfigError, match=words):
        run_world(job, shards, callbacks=[callback])


def test_a_learning_rate_that_cannot_follow_is_refused() -> None:
    job, shards = measured_job(scheduler=partial(ReduceLROnPlateau, mode="max"))
    with pytest.raises(ConfigError, match="'lost', which is not one of the metrics"):
        run_world(replace(job, scheduler_metric="lost"), shards)
    with pytest.raises(ConfigError, match="can follow only a metric with a single value"):
        run_world(replace(job, scheduler_metric="confusion"), shards)
    with pytest.raises(ConfigError, match="but the scheduler follows no metric"):
        run_world(replace(job, scheduler_metric="auroc", scheduler=_tenth_at_the_fourth), shards)


def test_metrics_without_held_out_rows_are_refused_in_words() -> None:
    job, _ = measured_job()
    with pytest.raises(ConfigError, match="held-out rows, but there are none: set validationFrac"):
        run_world(replace(job, schema=schema()), classification(SIZES).shards())


def test_more_than_the_driver_takes_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sparkdl.averager.headers.MAX_STATES_BYTES", 300)
    job, shards = measured_job()
    words = r"each of 3 workers may send the driver at most 100\. .* thresholds=200"
    with pytest.raises(WorkerError, match=words):
        run_world(job, shards)
    monkeypatch.undo()
    monkeypatch.setattr("sparkdl.driver.serving.MAX_NUMBERS", 8)
    with pytest.raises(ConfigError, match="'confusion' has 9 values"):
        run_world(job, shards)
