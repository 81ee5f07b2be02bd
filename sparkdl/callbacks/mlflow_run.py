"""A training as an MLflow run."""

from __future__ import annotations

import logging
import math
import posixpath
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sparkdl.arguments import convert_numbers
from sparkdl.callbacks.base import Callback, Training, imported
from sparkdl.callbacks.mlflow_model import OfColumns, saving_arguments
from sparkdl.errors import ConfigError
from sparkdl.events import EpochSummary
from sparkdl.feed.statistics.shards import DataStatistics
from sparkdl.report.history import metrics_of

logger = logging.getLogger(__name__)

TRAINING = "sparkdl.training"
"""The tag by which a fit that resumes from a checkpoint finds the run to continue."""
LOGGED = "sparkdl.model"
"""The tag that says which of the run's models is its final one."""
PARAMS_A_CALL = 100
"""MLflow's own limit."""
MAX_NAME = 250
"""Characters of a name, also MLflow's own limit."""
_NOT_IN_NAMES = re.compile(r"[^\w\-. /:]")


@dataclass(frozen=True)
class MLflow(Callback):
    """Log a training as one MLflow run: its settings, its epochs and its model.

    A fit that resumes from a checkpoint continues the previous fit's run. Inside
    ``with mlflow.start_run():``, that run is used.

    Args:
        experiment: the experiment's name; None for MLflow's default, or the environment's.
        run_name: the run's name; None for one that MLflow makes up.
        tracking_uri: where MLflow keeps it; None for what MLflow is otherwise configured to use
            (``MLFLOW_TRACKING_URI``, ``mlflow.set_tracking_uri``).
        log_model: whether the model is logged at the end, with its signature, as ``model``;
            ``mlflow.pytorch.load_model`` loads it, and ``mlflow.pyfunc.load_model`` one of a single
            column that returns one tensor.
        registered_model_name: the name to register it under, as a new version; None not to.

    Raises:
        ConfigError: an argument is not one of these.
        SetupError: MLflow is not installed in the driver's Python.
    """

    observer = True

    experiment: str | None = None
    run_name: str | None = None
    tracking_uri: str | None = None
    log_model: bool = True
    registered_model_name: str | None = None

    def __post_init__(self) -> None:
        convert_numbers(self)
        for name in ("experiment", "run_name", "tracking_uri", "registered_model_name"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"{name} must be None or a string, got {value!r}")
        if not isinstance(self.log_model, bool):
            raise ConfigError(f"log_model must be a bool, got {self.log_model!r}")
        if self.registered_model_name is not None and not self.log_model:
            raise ConfigError("registered_model_name needs a logged model, but log_model is False")

    def on_start(self, training: Training, statistics: DataStatistics) -> None:
        """Start or continue the run, and log what is trained."""
        mlflow = imported("mlflow", package="mlflow", extra="mlflow", who="MLflow()")
        run = _Run(mlflow, self, training)
        training.kept[self] = run
        run.log_settings(training, statistics)

    def on_epoch(self, training: Training, summary: EpochSummary) -> None:
        """Log the epoch's numbers, unless a fit that was interrupted after it did so."""
        training.kept[self].log_epoch(summary)

    def on_end(self, training: Training, error: BaseException | None) -> None:
        """Log the model, and end the run."""
        run: _Run | None = training.kept.pop(self, None)
        if run is None:
            return  # no rows had been read yet
        try:
            if error is None and self.log_model:
                run.log_model(training)
        except BaseException:
            run.end("FAILED")
            raise
        if error is None:
            run.end("FINISHED")
        else:
            run.end("FAILED" if isinstance(error, Exception) else "KILLED")


