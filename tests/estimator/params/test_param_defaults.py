"""Params: what they are by default, how they are described, and that each has an effect."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from dataclasses import fields
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from every_row import every, every_row
from frames import WIDTH, estimator, frame
from models import Net
from pyspark.ml.param import Param
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from stubs import FOLDER, MODULES, written
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from sparkdl import (
    GradientAllReduce,
    ParameterAveraging,
    TorchClassificationModel,
    TorchClassifier,
    TorchEstimator,
    TorchModel,
    TorchRegressionModel,
    TorchRegressor,
)
from sparkdl.callbacks import EarlyStopping, TimeBudget
from sparkdl.checkpoint.identity import describe
from sparkdl.errors import ConfigError
from sparkdl.estimator.checks.preflight import plan_fit
from sparkdl.estimator.head import Head
from sparkdl.estimator.params.declaration import GROUPS, LONGEST, described, settings_of
from sparkdl.protocols import Batch

GIVEN: dict[str, Any] = {
    "model": Net,
    "loss": nn.CrossEntropyLoss(),
    "optimizer": partial(torch.optim.SGD, lr=0.1),
}
WITHOUT = {"weightCol", "validationIndicatorCol"}
"""pyspark.ml's own, which have no default."""


def set_params(estimator: TorchEstimator) -> set[str]:
    return {param.name for param in estimator.params if estimator.isSet(param)}


def test_what_was_not_given_is_a_default_and_not_set() -> None:
    estimator = TorchEstimator(**GIVEN, epochs=1, numWorkers=None)
    assert set_params(estimator) == {*GIVEN, "epochs", "numWorkers"}
    signature = inspect.signature(TorchEstimator.__init__).parameters
    defaults = {
        name: parameter.default
        for name, parameter in signature.items()
        if name not in {"self", *GIVEN, *WITHOUT}
    }
    defaults["strategy"] = ParameterAveraging()
    assert {p.name for p in estimator.params if estimator.hasDefault(p)} == set(defaults)
    cleared = TorchEstimator(**GIVEN)
    assert {name: cleared.getOrDefault(name) for name in defaults} == defaults


def test_a_param_that_is_cleared_has_its_default_again() -> None:
    estimator = TorchEstimator(**GIVEN, epochs=7)
    estimator.clear(estimator.epochs)
    assert estimator.getEpochs() == 1
    assert "epochs: passes over the data (>= 1) (default: 1)" in estimator.explainParams()


def test_pysparks_own_params_without_a_default_stay_undefined() -> None:
    estimator = TorchEstimator(**GIVEN, weightCol=None)
    assert not any(estimator.isDefined(name) for name in WITHOUT)
    assert estimator.setWeightCol("w").isSet("weightCol")


def test_what_was_set_and_what_was_not_is_saved(tmp_path: Path) -> None:
    for number, changes in enumerate([{}, {"strategy": ParameterAveraging(), "epochs": 1}]):
        estimator = TorchEstimator(**GIVEN, **changes)
        path = str(tmp_path / str(number))
        estimator.save(path)
        loaded = TorchEstimator.load(path, trust=["models"])
        assert set_params(loaded) == set_params(estimator) == {*GIVEN, *changes}
        assert loaded.getStrategy() == ParameterAveraging()
        assert loaded.hasDefault("strategy")


def test_a_copy_takes_params_by_name_and_by_param() -> None:
    given = estimator()
    copied = given.copy({"numWorkers": 7, given.batchSize: 99})
    assert (copied.getNumWorkers(), copied.getBatchSize()) == (7, 99)
    assert copied.uid == given.uid
    assert given.getBatchSize() != 99
    assert given.copy().getBatchSize() == given.getBatchSize()


def test_a_dict_for_the_strategy_has_what_differs_in_it() -> None:
    given = estimator(strategy=ParameterAveraging(3, average_optimizer_state=False))
    copied = given.copy({"strategy": {"period": 8, "aggregation": "executors"}})
    assert copied.getStrategy() == ParameterAveraging(
        8, average_optimizer_state=False, aggregation="executors"
    )
    assert given.getStrategy().period == 3
    assert given.copy({"strategy": GradientAllReduce()}).getStrategy() == GradientAllReduce()


