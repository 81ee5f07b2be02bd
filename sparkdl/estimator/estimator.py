"""``TorchEstimator``: train a PyTorch model on a Spark DataFrame."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar, overload

import torch
from pyspark.ml import Estimator
from pyspark.ml.param import Param, Params
from pyspark.ml.util import MLReadable, MLWritable
from pyspark.sql import DataFrame
from typing_extensions import Self

from sparkdl.averager.service.server import EdgeOptions
from sparkdl.checkpoint.module_files import SavedModule
from sparkdl.checkpoint.trust import TrustArgument
from sparkdl.driver import Outcome
from sparkdl.errors import CallbackError, ConfigError
from sparkdl.estimator.checks.preflight import FitPlan, plan_fit
from sparkdl.estimator.checks.row_checks import Checked, RowChecks, run_checked
from sparkdl.estimator.fitted import FittedModel
from sparkdl.estimator.in_stage import fit_in_stage, require_in_stage
from sparkdl.estimator.model import TorchModel
from sparkdl.estimator.outputs import ChosenOutputs
from sparkdl.estimator.params.declaration import constructor, settings_of
from sparkdl.estimator.params.estimators import TorchEstimatorParams
from sparkdl.estimator.persistence import (
    DirectoryWriter,
    StageReader,
    read_estimator,
    require_savable_grid,
)
from sparkdl.estimator.progress import ProgressBar
from sparkdl.estimator.schema import FitSettings
from sparkdl.process.lazy_compiler import compiler_deferred
from sparkdl.report import TrainingSummary
from sparkdl.spark.catalyst.jvm import is_of_connect
from sparkdl.spark.cluster.network import driver_ports
from sparkdl.spark.cluster.slots import queued
from sparkdl.spark.diagnostics.console import driver_hosts
from sparkdl.spark.launch.launcher import launch
from sparkdl.spark.launch.spare_tasks import SpareTasks
from sparkdl.strategies import ParameterAveraging

M = TypeVar("M", bound=FittedModel)
ParamMap = dict[Param[Any], Any]


class BaseEstimator(
    Estimator[M], FitSettings, MLWritable, MLReadable["BaseEstimator[Any]"], Generic[M]
):
    """Trains a PyTorch model; subclasses say what kind of model comes out.

    They define ``_model``: the arguments of ``FittedModel`` -> the model.
    """

    _model: Callable[..., M]

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(strategy=ParameterAveraging())

    def write(self) -> DirectoryWriter:
        """A writer: ``estimator.write().overwrite().save(path)``."""
        return DirectoryWriter(self)

    @classmethod
    def read(cls, *, trust: TrustArgument = False) -> StageReader:
        """A reader; for ``trust`` see ``load``."""
        return StageReader(cls, partial(read_estimator, cls, trust))

    @classmethod
    def load(cls, path: str, *, trust: TrustArgument = False) -> Self:
        """Load a saved estimator.

        Args:
            path: where it was saved.
            trust: names of the modules that its classes and functions come from, for example
                ``["mypackage.models"]``; torch's and sparkdl's strategies need no trust. True
                trusts everything, even pickled Params, which run their author's code.

        Raises:
            ConfigError: there is no estimator, it is damaged, or a Param is not trusted.
        """
        estimator: Self = cls.read(trust=trust).load(path)
        return estimator

    def copy(self, extra: Mapping[Any, Any] | None = None) -> Self:
        """A copy with other values of some Params.

        Args:
            extra: values by Param or by its name. For ``"strategy"`` a dict has what differs in the
                strategy that there is: ``{"numWorkers": 8, "strategy": {"period": 10}}``.

        Raises:
            ConfigError: there is no such Param, the strategy has no such argument, or this is for a
                search whose grid has a value that cannot be saved.
        """
        require_savable_grid(self)
        self._require_declared([each for each in extra or {} if isinstance(each, str)])
        given = {}
        for each, value in (extra or {}).items():
            name = each if isinstance(each, str) else each.name
            if name == "strategy" and isinstance(value, Mapping):
                value = self._changed_strategy(value)
            given[self.getParam(name) if isinstance(each, str) else each] = value
        copied: Self = super().copy(given)
        return copied

    def _set(self, **values: Any) -> Self:
        if isinstance(values.get("strategy"), Mapping):
            values["strategy"] = self._changed_strategy(values["strategy"])
        return super()._set(**values)

    def _changed_strategy(self, changes: Mapping[str, Any]) -> Any:
        strategy: Any = self.getOrDefault("strategy")
        try:
            return replace(strategy, **changes)
        except TypeError as error:
            raise ConfigError(
                f"the strategy {strategy!r:.200} does not take {dict(changes)}: {error}"
            ) from error

    @overload
    def fit(
        self,
        dataset: DataFrame,
        params: ParamMap | None = None,
        *,
        warm_start: FittedModel | None = None,
    ) -> M: ...

    @overload
    def fit(
        self,
        dataset: DataFrame,
        params: list[ParamMap] | tuple[ParamMap, ...],
        *,
        warm_start: FittedModel | None = None,
    ) -> list[M]: ...

    def fit(
        self,
        dataset: DataFrame,
        params: ParamMap | list[ParamMap] | tuple[ParamMap, ...] | None = None,
        *,
        warm_start: FittedModel | None = None,
    ) -> M | list[M]:
        """Train the model on a DataFrame.

        Args:
            dataset: the rows.
            params: values of Params for this call, by Param; or a list of such dicts, each of which
                gives a model.
            warm_start: a model whose parameters and buffers the training starts from, instead of
                those that ``model`` builds. The optimizer and its schedule start over, and so does
                the history. A checkpoint takes precedence over it, and is refused if it was made
                with another one.

        Returns:
            The trained model; a list of them for a list of ``params``.

        Raises:
            ModelError: the model cannot be trained, or ``warm_start`` does not fit it.
        """
        if warm_start is None:
            return super().fit(dataset, params)  # type: ignore[arg-type] # lists too
        if not isinstance(warm_start, FittedModel):
            raise ConfigError(
                f"warm_start must be a TorchModel, got one of type {type(warm_start).__name__}"
            )
        if isinstance(params, (list, tuple)):
            return [self.fit(dataset, each, warm_start=warm_start) for each in params]
        changed = self.copy(params) if params else self
        return changed._fit(dataset, warm_start)

    def _fit(self, dataset: DataFrame, warm_start: FittedModel | None = None) -> M:
        """Called by ``fit``; see the class."""
        own = Params.copy(self)  # which nobody else changes while it is trained
        return own._trained(own, dataset, warm_start)

    def _trained(
        self, settings: FitSettings, dataset: DataFrame, warm_start: FittedModel | None
    ) -> M:
        """Train by some settings; the model, and what is reported, have one's own."""
        # What is made in the caller's inference mode could not be trained.
        with torch.inference_mode(False), compiler_deferred():
            start = None if warm_start is None else warm_start.module
            plan, replica = plan_fit(settings, dataset, start)
            spark, workers = dataset.sparkSession, plan.workers
            train: Callable[[], tuple[Outcome, Checked]]
            if is_of_connect(spark):
                module = replica.release()
                require_in_stage(plan, module)
                train = partial(fit_in_stage, plan, module)
            else:
                train = partial(self._train, plan, RowChecks(replica))
            del replica  # only the checks hold it, until they need it no more
            most = plan.job.max_workers or workers.num_workers
            with queued(spark, most // workers.ranks_a_task, workers.profile):
                try:
                    return self._fitted(plan, *train())
                except CallbackError as error:
                    if error.model is not None:
                        error.model = self._fitted(plan, *error.model)
                    raise

    def _train(self, plan: FitPlan, checks: RowChecks) -> tuple[Outcome, Checked]:
        spark, settings = plan.workers.frame.sparkSession, plan.settings
        host, advertised_host = driver_hosts(spark)
        edge = EdgeOptions(host=host, advertised_host=advertised_host, ports=driver_ports(spark))
        with ProgressBar(settings.getEpochs(), visible=settings.getProgress()) as progress:
            most, shown = plan.job.max_workers, settings_of(self)
            spares = None if most is None else SpareTasks(plan.workers, most)
            start = launch(plan.workers, plan.job, spares)
            followers = {"on_event": progress, "settings": shown}
            return run_checked(plan, checks, start, edge, spares, **followers)

    def _fitted(self, plan: FitPlan, outcome: Outcome, checked: Checked) -> M:
        recording = outcome.recording
        recording.setup = replace(recording.setup, settings=settings_of(self))
        made_of = SavedModule(
            module=outcome.module,
            builder=plan.settings.getModel(),
            features=checked.features,
            head=plan.head.value,
            widths=checked.widths,
            history=outcome.history,
            labels=checked.labels,
            loss=plan.job.loss,
            seed=plan.job.seed,
        )
        return self._copyValues(self._model(made_of, TrainingSummary(recording)))


@constructor()
class TorchEstimator(TorchEstimatorParams, BaseEstimator[TorchModel], ChosenOutputs):
    """Trains a PyTorch model on a Spark DataFrame, with replicas that stay in the executors.

    Every argument is a pyspark.ml Param with a getter and a setter. They come in groups:

    Raises:
        ConfigError: an argument is unknown or out of range.
    """

    _model = TorchModel
