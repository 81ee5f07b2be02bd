"""A job's messages: as text for a person, or one JSON object per line for a machine."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from typing import Any

from sparkdl.arguments import counted
from sparkdl.callbacks import Callback, Training
from sparkdl.events import EpochSummary
from sparkdl.feed.shards import DataStatistics
from sparkdl.redaction import without_credentials

_steps = logging.getLogger("sparkdl.jobs.steps")


def say(what: str, started: float | None = None, **context: Any) -> None:
    """Log what has been done; custom sources may use it too.

    Args:
        what: what was done, in words.
        started: ``time.perf_counter()`` when it began.
        context: figures, which JSON lines have by name.
    """
    if started is not None:
        context = {"seconds": round(time.perf_counter() - started, 3), **context}
    _steps.info(what, extra={"context": context})


def configure(log_format: str, log_level: str | None, context: dict[str, Any]) -> None:
    """Set up this process's logging.

    JSON lines have the fields of Spark's own structured log (``pyspark.logger.SPARK_LOG_SCHEMA``).

    Args:
        log_format: ``text`` or ``json``.
        log_level: the lowest level logged; by default WARNING as text, INFO as JSON.
        context: fields that each JSON line has in addition.
    """
    root = logging.getLogger()
    _steps.setLevel(logging.INFO)
    # It repeats each SQL error with the JVM's whole stack; the job reports it itself.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL + 1)
    if log_format == "json":
        lines = logging.StreamHandler(sys.stderr)
        lines.setFormatter(_Lines(context))
        lines.addFilter(_hide_credentials)
        root.handlers = [lines]
        _steps.handlers, _steps.propagate = [], True
        root.setLevel(log_level or "INFO")
        logging.getLogger("py4j").setLevel("WARNING")
        logging.captureWarnings(True)
        return
    # Drop the handlers of an earlier job in this process.
    root.handlers = [each for each in root.handlers if not isinstance(each.formatter, _Lines)]
    logging.basicConfig(level=log_level or "WARNING", format="%(levelname)s %(name)s: %(message)s")
    words = logging.StreamHandler(sys.stdout)
    words.setFormatter(_Words())
    for each in (words, *root.handlers):
        each.addFilter(_hide_credentials)
    _steps.handlers = [words]
    _steps.propagate = False


def _hide_credentials(record: logging.LogRecord) -> bool:
    record.msg, record.args = without_credentials(record.getMessage()), ()
    return True


class _Lines(logging.Formatter):
    def __init__(self, context: dict[str, Any]) -> None:
        super().__init__()
        self._context = context

    def format(self, record: logging.LogRecord) -> str:
        given = record.__dict__.get("context", {})
        line: dict[str, Any] = {
            "ts": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "msg": record.getMessage(),
            # As strings, like in the schema of Spark's structured log.
            "context": {name: str(value) for name, value in {**self._context, **given}.items()},
        }
        if record.exc_info and record.exc_info[0] is not None:
            kind, error, trace = record.exc_info
            line["exception"] = {
                "class": kind.__name__,
                "msg": without_credentials(str(error)),
                "stacktrace": [
                    {
                        "class": None,
                        "method": frame.name,
                        "file": frame.filename,
                        "line": str(frame.lineno),
                    }
                    for frame in traceback.extract_tb(trace)
                ],
            }
        return json.dumps(line, ensure_ascii=False)


class _Words(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        seconds = record.__dict__.get("context", {}).get("seconds")
        message = record.getMessage()
        return message if seconds is None else f"[{seconds:5.1f} s] {message}"


class EpochLines(Callback):
    """Logs that a training resumes, and each epoch's figures where no progress bar shows them.

    Args:
        epochs: whether to log the epochs.
    """

    observer = True

    def __init__(self, epochs: bool = True) -> None:
        self._epochs = epochs

    def on_start(self, training: Training, statistics: DataStatistics) -> None:
        """Called by the fit."""
        if training.resumed:
            done = f"{len(training.history)} of {counted(training.epochs, 'epoch')}"
            _steps.info("resumed from a checkpoint: %s done, step %d", done, training.step)

    def on_epoch(self, training: Training, summary: EpochSummary) -> None:
        """Called by the fit."""
        if not self._epochs:
            return
        context = {
            "epoch": summary.epoch,
            "epochs": training.epochs,
            "loss": summary.loss,
            "examples": summary.examples,
            "seconds": round(summary.seconds, 3),
        }
        words = f"epoch {summary.epoch} of {training.epochs}: loss {summary.loss:.4f}"
        if summary.validation_loss is not None:
            context["validation_loss"] = summary.validation_loss
            words += f", {summary.validation_loss:.4f} on held-out rows"
        _steps.info(words, extra={"context": context})
