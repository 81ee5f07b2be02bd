"""How large a worker's gradients are, found out where DistributedDataParallel gathers them.

In the backward pass DDP puts the gradients, divided by the number of workers, one behind the other
into buckets, of which each leaves when it is full. The last one waits for a ``Passenger``, which
comes when all others are there: until then its gradients are this worker's own, and are squared
where they lie. Those of earlier buckets are seen by hooks before they get there, at the price of a
call of Python from the backward pass for each parameter. Models of less than ``bucket_mb`` have one
bucket, and their steps are the ones that are so short that this matters.

Each parameter's squares are added up by themselves, and their sums together are rounded once: the
result is the same to the bit in whatever order DDP lays out the parameters, which is another one
after its first step, and so in the first step of a worker that resumes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparkdl.errors import TrainingError
from sparkdl.strategies.all_reduce.gradient_noise import norms_of
from sparkdl.strategies.base import Run

PIECE = 1 << 20
"""How many numbers are squared and added up at once, for long sums of float32 come out too small:
by 1e-4 for 25 million, and by 1e-6 in such pieces."""

Flat = list[np.ndarray[tuple[int, ...], np.dtype[np.floating[Any]]]]


class OwnSquares:
    """Of the gradients of one worker's minibatches, and then of the mean of all workers'.

    Args:
        run: this worker's, on a CPU.
        workers: how many there are.
        in_place: whether each backward pass ends in the buckets, and with every parameter.

    Attributes:
        looks: whether what the hooks see belongs to a minibatch.
    """

    def __init__(self, run: Run, workers: int, *, in_place: bool) -> None:
        self.looks = False
        self._parameters = run.replica.trainable()
        self._workers = workers
        self._power_of_two = workers & (workers - 1) == 0
        self._in_place = in_place
        self._hooks = {
            place: each.register_hook(partial(self._look_at, place))  # type: ignore[no-untyped-call]
            for place, each in enumerate(self._parameters)
        }
        run.cleanup.callback(self._remove, self._hooks)
        self._seen: dict[int, float] = {}
        self._buckets: _Buckets | None = None

    def take(self) -> float:
        """The sum of the squares of a minibatch's gradients, before its passenger comes.

        Raises:
            TrainingError: DDP has moved what was looked at where it lay.
        """
        seen, self._seen = self._seen, {}
        buckets = self._buckets
        if buckets is None or not buckets.are_there:
            if len(self._hooks) < len(self._parameters):
                raise TrainingError("DistributedDataParallel has not the buckets that it had")
            return _total(seen.values()) * self._workers**2
        self._remove(buckets.last.keys() & self._hooks.keys())
        early = [square for place, square in seen.items() if place not in buckets.last]
        return _total([*early, *_squares(buckets.last.values())]) * self._workers**2

    def of_mean(self, seat: Tensor) -> float:
        """The sum of the squares of the gradients that all workers have now.

        Args:
            seat: the passenger's gradient among them.
        """
        if not self._in_place:
            gradients = [each.grad for each in self._parameters if each.grad is not None]
            return _total(map(_square, gradients))
        if self._buckets is None or not self._buckets.hold(seat):
            self._buckets = _Buckets(self._parameters, seat)
        return _total(self._buckets.squares())

    def _look_at(self, place: int, gradient: Tensor) -> None:
        """Square what DDP is about to make of a gradient."""
        if not self.looks:
            return
        parameter = self._parameters[place]
        alike = gradient.is_contiguous() and parameter.is_contiguous()
        if not _is_plain(gradient) or (alike and self._power_of_two):
            self._seen[place] = _square(gradient) / self._workers**2
            return
        share = torch.empty_like(parameter)
        torch.mul(gradient, 1 / self._workers, out=share)
        self._seen[place] = _total(_squares([_flat(share)]))

    def _remove(self, places: Iterable[int]) -> None:
        for place in list(places):
            self._hooks.pop(place).remove()


class _Buckets:
    """Where DDP has its gradients; as long as this is there, nothing else will lie there.

    Args:
        parameters: with gradients.
        seat: the passenger's, in the bucket that leaves last.

    Attributes:
        last: the gradients in that bucket, by the place of their parameter.
    """

    def __init__(self, parameters: Sequence[Tensor], seat: Tensor) -> None:
        self.last: dict[int, Flat] = {}
        self._seat = seat.data_ptr()
        self._waiting: list[Tensor] = []
        self._early: list[Flat] = []
        self._others: list[Tensor] = []
        bucket = seat.untyped_storage().data_ptr()
        for place, parameter in enumerate(parameters):
            gradient = parameter.grad
            assert gradient is not None
            if not _is_plain(gradient):
                self._others.append(parameter)
            elif gradient.untyped_storage().data_ptr() == bucket:
                self.last[place] = _flat(gradient)
                self._waiting.append(parameter)
            else:
                self._early.append(_flat(gradient))
        self._first = next((flat[0].ctypes.data for flat in self.last.values()), 0)

    @property
    def are_there(self) -> bool:
        """Whether the gradients of the last one still lie where they did."""
        first = self._waiting[0].grad if self._waiting else None
        return not self._waiting or (first is not None and first.data_ptr() == self._first)

    def hold(self, seat: Tensor) -> bool:
        """Whether a gradient of the passenger is in one of them."""
        return seat.data_ptr() == self._seat

    def squares(self) -> list[float]:
        """Of all gradients, as they are now."""
        others = (each.grad for each in self._others)
        return [
            *_squares(self.last.values()),
            *_squares(self._early),
            *(_square(each) for each in others if each is not None),
        ]


def _is_plain(gradient: Tensor) -> bool:
    return not gradient.is_sparse and gradient.dtype in (torch.float32, torch.float64)


def _flat(dense: Tensor) -> Flat:
    """The numbers in the order in which they lie, of a tensor that has no gaps."""
    flat = dense.detach().as_strided((dense.numel(),), (1,))
    return [each.numpy() for each in torch.split(flat, PIECE)]


def _squares(flats: Iterable[Flat]) -> list[float]:
    with np.errstate(over="ignore"):
        return [float(np.dot(piece, piece)) for flat in flats for piece in flat]


def _square(gradient: Tensor) -> float:
    if _is_plain(gradient):
        return _total(_squares([_flat(gradient.contiguous())]))
    return float(norms_of([gradient])[0]) ** 2


def _total(squares: Iterable[float]) -> float:
    try:
        return math.fsum(squares)
    except OverflowError:
        return math.inf
