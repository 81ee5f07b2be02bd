"""One training step in the driver on a made-up batch, before any worker takes its first.

The batch has two rows: the smallest and the largest value of every column. An embedding too small,
a label out of range, a wrong width or a loss that needs another dtype all show here, in a second.
"""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparkdl.arguments import counted, listed
from sparkdl.errors import DataError, ModelError
from sparkdl.estimator.checks.building import reported
from sparkdl.estimator.head import Head
from sparkdl.feed.column_statistics import ColumnStatistics
from sparkdl.feed.schema import Column, FeedSchema, equal_rows, input_names, picked
from sparkdl.metrics.metrics import Metrics, rehearse
from sparkdl.outputs import Widths, described, pick, widths_of
from sparkdl.process.randomness import borrowed_random_numbers
from sparkdl.protocols import Batch, ColumnSpec, Features, LossFunction, Targets
from sparkdl.replica import Replica
from sparkdl.replica.buffers import OwnAttributes, left_as_it_was
from sparkdl.replica.flat import persistent_buffers
from sparkdl.replica.loss_use import require_own_targets_in
from sparkdl.replica.losses import ModelLoss

logger = logging.getLogger(__name__)

PREDICTED_ROWS = 5
"""Made-up rows to predict for: a number that few models have of layers or classes, so that the
length of a tensor tells whether it has one value per row."""


