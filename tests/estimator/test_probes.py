"""``sparkdl.plan``: short fits on executors become a plan, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from frames import estimator, frame
from pyspark.sql import SparkSession

import sparkdl
from sparkdl import ParameterAveraging
from sparkdl.callbacks import TrainingReport
from sparkdl.errors import ConfigError


@pytest.mark.nightly
def test_probes_with_one_and_two_workers_make_a_plan_of_all_rows(
    spark: SparkSession, tmp_path: Path
) -> None:
    given = estimator(
        strategy=ParameterAveraging(2),
        batchSize=4,
        validationFraction=0.25,
        checkpointPath=str(tmp_path / "checkpoints"),
        callbacks=[TrainingReport(str(tmp_path / "report.html"))],
        epochs=7,
    )
    rows = frame(spark)
    plan = sparkdl.plan(given, rows, workers=[1, 2, 8], seconds=0.5)
    assert [(each.workers, each.batch_size, each.aggregation) for each in plan.profiles] == [
        (1, 4, "driver"),
        (1, 16, "driver"),
        (2, 4, "driver"),
        (2, 4, "executors"),
    ]
    assert plan.rows == round(0.75 * rows.count())
    assert not any(tmp_path.iterdir())
    best = plan.best(0.5)
    trained = given.copy(best.params)
    assert trained.getNumWorkers() == best.num_workers
    assert trained.getEpochs() == 7
    first = given.copy({"checkpointPath": None, "callbacks": None, "epochs": 2}).fit(rows)
    assert first.summary.plan(link="1 Gbit/s").predict(8).seconds > 0


def test_what_there_is_nothing_to_plan_with_is_refused(spark: SparkSession) -> None:
    with pytest.raises(ConfigError, match="there are no rows to plan with"):
        sparkdl.plan(estimator(), frame(spark).limit(0))
    with pytest.raises(ConfigError, match="seconds must be a number > 0"):
        sparkdl.plan(estimator(), frame(spark), seconds=0)
