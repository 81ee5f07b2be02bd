"""A fit's Params as one frozen value, from which everything that is told to others is made."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from sparkdl.callbacks import Callback, WorkerCallback
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.errors import ConfigError
from sparkdl.estimator.outputs import SharedParams
from sparkdl.estimator.params.converters import optimizer_builder
from sparkdl.estimator.params.estimators import ParamValues
from sparkdl.estimator.params.settings import described
from sparkdl.feed.feed import FeedOptions
from sparkdl.protocols import LossFunction, OptimizerBuilder
from sparkdl.replica.losses import ModelLoss
from sparkdl.spark.rows.column_overrides import ColumnOverrides
from sparkdl.spark.storage.files import open_hadoop


class FitSettings(ParamValues):
    """The Params of an estimator when ``fit`` is called, and what is made of them."""

    feature_columns: list[str]
    label_columns: list[str]

    def __init__(self, params: SharedParams) -> None:
        super().__init__(params)
        vars(self)["feature_columns"] = params.feature_columns()
        vars(self)["label_columns"] = params.label_columns()

    @property
    def driver_callbacks(self) -> list[Callback]:
        """The callbacks that run in the driver."""
        return [each for each in self.callbacks or () if isinstance(each, Callback)]

    @property
    def worker_callbacks(self) -> tuple[WorkerCallback, ...]:
        """The callbacks that run on the workers."""
        return tuple(each for each in self.callbacks or () if isinstance(each, WorkerCallback))

    @property
    def column_overrides(self) -> ColumnOverrides:
        """What was declared about columns."""
        images = (self.image_cols, self.image_size, self.image_fit, self.image_scale)
        shapes, dtypes = self.column_shapes, self.column_dtypes
        return ColumnOverrides(shapes, dtypes, *images, self.pad_cols, self.pad_inputs)

    @property
    def feed(self) -> FeedOptions:
        """How the rows are fed, as far as the Params say it."""
        return FeedOptions(
            drop_last=self.drop_last,
            reshuffle_every=self.reshuffle_every,
            transform=self.batch_transform,
            group_by_length=self.group_by_length,
            skip_invalid=self.handle_invalid == "skip",
        )

    def loss_function(self) -> LossFunction:
        """The loss to train with.

        Raises:
            ConfigError: it is the model's own, and another Param does not go with that.
        """
        if not isinstance(self.loss, str):
            return self.loss
        if self.weight_col is not None:
            raise ConfigError(
                "weightCol cannot be combined with loss='model': a model that computes its own "
                "loss gives no value per row to weight. Drop one of the two"
            )
        keywords = tuple(self.label_cols or ["labels"])
        both = set(keywords) & set(self.feature_columns) if self.features_as == "kwargs" else set()
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
        build: Any = optimizer_builder(self.optimizer)
        if self.learning_rate is None:
            return build  # type: ignore[no-any-return]
        taken = inspect.signature(build).parameters
        if "lr" not in taken and all(each.kind is not each.VAR_KEYWORD for each in taken.values()):
            raise ConfigError(
                f"learningRate={self.learning_rate:g} is passed to the optimizer as lr, but "
                f"{described(build)} takes only ({', '.join(taken)}). Give it an argument lr, or "
                "leave out learningRate"
            )
        return partial(build, lr=self.learning_rate)

    def held_out_by(self) -> str | float | None:
        """The column that marks held-out rows, or the fraction to hold out; None for neither.

        Raises:
            ConfigError: both are given.
        """
        fraction, column = self.validation_fraction, self.validation_indicator_col
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
        if self.checkpoint_path is None:
            return None
        return CheckpointPolicy(
            path=self.checkpoint_path,
            every_epochs=self.checkpoint_every,
            every_rounds=self.checkpoint_rounds,
            keep_last=self.keep_last,
            resume="auto" if self.resume == "auto" else "never",
            open_elsewhere=open_hadoop,
            application=application,
        )
