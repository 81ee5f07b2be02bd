"""The metrics of a fit or of an evaluation: counted where the rows are, computed in the driver."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from sparkdl.arguments import listed
from sparkdl.errors import ConfigError, ModelError
from sparkdl.events import EpochSummary, MetricValue
from sparkdl.metrics.states import merge_states, pack_states, parts_of, read_states
from sparkdl.outputs import described
from sparkdl.process.randomness import borrowed_random_numbers
from sparkdl.protocols import Targets
from sparkdl.user_code.tracebacks import message_of

Inputs = Callable[[Any, Targets], tuple[Any, Any]]
"""Turns a model's outputs and the targets into the arguments of a metric's ``update``."""

WEIGHTS = "sample_weight"
"""The argument of a metric's ``update`` that says how much each row counts."""

TAKEN = (*(each.name for each in fields(EpochSummary)), "examples_per_second")
"""Names that no metric may have: an epoch's own numbers have them, in histories too."""


def require_torchmetrics() -> Any:
    """Import and return torchmetrics.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("torchmetrics")
    except ImportError as error:
        raise ConfigError(
            "metrics need torchmetrics, which is not installed: pip install "
            '"sparkdl-torch[metrics]", in the driver and on the executors'
        ) from error


def as_given(outputs: Any, targets: Targets) -> tuple[Any, Any]:
    """Pass the model's outputs and the targets to a metric unchanged."""
    return outputs, targets


@dataclass(frozen=True)
class Metrics:
    """Metrics by name; sent to the workers unchanged.

    Attributes:
        makers: a ``torchmetrics.Metric`` by name, which is copied, or a function or class without
            arguments that makes one.
        inputs: what the metrics are given.
    """

    makers: Mapping[str, Any]
    inputs: Inputs = as_given

    @classmethod
    def of(cls, given: object, inputs: Inputs = as_given) -> Metrics:
        """Check what the user gave: a dict, or a ``MetricCollection``.

        Raises:
            ConfigError: it is something else, or torchmetrics is not installed.
        """
        torchmetrics = require_torchmetrics()
        if isinstance(given, torchmetrics.MetricCollection):
            # Copied one by one, as metrics of one compute group share their states.
            given = {name: copy.deepcopy(metric) for name, metric in given.items()}
        if not isinstance(given, Mapping) or not given:
            raise ConfigError(
                "metrics must be a dict of torchmetrics by name, for example {'accuracy': "
                f"MulticlassAccuracy(num_classes=10)}}, or a MetricCollection, got {given!r}"
            )
        for name, maker in given.items():
            if not isinstance(name, str) or not name or name in TAKEN:
                raise ConfigError(
                    f"metrics has the name {name!r}: it must be a string, and not one of "
                    f"{', '.join(TAKEN)}, which every epoch already has"
                )
            if not isinstance(maker, torchmetrics.Metric) and not callable(maker):
                raise ConfigError(
                    f"metric '{name}' must be a torchmetrics.Metric, or a function or class "
                    f"without arguments that makes one, got {maker!r}"
                )
        return cls(dict(given), inputs)

    def begin(self, device: torch.device | str = "cpu") -> Measurement:
        """Start counting on a device.

        Raises:
            ConfigError: one of the makers does not make a metric.
        """
        return Measurement(self._made(device), self.inputs)

    def higher_is_better(self) -> dict[str, bool | None]:
        """Whether a larger value of each metric is better; None if it does not say."""
        return {name: metric.higher_is_better for name, metric in self._made("cpu").items()}

    def without_weights(self) -> list[str]:
        """The metrics for which every row counts equally, whatever its weight."""
        return [name for name, metric in self._made("cpu").items() if not _takes_weights(metric)]

    def measure(self, states: Sequence[bytes]) -> dict[str, MetricValue]:
        """Compute the metrics from what all workers have counted.

        Args:
            states: of each ``Measurement``, in a fixed order, on which floating-point sums depend.

        Returns:
            A number by name; lists of numbers for a metric with several, dicts for one with names.

        Raises:
            ModelError: a metric cannot be computed from them.
            TrainingError: something other than states was sent.
        """
        made = self._made("cpu")
        read = [read_states(data, list(made.values())) for data in states]
        values = {}
        for index, (name, metric) in enumerate(made.items()):
            with _named(name, "cannot be computed from what the workers counted"):
                merge_states(metric, [of_rank[index] for of_rank in read])
                with torch.no_grad():
                    values[name] = _plain(metric.compute())
        return values

    def _made(self, device: torch.device | str) -> dict[str, Any]:
        return {name: _make(name, maker).to(device) for name, maker in self.makers.items()}


