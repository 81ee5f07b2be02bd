"""What estimators and their models share: which columns go in, and which come out of what.

What metrics are given: the output behind ``predictionCol``, as probabilities where possible.

torchmetrics takes scores outside of 0 to 1 for logits and turns them into probabilities itself,
minibatch by minibatch. It would leave a minibatch that happens to have none as it is, so that the
value would depend on which worker has which rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparkdl.errors import ConfigError, ModelError
from sparkdl.estimator.head import Head, class_scores, class_winners, output_function
from sparkdl.estimator.params.columns import (
    ClassParams,
    InputParams,
    ModuleParams,
    OutputParams,
    PredictionParams,
)
from sparkdl.outputs import OutputKey, Widths, pick
from sparkdl.protocols import Targets
from sparkdl.spark.inference.predictor import OutputColumn


class SharedParams(ModuleParams, InputParams, PredictionParams):
    """What every estimator and model has."""

    def feature_columns(self) -> list[str]:
        """The feature columns in the order of the model's arguments."""
        return self.getFeaturesCols() or [self.getFeaturesCol()]

    def label_columns(self) -> list[str]:
        """The label columns in the order of the loss's targets."""
        return self.getLabelCols() or [self.getLabelCol()]

    def output_keys(self) -> dict[str, OutputKey | None]:
        """The output of each column that the model adds, by name; None for the only one."""
        return {self.getPredictionCol(): None}

    def setter_of(self, column: str) -> str:
        """The method that renames a column that the model adds."""
        named = ("outputCols", "lossCol", "rawPredictionCol", "probabilityCol", "predictionCol")
        held = {name: self.getOrDefault(name) for name in named if self.hasParam(name)}
        param = next(n for n, v in held.items() if column in (v if isinstance(v, dict) else [v]))
        return f"set{param[0].upper()}{param[1:]}"

    def predicted_columns(self, head: Head, widths: Widths) -> list[OutputColumn]:
        """The columns that the model adds, in their order.

        Args:
            head: what the outputs mean.
            widths: of the model's outputs.

        Raises:
            ConfigError: outputs of this meaning and width have no such columns.
        """
        raise NotImplementedError(type(self).__name__)


class ChosenOutputs(SharedParams, OutputParams):
    """Any of the outputs, of ``TorchEstimator`` and ``TorchModel``."""

    def output_keys(self) -> dict[str, OutputKey | None]:
        """The output of each column that the model adds, by name; None for the only one."""
        return {**(self.getOutputCols() or {self.getPredictionCol(): None})}

    def predicted_columns(self, head: Head, widths: Widths) -> list[OutputColumn]:
        """The columns that the model adds; ``outputType`` applies to ``predictionCol``."""
        keys, prediction = self.output_keys(), self.getPredictionCol()
        output_type = self.getOutputType()
        if prediction not in keys and output_type in ("class", "probability"):
            raise ConfigError(
                f"outputType='{output_type}' applies to predictionCol, but outputCols "
                f"({', '.join(keys)}) has no column '{prediction}'. Set predictionCol to one of "
                "them"
            )
        columns = []
        for name, key in keys.items():
            if key not in widths:
                known = ", ".join(repr(each) for each in widths if each is not None)
                raise ConfigError(
                    f"column '{name}' asks for output {key!r}, but the model's outputs are "
                    f"{known}. Choose one with outputCols={{'{name}': ...}}"
                    if known
                    else f"outputCols has column '{name}', but the model has only one output. Drop "
                    "outputCols; predictionCol names its column"
                )
            function, wide = output_function(
                output_type if name == prediction else "raw", head, widths[key]
            )
            columns.append(OutputColumn(name, key, function, wide))
        return columns


class ClassOutputs(ClassParams, SharedParams):
    """The columns of a classifier and its model."""

    def predicted_columns(self, head: Head, widths: Widths) -> list[OutputColumn]:
        """The columns that the model adds; see ``SharedParams``."""
        if not head.is_classification:
            raise ConfigError(
                "a classifier needs one of torch's losses for classes (CrossEntropyLoss, NLLLoss, "
                "BCEWithLogitsLoss, BCELoss, MultiMarginLoss), which defines what the outputs "
                "mean. For another loss use TorchEstimator"
            )
        if None not in widths:
            raise ConfigError(
                "a classifier's model returns one tensor, but there are outputs "
                f"{', '.join(repr(key) for key in widths)}. Wrap it in a module that returns one, "
                "or use TorchEstimator with outputCols"
            )
        count = self._count(head, widths[None])
        function: Any = functools.partial(class_scores, head=head)
        columns = [OutputColumn(self.getRawPredictionCol(), None, function, True)]
        if head is not Head.SCORES:
            columns.append(OutputColumn(self.getProbabilityCol(), None, head.probabilities, True))
        function = functools.partial(
            class_winners,
            head=head,
            thresholds=self._thresholds(head, count),
            values=self._values(),
        )
        columns.append(OutputColumn(self.getPredictionCol(), None, function, False))
        named = [each for each in columns if each.name]
        taken = [each.name for each in named]
        if len(set(taken)) < len(taken) or not taken:
            raise ConfigError(
                "rawPredictionCol, probabilityCol and predictionCol must be different names, and "
                f"not all empty, got {', '.join(map(repr, taken)) or 'no name'}"
            )
        return named

    def _count(self, head: Head, width: int | None) -> int:
        """How many classes there are."""
        single = head in (Head.BINARY_LOGIT, Head.BINARY_PROBABILITY)
        count = width or 1
        if single != (count == 1):
            wanted = "one output per row, for two classes" if single else "one output per class"
            raise ConfigError(f"the loss takes {wanted}, but the model gives {count} per row")
        count = 2 if single else count
        named = self.getLabels()
        if named is not None and len(named) != count:
            raise ConfigError(
                f"the model distinguishes {count} classes, but there are {len(named)} labels "
                f"({', '.join(map(repr, named[:20]))}). Give it one output per label"
            )
        return count

    def _thresholds(self, head: Head, count: int) -> list[float] | None:
        if not self.isDefined(self.thresholds):
            return None
        found = self.getThresholds()
        if head is Head.SCORES:
            raise ConfigError(
                "thresholds apply to probabilities, which MultiMarginLoss does not give. Drop "
                "them, or use CrossEntropyLoss"
            )
        if len(found) != count or not all(each >= 0 for each in found) or found.count(0.0) > 1:
            raise ConfigError(
                f"thresholds must be {count} numbers > 0, one per class (at most one may be 0), "
                f"got {found}"
            )
        return found

    def _values(self) -> list[float] | None:
        """What ``predictionCol`` holds for each class, if not its index."""
        named = self.getLabels()
        return None if named is None or isinstance(named[0], str) else [float(n) for n in named]