@dataclass(frozen=True)
class Trial:
    """Tries out a replica that is thrown away afterwards, on made-up rows.

    Attributes:
        replica: from ``build``.
        schema: the tensors that it will be fed.
        statistics: what is known of each of its columns.
        given: the module that the replica's is a copy of; None if a function built it.
    """

    replica: Replica
    schema: FeedSchema
    statistics: Sequence[ColumnStatistics]
    given: nn.Module | None = None

    def step(
        self,
        head: Head,
        *,
        metrics: Metrics | None = None,
        scores: bool = False,
        several: bool = False,
    ) -> Any:
        """Take one step.

        Args:
            head: what the loss says about the outputs.
            metrics: to try on its predictions.
            scores: whether rows will be scored with the loss.
            several: whether there are several workers.

        Returns:
            What the model returns in evaluation mode, without labels, for ``PREDICTED_ROWS``.

        Raises:
            ModelError: the model, the loss or the optimizer fails.
            DataError: the label is out of the model's range.
        """
        replica, batch, predicted = self.replica, self._rows(2), self._rows(PREDICTED_ROWS)
        # The one that the driver has built since would begin where this one's step leads to.
        if not replica.has_own_module:
            raise ModelError(
                "model is a function that returns the same module each time, but each replica "
                "needs one of its own. Build the module in the function, or give the module "
                "itself as model, which is copied"
            )
        built, own = _shapes_of(replica.module), OwnAttributes(replica.module)
        infinite = _not_finite(replica.module)
        with borrowed_random_numbers(), self._loss_as_it_was():
            require_own_targets_in(replica, self._rows, scores=scores, several=several)
            with torch.enable_grad():
                replica.module.train()
                outputs = self._outputs(batch, with_labels=True)
                if isinstance(outputs, Tensor) and not isinstance(replica.loss, ModelLoss):
                    pick(outputs, None, batch.examples)
                self._check_labels(outputs, head)
                loss = self._loss(outputs, batch)
            predictions = self._predict(predicted)
            if metrics is not None:
                rehearse(metrics, predictions, predicted.targets, predicted.weights)
            _require_as_built(replica.module, built)
            _require_finite(infinite & _not_finite(replica.module))
            both = self._both(outputs, batch)
            # A detached output, an optimizer that needs a closure, ...
            with reported(f"the backward pass or the optimizer's step fails after {both}"):
                with self._none_for_the_given():
                    loss.backward()  # type: ignore[no-untyped-call]
                replica.optimizer.step()
            self._tell_what_is_not_returned(own, predicted)
        return predictions

    def _tell_what_is_not_returned(self, own: OwnAttributes, batch: Batch) -> None:
        """Warn of what the forward pass has changed, and predictions depend on."""

        def outputs() -> Any:
            self.replica.module.eval()
            return self.replica.outputs(batch, with_labels=False)

        try:
            needed = own.needed_for(outputs)
        except Exception as error:  # the user's forward may raise anything
            logger.debug("predictions by the model as it was built were not tried: %s", error)
            return
        if needed:
            logger.warning(
                "in training, the model's forward pass changes %s, and its predictions depend on "
                "that. It is no part of the state that replicas exchange: the model that fit "
                "returns has it as it was built. Make it a buffer with register_buffer",
                listed(map(repr, needed)),
            )

    def widths_of_shorter_rows(self) -> Widths | None:
        """How wide the outputs are for rows one item shorter than the longest of the data.

        Returns:
            The widths for ``PREDICTED_ROWS``; None if no features are padded.

        Raises:
            ModelError: the model fails on them.
        """
        if all(spec.padding is None for spec in self.schema.features):
            return None
        pairs = zip(self.statistics, self.schema.columns, strict=True)
        shorter = replace(self, statistics=[_shorter(*pair) for pair in pairs])
        with borrowed_random_numbers():
            outputs = shorter._predict(shorter._rows(PREDICTED_ROWS))
        return widths_of(outputs, PREDICTED_ROWS)

    def require_single_row(self, rows: int, *, joint_batch_norm: bool = False) -> None:
        """Check that a model trains on a single row, which a worker's last minibatch may have.

        Args:
            rows: how many the worker with such a minibatch has.
            joint_batch_norm: whether BatchNorm layers have others' rows besides, and so are left
                out.

        Raises:
            ModelError: the model or the loss fails on it.
        """
        module, has = self.replica.module, f"a worker with {counted(rows, 'row')} has"
        with (
            reported(
                f"the model fails on a minibatch of one row, which {has} last",
                "Set dropLast=True to leave such minibatches out, or another batchSize",
            ),
            borrowed_random_numbers(),
            self._loss_as_it_was(),
            left_as_it_was(module),
            torch.no_grad(),
        ):
            for layer in module.modules() if joint_batch_norm else ():
                if isinstance(layer, _BatchNorm):
                    layer.forward = _as_it_is  # type: ignore[assignment, method-assign]
            self.replica.forward(self._rows(1))

    @contextmanager
    def _none_for_the_given(self) -> Iterator[None]:
        """Check that a backward pass has no gradients for the module that was given."""
        named = [] if self.given is None else list(self.given.named_parameters())
        before = [each.grad for _, each in named]
        for _, each in named:
            each.grad = None
        try:
            yield
            used = [name for name, each in named if each.grad is not None]
        finally:
            for (_, each), gradient in zip(named, before, strict=True):
                each.grad = gradient
        if used:
            raise ModelError(
                f"the loss computes with '{used[0]}' of the module that was given as model, of "
                "which each replica trains a copy: it would see the values from before the "
                "training, and none of its gradients would count. Let the model compute what "
                "depends on its parameters (loss='model'), or use the optimizer's weight_decay. If "
                "it is a lambda or another function inside the module that uses them, make it a "
                "method, or give the class or a function that builds the module as model"
            )

    def _loss_as_it_was(self) -> AbstractContextManager[None]:
        """The loss is the user's own, not a copy, and may count its calls or keep class centers."""
        own = self.replica.loss
        return left_as_it_was(own) if isinstance(own, nn.Module) else nullcontext()

    def _rows(self, rows: int) -> Batch:
        """A minibatch of so many rows, each one of two; all of them weigh the same."""
        columns = list(map(_extremes, self.statistics, self.schema.stored))
        if self.schema.weight is not None:
            columns[-1] = torch.ones(2)
        chosen = torch.arange(rows) % 2
        return self.schema.batch([picked(column, chosen) for column in columns], last=True)

    def _predict(self, batch: Batch) -> Any:
        """What ``transform`` will see; and the loss on held-out rows, if there are any."""
        self.replica.module.eval()
        # Not in inference mode: a backward pass must be able to use what the model keeps from this.
        with torch.no_grad():
            predictions = self._outputs(batch, with_labels=False)
            if self.schema.validation is not None:
                self._loss(self._outputs(batch, with_labels=True), batch)
        self.replica.module.train()
        return predictions

    def _outputs(self, batch: Batch, *, with_labels: bool) -> Any:
        """What the model returns; for ``with_labels`` see ``Replica.outputs``."""
        schema, own = self.schema, self.replica.loss
        labels = own.keywords if with_labels and isinstance(own, ModelLoss) else ()
        columns = schema.stored if labels else schema.features
        given = _shapes(batch.features)
        given += f" and labels of {_shapes(batch.targets)}" if labels else ""
        given += _ranges(columns, self.statistics[: len(columns)])
        mode = "" if self.replica.module.training else " in evaluation mode"
        what = f"the model fails{mode} on a batch with features of {given}"
        with reported(what, self._call(labels)):
            return self.replica.outputs(batch, with_labels=with_labels)

    def _call(self, labels: Sequence[str]) -> str:
        """How the model is called, what it takes, and which Params change the call."""
        names = input_names(self.schema.features)
        if self.schema.by_name and self.replica.features_as_kwargs:
            names = [f"{name}=..." for name in names]
        elif self.schema.by_name:
            names = [f"{{{listed(f'{name!r}: ...' for name in names)}}}"]
        given = listed([*names, *(f"{name}=..." for name in labels)])
        try:
            taken = listed(inspect.signature(self.replica.module.forward).parameters)
        except (TypeError, ValueError):  # a callable written in C may have no signature
            taken = "..."
        return (
            f"It was called as model({given}), and its forward takes ({taken}). What it is given "
            "follows from featuresCols, featuresAs, columnShapes, columnDtypes, imageScale and "
            "padInputs"
        )

    def _loss(self, outputs: Any, batch: Batch) -> Tensor:
        """The loss of what the model returned."""
        both, label = self._both(outputs, batch), self.schema.labels[0]
        mode = "" if self.replica.module.training else " in evaluation mode, which validation uses,"
        whose, advice = f" (label column '{label.name}')", ""
        if not isinstance(outputs, Tensor):
            advice = (
                "The loss is given all that the model returns; to use one output of several, give "
                "a function, for example loss=lambda outputs, targets: mse_loss(outputs[0], "
                "targets)"
            )
        elif outputs.dim() > 2 and not label.is_array:
            whose = ""
            advice = (
                f"The model returns shape {tuple(outputs.shape[1:])} for each row, and the label "
                "is one number: have forward return shape (rows,), or (rows, classes)"
            )
        with reported(f"the loss fails{mode} on {both}{whose}", advice), warnings.catch_warnings():
            # torch only warns before it broadcasts (2, 2) outputs against (2,) targets.
            warnings.filterwarnings("error", message="Using a target size")
            loss = self.replica.loss_of(outputs, batch)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ModelError(f"the loss of {both} must be a scalar tensor (the mean), not {shape}")
        return loss

    def _both(self, outputs: Any, batch: Batch) -> str:
        return f"outputs {described(outputs)} and targets {_shapes(batch.targets)}"

    def _check_labels(self, outputs: Any, head: Head) -> None:
        """Check that the loss takes the labels that there are."""
        ignored, first = _ignored_label(self.replica.loss), len(self.schema.features)
        for label, found in zip(self.schema.labels, self.statistics[first:], strict=False):
            name, low, high = label.name, found.smallest, found.largest
            if low is None or high is None or label.is_array:
                continue
            holds = (
                f"label column '{name}' holds {low:g} to {high:g} ({found.where('smallest')}, "
                f"{found.where('largest')}), but the"
            )
            if head.takes_class_index and isinstance(outputs, Tensor) and outputs.dim() == 2:
                classes = outputs.shape[1]
                if (low < 0 and low != ignored) or (high >= classes and high != ignored):
                    raise DataError(
                        f"{holds} model has {classes} outputs and so takes classes 0 to "
                        f"{classes - 1}. Number the classes from 0 "
                        "(pyspark.ml.feature.StringIndexer does), or give the model more outputs"
                    )
            if head in (Head.BINARY_LOGIT, Head.BINARY_PROBABILITY) and (low < 0 or high > 1):
                raise DataError(
                    f"{holds} loss takes 0 to 1. Map the two classes to 0 and 1, or use "
                    "CrossEntropyLoss for more classes"
                )