@every_row(
    ({"batchsize": 3}, "TorchEstimator has no parameter 'batchsize'"),
    ({"scoreCol": "loss"}, "has no parameter 'scoreCol'. In its place there is lossCol"),
    ({"batchSize": 0}, "batchSize"),
    ({"strategy": {"periods": 3}}, "does not take"),
    ({"strategy": {"period": 0}}, "period"),
)
def test_what_does_not_fit_is_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        estimator().copy(params)


def test_several_params_are_set_by_their_names() -> None:
    given = estimator()
    assert given.setParams(epochs=3, strategy={"period": 8}) is given
    assert (given.getEpochs(), given.getStrategy().period) == (3, 8)
    with pytest.raises(ConfigError, match=r"no parameter 'epoch'\. Did you mean 'epochs'"):
        given.setParams(epoch=3)


class Unspeakable:
    def __repr__(self) -> str:
        raise ValueError("no")


@every_row(
    (3, 3),
    (None, None),
    (True, True),
    ("x" * 1000, "x" * LONGEST),
    (partial(torch.optim.SGD, lr=0.1), "SGD(lr=0.1)"),
    (torch.optim.Adam, "Adam"),
    (nn.Sequential(nn.Linear(1, 1)), "Sequential"),
    (["a", "b"], "['a', 'b']"),
    ([EarlyStopping(patience=2)], None),
    (object(), "object"),
    (Unspeakable(), "Unspeakable"),
)
def test_a_value_is_described_as_it_was_written(value: Any, expected: Any) -> None:
    found = described(value)
    if isinstance(value, list) and expected is None:
        assert "EarlyStopping(" in str(found)
        assert "patience=2" in str(found)
        return
    assert found == expected


def test_of_a_long_list_only_what_is_shown_is_described() -> None:
    class Told:
        times = 0

        def __repr__(self) -> str:
            Told.times += 1
            return "x"

    assert described([Told()] * 100_000) == ("[" + "x, " * LONGEST)[:LONGEST]
    assert Told.times <= LONGEST


def test_every_param_is_there_and_says_the_same_each_time() -> None:
    def made() -> dict[str, object]:
        return settings_of(
            TorchEstimator(
                model=nn.Linear(2, 1),
                loss=nn.MSELoss(),
                optimizer=partial(torch.optim.SGD, lr=0.5),
                learningRate=0.25,
                strategy=ParameterAveraging(period=3),
            )
        )

    settings = made()
    assert settings == made()
    assert (settings["batchSize"], settings["learningRate"]) == (32, 0.25)
    assert settings["loss"] == "MSELoss"
    assert "period=3" in str(settings["strategy"])
    assert set(settings) >= {"epochs", "seed", "featuresCol", "model", "optimizer"}


STAGES = (
    TorchEstimator,
    TorchClassifier,
    TorchRegressor,
    TorchModel,
    TorchClassificationModel,
    TorchRegressionModel,
)


def same(batch: Batch) -> Batch:
    return batch


