"""What Spark shows of a Parquet table is what workers read, however the table is made and set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from frames import configured
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T
from torch import nn

from sparkdl import TorchEstimator, TorchModel
from sparkdl.feed.record_batches.packed import unpacked_rows
from sparkdl.spark.rows.in_files import (
    AT_DEFAULT,
    FAMILIES,
    WITHOUT_EFFECT,
    columns_in_files,
    describes_only,
    places,
)

FLOATS = T.ArrayType(T.FloatType())
Make = Callable[[SparkSession, str], DataFrame]


@dataclass(frozen=True)
class Case:
    """A table with a column ``x``.

    Attributes:
        make: writes it to a new path, whose last part is a new name, and reads it.
        settings: of Spark, while it is made and read.
        ours: whether workers are to read it themselves.
    """

    make: Make
    settings: Mapping[str, str] = field(default_factory=dict)
    ours: bool = False


def written(*columns: pa.Field, **values: Any) -> Callable[[str], str]:
    """Write a file by pyarrow."""

    def write(path: str) -> str:
        Path(path).mkdir(exist_ok=True)
        name = f"{path}/{len(list(Path(path).iterdir()))}.parquet"
        pq.write_table(pa.table(list(values.values()), schema=pa.schema(columns)), name)
        return path

    return write


def of(kind: pa.DataType, values: list[Any], name: str = "x") -> Callable[[str], str]:
    return written(pa.field(name, kind), **{name: values})


def read(
    *writers: Callable[[str], str], schema: T.StructType | str | None = None, **options: str
) -> Make:
    def make(spark: SparkSession, path: str) -> DataFrame:
        for write in writers:
            write(path)
        reader = spark.read.options(**options)
        return (reader.schema(schema) if schema is not None else reader).parquet(f"file://{path}")

    return make


def by_spark(sql: str = "array(cast(id as float)) x", **options: str) -> Make:
    def make(spark: SparkSession, path: str) -> DataFrame:
        rows = spark.range(4).selectExpr(*sql.split("; "))
        rows.write.options(**options).parquet(f"file://{path}")
        return spark.read.parquet(f"file://{path}")

    return make


def table(*statements: str) -> Make:
    """A table in the catalog; ``{t}`` is its name, ``{path}`` where it lies."""

    def make(spark: SparkSession, path: str) -> DataFrame:
        name = Path(path).name
        for statement in statements:
            spark.sql(statement.format(t=name, path=f"file://{path}"))
        return spark.table(name)

    return make


def with_ids(at: Callable[[T.StructField], T.StructType]) -> Make:
    def make(spark: SparkSession, path: str) -> DataFrame:
        fields = [
            T.StructField(name, FLOATS, True, {"parquet.field.id": number})
            for number, name in enumerate(("x", "y"))
        ]
        rows = [([1.0], [10.0]), ([2.0], [20.0])]
        spark.createDataFrame(rows, T.StructType(fields)).write.parquet(f"file://{path}")
        other = T.StructField("x", FLOATS, True, {"parquet.field.id": 1})
        return spark.read.schema(at(other)).parquet(f"file://{path}")

    return make


CREATE = "CREATE TABLE {t} (id INT, x ARRAY<FLOAT>{more}) USING parquet LOCATION '{path}'"
PLAIN = CREATE.replace("{more}", "")
ROWS = "INSERT INTO {t} VALUES (1, array(1F)), (2, array(2F))"
ADD = "ALTER TABLE {t} ADD COLUMNS "
IDS = {"spark.sql.parquet.fieldId.read.enabled": "true"}
FLOAT_LISTS, VALUES = pa.list_(pa.float32()), [[1.0], [2.0]]
NESTED = T.StructField("s", T.StructType([T.StructField("f", FLOATS, True, {"unit": "cm"})]))

CASES = {
    "as Spark writes it": Case(by_spark(), ours=True),
    "in another layout": Case(
        by_spark(), {"spark.sql.parquet.writeLegacyFormat": "true"}, ours=True
    ),
    "without the vectorized reader": Case(
        by_spark(),
        {
            "spark.sql.parquet.enableVectorizedReader": "false",
            "spark.sql.parquet.recordLevelFilter.enabled": "true",
        },
        ours=True,
    ),
    "a name with a dot": Case(by_spark("array(cast(id as float)) x; array(id) `x.y`"), ours=True),
    "a table": Case(table(PLAIN, ROWS), ours=True),
    "a commented table": Case(
        table(PLAIN.replace("FLOAT>", "FLOAT> COMMENT 'it'"), ROWS), ours=True
    ),
    "a table in buckets": Case(
        table(PLAIN.replace("LOC", "CLUSTERED BY (id) INTO 2 BUCKETS LOC"), ROWS), ours=True
    ),
    "an added column": Case(table(PLAIN, ROWS, ADD + "(y ARRAY<FLOAT>)"), ours=True),
    "a column that old files lack": Case(
        table(PLAIN.replace("x", "y"), ROWS, ADD + "(x ARRAY<FLOAT>)"), ours=True
    ),
    "an added column with a default": Case(
        table(PLAIN.replace("x", "y"), ROWS, ADD + "(x ARRAY<FLOAT> DEFAULT array(5F))")
    ),
    "another column with a default": Case(table(PLAIN, ROWS, ADD + "(y INT DEFAULT 5)")),
    "a table with text of fixed length": Case(
        table(CREATE.replace("{more}", ", c CHAR(3)"), "INSERT INTO {t} VALUES (1, array(1F), 'c')")
    ),
    "a table with partitions": Case(
        table(
            CREATE.replace("{more}", ", p INT").replace("LOC", "PARTITIONED BY (p) LOC"),
            "INSERT INTO {t} VALUES (1, array(1F), 2)",
        )
    ),
    "a table with unknown options": Case(
        table(PLAIN.replace("LOC", "OPTIONS (serialization.format '1') LOC"), ROWS)
    ),
    "another column's id": Case(with_ids(lambda x: T.StructType([x])), IDS),
    "ids that are not asked for": Case(with_ids(lambda x: T.StructType([x]))),
    "an id in a struct": Case(
        read(of(FLOAT_LISTS, VALUES), schema=T.StructType([T.StructField("x", FLOATS), NESTED]))
    ),
    "a note in a field": Case(
        read(
            of(FLOAT_LISTS, VALUES),
            schema=T.StructType([T.StructField("x", FLOATS, True, {"unit": "cm"})]),
        )
    ),
    "another case": Case(read(of(FLOAT_LISTS, VALUES, "X"), schema="x array<float>"), ours=True),
    "another case, which matters": Case(
        read(of(FLOAT_LISTS, VALUES, "X"), schema="x array<float>"),
        {"spark.sql.caseSensitive": "true"},
        ours=True,
    ),
    "two cases, which matter": Case(
        read(
            written(pa.field("X", FLOAT_LISTS), pa.field("x", FLOAT_LISTS), X=[[8.0]], x=[[9.0]]),
            schema="x array<float>",
        ),
        {"spark.sql.caseSensitive": "true"},
        ours=True,
    ),
    "floats as doubles": Case(
        read(of(FLOAT_LISTS, [[0.1], None, []]), schema="x array<double>"), ours=True
    ),
    "ints as bigints": Case(
        read(of(pa.list_(pa.int32()), [[-1], [1 << 30]]), schema="x array<bigint>"), ours=True
    ),
    "ints as doubles": Case(
        read(of(pa.list_(pa.int32()), [[-1], [1 << 30]]), schema="x array<double>"), ours=True
    ),
    "files of two types": Case(
        read(
            of(pa.list_(pa.int64()), [[1 << 40]]),
            of(pa.list_(pa.int32()), [[2]]),
            schema="x array<bigint>",
        ),
        ours=True,
    ),
    "unsigned bytes": Case(read(of(pa.list_(pa.uint8()), [[200]])), ours=True),
    "unsigned ints": Case(read(of(pa.list_(pa.uint32()), [[1 << 31]])), ours=True),
    "lists of one length": Case(read(of(pa.list_(pa.float32(), 1), [[1.0], None])), ours=True),
    "text as bytes": Case(read(of(pa.string(), ["a", "ä"]), schema="x binary"), ours=True),
    "bytes of one length": Case(read(of(pa.binary(2), [b"ab", b"cd"])), ours=True),
    "bytes as text": Case(
        read(of(pa.binary(), [b"a"])), {"spark.sql.parquet.binaryAsString": "true"}
    ),
    "merged schemas": Case(
        read(of(FLOAT_LISTS, VALUES), of(FLOAT_LISTS, VALUES, "y"), mergeSchema="true"), ours=True
    ),
    "nanoseconds as numbers": Case(
        read(of(pa.list_(pa.timestamp("ns")), [[1]])),
        {"spark.sql.legacy.parquet.nanosAsLong": "true"},
    ),
    "files that may be missing": Case(read(of(FLOAT_LISTS, VALUES), ignoreMissingFiles="false")),
    "an unknown setting": Case(by_spark(), {"spark.sql.parquet.anyNewSetting": "1"}),
    "a setting of Hadoop": Case(by_spark(), {"parquet.any.new.setting": "1"}),
    "the second version of data sources": Case(
        by_spark(), {"spark.sql.sources.useV1SourceList": ""}
    ),
}


def plain(value: Any) -> Any:
    return bytes(value) if isinstance(value, bytearray) else value


def read_by_us(frame: DataFrame, of_files: Mapping[str, Any]) -> list[Any]:
    name, where = places(frame, of_files)
    batches = frame.select(where.alias(name)).toArrow().to_batches()
    return [
        value for batch in unpacked_rows(iter(batches)) for value in batch.column(0).to_pylist()
    ]


@pytest.mark.slow
def test_what_workers_read_is_what_spark_shows(spark: SparkSession, tmp_path: Path) -> None:
    for number, (name, case) in enumerate(CASES.items()):
        table_name = f"parquet_settings_{number}"
        with configured(spark, case.settings):
            try:
                frame = case.make(spark, str(tmp_path / table_name))
                shown = [plain(row.x) for row in frame.select("x").collect()]
                of_files = columns_in_files(frame, {"c0": "x"})
                assert bool(of_files) == case.ours, name
                assert len(shown) > 0, name
                if of_files:
                    assert read_by_us(frame, of_files) == shown, name
            finally:
                spark.sql(f"DROP TABLE IF EXISTS {table_name}")


def test_each_of_sparks_settings_for_files_is_known(spark: SparkSession) -> None:
    jvm: Any = spark._jvm
    configuration = getattr(jvm.org.apache.spark.sql.internal, "SQLConf$")
    entries = getattr(configuration, "MODULE$").getConfigEntries().iterator()
    found = {}
    while entries.hasNext():
        entry = entries.next()
        if entry.key().startswith(FAMILIES):
            found[entry.key()] = entry.defaultValueString()
    assert len(found) > 30
    assert set(found) <= WITHOUT_EFFECT | set(AT_DEFAULT)
    assert {name: found[name] for name in AT_DEFAULT} == AT_DEFAULT


def test_only_descriptions_may_stand_in_a_fields_metadata() -> None:
    def schema(**metadata: Any) -> Any:
        inner = T.StructType([T.StructField("f", FLOATS, True, metadata)])
        return T.StructType(
            [T.StructField("m", T.MapType(T.StringType(), T.ArrayType(inner)))]
        ).jsonValue()

    assert describes_only(schema())
    assert describes_only(schema(comment="metadata", ml_attr={"parquet.field.id": 1}))
    assert describes_only(T.StructType([T.StructField("v", VectorUDT())]).jsonValue())
    for key in ("parquet.field.id", "EXISTS_DEFAULT", "CURRENT_DEFAULT", "new"):
        assert not describes_only(schema(**{key: 1}))


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.sum(1, keepdim=True) * self.weight


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["another column's id", "an added column with a default", "floats as doubles"]
)
def test_transform_udf_and_fit_have_the_rows_that_spark_shows(
    spark: SparkSession, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    with configured(spark, case.settings):
        frame = case.make(spark, str(tmp_path / "a_table_that_is_used")).where("size(x) > 0")
        try:
            shown = sorted(sum(row.x) for row in frame.select("x").collect())
            model = TorchModel.from_module(Sums(), torch.zeros(1, 1), featuresCol="x")
            predicted = sorted(row.prediction for row in model.transform(frame).collect())
            assert predicted == pytest.approx(shown)
            function = model.udf()
            called = sorted(row[0] for row in frame.select(function("x")).collect())
            assert called == pytest.approx(shown)
            # The loss of the untouched module is the mean of the rows' squares.
            fitted = TorchEstimator(
                model=Sums,
                loss=lambda outputs, targets: (outputs**2).mean() + 0 * targets.sum(),
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
                featuresCol="x",
                labelCol="label",
                numWorkers=1,
                progress=False,
            ).fit(frame.withColumn("label", frame.x[0]))
            mean = sum(value**2 for value in shown) / len(shown)
            assert fitted.history[-1].loss == pytest.approx(mean)
        finally:
            spark.sql("DROP TABLE IF EXISTS a_table_that_is_used")