def _as_it_is(features: Tensor) -> Tensor:
    return features


def _shorter(statistics: ColumnStatistics, spec: ColumnSpec) -> ColumnStatistics:
    if spec.padding is None:
        return statistics
    width, longest = math.prod(spec.item_shape), statistics.longest or 0
    items = max(1, longest - width) if longest > width else 2 * width
    return replace(statistics, shortest=items, longest=items)


def _shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that are trained or averaged, by name."""
    tensors = {**dict(module.named_parameters()), **persistent_buffers(module)}
    return {name: tuple(each.shape) for name, each in tensors.items()}


def _require_as_built(module: nn.Module, built: dict[str, tuple[int, ...]]) -> None:
    """Check that the forward passes kept the tensors that the model was built with."""
    now = _shapes_of(module)
    changed = [
        f"'{name}' from {built.get(name, 'nothing')} to {now.get(name, 'nothing')}"
        for name in built | now
        if built.get(name) != now.get(name)
    ]
    if changed:
        raise ModelError(
            f"the model's forward pass changes its parameters or buffers: {listed(changed)}. "
            "The optimizer and the other workers only know those that exist when it is built. "
            "Create them all in __init__, with their final shapes, or give a function as model "
            "that builds it and calls it on a batch. Buffers that are caches may be registered "
            "with persistent=False"
        )


def _not_finite(module: nn.Module) -> set[str]:
    """The names of the buffers that are averaged and hold NaN or infinity."""
    buffers = persistent_buffers(module).items()
    return {name for name, buffer in buffers if not bool(torch.isfinite(buffer).all())}


def _require_finite(infinite: set[str]) -> None:
    """Check that no buffer keeps holding what no worker may contribute to a round."""
    if infinite:
        raise ModelError(
            f"NaN or infinity is in {counted(len(infinite), 'buffer')} of the model as it is "
            f"built, {listed(map(repr, sorted(infinite)))}, and replicas exchange only finite "
            "numbers. Register such a constant, for example a mask for attention, with "
            "persistent=False, or fill it with torch.finfo(dtype).min or booleans instead"
        )


def _ignored_label(loss: LossFunction) -> int | None:
    """The label of rows that the loss skips: torch's ``ignore_index``."""
    if isinstance(loss, nn.Module):
        found = getattr(loss, "ignore_index", None)
    else:
        try:
            argument = inspect.signature(loss).parameters.get("ignore_index")
        except (TypeError, ValueError):  # a callable written in C may have no signature
            return None
        found = None if argument is None else argument.default
    return found if isinstance(found, int) else None


