"""Nesterov's momentum around any optimizer, with place and velocity kept apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparkdl.strategies.worker_group import HALVES


class NesterovMomentum:
    """One replica's velocity v, at momentum m, where the optimizer moves the parameters by u.

        v  <-  m * v + u(x + m * v)          x  <-  x + v

    The parameters are x + m * v, so that the next gradient is taken there. For SGD without
    momentum, u is minus learning rate times gradient: Sutskever et al. 2013, "On the importance of
    initialization and momentum in deep learning". torch's ``SGD(nesterov=True)`` moves the
    parameters the same way while the learning rate is constant, but keeps neither x nor v.

    Args:
        momentum: m, in [0, 1); 0 for none, which costs nothing.
        parameters: where they start.
    """

    def __init__(self, momentum: float, parameters: Sequence[Tensor]) -> None:
        self._momentum = momentum
        parameters = parameters if momentum else []
        # Where the last step left the parameters; velocities in half precision are kept in float32,
        # as small changes to them would be rounded away.
        self._left_at = [values.clone() for values in parameters]
        self._velocity = [
            torch.zeros_like(values, dtype=torch.float32 if values.dtype in HALVES else None)
            for values in parameters
        ]

    def after_step(self, parameters: Sequence[Tensor]) -> None:
        """Coast after the optimizer has moved the parameters; ``leave`` must follow."""
        ends = zip(parameters, self._left_at, self._velocity, strict=self._momentum > 0)
        for values, left_at, velocity in ends:
            moved = torch.sub(values, left_at, out=left_at)
            velocity.mul_(self._momentum).add_(moved)
            values.add_(velocity, alpha=self._momentum)

    def leave(self, parameters: Sequence[Tensor]) -> None:
        """Note where the parameters are when the optimizer's next step begins."""
        for values, left_at in zip(parameters, self._left_at, strict=self._momentum > 0):
            left_at.copy_(values)

    def to_place(self, values: Tensor, index: int) -> None:
        """Turn parameters into x.

        Args:
            values: parameters number ``index``, or a copy of them; overwritten.
            index: counted from 0.
        """
        if self._momentum:
            values.add_(self._velocity[index], alpha=-self._momentum)

    def saved(self) -> dict[str, Any]:
        """For ``restore``."""
        return {f"velocity.{index}": values for index, values in enumerate(self._velocity)}

    def restore(self, saved: Mapping[str, Any], parameters: Sequence[Tensor]) -> None:
        """Take over what was ``saved``.

        Args:
            saved: by a worker with these parameters.
            parameters: where it left them.
        """
        for index, velocity in enumerate(self._velocity):
            velocity.copy_(saved[f"velocity.{index}"])
        self.leave(parameters)
