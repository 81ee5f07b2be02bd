"""Saved estimators, models and pipelines come back the same, also without Spark."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from every_row import every
from frames import estimator, features_of, frame, same_bits
from models import Drawn, Net, decayed
from pyspark.ml import PipelineModel
from pyspark.ml.param import Param, Params
from pyspark.sql import DataFrame, SparkSession
from subprocesses import printed_by
from torch import nn

from sparkdl import (
    ParameterAveraging,
    TorchClassificationModel,
    TorchClassifier,
    TorchEstimator,
    TorchModel,
    load_module,
    trusted_modules,
    trusted_pickles,
)
from sparkdl.callbacks import EarlyStopping, ModelCheckpoint, TimeBudget
from sparkdl.errors import CheckpointError, ConfigError, SparkDLError


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    return frame(spark)


@pytest.fixture(scope="module")
def described(rows: DataFrame) -> TorchModel:
    """From a class that can be imported."""
    return estimator(model=Net, epochs=2, outputType="probability").fit(rows)


@pytest.fixture(scope="module")
def pickled(rows: DataFrame) -> TorchModel:
    """From an instance."""
    return TorchModel.from_module(Net(), torch.zeros(1, 4))


def predictions(model: TorchModel | PipelineModel, rows: DataFrame) -> list[object]:
    return [row[0] for row in model.transform(rows).orderBy("id").select("prediction").collect()]


@pytest.mark.versions
def test_a_loaded_model_is_the_same_and_was_saved_without_pickle(
    described: TorchModel, rows: DataFrame, tmp_path: Path
) -> None:
    uri = (tmp_path / "with space" / "model").as_uri()
    described.save(uri)
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {"module.json", "module.safetensors", "part-00000"}
    loaded = TorchModel.load(uri, trust=["models"])
    assert predictions(loaded, rows) == predictions(described, rows)
    assert loaded.history == described.history
    assert len(loaded.history) == 2
    assert loaded.uid == described.uid
    assert loaded.getOutputType() == "probability"
    assert not loaded.module.training


def test_what_a_model_drew_outside_of_its_state_is_the_same_on_executors_and_once_loaded(
    rows: DataFrame, tmp_path: Path
) -> None:
    model = estimator(model=Drawn, seed=3, outputType="probability").fit(rows)
    model.save(str(tmp_path / "model"))
    loaded = TorchModel.load(str(tmp_path / "model"), trust=["models"])
    features = torch.tensor(features_of(range(rows.count())), dtype=torch.float32)
    expected = model.module(features).softmax(1)
    assert torch.equal(loaded.module(features).softmax(1), expected)
    assert np.allclose(predictions(model, rows), expected.tolist(), rtol=1e-6)


def test_an_instance_is_refused_without_trust_and_loads_with_it(
    pickled: TorchModel, rows: DataFrame, tmp_path: Path
) -> None:
    path, whole = str(tmp_path / "model"), str(tmp_path / "pipeline")
    pickled.save(path)
    PipelineModel([pickled]).save(whole)
    loads = TorchModel.load, load_module
    for load in loads:
        with pytest.raises(ConfigError, match="trust=True"):
            load(path)
    with pytest.raises(ConfigError, match="trusted_pickles"):
        PipelineModel.load(whole)
    with trusted_pickles():
        loaded = [TorchModel.load(path), PipelineModel.load(whole).stages[0]]
    for each in (TorchModel.load(path, trust=True), *loaded):
        assert same_bits(each, pickled)
    assert predictions(loaded[0], rows) == predictions(pickled, rows)
    with pytest.raises(ConfigError, match="trust=True"):
        TorchModel.load(path)


def test_a_saved_model_is_overwritten_only_if_asked(
    described: TorchModel, pickled: TorchModel, tmp_path: Path
) -> None:
    path = str(tmp_path / "model")
    pickled.save(path)
    with pytest.raises(ConfigError, match=r"already exists.*overwrite\(\)"):
        described.save(path)
    assert (tmp_path / "model" / "model.pkl").exists()
    described.write().overwrite().save(path)
    assert not (tmp_path / "model" / "model.pkl").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["model"], "something was left beside"


class Scored(TorchModel):
    """A user's own kind of model, whose Params have names that estimators have too."""

    loss = Param(Params._dummy(), "loss", "what it had in an earlier year")
    metrics = Param(Params._dummy(), "metrics", "names of its columns of scores")