METRICS = {"a": MulticlassAccuracy(3), "b": MulticlassF1Score(3)}
HELD_OUT = {"validationFraction": 0.5}
FOLLOWED = {
    **HELD_OUT,
    "metrics": METRICS,
    "scheduler": partial(ReduceLROnPlateau, mode="max"),
    "schedulerMetric": "a",
}
SAVED = {"checkpointPath": "somewhere"}
CHANGES: dict[str, Any] = {
    "batchSize": 11,
    "batchTransform": same,
    "callbacks": [TimeBudget(5.0)],
    "checkpointEvery": 3,
    "checkpointPath": "elsewhere",
    "checkpointRounds": 4,
    "clipNorm": 2.0,
    "collectiveInterface": "lo",
    "collectivePorts": "40000-40100",
    "columnDtypes": {"features": "float64"},
    "columnShapes": {"features": [WIDTH]},
    "device": "cpu",
    "dropLast": True,
    "epochs": 2,
    "featuresAs": "dict",
    "featuresCol": "other",
    "featuresCols": ["features", "other"],
    "handleInvalid": "keep",
    "keepLast": 5,
    "labelCol": "second",
    "learningRate": 0.25,
    "labelCols": ["label", "second"],
    "loss": nn.NLLLoss(),
    "maxFailures": 1,
    "maxWorkers": 3,
    "metrics": {"a": METRICS["a"]},
    "minWorkers": 2,
    "model": nn.Linear(WIDTH, 3),
    "numWorkers": 1,
    "optimizer": torch.optim.Adam,
    "precision": "bf16",
    "predictionCol": "mine",
    "reshuffleEvery": 1,
    "resume": "never",
    "scheduler": partial(StepLR, step_size=1),
    "schedulerEvery": "step",
    "schedulerMetric": "b",
    "seed": 8,
    "shipModules": False,
    "shuffleRows": "none",
    "storeIn": "memory",
    "strategy": GradientAllReduce(),
    "timeout": 240.0,
    "tls": True,
    "validationFraction": 0.5,
    "validationIndicatorCol": "held",
    "weightCol": "weight",
}
"""What each becomes in an estimator, of which the rest stays as it is."""
BEFORE: dict[str, dict[str, Any]] = {
    "checkpointEvery": SAVED,
    "checkpointPath": SAVED,
    "checkpointRounds": SAVED,
    "keepLast": SAVED,
    "metrics": {**HELD_OUT, "metrics": METRICS},
    "resume": SAVED,
    "schedulerEvery": {"scheduler": partial(StepLR, step_size=1)},
    "schedulerMetric": FOLLOWED,
}
"""Without which some could have no effect."""
OF_OUTPUTS: dict[str, tuple[type, Any]] = {
    "labels": (TorchClassifier, [1.5, 2.5, 3.5]),
    "outputCols": (TorchEstimator, {"prediction": "a", "other": "b"}),
    "outputType": (TorchEstimator, "probability"),
    "probabilityCol": (TorchClassifier, "mine"),
    "rawPredictionCol": (TorchClassifier, "mine"),
    "thresholds": (TorchClassifier, [0.1, 0.2, 0.7]),
}
"""Those that decide which columns come of which outputs."""
OF_PREDICTING: dict[str, Any] = {
    "predictBatchSize": 7,
    "predictCompiled": True,
    "predictDevice": "cpu",
    "predictPrecision": "bfloat16",
    "predictionDtype": "float32",
}
ELSEWHERE = {
    *("imageCols", "imageFit", "imageScale", "imageSize", "groupByLength", "padCols", "padInputs"),
    *("progress", "lossCol"),
}
"""Those that no fit on these rows could show, and that tests of images and sequences do."""


def params_of(stage: type) -> set[str]:
    return {name for name in dir(stage) if isinstance(getattr(stage, name, None), Param)}


def test_every_param_is_listed_once_with_what_shows_its_effect() -> None:
    listed = [*CHANGES, *OF_OUTPUTS, *OF_PREDICTING, *ELSEWHERE]
    assert len(set(listed)) == len(listed)
    assert set().union(*map(params_of, STAGES)) == set(listed)


def stage(kind: Any = TorchEstimator, **changes: Any) -> Any:
    torch.manual_seed(1)
    settings: dict[str, Any] = {
        "model": nn.Sequential(nn.Linear(WIDTH, 3)),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "numWorkers": 2,
    }
    return kind(**{**settings, **changes})


def text(value: Any) -> str:
    return json.dumps(describe(value), sort_keys=True)


def told(estimator: TorchEstimator, rows: DataFrame) -> dict[str, str]:
    """What a fit tells those who act: by whom and what, for comparison."""
    plan, _ = plan_fit(estimator, rows)
    settings = plan.settings
    job = {field.name: text(getattr(plan.job, field.name)) for field in fields(plan.job)}
    apart = {"frame", "columns"}
    workers = {
        field.name: text(getattr(plan.workers, field.name))
        for field in fields(plan.workers)
        if field.name not in apart
    }
    return {
        **job,
        **workers,
        "columns": text([column.name for column in plan.workers.columns]),
        "checkpoints": repr(settings.checkpoint_policy("application")),
        "callbacks in the driver": text(settings.driver_callbacks()),
        "not finite": text(settings.getHandleInvalid()),
        "predicted": text([each.name for each in estimator.predicted_columns(plan.head, WIDTHS)]),
    }


WIDTHS = {None: 3, "a": 3, "b": 2}