class NumberOutput(SharedParams):
    """The column of a regressor and its model."""

    def predicted_columns(self, head: Head, widths: Widths) -> list[OutputColumn]:
        """The column that the model adds; see ``SharedParams``."""
        if head.is_classification:
            raise ConfigError(
                "the loss is for classification: use TorchClassifier, or a regression loss, for "
                "example MSELoss"
            )
        if widths.get(None, 0) not in (None, 1):
            shown = widths.get(None)
            raise ConfigError(
                "a regressor's model gives one number per row, but this one gives "
                f"{'several outputs' if shown is None else shown}. Use TorchEstimator, whose "
                "predictionCol holds vectors and whose outputCols name several outputs"
            )
        function, _ = output_function("raw", head, None)
        return [OutputColumn(self.getPredictionCol(), None, function, False)]


def require_any_length(widths: Widths, shorter: Widths, keys: Sequence[OutputKey | None]) -> None:
    """Check that the width of outputs that become columns does not depend on padded lengths.

    Args:
        widths: of the model's outputs for rows of one length.
        shorter: for shorter rows.
        keys: of the outputs.

    Raises:
        ModelError: that of one does.
    """
    for key in keys:
        if key in widths and widths[key] != shorter.get(key):
            name = "" if key is None else f" as its output {key!r}"
            raise ModelError(
                f"the model returns {widths[key]} numbers per row{name} but {shorter.get(key)} "
                "for shorter rows: as many as the longest row of a minibatch has items. A "
                "prediction column needs the same number in every row: return a mean over the "
                "items, or the output of one item, or choose another output with outputCols"
            )


@dataclass(frozen=True)
class MetricInputs:
    """Turns a model's outputs and the targets into a metric's predictions and targets.

    Attributes:
        head: what the outputs mean.
        key: which of several outputs; None for the only one.
    """

    head: Head
    key: OutputKey | None

    @classmethod
    def of(cls, params: SharedParams, head: Head) -> MetricInputs:
        """What the metrics of an estimator or a model are given.

        Raises:
            ConfigError: ``predictionCol`` comes from no output.
        """
        keys, prediction = params.output_keys(), params.getPredictionCol()
        if prediction not in keys:
            raise ConfigError(
                f"metrics measure the output of predictionCol, but outputCols ({', '.join(keys)}) "
                f"has no column '{prediction}'. Set predictionCol to one of them"
            )
        return cls(head, keys[prediction])

    def __call__(self, outputs: Any, targets: Targets) -> tuple[Tensor, Targets]:
        """Return the predictions and the targets of a minibatch.

        Args:
            outputs: what the model returned.
            targets: its labels.

        Returns:
            Probabilities, shape (n, classes, ...), or those of class 1, shape (n,), for one of
            torch's losses for classes; else the output, shape (n,) if there is one number per row.
            Class targets are int64.
        """
        first = targets if isinstance(targets, Tensor) else targets[0]
        predicted = self._probabilities(pick(outputs, self.key, len(first)))
        if predicted.dim() == 2 and predicted.shape[1] == 1:
            predicted = predicted[:, 0]
        if not isinstance(targets, Tensor):
            return predicted, targets
        if targets.shape != predicted.shape and targets.numel() == predicted.numel():
            targets = targets.view(predicted.shape)
        if self.head.is_classification and targets.is_floating_point():
            whole = targets.long()
            targets = whole if bool((whole == targets).all()) else targets
        return predicted, targets

    def _probabilities(self, output: Tensor) -> Tensor:
        if output.is_floating_point() and output.dtype.itemsize < 4:
            output = output.float()  # few metrics handle half precision
        if self.head is Head.LOGITS:
            return output.softmax(dim=1)
        if self.head is Head.LOG_PROBABILITIES:
            return output.exp()
        return torch.sigmoid(output) if self.head is Head.BINARY_LOGIT else output
