"""The job that trains: rows in, a saved model out."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Any

from pyspark.ml import Pipeline
from pyspark.sql import DataFrame

from sparkdl.callbacks import TrainingReport
from sparkdl.errors import ConfigError
from sparkdl.estimator.estimator import TorchEstimator
from sparkdl.estimator.fitted import FittedModel
from sparkdl.jobs import logs
from sparkdl.jobs.command import JobContext, JobOutput, run_command, torch_model
from sparkdl.jobs.evaluate import Score, format_history, format_scores, measure, require_rows

NETWORK = "network"
"""The network's name among the baselines."""


def main(arguments: list[str] | None = None) -> int:
    """Run train.py; returns its exit code."""
    return run_command("train", train, arguments)


def train(context: JobContext) -> JobOutput:
    """Fit baselines and network, evaluate them, and save the network.

    Args:
        context: what was asked for, and where to write.

    Raises:
        DataError: there are no rows to measure on.
    """
    settings = context.settings
    with settings.rows.read(settings.source, context.spark) as rows:
        learn = settings.rows.where(rows, settings.rows.train)
        test = settings.rows.where(rows, settings.rows.test)
        evaluators = settings.build("evaluators", settings.evaluators or {})
        if evaluators:  # reported now, not after a training
            require_rows(test, settings.rows.test)
        stages = settings.build("stages", settings.stages or [])
        baselines = settings.build("baselines", settings.baselines or {})
        estimator = _estimator(context)
        scores = []
        for name, last in [*baselines.items(), (NETWORK, estimator)]:
            whole = Pipeline(stages=[*stages, last]) if stages else last
            model, score = _score(name, whole, learn, test, evaluators)
            scores.append(score)
        model.write().save(context.target)
    fitted = torch_model(model)
    history = fitted.history
    larger = {name: bool(one.isLargerBetter()) for name, one in evaluators.items()}
    result = {
        "history": [asdict(summary) for summary in history],
        "metrics": {score.name: score.metrics for score in scores} if evaluators else {},
        "profile": _profile(fitted),
    }
    table = f"\n{format_scores(scores, larger)}" if evaluators else ""
    saved = f"Model saved in {settings.output}"
    return JobOutput(result, f"\n{format_history(history)}\n{table}\n{_reports(estimator)}{saved}")


def _profile(fitted: FittedModel) -> dict[str, Any] | None:
    """What the fit has cost, for plan.py; None if it only found all epochs done by an earlier one.

    Args:
        fitted: the model that it returned.
    """
    try:
        profile: dict[str, Any] = json.loads(fitted.summary.profile.to_json())
    except ConfigError:
        return None
    return profile


def _reports(estimator: TorchEstimator) -> str:
    """Where the training's reports are, one per line."""
    return "".join(
        f"Training report in {each.path}\n"
        for each in estimator.getCallbacks() or ()
        if isinstance(each, TrainingReport)
    )


def _estimator(context: JobContext) -> TorchEstimator:
    estimator = context.settings.build_estimator()
    if estimator.getCheckpointPath() is None and context.checkpoints is not None:
        estimator.setCheckpointPath(context.checkpoints)
    if context.settings.log_format == "json":
        estimator.setProgress(False)
    lines = logs.EpochLines(epochs=not estimator.getProgress())
    estimator.setCallbacks([*(estimator.getCallbacks() or ()), lines])
    return estimator


def _score(
    name: str, estimator: Any, learn: DataFrame, test: DataFrame, evaluators: dict[str, Any]
) -> tuple[Any, Score]:
    started = time.perf_counter()
    model = estimator.fit(learn)
    if evaluators:
        score = measure(name, model.transform(test), evaluators, started)
    else:
        score = Score(name=name, metrics={}, seconds=time.perf_counter() - started)
    logs.say(name, started, **score.metrics)
    return model, score