def test_params_that_a_subclass_adds_are_saved_whatever_their_names(tmp_path: Path) -> None:
    model = Scored.from_module(Net(), torch.zeros(1, 4))._set(metrics=["precision", "recall"])
    model.save(str(tmp_path / "model"))
    loaded = Scored.load(str(tmp_path / "model"), trust=True)
    assert loaded.getOrDefault("metrics") == ["precision", "recall"]
    assert not loaded.isDefined("loss")


@pytest.mark.parametrize("called", [TorchClassificationModel, TorchEstimator])
def test_a_model_of_another_class_is_refused_by_the_class_that_it_was_saved_as(
    called: type[TorchClassificationModel | TorchEstimator], tmp_path: Path
) -> None:
    TorchModel.from_module(nn.Linear(4, 2), torch.zeros(1, 4)).save(str(tmp_path / "model"))
    words = r"/model was saved as TorchModel, .* Call TorchModel\.load$"
    with pytest.raises(ConfigError, match=words):
        called.load(str(tmp_path / "model"))


def test_a_classifier_is_refused_as_another_estimator_by_its_class(tmp_path: Path) -> None:
    classifier = TorchClassifier(model=Net, optimizer="Adam", featuresCol="x", labelCol="y")
    classifier.save(str(tmp_path / "classifier"))
    with pytest.raises(ConfigError, match=r"Call TorchClassifier\.load$"):
        TorchEstimator.load(str(tmp_path / "classifier"), trust=["models"])


def test_a_pipeline_is_no_model_by_itself(tmp_path: Path, spark: SparkSession) -> None:
    model = TorchModel.from_module(nn.Linear(4, 2), torch.zeros(1, 4))
    PipelineModel([model]).save(str(tmp_path / "pipeline"))
    with pytest.raises(ConfigError, match=r"Call PipelineModel\.load"):
        TorchModel.load(str(tmp_path / "pipeline"))


def test_a_disk_of_temporary_files_that_cannot_hold_a_model_is_named_with_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    words = rf"/model could not be written: .* in {tmp_path}/gone first, .* Set TMPDIR to"
    with pytest.raises(CheckpointError, match=words):
        TorchModel.from_module(nn.Linear(4, 2), torch.zeros(1, 4)).save(str(tmp_path / "model"))


def test_a_model_is_loaded_as_the_class_of_its_user_too(tmp_path: Path) -> None:
    TorchModel.from_module(nn.Linear(4, 2), torch.zeros(1, 4)).save(str(tmp_path / "model"))
    assert isinstance(Scored.load(str(tmp_path / "model"), trust=True), Scored)


