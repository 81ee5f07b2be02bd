"""A training as an MLflow run."""

from __future__ import annotations

import inspect
import logging
import math
import re
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparkdl.arguments import convert_numbers
from sparkdl.callbacks.base import Callback, Training, imported
from sparkdl.errors import ConfigError
from sparkdl.events import EpochSummary
from sparkdl.feed.schema import FeedSchema
from sparkdl.feed.shards import DataStatistics
from sparkdl.outputs import parts_of
from sparkdl.protocols import UNKNOWN
from sparkdl.replica.replica import forward
from sparkdl.report.history import metrics_of
from sparkdl.user_code.tracebacks import text_of
from sparkdl.version import __version__

logger = logging.getLogger(__name__)

TRAINING = "sparkdl.training"
"""The tag by which a fit that resumes from a checkpoint finds the run to continue."""
LOGGED = "sparkdl.model"
"""The tag that says which of the run's models is its final one."""
ROWS = 2
"""Rows of the example that the graph is made with; torch would take one for a constant."""
LENGTH = 3
"""The length, in the example, of what has none of its own."""
_TAKEN_AS_IT_IS = re.compile(r"(?=.{1,250}\Z)\w[\w\-. :]*(/\w[\w\-. :]*)*")


class _Run(NamedTuple):
    """One run, in a store."""

    client: Any
    found: Any
    """The run, as it was when the fit began."""
    owned: bool
    logged: dict[int, float]
    """The losses of epochs that an interrupted fit has logged."""

    @property
    def id(self) -> str:
        return str(self.found.info.run_id)


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
        """Start or continue the run, and log the settings that it does not have."""
        mlflow = imported("mlflow", package="mlflow", extra="mlflow", who="MLflow()")
        active = None if self.tracking_uri else mlflow.active_run()
        client = mlflow.MlflowClient(self.tracking_uri)
        if active is None:
            found = self._continued_or_created(mlflow, client, training)
        else:
            found = client.get_run(active.info.run_id)
        known = client.get_metric_history(found.info.run_id, "loss") if training.resumed else []
        known = sorted(known, key=lambda metric: metric.timestamp)
        run = _Run(client, found, active is None, {each.step: each.value for each in known})
        training.kept[self] = run
        setup = training.recording.setup
        settings = {
            "model": setup.model,
            "strategy": setup.strategy,
            "parameters": setup.parameters,
            "rows": statistics.rows,
            "workers": training.recording.world_size,
            **setup.settings,
        }
        new = {name: str(settings[name]) for name in settings if name not in found.data.params}
        client.log_batch(run.id, params=[mlflow.entities.Param(*each) for each in new.items()])

    def on_epoch(self, training: Training, summary: EpochSummary) -> None:
        """Log the epoch's numbers, unless a fit that was interrupted after it has logged the same.

        Where training it again comes to others, MLflow takes the later ones for the epoch's.
        """
        from mlflow.entities import Metric

        run: _Run = training.kept[self]
        if run.logged.get(summary.epoch) == summary.loss:
            return
        values = {**metrics_of(summary), "examples_per_second": summary.examples_per_second}
        now = int(time.time() * 1000)
        metrics = [
            Metric(name_of(name), value, now, summary.epoch)
            for name, value in values.items()
            if math.isfinite(value)
        ]
        run.client.log_batch(run.id, metrics=metrics)

    def on_end(self, training: Training, error: BaseException | None) -> None:
        """Log the model, and end the run unless someone else started it."""
        run: _Run | None = training.kept.pop(self, None)
        if run is None:
            return  # no rows had been read yet
        status = "FAILED" if error is None or isinstance(error, Exception) else "KILLED"
        try:
            # An earlier fit has logged the model if there was nothing left to train.
            trained = LOGGED not in run.found.data.tags or training.recording.rows.any()
            if error is None and self.log_model and trained:
                self._log_model(run, training)
            status = "FINISHED" if error is None else status
        finally:
            if run.owned:
                run.client.set_terminated(run.id, status)

    def _log_model(self, run: _Run, training: Training) -> None:
        import mlflow.pytorch
        from mlflow.models import Model

        assert training.model is not None
        assert training.schema is not None
        model = OfColumns(training.model, training.schema, as_kwargs=training.features_as_kwargs)
        with self._store(mlflow):
            info = Model.log(
                None,
                flavor=mlflow.pytorch,
                name="model",
                run_id=run.id,
                registered_model_name=self.registered_model_name,
                **saving_arguments(model.eval(), training.schema),
            )
        run.client.set_tag(run.id, LOGGED, info.model_uri)
        logger.info("the model was logged as %s", info.model_uri)

    def _continued_or_created(self, mlflow: Any, client: Any, training: Training) -> Any:
        """The run of the fit that this one continues, or a new one."""
        if self.experiment is None:
            # No public function tells what set_experiment or the environment has chosen.
            with self._store(mlflow):
                experiment = str(mlflow.tracking.fluent._get_experiment_id())
        else:
            named = client.get_experiment_by_name(self.experiment)
            experiment = named.experiment_id if named else client.create_experiment(self.experiment)
        tags = {} if training.identity is None else {TRAINING: training.identity}
        if tags and training.resumed:
            found = client.search_runs(
                [experiment],
                filter_string=f"tags.`{TRAINING}` = '{training.identity}'",
                order_by=["attributes.start_time DESC"],
                max_results=1,
            )
            if found:
                client.update_run(found[0].info.run_id, status="RUNNING")
                return found[0]
            logger.warning(
                "the fit resumes from a checkpoint, but MLflow has no run of the previous fit; a "
                "new run starts at epoch %d",
                len(training.history) + 1,
            )
        return client.create_run(experiment, run_name=self.run_name, tags=tags)

    @contextmanager
    def _store(self, mlflow: Any) -> Iterator[None]:
        """Make MLflow's implicit calls go to the run's store."""
        before = mlflow.get_tracking_uri() if mlflow.tracking.is_tracking_uri_set() else ""
        if self.tracking_uri is not None:
            mlflow.set_tracking_uri(self.tracking_uri)
        try:
            yield
        finally:
            if self.tracking_uri is not None:
                mlflow.set_tracking_uri(before)