@pytest.mark.nightly
def test_each_changes_what_a_fit_tells_workers_and_driver(spark: SparkSession) -> None:
    rows = frame(spark).select(
        "*",
        F.col("features").alias("other"),
        F.col("label").alias("second"),
        (F.col("id") % 2 == 0).alias("held"),
        F.lit(2.0).alias("weight"),
    )
    known: dict[str, dict[str, str]] = {}
    without = []
    for name, value in CHANGES.items():
        before = BEFORE.get(name, {})
        key = repr(sorted(before))
        if key not in known:
            known[key] = told(stage(**before), rows)
            assert known[key] == told(stage(**before), rows)  # else all would seem to have one
        if told(stage(**{**before, name: value}), rows) == known[key]:
            without.append(name)
    assert without == []


def columns(kind: Any, **changes: Any) -> Any:
    made = stage(kind, **changes).predicted_columns(Head.LOGITS, WIDTHS)
    outputs = torch.tensor([[2.0, 1.0, 0.5], [0.0, 0.5, 0.1]])
    return [(each.name, each.key, each.function(outputs).tolist()) for each in made]


@every("name", OF_OUTPUTS)
def test_each_changes_the_columns_of_the_outputs(name: str) -> None:
    kind, value = OF_OUTPUTS[name]
    assert columns(kind, **{name: value}) != columns(kind)


@every("name", OF_PREDICTING)
def test_each_changes_how_a_model_predicts(name: str) -> None:
    model = TorchModel.from_module(nn.Linear(2, 2), torch.zeros(1, 2))
    before = model.prediction_settings()
    assert model._set(**{name: OF_PREDICTING[name]}).prediction_settings() != before


USER = """
from functools import partial
import torch
from sparkdl import TorchClassifier, TorchEstimator, TorchModel, TorchRegressor
sgd = partial(torch.optim.SGD, lr=0.1)
mse = torch.nn.MSELoss()
estimator = TorchEstimator(model=torch.nn.Linear(1, 1), loss=mse, optimizer=sgd, epochs=3)
epochs: int = estimator.setEpochs(4).setNumWorkers(None).getEpochs()
TorchClassifier(model=torch.nn.Linear(1, 2), optimizer=sgd, labels=["a", "b"])
TorchRegressor(model=torch.nn.Linear(1, 1), optimizer=sgd, featuresCols=["x"])
precision: str = TorchModel.load("there").setPredictPrecision("bfloat16").getPredictPrecision()
"""
WRONG = [
    "estimator.setEpochs('4')",
    "TorchEstimator(model=torch.nn.Linear(1, 1), loss=mse, optimizer=sgd, epoch=3)",
    "TorchEstimator(loss=mse, optimizer=sgd)",
    "TorchRegressor(model=torch.nn.Linear(1, 1), optimizer=sgd, outputType='raw')",
    "TorchClassifier(model=torch.nn.Linear(1, 1), optimizer=sgd, epochs='3')",
]


@pytest.mark.nightly
def test_a_users_strict_mypy_takes_what_is_right_and_refuses_what_is_wrong(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(USER + "\n".join(WRONG) + "\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    first = USER.count("\n") + 1
    refused = {int(line) for line in re.findall(r"program\.py:(\d+): error", done.stdout)}
    assert refused == set(range(first, first + len(WRONG))), done.stdout + done.stderr


def test_stubs_are_what_the_declarations_say() -> None:
    """``PYTHONPATH=. python tests/estimator/params/stubs.py`` writes them anew."""
    old = [each for each in MODULES if (FOLDER / f"{each}.pyi").read_text() != written(each)]
    assert old == []


def test_the_docstring_lists_the_constructors_arguments_in_its_order_by_group() -> None:
    text = inspect.getdoc(TorchEstimator) or ""
    listed = re.findall(r"^    (\w+): ", text.partition("Raises:")[0], re.M)
    assert listed == list(inspect.signature(TorchEstimator.__init__).parameters)[1:]
    groups = [each.group for each in TorchEstimator.declarations.values()]
    assert [group for group, _ in groupby(groups)] == list(GROUPS[:-1])
    for kind in (TorchClassifier, TorchRegressor):
        assert re.search(r"^    loss: ", inspect.getdoc(kind) or "", re.M)
        assert not re.search(r"^    epochs: ", inspect.getdoc(kind) or "", re.M)
