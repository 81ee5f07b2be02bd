"""Folders and tables of photographs, from files to predictions, against plain Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from frames import estimator
from pictures import by_pillow, drawn, encoded
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import Tensor, nn
from torchmetrics import MeanSquaredError

from sparkdl import TorchModel
from sparkdl.errors import ConfigError

WIDTH, HEIGHT = 12, 10
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FILES = {
    "0.jpg": encoded(drawn(61, 40), "JPEG"),
    "1.jpg": encoded(drawn(61, 40, seed=1), "JPEG", 6),
    "2.png": encoded(drawn(9, 31, "RGBA"), "PNG"),
    "3.png": encoded(drawn(31, 9, "P"), "PNG"),
    "4.webp": encoded(drawn(50, 50, "RGBA"), "WEBP", 3),
    "5.gif": encoded(drawn(20, 33, "L"), "GIF"),
    "6.bmp": encoded(drawn(13, 10), "BMP"),
    "7.jpg": encoded(drawn(400, 300, "CMYK"), "JPEG"),
}


def floats_of(octets: bytes, fit: str, channels: int = 3) -> np.ndarray:
    """What a model is to be given: shape (channels, height, width), float32."""
    pixels = by_pillow(octets, channels, fit, (WIDTH, HEIGHT)).astype(np.float32)
    mean, std = (np.array(each, np.float32)[:channels, None, None] for each in (MEAN, STD))
    return (pixels / np.float32(255) - mean) / std


def digest(rows: np.ndarray | Tensor) -> Tensor:
    """One number a row, which tells pictures apart, and turned ones too."""
    pixels = torch.as_tensor(rows).double().flatten(1)
    return pixels @ torch.arange(1, pixels.shape[1] + 1, dtype=torch.float64) / pixels.shape[1]


class Recognizes(nn.Module):
    """Predicts the digest of a picture; refuses any that is not one of those that there are."""

    def __init__(self, known: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("known", torch.tensor(known, dtype=torch.float64))
        self.slope = nn.Parameter(torch.ones(()))

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        assert pixels.dtype == torch.float32
        found = digest(pixels)
        made_up = pixels.flatten(2).std(2).sum(1) == 0  # the checks before the training
        near = (found[:, None] - self.known).abs().min(1).values < 1e-4
        assert bool((near | made_up).all()), found.tolist()
        return self.slope * found.float(), pixels.mean((2, 3))


def first(outputs: Any, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs[0], targets)


def image_estimator(fit: str, known: Sequence[float], **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "model": Recognizes(known),
        "loss": first,
        "optimizer": partial(torch.optim.SGD, lr=0.0),
        "featuresCol": "content",
        "labelCol": "y",
        "imageCols": ["content"],
        "imageSize": (HEIGHT, WIDTH),
        "imageFit": fit,
        "imageScale": (MEAN, STD),
        "outputCols": {"prediction": 0, "colours": 1},
        "epochs": 2,
        "batchSize": 3,
    }
    return estimator(**{**settings, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "photographs"
    path.mkdir()
    for name, octets in FILES.items():
        (path / name).write_bytes(octets)
    return path


def read(spark: SparkSession, folder: Path) -> DataFrame:
    rows = spark.read.format("binaryFile").load(folder.as_uri())
    name = F.element_at(F.split("path", "/"), -1)
    return rows.withColumn("name", name).withColumn("y", F.lit(1.0).cast("float"))


def found_in(predicted: DataFrame, *columns: str) -> dict[str, list[Any]]:
    return {row["name"]: [row[each] for each in columns] for row in predicted.collect()}


@pytest.mark.nightly
def test_photographs_of_any_size_train_and_predict_as_plain_pillow_and_torch_do(
    spark: SparkSession, folder: Path, tmp_path: Path
) -> None:
    """Cut; of others, padded and stretched, tests of the encoding say so."""
    rows = read(spark, folder)
    expected = {name: floats_of(octets, "crop") for name, octets in FILES.items()}
    digests = {name: digest(each[None]).item() for name, each in expected.items()}
    model = image_estimator("crop", list(digests.values())).fit(rows)
    assert [epoch.examples for epoch in model.history] == [len(FILES)] * 2
    path = str(tmp_path / "model")
    model.save(path)
    table = spark.createDataFrame(
        [(k, bytearray(v)) for k, v in FILES.items()], "name string, content binary"
    )
    for each in (model, TorchModel.load(path, trust=True)):
        for given in (rows.drop("y"), table):
            found = found_in(each.transform(given), "prediction", "colours")
            assert found.keys() == expected.keys()
            for name, (prediction, colours) in found.items():
                assert prediction == pytest.approx(digests[name], rel=1e-6)
                assert colours.toArray() == pytest.approx(expected[name].mean((1, 2)), abs=1e-5)
        called = table.select("name", each.udf()("content").alias("both"))
        found = found_in(called.select("name", "both.prediction"), "prediction")
        assert {k: v[0] for k, v in found.items()} == pytest.approx(digests, rel=1e-6)
    measured = model.evaluate(rows, {"mse": MeanSquaredError})
    errors = np.array(list(digests.values())) - 1
    assert measured["mse"] == pytest.approx(float((errors**2).mean()), rel=1e-5)


@pytest.mark.nightly
@pytest.mark.versions
def test_sparks_image_source_trains_and_predicts_alike(spark: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    pictures = {f"{i}.png": encoded(drawn(20 + 7 * i, 40 - i), "PNG") for i in range(6)}
    for name, octets in pictures.items():
        (folder / name).write_bytes(octets)
    digests = {k: digest(floats_of(v, "crop")[None]).item() for k, v in pictures.items()}
    rows = spark.read.format("image").load(folder.as_uri())
    named = rows.withColumn("name", F.element_at(F.split("image.origin", "/"), -1))
    named = named.withColumn("y", F.lit(1.0).cast("float"))
    model = image_estimator(
        "crop", list(digests.values()), featuresCol="image", imageCols=["image"]
    ).fit(named)
    found = found_in(model.transform(named), "prediction")
    assert {k: v[0] for k, v in found.items()} == pytest.approx(digests, rel=1e-6)


def test_a_module_of_other_images_is_refused() -> None:
    images: dict[str, Any] = {"imageCols": ["content"], "imageSize": (HEIGHT, WIDTH)}
    with pytest.raises(ConfigError, match="they must agree"):
        TorchModel.from_module(
            nn.Flatten(), torch.zeros(1, 3, 4, 4), featuresCol="content", **images
        )