class OfColumns(nn.Module):
    """A module as a function of one tensor per column that returns a tensor, or tensors by name.

    Args:
        module: the user's.
        schema: its columns.
        as_kwargs: whether it takes them by name as arguments, if it takes them by name.
    """

    def __init__(self, module: nn.Module, schema: FeedSchema, *, as_kwargs: bool = False) -> None:
        super().__init__()
        self.module = module

        def call(*columns: Tensor) -> Any:
            pairs = zip(schema.features, columns, strict=True)
            given = {spec.name: column.to(spec.dtype) for spec, column in pairs}
            features = given if schema.by_name else tuple(given.values())
            outputs = forward(self.module, features, as_kwargs=as_kwargs)
            if isinstance(outputs, Tensor):
                return outputs
            return {str(k): each for k, each in parts_of(outputs).items() if torch.is_tensor(each)}

        # torch.export takes ``*columns`` for one argument, and would fix its length.
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(f"column_{k}", kind) for k in range(len(schema.features))]
        )
        self.forward = call


def saving_arguments(model: OfColumns, schema: FeedSchema) -> dict[str, Any]:
    """What ``mlflow.pytorch.save_model`` is given for a module as a function of columns.

    It is saved as a graph (``torch.export``), which loads without any of the user's code and runs
    none; a module that cannot be exported is pickled.
    """
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    def spec(name: str | None, shown: Tensor, shape: Sequence[int]) -> Any:
        return TensorSpec(shown.detach().numpy().dtype, (-1, *shape), name=name)

    several = len(schema.features) > 1
    taken: dict[str, tuple[Tensor, Sequence[int]]] = {}
    for each in schema.features:
        shape = (LENGTH if size == UNKNOWN else size for size in each.row_shape)
        taken[each.name] = for_numpy(torch.zeros((ROWS, *shape), dtype=each.dtype)), each.row_shape
    example = tuple(shown for shown, _ in taken.values())
    with torch.no_grad():
        outputs = model(*example)
    given = {None: outputs} if isinstance(outputs, Tensor) else outputs
    requirements = [f"torch=={torch.__version__.partition('+')[0]}"]
    arguments = {
        "signature": ModelSignature(
            Schema([spec(name if several else None, *each) for name, each in taken.items()]),
            Schema([spec(name, for_numpy(each), each.shape[1:]) for name, each in given.items()]),
        ),
        "pytorch_model": model,
        "pip_requirements": requirements,
    }
    try:
        torch.export.export(model, example)
    except Exception as error:  # the user's module may fail for many reasons
        logger.warning(
            "the model cannot be exported as a graph (%s: %s), so it is logged as a pickle, "
            "which MLflow loads only where MLFLOW_ALLOW_PICKLE_DESERIALIZATION is 'true'",
            type(error).__name__,
            text_of(error).partition("\n")[0],
        )
        requirements.append(f"sparkdl-torch=={__version__}")
        return arguments | {"serialization_format": "pickle"}
    return arguments | {"input_example": example if several else example[0].numpy()}


def for_numpy(values: Tensor) -> Tensor:
    """The values as NumPy and MLflow have them too: without bfloat16."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def name_of(metric: str) -> str:
    """A name that MLflow takes; a checksum tells names apart that differ in what it refuses."""
    if _TAKEN_AS_IT_IS.fullmatch(metric):
        return metric
    return re.sub(r"\W", "_", metric)[:240] + f"-{zlib.crc32(metric.encode()):08x}"
