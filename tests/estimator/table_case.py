"""A row of what_happens.md: what is fitted, on which rows, and what torch alone makes of it.

Both workers have the same rows, all of them in one minibatch. So they take the same steps, whatever
the optimizer, and end where a loop of torch's own ends on those rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import torch
from frames import CLASSES, estimator, features_of, labels_of, with_features
from models import append_line
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import ReduceLROnPlateau

from sparkdl import ParameterAveraging, TorchModel

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS, WIDTH, TOKENS, WORDS = 24, 16, 5, 10
EPOCHS = 4


def network() -> nn.Module:
    """What the optimizers and schedulers of the table train."""
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: what it is called there, in Markdown.
        model: builds the model.
        settings: changes of the estimator's arguments.
        how: what the user has to set, if it is not plain.
        as_function: whether the estimator is given that, not what it builds.
        random: whether each training is another one.
        by_name: whether the optimizer is built from parameters with their names.
    """

    name: str
    model: Callable[[], Any] = network
    settings: Mapping[str, Any] = field(default_factory=dict)
    how: str = ""
    as_function: bool = False
    random: bool = False
    by_name: bool = False


def as_function(name: str, model: Callable[[], Any]) -> Case:
    """A model that works if it is given as a function."""
    return Case(name, model, how="given as a function", as_function=True)


class Seeded:
    """Builds a model from the same random numbers each time."""

    def __init__(self, model: Callable[[], Any]) -> None:
        self.model = model

    def __call__(self) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return self.model()


class Watched:
    """A batch transform that changes nothing, and tells of each minibatch that is trained on."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, batch: Any) -> Any:
        append_line(self.path, "batch")
        return batch


def table_rows(spark: SparkSession) -> DataFrame:
    """The same rows in two partitions, of every kind of column that a model of the table takes."""
    ids = spark.range(0, 2 * ROWS, 1, 2).select((F.col("id") % ROWS).alias("id"))
    words = [(F.col("id") * 7 + k * 3) % WORDS for k in range(TOKENS)]
    return (
        with_features(ids, WIDTH)
        .withColumn("tokens", F.array(*words))
        .withColumn("scale", (F.col("id") / ROWS).cast("double"))
        .cache()
    )


def _columns(dtype: torch.dtype) -> dict[str, Tensor]:
    """The same rows as tensors."""
    ids = np.arange(ROWS)
    return {
        "features": torch.from_numpy(features_of(ids, WIDTH)).to(dtype),
        "tokens": torch.from_numpy((ids[:, None] * 7 + np.arange(TOKENS) * 3) % WORDS),
        "scale": torch.from_numpy(ids / ROWS).to(dtype),
        "label": torch.from_numpy(labels_of(ids)),
    }


def estimate(case: Case, path: str) -> Any:
    """Make the estimator; its workers write to ``path`` when they train."""
    builder = Seeded(case.model)
    settings: dict[str, Any] = {
        "model": builder if case.as_function else builder(),
        "strategy": ParameterAveraging(period=1),
        "epochs": EPOCHS,
        "batchSize": ROWS,
        "outputType": "raw",
        "shuffleRows": "none",  # each worker has all rows
        "batchTransform": Watched(path),
        **case.settings,
    }
    return estimator(**settings)


def features_for(case: Case, module: nn.Module) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Positional and keyword arguments of the model's call."""
    floating = [p.dtype for p in module.parameters() if p.is_floating_point()]
    columns, settings = _columns(floating[0] if floating else torch.float32), case.settings
    shapes = settings.get("columnShapes", {})
    named = {
        name: columns[name].reshape(ROWS, *shapes.get(name, columns[name].shape[1:]))
        for name in settings.get("featuresCols") or [settings.get("featuresCol", "features")]
    }
    if settings.get("featuresAs") == "kwargs":
        return [], named
    return ([named] if settings.get("featuresAs") == "dict" else [*named.values()]), {}


def trained_by_torch(case: Case) -> nn.Module:
    """What a plain loop makes of one worker's rows."""
    settings = case.settings
    module: nn.Module = Seeded(case.model)()
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    optimizer = settings.get("optimizer", partial(torch.optim.SGD, lr=0.1))(
        trained if case.by_name else [parameter for _, parameter in trained]
    )
    scheduler = settings["scheduler"](optimizer) if settings.get("scheduler") else None
    loss = settings.get("loss", nn.CrossEntropyLoss())
    given, named = features_for(case, module)
    columns = _columns(given[0].dtype if given and isinstance(given[0], Tensor) else torch.float32)
    names = settings.get("labelCols") or [settings.get("labelCol", "label")]
    targets = [columns[name] for name in names]
    module.train()
    for _ in range(settings.get("epochs", EPOCHS)):
        optimizer.zero_grad()
        if loss == "model":
            value = module(*given, **named, labels=targets[0])["loss"]
        else:
            value = loss(module(*given, **named), targets[0] if len(names) == 1 else (*targets,))
        value.backward()
        if "clipNorm" in settings:
            nn.utils.clip_grad_norm_(module.parameters(), settings["clipNorm"])
        optimizer.step()
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(value.detach())
        elif scheduler is not None:
            scheduler.step()
    return module.eval()


def require_trained(case: Case, fitted: TorchModel) -> None:
    """Check that a fit has ended where torch alone ends; of a random one that it has moved."""
    assert all(np.isfinite(epoch.loss) for epoch in fitted.history), fitted.history
    ended = {**dict(fitted.module.named_buffers()), **dict(fitted.module.named_parameters())}
    if case.random:
        before = dict(Seeded(case.model)().named_parameters())
        assert any(is_lazy(each) or not torch.equal(each, ended[n]) for n, each in before.items())
        return
    alone = trained_by_torch(case)
    trained = {**dict(alone.named_buffers()), **dict(alone.named_parameters())}
    saved = alone.state_dict()
    for name, values in trained.items():
        if name not in saved and (name not in ended or values.shape != ended[name].shape):
            continue  # a cache
        exact = values.dtype not in (torch.bfloat16, torch.float16)
        torch.testing.assert_close(
            ended[name],
            values,
            rtol=1e-3 if exact else 0.05,
            atol=1e-5 if exact else 1e-2,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def require_predicted(case: Case, fitted: TorchModel, rows: DataFrame) -> None:
    """Check that ``transform`` gives what the trained model returns for the same rows."""
    module = fitted.module
    given, named = features_for(case, module)
    with torch.no_grad():
        outputs = module(*given, **named)
    chosen = case.settings.get("outputCols") or {"prediction": None}
    found = fitted.transform(rows).where(F.spark_partition_id() == 0).orderBy("id")
    table = found.select(*chosen).collect()
    for place, key in enumerate(chosen.values()):
        expected = outputs if key is None else _output(outputs, key)
        predicted = [row[place] for row in table]
        numbers = [p.toArray() if hasattr(p, "toArray") else p for p in predicted]
        np.testing.assert_allclose(
            np.array(numbers, dtype=np.float64).reshape(ROWS, -1),
            expected.detach().reshape(ROWS, -1).double().numpy(),
            rtol=1e-3,
            atol=1e-5 if expected.dtype is not torch.bfloat16 else 1e-2,
        )


def _output(outputs: Any, key: str | int) -> Tensor:
    by_name = isinstance(key, str) and not isinstance(outputs, dict)
    found: Tensor = getattr(outputs, str(key)) if by_name else outputs[key]
    return found
