"""Test metrics of every model, measured alike, in one table."""

import time
from dataclasses import dataclass

from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.ml.functions import vector_to_array
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from sparkdl import EpochSummary

SMALLEST_PROBABILITY = 1e-15
"""A model that was certain and wrong gets a large loss, not an infinite one."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """How well one model predicts the test flights."""

    name: str
    auc: float
    """Area under the ROC curve."""
    accuracy: float
    """At a threshold of one half."""
    log_loss: float
    """Mean negative logarithm (natural) of the probability given to what happened."""
    seconds: float
    """Spent fitting, predicting and evaluating."""


def evaluate(name: str, predictions: DataFrame, started: float) -> Score:
    """Measure one model's predictions on the test flights.

    Args:
        name: the model's name in the table.
        predictions: ``label`` and ``probability`` (vector of both classes).
        started: ``time.perf_counter()`` when the model's turn began.
    """
    late = vector_to_array(F.col("probability"))[1]
    happened = F.when(F.col("label") == 1, late).otherwise(1 - late)
    scored = predictions.select("label", "probability").persist()
    try:
        # Without bins the area is exact.
        ranking = BinaryClassificationEvaluator(rawPredictionCol="probability", numBins=0)
        auc = ranking.evaluate(scored)
        means = scored.agg(
            F.avg(((late > 0.5) == (F.col("label") == 1)).cast("double")).alias("accuracy"),
            F.avg(-F.ln(F.greatest(happened, F.lit(SMALLEST_PROBABILITY)))).alias("log_loss"),
        ).first()
    finally:
        scored.unpersist()
    assert means is not None  # an aggregate without keys has one row
    return Score(
        name=name,
        auc=auc,
        accuracy=means["accuracy"],
        log_loss=means["log_loss"],
        seconds=time.perf_counter() - started,
    )


def format_scores(scores: list[Score]) -> str:
    """Lay the scores out as a table, and say in words how the last one compares."""
    lines = [f"{'model':<22}{'AUC':>8}{'accuracy':>10}{'log-loss':>10}{'seconds':>9}"]
    lines += [
        f"{score.name:<22}{score.auc:>8.4f}{score.accuracy:>10.4f}{score.log_loss:>10.4f}"
        f"{score.seconds:>9.1f}"
        for score in scores
    ]
    *others, last = scores
    ranked = last.auc > max(other.auc for other in others)
    calibrated = last.log_loss < min(other.log_loss for other in others)
    verdict = {
        (True, True): "beats every baseline on AUC and on log-loss",
        (True, False): "beats every baseline on AUC, but not on log-loss",
        (False, True): "beats every baseline on log-loss, but not on AUC",
        (False, False): "beats the best baseline neither on AUC nor on log-loss",
    }[ranked, calibrated]
    return "\n".join([*lines, f"The {last.name} {verdict}."])


def format_history(history: list[EpochSummary]) -> str:
    """Lay out what was learnt in each epoch."""
    return "\n".join(
        f"epoch {summary.epoch}: training loss {summary.loss:.4f}, {summary.examples:,} flights in "
        f"{summary.seconds:.1f} s, {summary.rounds} averaging rounds"
        for summary in history
    )
