"""Summary and history of a model."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from frames import estimator, features_of, frame, labels_of
from pyspark.sql import SparkSession
from torch import nn

from sparkdl import ParameterAveraging, TorchModel
from sparkdl.callbacks import MLflow, TensorBoard, TrainingReport
from sparkdl.errors import ConfigError
from sparkdl.phases import PHASES


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


def test_history_has_a_row_for_each_epoch_with_all_rows_and_the_rounds(
    spark: SparkSession,
) -> None:
    model = estimator(
        epochs=3, optimizer=partial(torch.optim.Adam, lr=0.0), strategy=ParameterAveraging(period=2)
    ).fit(frame(spark, rows=60, partitions=2))
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