@pytest.mark.gate
def test_a_model_loads_without_java_and_gives_identical_outputs(
    described: TorchModel, tmp_path: Path
) -> None:
    path = str(tmp_path / "model")
    described.save(path)
    features = features_of(range(8)).tolist()
    script = (
        "import json, sys, torch, sparkdl\n"
        "from pyspark import SparkContext\n"
        "module = sparkdl.load_module(sys.argv[1], trust=['models'])\n"
        "model = sparkdl.TorchModel.load(sys.argv[1], trust=['models'])\n"
        "x = torch.tensor(json.loads(sys.argv[2]))\n"
        "print(json.dumps({'outputs': module(x).tolist(), 'again': model.module(x).tolist(),\n"
        "    'epochs': len(model.history), 'jvm': SparkContext._gateway is not None}))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "JAVA_HOME"}
    environment["PATH"] = str(tmp_path)
    environment["PYTHONPATH"] = str(Path(__file__).parent.parent)

    printed = printed_by("-c", script, path, json.dumps(features), env=environment)

    answer = json.loads(printed)
    expected = described.module(torch.tensor(features)).tolist()
    assert answer == {"outputs": expected, "again": expected, "epochs": 2, "jvm": False}


def test_a_stage_that_names_a_command_is_refused_in_a_pipeline_too(
    described: TorchModel, tmp_path: Path
) -> None:
    PipelineModel([described]).save(str(tmp_path / "pipeline"))
    (file,) = (tmp_path / "pipeline").rglob("module.json")
    description = json.loads(file.read_text())
    command = {
        "partial": {"import": "os:system"},
        "args": [f"touch {tmp_path}/touched"],
        "kwargs": {},
    }
    file.write_text(json.dumps({**description, "model": {"recipe": command}}))
    for _ in range(2):
        with trusted_modules("models"), pytest.raises(ConfigError, match=r"trust=\['os'\]"):
            PipelineModel.load(str(tmp_path / "pipeline"))
    assert not (tmp_path / "touched").exists()


OBJECTS = ("model", "loss", "optimizer", "scheduler")


def test_a_loaded_estimator_keeps_every_param(tmp_path: Path) -> None:
    original = estimator(
        model=partial(Net, outputs=5),
        loss=nn.CrossEntropyLoss(label_smoothing=0.1),
        optimizer=partial(decayed, lr=0.5),
        learningRate=0.02,
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=3),
        schedulerEvery="step",
        strategy=ParameterAveraging(period=4, average_optimizer_state=False, wire_dtype="bfloat16"),
        featuresCols=["a", "b"],
        featuresAs="kwargs",
        outputCols={"guess": "logits", "embedding": 1},
        labelCols=["target", "other"],
        weightCol="weight",
        validationIndicatorCol="held_out",
        validationFraction=0.2,
        checkpointPath="a",
        checkpointRounds=7,
        keepLast=5,
        callbacks=[EarlyStopping("loss", patience=7), TimeBudget(60.0), ModelCheckpoint("loss")],
        columnShapes={"a": [2, 3]},
        columnDtypes={"a": "bfloat16"},
        imageCols=["b"],
        handleInvalid="keep",
        dropLast=True,
        shuffleRows="spark",
        reshuffleEvery=3,
        batchTransform=dataclasses.replace,
        storeIn="memory",
        collectiveInterface="10.1.0.0/16",
        collectivePorts="40000-40100",
        predictionCol="guess",
        outputType="probability",
        epochs=9,
        batchSize=17,
        numWorkers=None,
        device="cpu",
        seed=123,
        timeout=44.0,
        clipNorm=0.5,
        precision="bf16",
    )
    path = str(tmp_path / "estimator")
    original.save(path)
    with pytest.raises(ConfigError, match=r"models:Net.*trust=\['models'\]"):
        TorchEstimator.load(path)
    loaded = TorchEstimator.load(path, trust=["models", "dataclasses"])

    assert not list((tmp_path / "estimator").rglob("*.pkl"))
    assert loaded.uid == original.uid
    plain = [p.name for p in original.params if p.name not in OBJECTS]
    assert {n: loaded.getOrDefault(n) for n in plain} == {
        n: original.getOrDefault(n) for n in plain
    }
    assert isinstance(loaded.getLoss(), nn.CrossEntropyLoss)
    assert loaded.getLoss().label_smoothing == 0.1
    named = str(tmp_path / "named")
    estimator(model=Net, loss="model", optimizer="Adam").save(named)
    by_name = TorchEstimator.load(named, trust=["models"])
    assert (by_name.getLoss(), by_name.getOptimizer()) == ("model", "Adam")
    for name in ("model", "optimizer", "scheduler"):
        mine, other = loaded.getOrDefault(name), original.getOrDefault(name)
        assert (mine.func, mine.args, mine.keywords) == (other.func, other.args, other.keywords)


def test_what_is_defined_locally_is_refused_without_trust(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Linear(4, 3)

    for name, given in {"loss": lambda outputs, targets: outputs.mean(), "model": build}.items():
        path = str(tmp_path / name)
        estimator(**{"model": Net, name: given}).save(path)
        with pytest.raises(ConfigError, match=f"{name} was saved as a pickle"):
            TorchEstimator.load(path, trust=["models", __name__])
        loaded = TorchEstimator.load(path, trust=True)
    assert loaded.getModel()().out_features == 3


@every("file", ["module.json", "module.safetensors", "metadata/part-00000"])
@every("damage", ["missing", "truncated"])
def test_a_damaged_model_is_refused_by_the_name_of_the_file(
    described: TorchModel, tmp_path: Path, file: str, damage: str
) -> None:
    directory = tmp_path / "model"
    described.save(str(directory))
    damaged = directory / file
    if damage == "missing":
        damaged.unlink()
    else:
        damaged.write_bytes(damaged.read_bytes()[:40])
    with pytest.raises(SparkDLError) as caught:
        TorchModel.load(str(directory), trust=["models"])
    assert file.split("/")[0] in str(caught.value)
    assert str(directory) in str(caught.value)


def test_a_path_with_nothing_there_is_refused(tmp_path: Path) -> None:
    for load in (TorchModel.load, TorchEstimator.load):
        with pytest.raises(ConfigError, match="nowhere"):
            load(str(tmp_path / "nowhere"))