class Measurement:
    """Metrics that count the rows of one worker.

    Args:
        metrics: by name; nothing else uses them.
        inputs: what they are given.
    """

    def __init__(self, metrics: Mapping[str, Any], inputs: Inputs) -> None:
        self._metrics = metrics
        self._inputs = inputs
        self._weighted = {name for name, metric in metrics.items() if _takes_weights(metric)}

    def update(self, outputs: Any, targets: Targets, weights: Tensor | None = None) -> None:
        """Count a minibatch.

        Args:
            outputs: what the model returned for it in evaluation mode.
            targets: its labels.
            weights: how much each row counts, shape (n,), for the metrics that take them; None
                where every row counts the same.

        Raises:
            ModelError: a metric does not take them.
        """
        given = self._inputs(outputs, targets)
        advice = ""
        if isinstance(given[1], tuple):
            advice = ". Labels of several columns are a tuple: give a metric whose update picks one"
        # A metric that draws random numbers must not change the training.
        with borrowed_random_numbers(), torch.no_grad():
            for name, metric in self._metrics.items():
                weighted = weights is not None and name in self._weighted
                with _named(name, f"fails on {' and '.join(map(_shown, given))}", advice):
                    metric.update(*given, **({WEIGHTS: weights} if weighted else {}))

    def states(self) -> bytes:
        """What was counted, for ``Metrics.measure``; in safetensors, without any pickle.

        Raises:
            ModelError: a metric keeps something that is not a tensor.
        """
        return pack_states(self._metrics)


def _takes_weights(metric: Any) -> bool:
    if WEIGHTS in inspect.signature(metric.update).parameters:
        return True
    from torchmetrics.metric import CompositionalMetric, Metric
    from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric

    # These pass on all keyword arguments; others select from them, or take none.
    if not isinstance(metric, (CompositionalMetric, ClasswiseWrapper, MinMaxMetric)):
        return False
    inner = [each for each in metric.children() if isinstance(each, Metric)]
    return bool(inner) and all(map(_takes_weights, inner))


def _make(name: str, maker: Any) -> Any:
    torchmetrics = require_torchmetrics()
    kinds = (torchmetrics.Metric, torchmetrics.MetricCollection)
    try:
        metric = copy.deepcopy(maker) if isinstance(maker, kinds) else maker()
    except Exception as error:  # the user's function may raise anything
        raise ConfigError(f"metric '{name}' cannot be made: {message_of(error)}") from error
    if not isinstance(metric, torchmetrics.Metric):
        advice = (
            ". Give the MetricCollection itself as metrics"
            if isinstance(metric, torchmetrics.MetricCollection)
            else ""
        )
        raise ConfigError(
            f"metric '{name}' must be a torchmetrics.Metric, but this makes a "
            f"{type(metric).__name__}{advice}"
        )
    metric.reset()
    parts = parts_of(metric)
    if not any(part._defaults for _, part in parts):
        raise ConfigError(
            f"metric '{name}', a {type(metric).__name__}, has no states: nothing it counts on "
            "the workers would reach the driver. Declare its state with add_state, and metrics "
            "inside it as attributes or in a torch.nn.ModuleList"
        )
    for _, part in parts:
        # We merge the states ourselves, even where the workers have a process group of their own.
        part.distributed_available_fn = functools.partial(bool, False)
    return metric


@contextmanager
def _named(name: str, what: str, advice: str = "") -> Iterator[None]:
    """Name the metric that raises; its warnings about few rows or one class stay unchanged."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # metrics may raise anything
        raise ModelError(f"metric '{name}' {what}: {message_of(error)}{advice}") from error


def _plain(value: Any) -> MetricValue:
    """A metric's value in JSON's types."""
    if isinstance(value, Tensor):
        found: MetricValue = value.tolist() if value.dim() else float(value)
        return found
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return float(value)


def _shown(value: Any) -> str:
    return listed(map(described, value)) if isinstance(value, tuple) else described(value)


def rehearse(
    metrics: Metrics, outputs: Any, targets: Targets, weights: Tensor | None = None
) -> None:
    """Check on a few rows that metrics take what the model returns, and that their states travel.

    Args:
        metrics: those that will be measured.
        outputs: of the model in evaluation mode.
        targets: some that the loss takes.
        weights: how much each row counts; None where every row counts the same.

    Raises:
        ConfigError: one of the makers does not make a metric.
        ModelError: a metric does not take them, or keeps something that is not a tensor.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # many would be due to the few rows only
        counted = metrics.begin()
        counted.update(outputs, targets, weights)
        read_states(counted.states(), list(counted._metrics.values()))
