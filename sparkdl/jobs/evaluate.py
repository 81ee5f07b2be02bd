"""The job that evaluates: rows and a saved model in, metrics out; and how models compare."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame

from sparkdl.errors import DataError
from sparkdl.events import EpochSummary
from sparkdl.jobs import logs
from sparkdl.jobs.command import JobContext, JobOutput, load_model, run_command


def main(arguments: list[str] | None = None) -> int:
    """Run evaluate.py; returns its exit code."""
    return run_command("evaluate", evaluate, arguments)


def evaluate(context: JobContext) -> JobOutput:
    """Measure a saved model.

    Args:
        context: what was asked for, and where to write.

    Raises:
        DataError: there are no rows to measure on.
    """
    settings = context.settings
    model = load_model(str(settings.model), settings.trust or (), context.spark)
    with settings.rows.read(settings.source, context.spark) as rows:
        started = time.perf_counter()
        test = settings.rows.where(rows, settings.rows.test)
        evaluators = settings.build("evaluators", settings.evaluators)
        require_rows(test, settings.rows.test)
        score = measure("model", model.transform(test), evaluators, started)
    logs.say(f"evaluated {settings.model}", started, **score.metrics)
    width = max(map(len, score.metrics))
    words = "\n".join(f"{name:<{width}}  {value:.4f}" for name, value in score.metrics.items())
    result = {"model": settings.model, "metrics": score.metrics}
    return JobOutput(result, f"\n{words}\nMetrics saved in {settings.output}")


@dataclass(frozen=True, kw_only=True)
class Score:
    """How well one model predicts the rows."""

    name: str
    metrics: dict[str, float]
    """The values by the evaluators' names."""
    seconds: float
    """The time spent fitting, predicting and evaluating."""


def require_rows(rows: DataFrame, condition: str | None) -> None:
    """Refuse to measure on no rows: pyspark.ml's evaluators return 0, or fail with a Java stack.

    Args:
        rows: those to measure on.
        condition: ``rows.test``, by which they were chosen.

    Raises:
        DataError: there are none.
    """
    if rows.isEmpty():
        which = "the source has 0 rows" if condition is None else f"rows.test is '{condition}'"
        raise DataError(
            f"there are 0 rows to evaluate on: {which}. Change rows.test, or the source"
        )


def measure(
    name: str, predictions: DataFrame, evaluators: Mapping[str, Any], started: float
) -> Score:
    """Evaluate one model's predictions, which are computed once.

    Args:
        name: the model's, in the table.
        predictions: with the columns that the evaluators read.
        evaluators: pyspark.ml's, by the names of the metrics.
        started: ``time.perf_counter()`` when the work on the model began.
    """
    several = len(evaluators) > 1
    rows = predictions.persist() if several else predictions
    try:
        metrics = {each: float(one.evaluate(rows)) for each, one in evaluators.items()}
    finally:
        if several:
            rows.unpersist()
    return Score(name=name, metrics=metrics, seconds=time.perf_counter() - started)


def format_scores(scores: Sequence[Score], larger_is_better: Mapping[str, bool]) -> str:
    """Lay out the scores as a table, and say in words how the last one compares.

    Args:
        scores: with the same metrics; baselines first.
        larger_is_better: for each metric, whether a larger value is better.
    """
    names = list(larger_is_better)
    widths = [max(8, len(name) + 2) for name in names]
    first = max(22, *(len(score.name) + 2 for score in scores))
    heads = "".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    lines = [f"{'model':<{first}}{heads}{'seconds':>9}"]
    for score in scores:
        values = "".join(
            f"{score.metrics[name]:>{width}.4f}" for name, width in zip(names, widths, strict=True)
        )
        lines.append(f"{score.name:<{first}}{values}{score.seconds:>9.1f}")
    *others, last = scores
    return "\n".join([*lines, _verdict(last, others, larger_is_better)] if others else lines)


def _verdict(last: Score, others: Sequence[Score], larger_is_better: Mapping[str, bool]) -> str:
    won: list[str] = []
    lost: list[str] = []
    unknown: list[str] = []
    for name, larger in larger_is_better.items():
        sign = 1 if larger else -1
        values = [sign * each.metrics[name] for each in (*others, last)]
        if any(map(math.isnan, values)):  # max would depend on their order
            unknown.append(name)
            continue
        (won if values.pop() > max(values) else lost).append(name)
    told = ""
    if won:
        but = f", but not on {_listed(lost, 'or')}" if lost else ""
        told = f"The {last.name} beats every baseline on {_listed(won, 'and')}{but}."
    elif lost:
        told = f"The {last.name} does not beat the best baseline on {_listed(lost, 'or')}."
    if unknown:
        told += f" Nothing follows from {_listed(unknown, 'or')}, which is nan for a model."
    return told.strip()


def _listed(names: Sequence[str], word: str) -> str:
    *others, last = names
    if not others:
        return last
    return f"{', '.join(others)} {word} {last}"


def format_history(history: Sequence[EpochSummary]) -> str:
    """Lay out the figures of each epoch."""
    return "\n".join(
        f"epoch {summary.epoch}: training loss {summary.loss:.4f}, {summary.examples:,} rows in "
        f"{summary.seconds:.1f} s, {summary.rounds} averaging rounds"
        for summary in history
    )
