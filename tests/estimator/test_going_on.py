"""``fit(df, warm_start=model)``, and optimizers that take names, on real executors."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from frames import estimator, frame, same_bits
from models import decayed
from pyspark.sql import DataFrame, SparkSession
from torch import nn

from sparkdl import TorchModel
from sparkdl.errors import ConfigError, ModelError


def test_a_fit_goes_on_from_a_model_that_fits_and_trains_what_is_not_frozen(
    spark: SparkSession,
) -> None:
    rows, lr = frame(spark), 1e-30
    begun = estimator(epochs=2).fit(rows)

    def build() -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        module[0].requires_grad_(False)
        return module

    # At such a rate gradients move nothing.
    going_on: Any = estimator(model=build, optimizer=partial(decayed, lr=lr))
    same = going_on.fit(rows, warm_start=begun)
    assert same_bits(same, begun)
    assert len(same.history) == 1
    (decayed_to_zero,) = going_on.fit(
        rows, [{going_on.optimizer: partial(decayed, lr=2.0)}], warm_start=begun
    )
    state = decayed_to_zero.module.state_dict()
    assert torch.equal(state["0.weight"], begun.module.state_dict()["0.weight"])
    assert not torch.allclose(state["2.weight"], begun.module.state_dict()["2.weight"], atol=1e-3)

    with pytest.raises(ConfigError, match="warm_start must be a TorchModel, got one of type Seq"):
        going_on.fit(rows, warm_start=begun.module)
    going_on.setModel(nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 3)))
    with pytest.raises(ModelError, match=r"'0.weight' is float32 \[9, 4\] in the model to train"):
        going_on.fit(rows, warm_start=begun)


@pytest.mark.nightly
def test_the_batches_of_a_stream_are_trained_on_one_after_another(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = frame(spark)
    rows.coalesce(2).write.parquet(str(tmp_path / "rows"))
    stream = spark.readStream.schema(rows.schema).option("maxFilesPerTrigger", 1)
    fitted: list[TorchModel] = []

    def fit(batch: DataFrame, number: int) -> None:
        # At such a rate the second fit ends where it began.
        optimizer = partial(torch.optim.SGD, lr=1e-30 if fitted else 0.1)
        begin = fitted[-1] if fitted else None
        fitted.append(estimator(optimizer=optimizer).fit(batch, warm_start=begin))

    query = (
        stream.parquet(str(tmp_path / "rows"))
        .writeStream.foreachBatch(fit)
        .option("checkpointLocation", str(tmp_path / "query"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    first, second = fitted
    assert first.history[-1].examples + second.history[-1].examples == rows.count()
    assert same_bits(second, first)
    begun = estimator().getModel().state_dict()
    assert not torch.equal(first.module.state_dict()["0.weight"], begun["0.weight"])
