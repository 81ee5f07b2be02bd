"""What metrics have counted, packed as bytes, and merged over several workers.

A ``torchmetrics.Metric`` keeps its counts in states, each a tensor or a list of tensors, and says
for each how those of several processes are reduced to one (``dist_reduce_fx``). A metric may be
composed of others (wrappers, sums of metrics): every part has states of its own.

The rules are those by which torchmetrics itself merges the ranks of a process group
(``Metric._sync_dist``), with two differences, so that a value does not depend on which worker has
which rows: a part that has seen no row does not count, and a mean is weighted by the updates behind
it (as in ``Metric.merge_state``).

Source: torchmetrics 1.9, ``metric.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparkdl.errors import ModelError, TrainingError

State = Tensor | list[Tensor]


@dataclass(frozen=True)
class PartStates:
    """What one part of a metric has counted on one worker.

    Attributes:
        updates: how many minibatches it has seen.
        states: by name.
    """

    updates: int
    states: dict[str, State]


MetricStates = Sequence[PartStates]
"""The states of each part of a metric, in the order of ``parts_of``."""


def parts_of(metric: Any) -> list[tuple[str, Any]]:
    """A metric and those that it is composed of, each with its place in the metric."""
    from torchmetrics import Metric

    return [(path, part) for path, part in metric.named_modules() if isinstance(part, Metric)]


def pack_states(metrics: Mapping[str, Any]) -> bytes:
    """The states of some metrics, for ``read_states``.

    Raises:
        ModelError: one keeps something that is not a tensor.
    """
    from safetensors.torch import save  # a bare GPU machine that measures nothing may lack it

    tensors = {}
    for index, (name, metric) in enumerate(metrics.items()):
        for path, part in parts_of(metric):
            place = f"{index}/{path}"
            tensors[place] = torch.tensor(part._update_count)
            for key, tensor in _named_tensors(name, part):
                # A separate copy, as metrics may share memory, which safetensors refuses.
                tensors[f"{place}/{key}"] = tensor.detach().cpu().clone().contiguous()
    return save(tensors)


def _named_tensors(name: str, part: Any) -> Iterator[tuple[str, Tensor]]:
    from torchmetrics.utilities import dim_zero_cat

    for key in part._defaults:
        value = getattr(part, key)
        if isinstance(value, list):
            if not all(isinstance(each, Tensor) for each in value):
                raise _no_tensor(name, key)
            if value and part._reductions[key] == dim_zero_cat:
                value = [dim_zero_cat(value)]
            for position, each in enumerate(value):
                yield f"{key}/{position}", each
        elif isinstance(value, Tensor):
            yield key, value
        else:
            raise _no_tensor(name, key)


def _no_tensor(name: str, key: str) -> ModelError:
    return ModelError(
        f"metric '{name}' keeps something other than tensors in its state '{key}', which cannot "
        "be sent to the driver without pickle. Compute it from the predictions that transform "
        "adds"
    )


def read_states(data: bytes, metrics: Sequence[Any]) -> list[MetricStates]:
    """The states of each metric that one worker has sent.

    Args:
        data: from ``pack_states``.
        metrics: those that the states belong to; freshly made.

    Raises:
        TrainingError: they belong to other metrics.
    """
    from safetensors.torch import load

    try:
        tensors = load(data)
    except Exception as error:  # safetensors may raise anything
        raise TrainingError(f"a worker sent no valid metric states: {error}") from error
    found: list[MetricStates] = []
    for index, metric in enumerate(metrics):
        parts = []
        for path, part in parts_of(metric):
            place = f"{index}/{path}"
            updates = tensors.pop(place, None)
            if updates is None or updates.shape != () or updates.dtype is not torch.int64:
                raise _not_states(place)
            states = {key: _take(tensors, f"{place}/{key}", part, key) for key in part._defaults}
            parts.append(PartStates(int(updates), states))
            if int(updates) < 0:
                raise _not_states(place)
        found.append(parts)
    if tensors:
        raise _not_states(min(tensors))
    return found


def _take(tensors: dict[str, Tensor], place: str, part: Any, key: str) -> State:
    if not isinstance(part._defaults[key], list):
        if place not in tensors:
            raise _not_states(place)
        return tensors.pop(place)
    state: list[Tensor] = []
    while (each := tensors.pop(f"{place}/{len(state)}", None)) is not None:
        state.append(each)
    return state


def _not_states(place: str) -> TrainingError:
    return TrainingError(
        f"a worker sent states of different metrics from the driver's (at '{place[:80]}'): are "
        "metrics made the same way everywhere, with the same version of torchmetrics?"
    )


def merge_states(metric: Any, states: Sequence[MetricStates]) -> None:
    """Make a metric what it would be had it seen all workers' rows.

    Args:
        metric: freshly made.
        states: of each worker, always in the same order.

    Raises:
        TrainingError: the states of two workers do not fit together.
    """
    for position, (path, part) in enumerate(parts_of(metric)):
        found = [of_worker[position] for of_worker in states if of_worker[position].updates]
        part._update_count = sum(each.updates for each in found)
        part._computed = None
        for key in part._defaults if found else ():
            try:
                merged = _merged(part._reductions[key], key, found)
            except (RuntimeError, TypeError, ValueError) as error:
                where = f"{type(metric).__name__}.{path}" if path else type(metric).__name__
                raise TrainingError(
                    f"the states '{key}' of {where} do not fit together: {error}"
                ) from error
            setattr(part, key, merged)


def _merged(reduce: Any, key: str, found: Sequence[PartStates]) -> State:
    from torchmetrics.utilities import dim_zero_cat, dim_zero_mean

    first = found[0].states[key]
    if isinstance(first, list):
        flat = [tensor for each in found for tensor in each.states[key]]
        return [dim_zero_cat(flat)] if flat and reduce == dim_zero_cat else flat
    if len(found) == 1:
        return first
    stacked = torch.stack([_tensor(each.states[key]) for each in found])
    if reduce is None:
        return stacked
    if reduce == dim_zero_mean:
        updates = torch.tensor([each.updates for each in found], dtype=torch.float64)
        shares = (updates / math.fsum(updates.tolist())).view(-1, *[1] * (stacked.dim() - 1))
        return (stacked.double() * shares).sum(dim=0).to(first.dtype)
    reduced: State = reduce(stacked)
    return reduced


def _tensor(state: State) -> Tensor:
    assert isinstance(state, Tensor)
    return state
