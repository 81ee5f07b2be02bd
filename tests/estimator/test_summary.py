"""What a fit shows and leaves: its bar, its summary, and a model to go on from."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_row import every, every_row
from frames import estimator, features_of, frame, labels_of, same_bits
from models import decayed
from pyspark.sql import DataFrame, SparkSession
from torch import nn
from tqdm import notebook

from sparkdl import ParameterAveraging, TorchModel
from sparkdl.averager.run_events import WorkerTimes
from sparkdl.callbacks import Callback, MLflow, TensorBoard, Training, TrainingReport
from sparkdl.errors import ConfigError, DataError, ModelError, TrainingError
from sparkdl.estimator import progress
from sparkdl.estimator.progress import ProgressBar
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.shards import DataStatistics
from sparkdl.phases import PHASES, PhaseTimes


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_fit_has_a_summary_a_report_curves_and_a_run(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("DO_NOT_TRACK", "true")
    import mlflow

    store = f"file://{tmp_path}/mlflow"
    model = estimator(
        epochs=3,
        validationFraction=0.2,
        callbacks=[
            TrainingReport(str(tmp_path / "report.html")),
            TensorBoard(str(tmp_path / "curves")),
            MLflow("x", tracking_uri=store),
        ],
    ).fit(frame(spark))
    summary = model.summary
    assert model.hasSummary
    assert summary.history["loss"].tolist() == [epoch.loss for epoch in model.history]
    assert summary.history.index.tolist() == [1, 2, 3]
    workers = summary.workers
    assert workers["rows"].sum() == summary.rows == model.history[0].examples
    assert workers["examples"].sum() == 3 * summary.rows
    assert summary.rows + summary.held_out_rows == 60
    assert (workers[list(PHASES)] >= 0).all(axis=None)
    assert (workers[["decode", "compute", "wait"]] > 0).all(axis=None)
    assert (workers[list(PHASES)].sum(axis=1) < summary.seconds).all()
    assert summary.num_workers == 2
    assert summary.parameters == sum(p.numel() for p in model.module.parameters())
    assert summary.bound_by in repr(summary)
    summary.save_report(tmp_path / "again.html")
    for page in ("report.html", "again.html"):
        text = (tmp_path / page).read_text()
        assert "finished" in text
        assert "batchSize" in text
        assert len(text.encode()) < 1_000_000
    assert list((tmp_path / "curves").glob("events*"))
    client = mlflow.MlflowClient(tracking_uri=store)
    (run,) = client.search_runs([client.get_experiment_by_name("x").experiment_id])
    assert run.data.params["batchSize"] == "10"
    assert run.data.params["optimizer"] == "SGD(lr=0.1)"
    assert run.data.metrics["validation_loss"] == pytest.approx(model.history[-1].validation_loss)
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(store)
    try:
        function = mlflow.pyfunc.load_model(run.data.tags["sparkdl.model"])
    finally:
        mlflow.set_tracking_uri(before)
    rows = features_of(range(7)).astype(np.float32)
    expected = model.module(torch.from_numpy(rows)).detach().numpy()
    assert function.predict(rows) == pytest.approx(expected, rel=1e-5)
    model.write().save(str(tmp_path / "model"))
    loaded = TorchModel.load(str(tmp_path / "model"), trust=True)
    assert not loaded.hasSummary
    with pytest.raises(ConfigError, match=r"model\.history"):
        _ = loaded.summary


def test_history_has_a_row_for_each_epoch_with_all_rows_and_the_rounds_and_nothing_is_printed(
    spark: SparkSession, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = frame(spark, rows=60, partitions=2)
    capfd.readouterr()
    model = estimator(
        epochs=3, optimizer=partial(torch.optim.Adam, lr=0.0), strategy=ParameterAveraging(period=2)
    ).fit(rows)
    assert capfd.readouterr() == ("", "")
    features = torch.tensor(features_of(range(60)), dtype=torch.float32)
    with torch.no_grad():  # at a rate of 0 all epochs have the loss of the first values
        outputs = model.module(features)
    loss = nn.functional.cross_entropy(outputs, torch.tensor(labels_of(range(60)))).item()
    assert [epoch.epoch for epoch in model.history] == [1, 2, 3]
    assert [epoch.examples for epoch in model.history] == [60, 60, 60]
    assert [epoch.rounds for epoch in model.history] == [2, 2, 2]  # after steps 2 and 3
    assert all(epoch.seconds > 0 for epoch in model.history)
    assert [epoch.loss for epoch in model.history] == pytest.approx([loss] * 3, rel=1e-5)
    assert type(model.module) is nn.Sequential
    assert not model.module.training
    assert {str(p.device) for p in model.module.parameters()} == {"cpu"}


def test_params_that_are_set_during_a_fit_are_of_the_next_one(spark: SparkSession) -> None:
    class Renames(Callback):
        def on_epoch(self, training: Training, summary: EpochSummary) -> None:
            given.setPredictionCol("another")

    given = estimator(callbacks=[Renames()])
    assert given.fit(frame(spark)).getPredictionCol() == "prediction"
    assert given.getPredictionCol() == "another"


def test_a_fit_goes_on_from_a_model_that_fits_and_trains_what_is_not_frozen(
    spark: SparkSession,
) -> None:
    rows, lr = frame(spark), 1e-30
    begun = estimator(epochs=2).fit(rows)

    def build() -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        module[0].requires_grad_(False)
        return module

    # At such a rate gradients move nothing.
    going_on: Any = estimator(model=build, optimizer=partial(decayed, lr=lr))
    same = going_on.fit(rows, warm_start=begun)
    assert same_bits(same, begun)
    assert len(same.history) == 1
    (decayed_to_zero,) = going_on.fit(
        rows, [{going_on.optimizer: partial(decayed, lr=2.0)}], warm_start=begun
    )
    state = decayed_to_zero.module.state_dict()
    assert torch.equal(state["0.weight"], begun.module.state_dict()["0.weight"])
    assert not torch.allclose(state["2.weight"], begun.module.state_dict()["2.weight"], atol=1e-3)

    with pytest.raises(ConfigError, match="warm_start must be a TorchModel, got one of type Seq"):
        going_on.fit(rows, warm_start=begun.module)
    going_on.setModel(nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 3)))
    with pytest.raises(ModelError, match=r"'0.weight' is float32 \[9, 4\] in the model to train"):
        going_on.fit(rows, warm_start=begun)


@pytest.mark.nightly
def test_the_batches_of_a_stream_are_trained_on_one_after_another(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = frame(spark)
    rows.coalesce(2).write.parquet(str(tmp_path / "rows"))
    stream = spark.readStream.schema(rows.schema).option("maxFilesPerTrigger", 1)
    fitted: list[TorchModel] = []

    def fit(batch: DataFrame, number: int) -> None:
        # At such a rate the second fit ends where it began.
        optimizer = partial(torch.optim.SGD, lr=1e-30 if fitted else 0.1)
        begin = fitted[-1] if fitted else None
        fitted.append(estimator(optimizer=optimizer).fit(batch, warm_start=begin))

    query = (
        stream.parquet(str(tmp_path / "rows"))
        .writeStream.foreachBatch(fit)
        .option("checkpointLocation", str(tmp_path / "query"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    first, second = fitted
    assert first.history[-1].examples + second.history[-1].examples == rows.count()
    assert same_bits(second, first)
    begun = estimator().getModel().state_dict()
    assert not torch.equal(first.module.state_dict()["0.weight"], begun["0.weight"])


def test_a_fit_with_progress_shows_rows_epoch_and_loss(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    estimator(progress=True, epochs=2).fit(frame(spark))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "reading rows" in shown.err
    assert "epoch 2/2" in shown.err
    assert "120/120" in shown.err
    assert "loss " in shown.err
    assert "rows/s" in shown.err


def window(rank: int, examples: int, loss_sum: float) -> WindowReport:
    return WindowReport(
        rank=rank, epoch=1, step=1, examples=examples, loss_sum=loss_sum, last=False
    )


def rows_known(*shard_rows: int) -> DataStatistics:
    return DataStatistics(shard_rows, ())


def on_screen(written: str) -> str:
    """What a terminal shows: a return goes to the line's start, and what follows covers it."""
    lines = []
    for line in written.split("\n"):
        shown = ""
        for piece in line.split("\r"):
            shown = piece + shown[len(piece) :]
        lines.append(shown.rstrip())
    return "\n".join(lines)


