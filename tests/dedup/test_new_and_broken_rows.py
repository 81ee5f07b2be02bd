"""New rows, broken rows, and searches that were saved."""

from __future__ import annotations

import base64
import io
import json
import logging
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from every_row import every
from frames import configured, in_files
from near_rows import digits, ids, png
from PIL import Image
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import SQLTransformer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkdl import NearDuplicates, NearDuplicatesModel
from sparkdl.dedup import near_duplicates
from sparkdl.errors import ConfigError
from sparkdl.estimator import persistence as saving
from sparkdl.spark.catalyst.versions import frame_of

WHITE = png(Image.new("L", (40, 30), 255))


def images(spark: SparkSession, *files: bytes | None) -> DataFrame:
    rows = {"id": pa.array(range(len(files)), pa.int64()), "image": pa.array(files, pa.binary())}
    return spark.createDataFrame(pa.table(rows))


def hashable(column: pd.Series) -> list[Any]:
    return [bytes(each) if isinstance(each, bytearray) else each for each in column]


def same_pixels(one: Any, other: bytes) -> bool:

    first, second = (Image.open(io.BytesIO(each)).convert("L") for each in (one, other))
    return first.size == second.size and first.tobytes() == second.tobytes()


@pytest.fixture(scope="module")
def pictures() -> list[bytes]:
    return [png(Image.fromarray(pixels)) for pixels in digits(40)[0][:6]]


