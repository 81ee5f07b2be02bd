"""What several workers have counted becomes one value: scikit-learn's, whoever had which rows."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from every_row import every, every_row
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torchmetrics import (
    CatMetric,
    MeanMetric,
    MeanSquaredError,
    Metric,
    MetricCollection,
    PearsonCorrCoef,
    R2Score,
    SpearmanCorrCoef,
)
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAUROC,
    BinaryAveragePrecision,
    BinaryF1Score,
    BinaryROC,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric, MultioutputWrapper

from sparkdl.errors import ConfigError, ModelError, TrainingError
from sparkdl.metrics import Metrics

CLASSES = 3
Oracle = Callable[[np.ndarray, np.ndarray], Any]
BINARY: dict[str, tuple[Any, Oracle]] = {
    "accuracy": (BinaryAccuracy, lambda p, y: sk.accuracy_score(y, p > 0.5)),
    "f1": (BinaryF1Score(), lambda p, y: sk.f1_score(y, p > 0.5)),
    "auroc": (BinaryAUROC, lambda p, y: sk.roc_auc_score(y, p)),
    "precision": (BinaryAveragePrecision, lambda p, y: sk.average_precision_score(y, p)),
}
MULTICLASS: dict[str, tuple[Any, Oracle]] = {
    "micro": (
        MulticlassAccuracy(CLASSES, average="micro"),
        lambda p, y: sk.accuracy_score(y, p.argmax(1)),
    ),
    "f1": (
        partial(MulticlassF1Score, CLASSES, average="macro"),
        lambda p, y: sk.f1_score(y, p.argmax(1), average="macro"),
    ),
    "auroc": (MulticlassAUROC(CLASSES), lambda p, y: sk.roc_auc_score(y, p, multi_class="ovr")),
    "confusion": (
        MulticlassConfusionMatrix(CLASSES),
        lambda p, y: sk.confusion_matrix(y, p.argmax(1)).tolist(),
    ),
}
REGRESSION: dict[str, tuple[Any, Oracle]] = {
    "mse": (MeanSquaredError, lambda p, y: sk.mean_squared_error(y, p)),
    "r2": (R2Score(), lambda p, y: sk.r2_score(y, p)),
    # States that are stacked, not added.
    "pearson": (PearsonCorrCoef, lambda p, y: np.corrcoef(p, y)[0, 1]),
    "root": (MeanSquaredError() ** 0.5, lambda p, y: sk.root_mean_squared_error(y, p)),
    "spearman": (SpearmanCorrCoef, lambda p, y: _spearman(p, y)),
}


def _spearman(predicted: np.ndarray, targets: np.ndarray) -> float:
    def ranks(values: np.ndarray) -> np.ndarray:
        return (values[:, None] > values).sum(1) + ((values[:, None] == values).sum(1) - 1) / 2

    return float(np.corrcoef(ranks(predicted), ranks(targets))[0, 1])


def measured(
    makers: dict[str, Any], predicted: np.ndarray, targets: np.ndarray, workers: list[list[int]]
) -> Any:
    """Have each worker count its minibatches, of so many rows each, and put all together."""
    metrics = Metrics.of(makers)
    states, start = [], 0
    for minibatches in workers:
        counted = metrics.begin()
        for rows in minibatches:
            here = slice(start, start + rows)
            counted.update(torch.tensor(predicted[here]), torch.tensor(targets[here]))
            start += rows
        states.append(counted.states())
    assert start == len(targets)
    return metrics.measure(states)


partitionings = st.lists(st.lists(st.integers(2, 9), max_size=4), min_size=1, max_size=5).filter(
    lambda workers: sum(map(sum, workers)) >= 12
)


@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
@settings(max_examples=12)
@given(workers=partitionings, seed=st.integers(0, 1000))
def test_any_partitioning_gives_the_value_that_scikit_learn_gives(
    task: str, workers: list[list[int]], seed: int
) -> None:
    rows, numbers = sum(map(sum, workers)), np.random.default_rng(seed)
    if task == "binary":
        targets, predicted, table = numbers.integers(0, 2, rows), numbers.random(rows), BINARY
        targets[:2] = 0, 1
    elif task == "multiclass":
        targets, table = numbers.integers(0, CLASSES, rows), MULTICLASS
        targets[:CLASSES] = range(CLASSES)
        predicted = numbers.dirichlet(np.ones(CLASSES), rows)
    else:
        targets, predicted, table = numbers.normal(size=rows), numbers.normal(size=rows), REGRESSION
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = measured({k: m for k, (m, _) in table.items()}, predicted, targets, workers)
    for name, (_, oracle) in table.items():
        np.testing.assert_allclose(
            found[name], oracle(predicted, targets), rtol=2e-5, atol=2e-6, err_msg=name
        )


def test_a_mean_counts_its_minibatches_and_a_worker_without_rows_counts_for_nothing() -> None:
    class MeanOfMinibatches(MeanMetric):
        """Its state is a running mean over updates, merged as torchmetrics's "mean"."""

        def __init__(self) -> None:
            super().__init__()
            self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")

        def update(self, predicted: Any, targets: Any) -> None:
            self.mean = self.mean + (predicted.mean() - self.mean) / self._update_count

        def compute(self) -> Any:
            return self.mean

    values = np.array([1.0, 2.0, 3.0, 10.0])
    found = measured({"mean": MeanOfMinibatches}, values, values, [[1, 1, 1], [], [1]])
    assert found == {"mean": pytest.approx(4.0)}