def test_a_fit_that_is_refused_while_rows_are_read_leaves_no_bar(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(DataError), ProgressBar(2, visible=True):
        raise DataError("the label is null in 3 rows")
    shown = capsys.readouterr().err
    assert "reading rows" in shown
    assert "epoch" not in shown
    assert on_screen(shown) == ""


def test_a_fit_that_fails_while_it_trains_leaves_how_far_it_came(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bar = ProgressBar(2, visible=True)
    bar(rows_known(10))
    bar(window(0, 5, 2.0))
    with pytest.raises(TrainingError), bar:
        raise TrainingError("rank 0: no more")
    assert "5.00/20.0" in on_screen(capsys.readouterr().err)


ENDED = EpochSummary(epoch=1, loss=10.0, examples=10, rounds=1, seconds=1.0)


@every_row(
    ([rows_known(10, 30), window(1, 30, 90.0)], ["epoch 1/3", "30.0/120 "]),
    ([rows_known(10, 30), window(0, 10, 10.0), window(1, 30, 90.0)], ["loss 2.5000"]),
    (
        [rows_known(10), window(0, 10, 100.0), ENDED, window(0, 10, 20.0)],
        ["loss 2.0000", "epoch 2/3"],
    ),
    ([rows_known(10), window(0, 0, 0.0)], ["loss nan"]),
)
def test_the_bar_shows_the_rows_of_all_epochs_and_the_mean_loss_of_this_one(
    capsys: pytest.CaptureFixture[str], events: list[Any], fragments: list[str]
) -> None:
    with ProgressBar(3, visible=True) as bar:
        for event in events:
            bar(event)
    shown = capsys.readouterr().err
    assert [each for each in fragments if each not in shown] == []


@every_row(
    # A callback has stopped it: tqdm itself would show that as a failure.
    ([rows_known(10), window(0, 10, 1.0)], None, (10, 20, "success", None)),
    ([rows_known(10), window(0, 10, 1.0)], TrainingError("no"), (10, 20, "danger", None)),
    ([], DataError("no"), (0, 1, "info", "hidden")),
)
def test_in_a_notebook_the_color_of_the_bar_says_how_the_training_ended(
    monkeypatch: pytest.MonkeyPatch, events: list[Any], error: Exception | None, expected: Any
) -> None:
    monkeypatch.setattr(progress, "tqdm", notebook.tqdm)
    bar = ProgressBar(2, visible=True)
    with nullcontext() if error is None else pytest.raises(type(error)), bar:
        for event in events:
            bar(event)
        if error is not None:
            raise error
    shown = bar._widget
    hidden = bar._bar.container.layout.visibility
    assert (shown.value, shown.max, shown.bar_style, hidden) == expected


def times(rank: int, **seconds: float) -> WorkerTimes:
    by_phase = tuple(seconds.get(name, 0.0) for name in PHASES)
    return WorkerTimes(rank, f"host-{rank}", PhaseTimes(0.0, sum(by_phase), by_phase))


@every_row(
    # 6 of 12 s each; the mean is 2 s a worker, and rank 2 takes 4.
    (
        [(1.0, 3.0), (1.0, 3.0), (4.0, 0.0)],
        ["loss 0.5000", "computing 50 %", "slow: rank 2 on host-2 (2.0 x)"],
    ),
    ([(1.0, 3.0), (1.1, 3.0)], ["waiting 74 %"]),
)
def test_the_bar_says_what_workers_do_and_who_is_slow(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    seconds: list[tuple[float, float]],
    told: list[str],
) -> None:
    monkeypatch.setattr(progress, "LOOK_S", 0.0)
    with ProgressBar(1, visible=True) as bar:
        bar(rows_known(*[10] * len(seconds)))
        for rank, (compute, wait) in enumerate(seconds):
            bar(times(rank, compute=compute, wait=wait))
        bar(window(0, 10, 5.0))
    shown = capsys.readouterr().err
    assert [each for each in told if each not in shown] == []
    assert ("slow" in shown) == (len(seconds) == 3)


def test_a_bar_that_nobody_sees_counts_nothing() -> None:
    with ProgressBar(1, visible=False) as bar:
        bar(rows_known(10))
        bar(times(0, compute=1.0))
        assert not bar._workers._busy


class Pipe(io.StringIO):
    """A stream whose reader leaves, or was never there."""

    broken = True

    def write(self, text: str) -> int:
        if self.broken:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


def closed_stream() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@every("stream", [Pipe, lambda: None, closed_stream])
def test_a_bar_that_cannot_be_shown_is_left_out_with_one_warning_at_most(
    stream: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stderr", stream())
    with ProgressBar(1, visible=True) as bar:
        bar(rows_known(10, 20))
        for rank in (0, 1):
            bar(window(rank, 10, 2.0))
    # tqdm itself takes a closed stream for one that is not to be written to.
    expected = 0 if stream is closed_stream else 1
    assert len([each for each in caplog.records if "progress bar" in each.getMessage()]) == expected


def test_a_reader_that_leaves_in_the_middle_costs_only_the_bar(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream = Pipe()
    stream.broken = False
    monkeypatch.setattr(sys, "stderr", stream)
    with ProgressBar(1, visible=True) as bar:
        bar(rows_known(10, 20))
        stream.broken = True
        bar(rows_known(10, 20))
        bar(window(0, 10, 2.0))
    assert "BrokenPipeError" in caplog.text
