"""A small table with a text column, and a configuration for it that all three jobs read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import yaml

ROWS = 600


def make_table(path: Path) -> dict[str, Any]:
    """Write it as Parquet; label is 1 where x + 2 (color is red) > 1. Returns its columns."""
    generator = np.random.default_rng(3)
    x = generator.normal(size=ROWS)
    color = generator.choice(["red", "green", "blue"], size=ROWS)
    columns = {
        "id": np.arange(ROWS),
        "x": x,
        "color": color,
        "label": (x + 2 * (color == "red") > 1).astype("int64"),
        "part": np.where(np.arange(ROWS) % 3 == 0, "test", "train"),
    }
    path.mkdir(parents=True)
    for number in range(3):
        piece = {name: values[number::3] for name, values in columns.items()}
        pa.parquet.write_table(pa.table(piece), path / f"part-{number}.parquet")
    return columns


def configuration(folder: Path, **estimator: Any) -> dict[str, Any]:
    """The configuration: text to indices, indices to vectors, and a linear network."""
    features = "pyspark.ml.feature"
    return {
        "session": {"master": "local[2]", "conf": {"spark.ui.enabled": "false"}},
        "source": {
            "class_path": "sparkdl.jobs.Files",
            "init_args": {"path": str(folder / "table")},
        },
        "rows": {"train": "part = 'train'", "test": "part = 'test'"},
        "stages": [
            {
                "class_path": f"{features}.StringIndexer",
                "init_args": {"inputCol": "color", "outputCol": "index"},
            },
            {
                "class_path": f"{features}.OneHotEncoder",
                "init_args": {"inputCol": "index", "outputCol": "one_hot"},
            },
            {
                "class_path": f"{features}.VectorAssembler",
                "init_args": {"inputCols": ["x", "one_hot"], "outputCol": "features"},
            },
        ],
        "estimator": {
            "model": {
                "class_path": "torch.nn.Linear",
                "init_args": {"in_features": 3, "out_features": 2},
            },
            "loss": "torch.nn.functional.cross_entropy",
            "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.1}},
            "batchSize": 32,
            "epochs": 6,
            "numWorkers": 2,
            "seed": 5,
            "progress": False,
            **estimator,
        },
        "baselines": {
            "constant": {
                "class_path": "pyspark.ml.classification.LogisticRegression",
                "init_args": {"featuresCol": "nothing", "maxIter": 1},
            }
        },
        "evaluators": {
            "accuracy": {
                "class_path": "pyspark.ml.evaluation.MulticlassClassificationEvaluator",
                "init_args": {"metricName": "accuracy"},
            },
        },
        "model": str(folder / "model"),
        "evaluation": str(folder / "evaluation"),
        "predictions": str(folder / "predictions"),
        "write": {"columns": ["id", "color", "prediction"], "partition_by": ["color"]},
    }


def write_configuration(folder: Path, said: dict[str, Any]) -> str:
    """Write it as YAML; returns the file's path."""
    (folder / "job.yaml").write_text(yaml.safe_dump(said))
    return str(folder / "job.yaml")
