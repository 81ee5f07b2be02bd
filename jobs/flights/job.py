"""The job from tables to table: features, baselines, network, metrics, saved model."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pyspark.ml.classification import LogisticRegression
from pyspark.sql import DataFrame, SparkSession

from flights.baselines import logistic_regression, majority_class
from flights.data import read_tables
from flights.features import CATEGORIES, FEATURES, build_features
from flights.network import DelayNetwork
from flights.preparation import Preparation, Split
from flights.report import Score, evaluate
from sparkdl import TorchEstimator, TorchModel
from sparkdl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """What the job found out."""

    scores: list[Score]
    """The baselines, then the network."""
    model: TorchModel
    """The network, saved."""


def run_job(
    spark: SparkSession,
    estimator: TorchEstimator,
    regression: LogisticRegression,
    split: Split,
    output: str,
) -> JobResult:
    """Train and compare the models, and save the network.

    Args:
        spark: the session.
        estimator: of the network; reads the columns that ``Preparation.apply`` makes and adds
            ``probability``.
        regression: the stronger baseline.
        split: training and test months.
        output: where the network is saved; overwritten.

    Raises:
        ConfigError: the network is too small for the vocabularies.
    """
    with _prepared_flights(spark, split) as (preparation, flights):
        require_room(estimator.getModel()(), preparation)
        train, test = split.train(flights), split.test(flights)
        started = time.perf_counter()
        scores = [_score("majority class", majority_class(train, test), started)]
        started = time.perf_counter()
        predictions = logistic_regression(train, test, regression)
        scores.append(_score("logistic regression", predictions, started))
        started = time.perf_counter()
        model = estimator.fit(train)
        scores.append(_score("network", model.transform(test), started))
        model.write().overwrite().save(output)
    return JobResult(scores=scores, model=model)


def require_room(network: DelayNetwork, preparation: Preparation) -> None:
    """Check that the network's embeddings have a row for every value seen in training.

    Args:
        network: as configured.
        preparation: what was learnt from the training part.

    Raises:
        ConfigError: a vocabulary is larger than its embedding; the message has the right sizes.
    """
    seen = [len(preparation.vocabularies[category]) for category in CATEGORIES]
    room = list(network.vocabulary_sizes)
    if any(values > rows for values, rows in zip(seen, room, strict=True)):
        raise ConfigError(
            f"the training months have {seen} values of {', '.join(CATEGORIES)}, but the network "
            f"was configured for {room}: --estimator.model.init_args.vocabulary_sizes '{seen}'"
        )


@contextmanager
def _prepared_flights(spark: SparkSession, split: Split) -> Iterator[tuple[Preparation, DataFrame]]:
    """Prepare all flights once, and keep them for as long as the models need them."""
    started = time.perf_counter()
    raw = build_features(read_tables(spark)).persist()
    _say(f"{len(FEATURES)} features of {raw.count():,} flights", started)
    started = time.perf_counter()
    preparation = Preparation.learn(split.train(raw))
    flights = preparation.apply(raw).persist()
    try:
        train, test = split.train(flights).count(), split.test(flights).count()
        raw.unpersist()
        _say(f"prepared: {train:,} flights to learn from, {test:,} to predict", started)
        yield preparation, flights
    finally:
        flights.unpersist()


def _score(name: str, predictions: DataFrame, started: float) -> Score:
    score = evaluate(name, predictions, started)
    _say(name, started)
    return score


def _say(what: str, started: float) -> None:
    print(f"[{time.perf_counter() - started:5.1f} s] {what}", flush=True)
