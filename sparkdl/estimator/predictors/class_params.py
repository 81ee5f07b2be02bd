"""The Params of a classifier and its model: columns, thresholds and labels."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Self

from pyspark.ml.param import Param, Params
from pyspark.ml.param.shared import HasProbabilityCol, HasRawPredictionCol, HasThresholds

from sparkdl.errors import ConfigError
from sparkdl.estimator.head import Head
from sparkdl.estimator.params.outputs import InputOutputParams
from sparkdl.estimator.predictors.class_outputs import scores, winners
from sparkdl.estimator.predictors.classes import Label, labels
from sparkdl.outputs import Widths
from sparkdl.spark.inference.predictor import OutputColumn


class ClassParams(InputOutputParams, HasRawPredictionCol, HasProbabilityCol, HasThresholds):
    """Params shared by ``TorchClassifier`` and its model."""

    labels: Param[list[Label] | None] = Param(
        Params._dummy(),
        "labels",
        "the classes' labels, texts, numbers, booleans or dates, in the order of the model's "
        "outputs; None for the indices 0, 1, ..., for what StringIndexer has left in the column, "
        "for false and true, or for all texts or dates that it has, sorted",
        typeConverter=labels,
    )

    def getLabels(self) -> list[Label] | None:
        """Gets the value of labels or its default value."""
        return self.getOrDefault(self.labels)

    def setLabels(self, value: Sequence[Label] | None) -> Self:
        """Sets the value of labels."""
        self._set(labels=value)
        return self

    def setRawPredictionCol(self, value: str) -> Self:
        """Sets the value of rawPredictionCol; an empty one for no such column."""
        self._set(rawPredictionCol=value)
        return self

    def setProbabilityCol(self, value: str) -> Self:
        """Sets the value of probabilityCol; an empty one for no such column."""
        self._set(probabilityCol=value)
        return self

    def setThresholds(self, value: Sequence[float]) -> Self:
        """Sets the value of thresholds."""
        self._set(thresholds=list(value))
        return self

    def setter_of(self, column: str) -> str:
        """The method that renames a column that the model adds."""
        setters = {
            self.getRawPredictionCol(): "setRawPredictionCol",
            self.getProbabilityCol(): "setProbabilityCol",
        }
        return setters.get(column, "setPredictionCol")

    def predicted_columns(self, head: Head, widths: Widths) -> list[OutputColumn]:
        """The columns that the model adds; see ``InputOutputParams``."""
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
        function: Any = functools.partial(scores, head=head)
        columns = [OutputColumn(self.getRawPredictionCol(), None, function, True)]
        if head is not Head.SCORES:
            columns.append(OutputColumn(self.getProbabilityCol(), None, head.probabilities, True))
        function = functools.partial(
            winners, head=head, thresholds=self._thresholds(head, count), values=self._values()
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
