"""What metrics are given: the output behind ``predictionCol``, as probabilities where possible.

torchmetrics takes scores outside of 0 to 1 for logits and turns them into probabilities itself,
minibatch by minibatch. It would leave a minibatch that happens to have none as it is, so that the
value would depend on which worker has which rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparkdl.errors import ConfigError
from sparkdl.estimator.head import Head
from sparkdl.estimator.outputs import SharedParams
from sparkdl.outputs import OutputKey, pick
from sparkdl.protocols import Targets


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
