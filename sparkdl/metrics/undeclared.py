"""Counts that a metric keeps outside its states, which are neither sent nor merged."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparkdl.metrics.states import parts_of

_PLAIN = (bool, int, float, complex, str, bytes, list, dict, set, Tensor, np.ndarray)


class Undeclared:
    """Watches what a metric counts outside of the states that ``add_state`` has declared.

    A count changes with each minibatch, even with one seen before; what a metric has only looked
    up, such as the number of classes, does not. So it is watched from the second minibatch on.

    Args:
        metric: one that has seen a minibatch.
    """

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._before = _kept(metric)

    def names(self) -> list[str]:
        """The attributes that have changed with the minibatches since."""
        found = _kept(self._metric)
        return sorted(
            name
            for name, value in found.items()
            if name not in self._before or not _same(self._before[name], value)
        )


def _kept(metric: Any) -> dict[str, Any]:
    """The plain values that each part keeps, except its states and torchmetrics' own."""
    found = {}
    for path, part in parts_of(metric):
        for name, value in vars(part).items():
            if name not in part._defaults and name not in _own() and isinstance(value, _PLAIN):
                found[f"{path}.{name}" if path else name] = copy.deepcopy(value)
    return found


def _own() -> frozenset[str]:
    """The attributes that every torchmetrics metric has."""
    from torchmetrics import SumMetric

    declared = SumMetric()
    return frozenset(vars(declared)) - set(declared._defaults)


def _same(before: Any, value: Any) -> bool:
    if type(before) is not type(value):
        return False
    if isinstance(before, Tensor):
        return before.shape == value.shape and torch.equal(before, value)
    if isinstance(before, np.ndarray):
        return bool(np.array_equal(before, value))
    if isinstance(before, Mapping):
        return before.keys() == value.keys() and all(_same(before[k], value[k]) for k in before)
    if isinstance(before, list):
        return len(before) == len(value) and all(map(_same, before, value))
    return bool(before == value) or bool(before != before)  # noqa: PLR0124 - NaN stays what it is
