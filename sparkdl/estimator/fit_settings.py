"""What a fit makes of an estimator's Params; a fit's own copy of the estimator keeps them."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from sparkdl.callbacks import Callback
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.errors import ConfigError
from sparkdl.estimator.outputs import SharedParams
from sparkdl.estimator.params.columns import ColumnParams
from sparkdl.estimator.params.converters import optimizer_builder
from sparkdl.estimator.params.settings import described
from sparkdl.estimator.params.training import (
    MonitoringParams,
    NetworkParams,
    RecoveryParams,
    RowParams,
    TrainingParams,
    ValidationParams,
    WorkerParams,
)
from sparkdl.protocols import LossFunction, OptimizerBuilder
from sparkdl.replica.losses import ModelLoss
from sparkdl.spark.storage.files import open_hadoop


class FitSettings(
    TrainingParams,
    WorkerParams,
    SharedParams,
    ColumnParams,
    RowParams,
    ValidationParams,
    MonitoringParams,
    RecoveryParams,
    NetworkParams,
):
    """The Params of every estimator, and what a fit makes of several of them."""

    def driver_callbacks(self) -> list[Callback]:
        """The callbacks that run in the driver."""
        return [each for each in self.getCallbacks() or () if isinstance(each, Callback)]

    def weight_column(self) -> str | None:
        """The column of the rows' weights; None for none."""
        return self.getWeightCol() if self.isDefined("weightCol") else None

    def loss_function(self) -> LossFunction:
        """The loss to train with.

        Raises:
            ConfigError: it is the model's own, and another Param does not go with that.
        """
        loss: Any = self.getLoss()
        if not isinstance(loss, str):
            return loss  # type: ignore[no-any-return]
        if self.weight_column() is not None:
            raise ConfigError(
                "weightCol cannot be combined with loss='model': a model that computes its own "
                "loss gives no value per row to weight. Drop one of the two"
            )
        keywords = tuple(self.getLabelCols() or ["labels"])
        by_keyword = self.getFeaturesAs() == "kwargs"
        both = set(keywords) & set(self.feature_columns()) if by_keyword else set()
        if both:
            raise ConfigError(
                f"the model would be given '{min(both)}' twice: as a feature (featuresAs='kwargs') "
                "and as a label (loss='model'). Remove it from featuresCols"
            )
        return ModelLoss(keywords)

    def optimizer_builder(self) -> OptimizerBuilder:
        """The optimizer to train with, at the learning rate that is set.

        Raises:
            ConfigError: it takes no learning rate.
        """
        build: Any = optimizer_builder(self.getOptimizer())
        rate = self.getLearningRate()
        if rate is None:
            return build  # type: ignore[no-any-return]
        taken = inspect.signature(build).parameters
        if "lr" not in taken and all(each.kind is not each.VAR_KEYWORD for each in taken.values()):
            raise ConfigError(
                f"learningRate={rate:g} is passed to the optimizer as lr, but {described(build)} "
                f"takes only ({', '.join(taken)}). Give it an argument lr, or leave out "
                "learningRate"
            )
        return partial(build, lr=rate)

    def held_out_by(self) -> str | float | None:
        """The column that marks held-out rows, or the fraction to hold out; None for neither.

        Raises:
            ConfigError: both are given.
        """
        fraction, column = self.getValidationFraction(), None
        if self.isDefined("validationIndicatorCol"):
            column = self.getValidationIndicatorCol()
        if fraction is not None and column is not None:
            raise ConfigError(
                f"validationFraction={fraction:g} and validationIndicatorCol='{column}' both say "
                "which rows are held out: drop one of the two"
            )
        return column if fraction is None else fraction

    def checkpoint_policy(self, application: str | None = None) -> CheckpointPolicy | None:
        """What is asked of checkpoints; None without ``checkpointPath``.

        Args:
            application: the one that trains, to name to another that is refused its directory.
        """
        path = self.getCheckpointPath()
        if path is None:
            return None
        return CheckpointPolicy(
            path=path,
            every_epochs=self.getCheckpointEvery(),
            every_rounds=self.getCheckpointRounds(),
            keep_last=self.getKeepLast(),
            resume="auto" if self.getResume() == "auto" else "never",
            open_elsewhere=open_hadoop,
            application=application,
        )
