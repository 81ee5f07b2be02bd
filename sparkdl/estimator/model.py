"""``TorchModel``: a trained module whose outputs become columns of your choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from sparkdl.errors import ConfigError
from sparkdl.estimator.fitted import FittedModel
from sparkdl.estimator.head import head_of
from sparkdl.estimator.outputs import ChosenOutputs
from sparkdl.estimator.pretrained import Example, named_features, output_widths, specs_of
from sparkdl.protocols import SequenceInput
from sparkdl.spark.rows.column_overrides import (
    ColumnOverrides,
    pad_inputs,
    paddings,
    require_distinct,
)
from sparkdl.user_code.exported import as_module


class TorchModel(FittedModel, ChosenOutputs):
    """A trained PyTorch model that adds columns of predictions to a DataFrame.

    Made by ``TorchEstimator.fit``, ``TorchModel.load`` or, from any module, by
    ``TorchModel.from_module``.

    Attributes:
        module: the plain nn.Module, on the CPU and in evaluation mode. ``transform`` predicts with
            it as it is when it is called.
        history: one ``EpochSummary`` per epoch of training.

    A model returned by ``fit`` also has a ``summary`` of that fit, which is not saved.
    """

    @classmethod
    def from_module(
        cls,
        module: nn.Module | ExportedProgram,
        example: Example,
        *,
        loss: Any = None,
        imageCols: Sequence[str] = (),
        padCols: dict[str, float] | None = None,
        padInputs: dict[str, SequenceInput] | None = None,
        **params: Any,
    ) -> TorchModel:
        """Make a model from a module that was trained elsewhere, to predict with it.

        Args:
            module: any, on the CPU; it is not changed. When the model is saved, it is pickled
                unless it consists of torch's own layers. A ``torch.export`` program needs none of
                the code that it was written in; dimension 0 of its tensors must be dynamic.
            example: what the module takes for one row or more, in tensors of shape (rows, ...): one
                tensor, one per argument, or a dict by column name. Each row of a column must have
                its shape there, and becomes a tensor of its dtype.
            loss: what it was trained with. If that is one of torch's for classes, ``outputType``
                can be 'class' or 'probability'; ``scoreCol`` needs it.
            imageCols: the binary columns of encoded images, whose pixels the example holds.
            padCols: columns of arrays of unequal length, each with the number that shorter rows are
                padded with; the example has rows of one length.
            padInputs: what the module is given after its features for those that are padded, as in
                ``TorchEstimator``; the example leaves them out.
            params: of the model, for example ``featuresCols``, ``featuresAsKwargs``, ``outputCols``
                or ``predictionCol``.

        Raises:
            ConfigError: the example or a Param does not fit the module.
            ModelError: the module fails on the example.
        """
        module = as_module(module)
        taking = cls(
            module, (), builder=module, head=head_of(loss), widths={}, history=[], loss=loss
        )
        unknown = [name for name in params if not taking.hasParam(name)]
        if unknown:
            raise ConfigError(
                f"TorchModel has no parameter '{unknown[0]}'. It has: "
                f"{', '.join(param.name for param in taking.params)}"
            )
        if isinstance(example, Mapping):
            params.setdefault("featuresCols", list(example))
        taking._set(**params)
        if isinstance(example, Mapping) and not taking.features_by_name():
            raise ConfigError(
                "the example has names: set featuresAsDict or featuresAsKwargs to say how the "
                "module takes them"
            )
        features = named_features(example, taking.feature_columns())
        overrides = ColumnOverrides(None, None, None, paddings(padCols), pad_inputs(padInputs))
        overrides.require_known(list(features))
        taking._features = tuple(specs_of(features, imageCols, overrides))
        if taking.features_by_name():
            require_distinct(taking._features)
        taking._widths = output_widths(
            module,
            features,
            taking._features,
            by_name=taking.features_by_name(),
            as_kwargs=taking.getFeaturesAsKwargs(),
        )
        taking.predicted_columns(taking._head, taking._widths)
        return taking
