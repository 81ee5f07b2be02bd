"""What a fit is checked for before its workers start, and probes that make a plan."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from every_row import every, every_row
from frames import CLASSES, WIDTH, built, estimator, frame
from models import Net
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from torch import Tensor, nn
from toys import Rateless

import sparkdl
from sparkdl import ParameterAveraging
from sparkdl.callbacks import Callback, TrainingReport, WorkerCallback
from sparkdl.errors import ConfigError, DataError, ModelError
from sparkdl.estimator.checks.preflight import plan_fit
from sparkdl.estimator.checks.probe import Trial
from sparkdl.estimator.checks.row_checks import (
    RowChecks,
    check_held_out,
    check_label,
    check_weight,
    require_holdable,
)
from sparkdl.estimator.head import Head
from sparkdl.feed.column_statistics import ColumnStatistics
from sparkdl.feed.decode import without_infinity
from sparkdl.feed.schema import FeedSchema
from sparkdl.feed.shards import DataStatistics
from sparkdl.protocols import UNKNOWN, ColumnSpec, Padding, SequenceInput
from sparkdl.spark.rows.columns import InputColumn
from sparkdl.strategies import (
    AdaScale,
    ElasticAveraging,
    GradientAllReduce,
    KFACPreconditioner,
    OneBitAdam,
)

LABEL = ColumnSpec("label", torch.int64)


FOUND = DataStatistics(
    (30, 30),
    (
        ColumnStatistics(shortest=WIDTH, longest=WIDTH),
        ColumnStatistics(smallest=0, largest=CLASSES - 1),
    ),
)


def refusal(model: type[nn.Module], *features: ColumnSpec, **found: Any) -> str:
    replica = built(model)
    statistics = [ColumnStatistics(smallest=0, largest=1, **found) for _ in (*features, LABEL)]
    with pytest.raises(ModelError) as caught:
        Trial(replica, FeedSchema(features, LABEL), statistics).step(Head.LOGITS)
    return str(caught.value)


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.recurrent = nn.Embedding(2, 3), nn.GRU(3, 3, batch_first=True)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        embedded = self.embedding(tokens)
        packed = nn.utils.rnn.pack_padded_sequence(
            embedded, lengths, batch_first=True, enforce_sorted=False
        )
        states: Tensor = self.recurrent(packed)[1]
        return states[0]


def tokens(told: SequenceInput | None) -> ColumnSpec:
    return ColumnSpec("tokens", torch.int64, (UNKNOWN,), padding=Padding(0, told))


def test_a_model_that_is_given_a_mask_in_place_of_lengths_is_told_of_pad_inputs() -> None:
    text = refusal(Packs, tokens("padding_mask"), shortest=2, longest=4)
    assert "called as model(tokens, padding_mask), and its forward takes (tokens, lengths)" in text
    assert "padInputs" in text


def test_an_empty_sequence_that_cannot_be_packed_is_named_with_its_row() -> None:
    text = refusal(Packs, tokens("lengths"), shortest=0, longest=4, places={"shortest": (2, 31)})
    assert "'tokens' of 0 (row 31 of partition 2) to 4 " in text


def test_the_replica_that_was_tried_out_is_gone_before_training(spark: SparkSession) -> None:
    plan, replica = plan_fit(estimator(), frame(spark, partitions=2))
    checks = RowChecks(replica)
    built = weakref.ref(replica.module)
    del replica
    checks.check(plan, FOUND)

    gc.collect()
    assert built() is None


SIGNS = GradientAllReduce(compression=OneBitAdam(10))
KFAC = GradientAllReduce(preconditioner=KFACPreconditioner())
ADAM = partial(torch.optim.Adam, lr=0.1)


class Remembers(WorkerCallback):
    def __init__(self, module: nn.Module) -> None:
        self.average = torch.optim.swa_utils.AveragedModel(module)
        self.module = module


class RemembersInDriver(Callback):
    def __init__(self, module: nn.Module) -> None:
        self.module, self.lock = module, threading.Lock()


def test_what_would_compute_with_the_given_module_which_is_never_trained_is_warned_of(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    module, rows = Net(), frame(spark)
    callback = Remembers(module)
    plan_fit(estimator(model=Net, callbacks=[callback]), rows)
    given = estimator(model=module, callbacks=[callback], batchTransform=lambda rows: rows)
    plan_fit(given, rows)
    (told,) = (each for each in caplog.messages if "from before the training" in each)
    assert told.startswith("what is given as callbacks refers")
    del callback.module  # what it has besides is a copy
    caplog.clear()
    plan_fit(given, rows)
    assert not [each for each in caplog.messages if "from before the training" in each]
    plan_fit(estimator(model=module, callbacks=[RemembersInDriver(module)]), rows)
    assert [each for each in caplog.messages if "from before the training" in each]


@every_row(
    ({"strategy": SIGNS, "optimizer": partial(torch.optim.SGD, lr=0.1)}, "AdamW, not of SGD"),
    ({"strategy": SIGNS, "optimizer": ADAM, "clipNorm": 1.0}, "Drop clipNorm"),
    ({"strategy": GradientAllReduce(sync_batch_norm=True)}, "has no BatchNorm layer"),
    ({"strategy": AdaScale(), "optimizer": Rateless}, "Rateless has no learning rate"),
    ({"strategy": KFAC, "optimizer": Rateless}, "Rateless has no learning rate.*kl_clip=None"),
    ({"strategy": ElasticAveraging(moving_rate=0.9)}, "is too high for 2 workers"),
)
def test_a_strategy_that_does_not_go_with_the_rest_is_refused_before_workers_start(
    spark: SparkSession, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_fit(estimator(**settings), frame(spark))


def test_kfac_is_refused_before_workers_start_if_no_layer_is_for_it(spark: SparkSession) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(CLASSES))

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return features[:, :1] * self.scale

    with pytest.raises(ModelError, match="Scaled has no Linear or Conv2d layer"):
        plan_fit(estimator(model=Scaled(), strategy=KFAC), frame(spark))


FIRST = {"not_finite": (2, 7), "least": (0, 3), "largest": (1, 1)}


@every("value", [math.inf, -math.inf])
def test_an_infinite_label_is_named_with_its_place(value: float) -> None:
    low, high = min(value, 0.0), max(value, 0.0)
    found = ColumnStatistics(not_finite=1, smallest=low, largest=high, places=FIRST)
    with pytest.raises(DataError, match="column 'y' holds infinity, the first in row 7 of part"):
        check_label(InputColumn("y", "double", False), nn.MSELoss(), found)


@every("name", ["a.b", "of `y`"])
@every("is_array", [False, True])
def test_the_advice_about_infinity_leaves_what_is_finite(
    spark: SparkSession, name: str, *, is_array: bool
) -> None:
    values = [1.0, math.nan, math.inf, -math.inf, -2.0]
    rows = [([value, 0.0] if is_array else value,) for value in values]
    of_value = "array(double('{}'), 0.0D)" if is_array else "double('{}')"
    quoted = name.replace("`", "``")
    table = ", ".join(f"({of_value.format(value)})" for value in values)
    df = spark.sql(f"SELECT * FROM VALUES {table} AS t(`{quoted}`)")
    advice = without_infinity(name, is_array=is_array).removeprefix("Drop these rows first: ")
    assert sorted(row[0] for row in eval(advice, {"df": df, "F": F}).collect()) == sorted(
        row[0] for row in (rows[0], rows[4])
    )


@every("count", ["not_finite", "fractions"])
def test_integers_hold_no_infinity_and_no_fractions(count: str) -> None:
    found = ColumnStatistics(**{count: 3}, places={count: (2, 7)})
    with pytest.raises(DataError, match=r"'x' .* 3 rows \(the first is row 7 .* int32 cannot hold"):
        require_holdable(ColumnSpec("x", torch.int32), found)
    require_holdable(ColumnSpec("x", torch.float16), found)


@every_row(
    (0.0, math.inf, "holds inf in row 1 of partition 1"),
    (-math.inf, 3.0, "holds -inf in row 2 of partition 2"),
    (math.nan, math.nan, "holds nan in row 2 of partition 2"),
    (-1.0, math.inf, "holds -1 in row 2 of partition 2"),
)
def test_a_weight_that_is_none_is_named_with_its_place(low: float, high: float, told: str) -> None:
    places = {"smallest": (2, 2), "largest": (1, 1), "not_finite": (0, 0)}
    found = ColumnStatistics(smallest=low, largest=high, not_finite=1, places=places)
    with pytest.raises(DataError, match=told):
        check_weight("w", found, 1.0, 4)


def weights(least: float, high: float) -> ColumnStatistics:
    return ColumnStatistics(smallest=0.0, largest=high, least=least, places=FIRST)


def test_a_weight_that_would_become_zero_is_named_with_its_place_and_the_mean() -> None:
    with pytest.raises(DataError, match=r"1e-50 in row 3 of partition 0, .* mean weight, 0.5"):
        check_weight("w", weights(1e-50, 1.0), 4.0, 8)


@every_row(
    (1e308, 1e308, math.inf, r"up to 1e\+308 \(row 1 of partition 1\).* infinite"),
    (5e-324, 5e-324, 5e-324, "mean of 8 rows is 0"),
    (1.0, 0.0, 0.0, "'w' is 0 in every row: there is nothing to train on"),
    (1.0, 3.0, 0.0, "'w' is 0 in every row to train on: there is nothing to train on"),
)
def test_weights_without_a_mean_above_0_are_refused(
    least: float, high: float, total: float, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        check_weight("w", weights(least, high), total, 8)


def test_held_out_rows_of_which_there_are_none_are_refused_as_they_were_asked_for() -> None:
    with pytest.raises(DataError, match=r"'held' .* is false in all of 60 rows: .* nothing to val"):
        check_held_out("held", 0, 60)
    with pytest.raises(DataError, match=r"validationFraction=1e-09 holds out none of 60 rows"):
        check_held_out(1e-9, 0, 60)


@every("unit", [1e-300, 1e-46, 1e-44, 1.0, 1e300])
def test_weights_of_any_unit_are_taken(unit: float) -> None:
    check_weight("w", weights(unit, 3 * unit), 6 * unit, 4)


@pytest.mark.gate
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
    assert trained.getNumWorkers() == best.workers
    assert trained.getEpochs() == 7
    first = given.copy({"checkpointPath": None, "callbacks": None, "epochs": 2}).fit(rows)
    assert first.summary.plan(link="1 Gbit/s").predict(8).seconds > 0


def test_what_there_is_nothing_to_plan_with_is_refused(spark: SparkSession) -> None:
    with pytest.raises(ConfigError, match="there are no rows to plan with"):
        sparkdl.plan(estimator(), frame(spark).limit(0))
    with pytest.raises(ConfigError, match="seconds must be a number > 0"):
        sparkdl.plan(estimator(), frame(spark), seconds=0)
