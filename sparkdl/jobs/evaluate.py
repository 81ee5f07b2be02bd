"""The job that evaluates: rows and a saved model in, metrics out."""

from __future__ import annotations

import time

from sparkdl.jobs import logs
from sparkdl.jobs.command import Found, Work, run_command
from sparkdl.jobs.metrics import measure, require_rows
from sparkdl.jobs.models import load_model


def main(arguments: list[str] | None = None) -> int:
    """Run evaluate.py; returns its exit code."""
    return run_command("evaluate", evaluate, arguments)


def evaluate(work: Work) -> Found:
    """Measure a saved model.

    Args:
        work: what was asked for.

    Raises:
        DataError: there are no rows to measure on.
    """
    settings, sections = work.settings, work.settings.sections
    model = load_model(sections.model, sections.trust, work.spark)
    rows = settings.rows.read(settings.source, work.spark)
    started = time.perf_counter()
    try:
        test = settings.rows.where(rows, settings.rows.test)
        evaluators = settings.named("evaluators")
        require_rows(test, settings.rows.test)
        score = measure("model", model.transform(test), evaluators, started)
    finally:
        rows.unpersist()
    logs.say(f"evaluated {sections.model}", started, **score.metrics)
    width = max(map(len, score.metrics))
    words = "\n".join(f"{name:<{width}}  {value:.4f}" for name, value in score.metrics.items())
    found = {"model": sections.model, "metrics": score.metrics}
    return found, f"\n{words}\nMetrics saved in {settings.output}"