def test_a_collection_is_metrics_by_its_names_and_several_numbers_are_lists_and_dicts() -> None:
    predicted = np.eye(CLASSES)[[0, 1, 2, 1]]
    targets = np.array([0, 1, 2, 0])
    recall = MulticlassAccuracy(CLASSES, average=None)
    both = {"recall": recall, "f1": MulticlassF1Score(CLASSES)}
    collection = MetricCollection(both, prefix="my_")
    found = measured(collection, predicted, targets, [[2], [2]])  # type: ignore[arg-type]
    assert found.keys() == {"my_recall", "my_f1"}
    assert found["my_recall"] == [0.5, 1.0, 1.0]
    each = ClasswiseWrapper(recall, labels=["a", "b", "c"])
    found = measured({"by": each}, predicted, targets, [[1], [3]])
    by_class = {f"multiclassaccuracy_{k}": v for k, v in zip("abc", [0.5, 1, 1], strict=True)}
    assert found == {"by": by_class}
    curve = measured({"roc": BinaryROC(thresholds=3)}, predicted[:, 0], targets == 0, [[4]])
    assert [len(each) for each in curve["roc"]] == [3, 3, 3]


def test_a_metric_of_the_user_s_stays_as_it_is_and_is_given_no_random_numbers() -> None:
    class Drawing(CatMetric):
        def update(self, predicted: Any, targets: Any) -> None:
            super().update(torch.rand(1))

    mine = BinaryAccuracy()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    measured({"mine": mine, "drawn": Drawing}, np.ones(4), np.ones(4, np.int64), [[2, 2]])
    assert mine.update_count == 0
    assert torch.equal(before, torch.get_rng_state())


@every(
    ("given", "words"),
    [
        ({}, "a dict of torchmetrics by name"),
        ([BinaryAccuracy()], "a dict of torchmetrics by name"),
        ({"loss": BinaryAccuracy()}, "not one of epoch, loss,"),
        ({"": BinaryAccuracy()}, "must be a string"),
        ({"a": 3}, "metric 'a' must be a torchmetrics.Metric, or a function"),
        ({"a": torch.nn.ReLU}, "makes a ReLU"),
        ({"a": MulticlassF1Score}, "'a' cannot be made: TypeError: .*num_classes"),
        ({"a": MetricCollection([BinaryAccuracy()])}, "Give the MetricCollection itself"),
        *(
            ({name: BinaryAccuracy}, f"metrics has the name '{name}'")
            for name in ("epoch", "examples", "examples_per_second", "validation_loss")
        ),
    ],
)
def test_what_is_no_metric_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Metrics.of(given).begin()


def test_a_metric_that_fails_is_named_with_what_it_was_given() -> None:
    counted = Metrics.of({"f1": MulticlassF1Score(CLASSES)}).begin()
    with pytest.raises(ModelError, match=r"'f1' fails on float32 \(4, 2\) and int64 \(4,\)"):
        counted.update(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ModelError, match="Labels of several columns are a tuple"):
        counted.update(torch.zeros(4, 3), (torch.zeros(4, dtype=torch.int64), torch.zeros(4)))
    metrics = Metrics.of({"r2": R2Score})
    counted = metrics.begin()
    counted.update(torch.zeros(1), torch.zeros(1))
    with pytest.raises(ModelError, match="'r2' cannot be computed"):
        metrics.measure([counted.states()])


