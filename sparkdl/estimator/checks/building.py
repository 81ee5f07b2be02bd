"""The replica that the driver tries out before any worker builds its own."""

from __future__ import annotations

import torch
from pyspark.sql import DataFrame
from torch import nn

from sparkdl.driver import build_replica
from sparkdl.errors import ModelError
from sparkdl.estimator.checks.hints import SHOW_ZEROS, fail, how_to_build
from sparkdl.estimator.fit_settings import FitSettings
from sparkdl.estimator.head import head_of
from sparkdl.estimator.params.converters import SEVERAL_OPTIMIZERS
from sparkdl.estimator.schema import fed_columns
from sparkdl.protocols import UNKNOWN, LossFunction, ModelBuilder, OptimizerBuilder
from sparkdl.replica import Replica
from sparkdl.replica.initial import Initialized, has_lazy_parameters
from sparkdl.replica.optimizer_state import NamedParameters, build_optimizer


def build(
    model: ModelBuilder,
    optimizer: OptimizerBuilder,
    loss: LossFunction,
    seed: int,
    *,
    clip_norm: float | None = None,
    features_as_kwargs: bool = False,
) -> Replica:
    """Build the replica that will be probed.

    Args:
        model: builds its module.
        optimizer: builds its optimizer.
        loss: its loss.
        seed: for its initial parameters.
        clip_norm: see ``Replica``.
        features_as_kwargs: see ``Replica``.

    Raises:
        LazyModelError: the model has to see a batch first.
        ModelError: the model or its optimizer cannot be built.
    """

    def checked_model() -> nn.Module:
        module = model()
        if not isinstance(module, nn.Module):
            raise ModelError(f"model builds a {type(module).__name__}; it must return an nn.Module")
        if has_lazy_parameters(module):
            raise LazyModelError(module)
        return module

    def checked_optimizer(named_parameters: NamedParameters) -> torch.optim.Optimizer:
        built = build_optimizer(optimizer, named_parameters)
        if not hasattr(built, "param_groups"):
            raise ModelError(
                f"optimizer builds a {type(built).__name__}; it must return one "
                f"torch.optim.Optimizer. {SEVERAL_OPTIMIZERS}"
            )
        return built

    _require_nothing_to_train(loss)
    try:
        replica = build_replica(
            checked_model,
            checked_optimizer,
            loss,
            seed,
            clip_norm=clip_norm,
            features_as_kwargs=features_as_kwargs,
        )
        replica.module.train()
        return replica
    except ModelError:
        raise
    except Exception as error:  # a user's constructor may raise anything
        fail("the model or its optimizer cannot be built", error, how_to_build(error))


def _require_nothing_to_train(loss: LossFunction) -> None:
    own = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    trained = [f"'{name}'" for name, each in own if each.requires_grad]
    if trained:
        raise ModelError(
            f"the loss {type(loss).__name__} has parameters of its own, {', '.join(trained)}, but "
            "only the model's are trained. Make the loss part of the model (loss='model'), or "
            "freeze them with requires_grad=False"
        )


class LazyModelError(ModelError):
    """A model has lazy layers that have not seen a batch."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(
            f"the model has lazy layers that no forward pass has initialized. {SHOW_ZEROS}"
        )
        self.module = module


def build_whole(
    builder: ModelBuilder, settings: FitSettings, frame: DataFrame, *, by_name: bool
) -> tuple[ModelBuilder, Replica]:
    """Build the replica to try out; lazy layers take their shapes from the first row.

    Args:
        builder: builds the model.
        settings: the estimator's.
        frame: the DataFrame to fit.
        by_name: whether the model takes its features by column name.

    Returns:
        A builder of the model with all of its parameters, and the replica.
    """
    loss, as_kwargs = settings.loss_function(), settings.features_as_kwargs

    def built(model: ModelBuilder) -> Replica:
        return build(
            model,
            settings.optimizer_builder(),
            loss,
            settings.seed,
            clip_norm=settings.clip_norm,
            features_as_kwargs=as_kwargs,
        )

    try:
        return builder, built(builder)
    except LazyModelError as lazy:
        fractions = parameter_dtype(lazy.module)
        fed = fed_columns(settings, frame, loss, head_of(loss), fractions, by_name=by_name)
    # Without their own names: ``dropna`` parses them, and they may hold a backtick.
    values_only = [each.expression().alias(f"{at}") for at, each in enumerate(fed.columns)]
    row = frame.select(values_only).dropna().first()
    values = [None] * len(fed.columns) if row is None else list(row)
    lengths = [
        len(value) if spec.row_shape == (UNKNOWN,) and value is not None else None
        for spec, value in zip(fed.schema.columns, values, strict=True)
    ]
    items = (
        len(value)
        for spec, value in zip(fed.schema.columns, values, strict=True)
        if spec.padding is not None and value is not None
    )
    schema = fed.schema.of_lengths(lengths)
    whole = Initialized(builder, schema, as_kwargs, max(items, default=1) or 1)
    return whole, built(whole)


def parameter_dtype(module: nn.Module) -> torch.dtype:
    """The dtype of the model's parameters, in which fractions are fed too."""
    dtypes = (p.dtype for p in module.parameters() if p.is_floating_point())
    return next(dtypes, torch.float32)