class _Run:
    """One run, in a store.

    Args:
        mlflow: the package.
        wanted: the run's settings.
        training: the fit.
    """

    def __init__(self, mlflow: Any, wanted: MLflow, training: Training) -> None:
        self._mlflow = mlflow
        self._wanted = wanted
        self._uri = wanted.tracking_uri or mlflow.get_tracking_uri()
        active = mlflow.active_run()
        self._owned = active is None
        if active is not None and wanted.tracking_uri is None:
            self._client = mlflow.MlflowClient()
            run = self._client.get_run(active.info.run_id)
        else:
            self._owned = True
            self._client = mlflow.MlflowClient(tracking_uri=self._uri)
            run = self._found(training) or self._created(training)
        self._id: str = run.info.run_id
        self._params = dict(run.data.params)
        self._tags = dict(run.data.tags)
        known = self._client.get_metric_history(self._id, "loss") if training.resumed else []
        self._logged = {metric.step for metric in known}

    def log_settings(self, training: Training, statistics: DataStatistics) -> None:
        """Log what is trained, and how, except what the run already has."""
        setup = training.recording.setup
        told = {
            "model": setup.model,
            "strategy": setup.strategy,
            "parameters": setup.parameters,
            "rows": statistics.rows,
            "workers": training.recording.world_size,
            **setup.settings,
        }
        param = self._mlflow.entities.Param
        names = names_of(told)
        named = {names[name]: str(value) for name, value in told.items()}
        new = [param(name, value) for name, value in named.items() if name not in self._params]
        for start in range(0, len(new), PARAMS_A_CALL):
            self._client.log_batch(self._id, params=new[start : start + PARAMS_A_CALL])

    def log_epoch(self, summary: EpochSummary) -> None:
        """Log the numbers of an epoch."""
        if summary.epoch in self._logged:
            return
        values = {**metrics_of(summary), "examples_per_second": summary.examples_per_second}
        now = int(time.time() * 1000)
        metric, names = self._mlflow.entities.Metric, names_of(values)
        self._client.log_batch(
            self._id,
            metrics=[
                metric(names[name], value, now, summary.epoch)
                for name, value in values.items()
                if math.isfinite(value)
            ],
        )

    def log_model(self, training: Training) -> None:
        """Log the model, unless an earlier fit did and this one has trained nothing."""
        assert training.model is not None
        assert training.schema is not None
        if LOGGED in self._tags and not training.recording.rows.any():
            return
        import mlflow.pytorch
        from mlflow.models import Model

        features = training.schema.features
        model = OfColumns(
            training.model,
            features,
            by_name=training.schema.by_name,
            as_kwargs=training.features_as_kwargs,
        ).eval()
        with self._store():
            info = Model.log(
                None,
                flavor=mlflow.pytorch,
                name="model",
                run_id=self._id,
                registered_model_name=self._wanted.registered_model_name,
                **saving_arguments(model, features),
            )
        self._client.set_tag(self._id, LOGGED, info.model_uri)
        logger.info("the model was logged as %s", info.model_uri)

    def end(self, status: str) -> None:
        """End the run, unless someone else started it."""
        if self._owned:
            self._client.set_terminated(self._id, status)

    def _found(self, training: Training) -> Any:
        """The run of the fit that this one continues, if there is one."""
        experiment = self._experiment()
        if training.identity is None or not training.resumed or experiment is None:
            return None
        found: Sequence[Any] = self._client.search_runs(
            [experiment],
            filter_string=f"tags.`{TRAINING}` = '{training.identity}'",
            order_by=["attributes.start_time DESC"],
            max_results=1,
        )
        if not found:
            logger.warning(
                "the fit resumes from a checkpoint, but MLflow has no run of the previous fit; a "
                "new run starts at epoch %d",
                len(training.history) + 1,
            )
            return None
        self._client.update_run(found[0].info.run_id, status="RUNNING")
        return found[0]

    def _created(self, training: Training) -> Any:
        experiment = self._experiment()
        if experiment is None:
            experiment = self._client.create_experiment(self._wanted.experiment)
        tags = {} if training.identity is None else {TRAINING: training.identity}
        return self._client.create_run(experiment, run_name=self._wanted.run_name, tags=tags)

    def _experiment(self) -> str | None:
        """The experiment's id; None if it has yet to be made."""
        if self._wanted.experiment is None:
            # No public function tells what set_experiment or the environment has chosen.
            from mlflow.tracking.fluent import _get_experiment_id

            with self._store():
                return str(_get_experiment_id())
        found = self._client.get_experiment_by_name(self._wanted.experiment)
        return None if found is None else str(found.experiment_id)

    @contextmanager
    def _store(self) -> Iterator[None]:
        """Make MLflow's implicit calls go to the run's store."""
        if self._mlflow.get_tracking_uri() == self._uri:
            yield
            return
        is_set = self._mlflow.tracking.is_tracking_uri_set()
        before = self._mlflow.get_tracking_uri() if is_set else ""
        self._mlflow.set_tracking_uri(self._uri)
        try:
            yield
        finally:
            self._mlflow.set_tracking_uri(before)


def names_of(given: Iterable[str]) -> dict[str, str]:
    """Distinct names that MLflow accepts; those that clash are numbered in order.

    Args:
        given: distinct names.
    """
    names = {name: _name(name) for name in given}
    taken = {name for name, cleaned in names.items() if name == cleaned}
    for name, cleaned in names.items():
        if name == cleaned:
            continue
        number, one = 1, cleaned
        while one in taken:
            number += 1
            one = f"{cleaned[: MAX_NAME - len(str(number)) - 1]}_{number}"
        taken.add(one)
        names[name] = one
    return names


def _name(name: str) -> str:
    cleaned = _NOT_IN_NAMES.sub("_", name)
    if posixpath.normpath(cleaned) != cleaned or cleaned.startswith((".", "/")):
        cleaned = "_" + cleaned.replace("/", "_")  # MLflow takes names for paths in a store
    return cleaned[:MAX_NAME]
