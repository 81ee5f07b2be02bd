"""Estimator and model come back the same from disk, also within a pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import SQLTransformer
from pyspark.sql import DataFrame, SparkSession

from sparkdl import NearDuplicates, NearDuplicatesModel
from sparkdl.errors import ConfigError
from sparkdl.spark.catalyst.versions import frame_of

WORDS = [0, 1, 3, 7, 7, -1, None]


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    columns = {"id": range(len(WORDS)), "image": pa.array(WORDS, pa.int64())}
    return frame_of(spark, pa.table({**columns, "label": ["a"] * len(WORDS)}))


@pytest.fixture(scope="module")
def model(rows: DataFrame) -> NearDuplicatesModel:
    return NearDuplicates(hash="given", threshold=2, mode="mark").fit(rows)


def marked(model: NearDuplicatesModel | PipelineModel, rows: DataFrame) -> list[tuple[object, ...]]:
    return sorted(map(tuple, model.transform(rows).collect()), key=lambda row: row[0])


@pytest.mark.versions
def test_a_loaded_model_marks_the_same_rows(
    model: NearDuplicatesModel, rows: DataFrame, tmp_path: Path
) -> None:
    path = str(tmp_path / "with space" / "model")
    model.save(path)
    loaded = NearDuplicatesModel.load(path)
    assert (loaded.uid, loaded.found, loaded.keys) == (model.uid, model.found, model.keys)
    assert marked(loaded, rows) == marked(model, rows)
    assert {row[0] for row in marked(model, rows) if row[3] is None} == {0, 3, 5, 6}
    again = str(tmp_path / "again")
    loaded.setThreshold(1).save(again)
    smaller = marked(NearDuplicatesModel.load(again), rows)
    assert {row[0] for row in smaller if row[3] is None} == {0, 2, 5, 6}
    with pytest.raises(ConfigError, match="does not know its rows"):
        loaded.report()
    assert list(loaded.report(rows).kept["rows"]) == [6, 4]
    with pytest.raises(ConfigError, match="already exists"):
        model.save(path)
    model.write().overwrite().save(path)


@pytest.mark.nightly
def test_an_estimator_and_a_pipeline_come_back(rows: DataFrame, tmp_path: Path) -> None:
    estimator = NearDuplicates(hash="given", threshold=2, within=None)
    estimator.save(str(tmp_path / "estimator"))
    loaded = NearDuplicates.load(str(tmp_path / "estimator"))
    assert loaded.extractParamMap() == {
        loaded.getParam(param.name): value for param, value in estimator.extractParamMap().items()
    }
    renamed = SQLTransformer(statement="SELECT id, image AS word FROM __THIS__")
    pipeline = Pipeline(stages=[renamed, loaded.setInputCol("word")])
    pipeline.save(str(tmp_path / "pipeline"))
    fitted = Pipeline.load(str(tmp_path / "pipeline")).fit(rows)
    fitted.save(str(tmp_path / "fitted"))
    again = PipelineModel.load(str(tmp_path / "fitted"))
    assert marked(again, rows) == marked(fitted, rows)
    assert [row[0] for row in marked(again, rows)] == [0, 3, 5, 6]


def test_damage_is_said(model: NearDuplicatesModel, tmp_path: Path) -> None:
    path = tmp_path / "model"
    model.save(str(path))
    found = json.loads((path / "found.json").read_text())
    for broken in ({}, {**found, "keys": {"bands": 3}}, {**found, "found": {"rows": 1}}):
        (path / "found.json").write_text(json.dumps(broken))
        with pytest.raises(ConfigError, match="is damaged"):
            NearDuplicatesModel.load(str(path))
    (path / "found.json").write_text(json.dumps(found))
    pq.write_table(pa.table({"word": [1]}), path / "hashes.parquet")
    with pytest.raises(ConfigError, match=r"is damaged.*columns \['word'\]"):
        NearDuplicatesModel.load(str(path))
    (path / "hashes.parquet").unlink()
    with pytest.raises(ConfigError, match="is damaged"):
        NearDuplicatesModel.load(str(path))
    with pytest.raises(ConfigError, match="there is no"):
        NearDuplicates.load(str(tmp_path))


@pytest.mark.nightly
def test_what_was_forgotten_is_computed_anew(rows: DataFrame) -> None:
    model = NearDuplicates(hash="given", threshold=2).fit(rows)
    assert model.words.storageLevel.useMemory
    before = marked(model, rows)
    assert not model.unpersist().words.storageLevel.useMemory
    assert marked(model, rows) == before