def _ranges(specs: Sequence[ColumnSpec], statistics: Sequence[ColumnStatistics]) -> str:
    """What an embedding or a packed sequence may fail on: integers, and numbers of items."""
    ranges = []
    for spec, found in zip(specs, statistics, strict=True):
        if not spec.dtype.is_floating_point and found.smallest is not None:
            ranges.append(f"'{spec.name}' from {_between(found, 'smallest', 'largest')}")
        if spec.padding is not None:
            ranges.append(f"'{spec.name}' of {_between(found, 'shortest', 'longest')} elements")
    return f", {listed(ranges)}" if ranges else ""


def _between(found: ColumnStatistics, low: str, high: str) -> str:
    return " to ".join(f"{getattr(found, each)} ({found.where(each)})" for each in (low, high))


def _extremes(statistics: ColumnStatistics, spec: ColumnSpec) -> Column:
    """Two rows: the column's smallest and largest value; 0 and 1 where those are unknown.

    If the column is padded, they are as long as its shortest and its longest row.
    """
    low = 0.0 if statistics.smallest is None else statistics.smallest
    high = 1.0 if statistics.largest is None else statistics.largest
    exact = torch.float64 if spec.dtype.is_floating_point else spec.dtype
    width = math.prod(spec.item_shape) if spec.padding is not None else 1
    items = (statistics.shortest or 0) // width, max(1, (statistics.longest or 0) // width)
    return equal_rows(spec, torch.tensor([low, high], dtype=exact), items)


def _shapes(tensors: Features | Targets) -> str:
    if isinstance(tensors, dict):
        return listed(f"'{name}' {described(tensor)}" for name, tensor in tensors.items())
    return listed(map(described, tensors if isinstance(tensors, tuple) else (tensors,)))