def test_a_state_that_is_no_tensor_is_refused() -> None:
    class Words(CatMetric):
        def update(self, predicted: Any, targets: Any) -> None:
            self.value.append("a word")  # type: ignore[union-attr]

    counted = Metrics.of({"words": Words}).begin()
    counted.update(torch.zeros(1), torch.zeros(1))
    with pytest.raises(ModelError, match=r"'words' keeps something .* tensors in its state"):
        counted.states()


@every(
    "change",
    [
        *({"0/": said} for said in (None, *map(torch.tensor, (-1, 1.0, [1, 2])))),
        {"0//total": None},
        {"1//value/7": torch.zeros(1)},
        {"2/": torch.tensor(1)},
        {"0//__class__": torch.tensor(1)},
    ],
)
def test_states_that_no_worker_sends_are_refused(change: dict[str, Any]) -> None:
    metrics = Metrics.of({"mse": MeanSquaredError, "all": CatMetric})
    counted = metrics.begin()
    counted._metrics["mse"].update(torch.zeros(3), torch.ones(3))
    counted._metrics["all"].update(torch.zeros(3))
    whole = load(counted.states())
    metrics.measure([save(whole)] * 2)
    forged = {k: v for k, v in {**whole, **change}.items() if v is not None}
    with pytest.raises(TrainingError, match="different metrics from the driver's"):
        metrics.measure([save(whole), save(forged)])


@settings(max_examples=50)
@given(octets=st.binary(max_size=200))
def test_octets_of_any_kind_are_refused_and_never_run(octets: bytes) -> None:
    with pytest.raises(TrainingError):
        Metrics.of({"mse": MeanSquaredError}).measure([octets])


def test_states_of_other_shapes_do_not_fit_together() -> None:
    metrics = Metrics.of({"confusion": MulticlassConfusionMatrix(2)})
    other = Metrics.of({"confusion": MulticlassConfusionMatrix(3)})
    states = []
    for each in (metrics, other):
        counted = each.begin()
        counted.update(torch.tensor([0, 1]), torch.tensor([1, 1]))
        states.append(counted.states())
    with pytest.raises((TrainingError, ModelError), match="do not fit together"):
        metrics.measure(states)


def test_without_torchmetrics_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    with pytest.raises(ConfigError, match=r'pip install "sparkdl-torch\[metrics\]"'):
        Metrics.of({"mse": MeanSquaredError})


class Bag(Metric):
    """Keeps a metric where nobody finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [BinaryAccuracy()]

    def update(self, predicted: Any, targets: Any) -> None:
        self.parts[0].update(predicted, targets)

    def compute(self) -> Any:
        return self.parts[0].compute()


def test_a_metric_of_whose_counts_nothing_would_travel_is_refused() -> None:
    with pytest.raises(ConfigError, match="metric 'bag', a Bag, has no states"):
        Metrics.of({"bag": Bag()}).begin()


class Weighed(Metric):
    """The weighted mean of squared errors."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(2), "sum")

    def update(self, predicted: Any, targets: Any, sample_weight: Any = None) -> None:
        weights = torch.ones(len(predicted)) if sample_weight is None else sample_weight
        self.sums += torch.stack([(weights * (predicted - targets) ** 2).sum(), weights.sum()])

    def compute(self) -> Any:
        return self.sums[0] / self.sums[1]


@every_row(
    (Weighed() ** 0.5, 2.0),
    (MinMaxMetric(Weighed()), {"raw": 4.0, "min": 4.0, "max": 4.0}),
    (Weighed() + MeanSquaredError(), None),
    (MultioutputWrapper(Weighed(), 1), None),
)
def test_weights_go_through_the_wrappers_that_hand_them_on(metric: Metric, wanted: Any) -> None:
    metrics = Metrics.of({"m": metric})
    assert metrics.without_weights() == ([] if wanted is not None else ["m"])
    if wanted is None:
        return
    counted = metrics.begin()
    counted.update(torch.tensor([3.0, 9.0]), torch.tensor([1.0, 0.0]), torch.tensor([5.0, 0.0]))
    assert metrics.measure([counted.states()]) == {"m": wanted}