def test_rows_without_a_hash_stay_and_are_counted(
    spark: SparkSession, pictures: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    frame = images(spark, pictures[0], None, pictures[0], b"no image", pictures[1], b"", None)
    with caplog.at_level(logging.WARNING):
        model = NearDuplicates(within=None).fit(frame)
    assert ids(model.transform(frame)) == [0, 1, 3, 4, 5, 6]
    found = model.found
    assert (found.rows, found.different, found.broken, found.null) == (7, 2, 2, 2)
    (said,) = [each for each in caplog.messages if "nothing to compare" in each]
    assert "of 7 rows, 2 have" in said
    assert "that with id=3: ValueError: it is not one of BMP" in said
    report = model.report()
    assert list(report.kept["rows"]) == [6] * 5
    assert "2 null values, kept; 2 broken rows, kept, first that with id=3" in report.summary


@pytest.mark.nightly
def test_of_a_new_table_the_rows_stay_that_are_near_no_kept_one(
    spark: SparkSession, pictures: list[bytes]
) -> None:
    old = images(spark, *pictures[:3])
    model = NearDuplicates(within=None).fit(old)
    new = images(spark, WHITE, pictures[4], pictures[1], pictures[4], b"broken", pictures[5])
    new = new.withColumn("id", F.col("id") + 100)
    assert ids(model.transform(new)) == [100, 101, 103, 104, 105]
    assert ids(model.transform(new.unionByName(old))) == [0, 1, 2, 100, 101, 103, 104, 105]
    grown = model.transform(new).unionByName(old)
    again = NearDuplicates(within=None).fit(grown).transform(grown)
    assert ids(again) == [0, 1, 2, 100, 101, 104, 105]


@pytest.mark.nightly
def test_a_new_row_with_the_number_of_a_kept_one_and_its_hash_is_that_row(
    spark: SparkSession, pictures: list[bytes]
) -> None:
    model = NearDuplicates(within=None).fit(images(spark, *pictures[:3]))
    assert ids(model.transform(images(spark, *pictures[:3]))) == [0, 1, 2]
    assert ids(model.transform(images(spark, pictures[1], pictures[1]))) == [1]


@pytest.mark.nightly
def test_images_of_sparks_own_source_are_taken(
    spark: SparkSession, pictures: list[bytes], tmp_path: Path
) -> None:
    for name, file in zip("abc", [pictures[0], pictures[1], pictures[0]], strict=True):
        (tmp_path / f"{name}.png").write_bytes(file)
    (tmp_path / "d.png").write_bytes(b"broken")
    structs = spark.read.format("image").load(tmp_path.as_uri())
    frame = structs.withColumn("id", F.substring_index("image.origin", "/", -1))
    model = NearDuplicates(within=None).fit(frame)
    kept = ["a.png", "b.png", "d.png"]
    assert ids(model.transform(frame)) == kept
    files = spark.read.format("binaryFile").load(tmp_path.as_uri())
    by_path = NearDuplicates(inputCol="content", keep="path", within=None).fit(files)
    assert [row.path[-5:] for row in by_path.transform(files).orderBy("path").collect()] == kept


@pytest.mark.nightly
def test_labels_that_differ_keep_near_rows_and_are_reported(
    spark: SparkSession, pictures: list[bytes], tmp_path: Path
) -> None:
    frame = images(spark, *pictures[:2], *pictures[:2], pictures[0])
    labels = F.expr("get(split('one two three two', ' '), cast(id as int))")
    frame = frame.withColumn("label", labels).withColumn("id", F.col("id") + 10)
    model = NearDuplicates().fit(frame)
    assert ids(model.transform(frame)) == [10, 11, 12, 14]
    found = sorted(tuple(row) for row in model.conflicts().collect())
    wanted = [(10, "one", 12, "three"), (10, "one", 14, None), (12, "three", 14, None)]
    assert found == [(*pair, 0) for pair in wanted]
    report = model.report()
    assert report.num_conflicts == 3
    assert list(report.pairs.itertuples(index=False, name=None)) == [(13, 11, 0)]
    assert set(report.values) == {10, 11, 12, 13, 14}
    path = tmp_path / "report.html"
    report.save(path)
    page = path.read_text()
    assert page.count("data:image/png;base64,") == 2 + 6
    for row, picture in zip(range(10, 15), (0, 1, 0, 1, 0), strict=True):
        assert same_pixels(report.values[row], pictures[picture])
        shown = base64.b64encode(report.values[row]).decode()
        assert f'<td>{row}<br><img src="data:image/png;base64,{shown}"></td>' in page
    assert "3 near pairs with different labels" in page
    assert page.split("<table")[1:] == report._repr_html_().split("<table")[1:]
    everything = NearDuplicates(within=None).fit(frame)
    assert ids(everything.transform(frame)) == [10, 11]
    with pytest.raises(ConfigError, match="no labels that could differ"):
        everything.conflicts()


@pytest.mark.gate
@every(
    "keep",
    [
        "cast(id as decimal(20, 3))",
        "cast(lpad(id, 3, '0') as binary)",
        "date_add(date'2020-02-28', cast(id as int))",
        "timestamp_seconds(id + 0.25)",
        "timestamp_ntz'2024-03-31 02:30:00' + make_dt_interval(id)",
    ],
)
def test_a_report_shows_the_pictures_of_rows_of_any_order(
    spark: SparkSession, pictures: list[bytes], keep: str
) -> None:
    given = [pictures[0], pictures[1], pictures[1], pictures[0]]
    with configured(spark, {"spark.sql.session.timeZone": "Asia/Kathmandu"}):
        frame = images(spark, *given).withColumn("first", F.expr(keep))
        order = hashable(frame.orderBy("id").toPandas()["first"])
        report = NearDuplicates(within=None, keep="first").fit(frame).report()
    pairs = [hashable(report.pairs[name]) for name in ("row", "duplicate_of")]
    assert set(zip(*pairs, strict=True)) == {(order[2], order[1]), (order[3], order[0])}
    assert report.values.keys() == set(order)
    for row, picture in zip(order, given, strict=True):
        assert same_pixels(report.values[row], picture)
    assert report.to_html().count("data:image/png;base64,") == 4


def test_a_saved_model_knows_times_without_a_zone_as_such(
    spark: SparkSession, tmp_path: Path
) -> None:
    with configured(spark, {"spark.sql.session.timeZone": "Asia/Kathmandu"}):
        frame = spark.sql(
            """select timestamp_ntz'2024-03-31 02:30:00' + make_dt_interval(id) as first,
                      timestamp_ntz'2024-01-01 00:00:00' as day, 7L as word from range(3)"""
        )
        dedup = NearDuplicates(inputCol="word", hash="given", within="day", keep="first")
        dedup.fit(frame).save(str(tmp_path / "model"))
        loaded = NearDuplicatesModel.load(str(tmp_path / "model"))
        assert loaded.words.schema["first"].dataType == T.TimestampNTZType()
        assert loaded.transform(frame).collect() == [frame.orderBy("first").first()]


def test_texts_and_names_that_are_no_utf8_are_named_and_shown(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frame = spark.sql(
        """select id, cast(text as string) as text, cast(name as string) as name,
                  cast(label as string) as label
           from values (1, X'77616c64', X'61fc', X'fd'), (2, X'4bf66c6e', X'62fc', X'fd'),
                       (3, X'57414c44', X'63fc', X'fd'), (4, X'77616c64', X'64', X'fe'),
                       (5, null, X'65', null) as t(id, text, name, label)"""
    )
    texts = NearDuplicates(inputCol="text", hash="simhash", keep="name", within="label")
    with caplog.at_level(logging.WARNING):
        model = texts.fit(frame)
    assert ids(model.transform(frame)) == [1, 2, 4, 5]
    assert (model.found.broken, model.found.null) == (1, 1)
    (said,) = [each for each in caplog.messages if "nothing to compare" in each]
    assert "of 5 rows, 1 have" in said
    assert "it is no UTF-8: byte 0xf6 at position 1" in said
    report = model.report()
    told = "1 null value, kept; 1 broken row, kept, first that with name='b\ufffd'"
    assert told in report.summary
    assert list(report.pairs["row"]) == ["c\ufffd"]
    assert report.values == {"a\ufffd": "wald", "c\ufffd": "WALD", "d": "wald"}
    assert set(report.conflicts["label"]) == {"\ufffd"}
    report.save(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Content-Security-Policy" in page
    assert "c\ufffd<br>WALD" in page


def test_images_of_one_grey_value_are_counted(spark: SparkSession) -> None:
    clear = png(Image.new("RGBA", (9, 9), (200, 10, 30, 0)))
    black = png(Image.new("L", (5, 5)))
    model = NearDuplicates(within=None).fit(images(spark, WHITE, clear, black))
    assert model.found.blank == 3
    assert "3 images of a single grey value" in model.report().summary


def test_a_table_whose_ids_are_no_longer_those_of_the_fit_is_refused(
    spark: SparkSession, pictures: list[bytes], tmp_path: Path
) -> None:
    saved = in_files(images(spark, *pictures[:3], pictures[0]), tmp_path / "table")
    offset = F.udf(lambda: int((tmp_path / "offset").read_text()), "long").asNondeterministic()
    (tmp_path / "offset").write_text("0")
    frame = saved.withColumn("id", F.col("id") + offset())
    model = NearDuplicates(within=None).fit(frame)
    assert ids(model.transform(frame)) == [0, 1, 2]
    (tmp_path / "offset").write_text("100")
    with pytest.raises(Exception, match=r"other values than in fit: .* had \d and now has 10\d"):
        model.transform(frame).collect()


def test_nothing_stays_persisted_after_an_error(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(words: DataFrame, *_: Any) -> DataFrame:
        return words.withColumn("dropped", F.raise_error(F.lit("no disk")).cast("long"))

    monkeypatch.setattr(near_duplicates, "decided", failing)
    before = spark.sparkContext._jsc.getPersistentRDDs().size()
    with pytest.raises(Exception, match="no disk"):
        NearDuplicates(within=None, hash="given", inputCol="id").fit(spark.range(3))
    assert spark.sparkContext._jsc.getPersistentRDDs().size() == before


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
    assert (loaded.uid, loaded.found) == (model.uid, model.found)
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


def test_damage_is_said(
    model: NearDuplicatesModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="there is no"):
        NearDuplicates.load(str(tmp_path))
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
    # A path that Hadoop reads is copied first: what is said names the path, not the copy.
    copied = tmp_path / "copied"
    shutil.copytree(path, copied)
    monkeypatch.setattr(saving, "fetch", lambda path: nullcontext(copied))
    with pytest.raises(ConfigError, match=f"the model in {path} is damaged"):
        NearDuplicatesModel.load(str(path))


@pytest.mark.nightly
def test_what_was_forgotten_is_computed_anew(rows: DataFrame) -> None:
    model = NearDuplicates(hash="given", threshold=2).fit(rows)
    assert model.words.storageLevel.useMemory
    before = marked(model, rows)
    assert not model.words.unpersist().storageLevel.useMemory
    assert marked(model, rows) == before
