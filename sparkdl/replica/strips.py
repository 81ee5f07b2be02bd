"""Parameters of which this worker trains a strip of rows, and other workers the other strips.

The parameters and the optimizer's state of them stay whole, so that the replica's flat state does:
a strip is a view of its rows. While the optimizer takes a step, strips stand in the place of whole
parameters. Between two times at which all strips are put together, the rows of other workers are
NaN, so that whatever reads them does not go on with old values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

Rows = tuple[int, int]
"""Where a strip begins and ends among the rows of its parameter."""


class Strips:
    """This worker's strips.

    Args:
        rows: of each parameter that is cut.
        add: returns the sum of a tensor over the workers that have the other strips.

    Attributes:
        of: by parameter, its strip: a view that has a gradient of its own.
    """

    def __init__(
        self, rows: Mapping[nn.Parameter, Rows], add: Callable[[Tensor], Tensor] = lambda own: own
    ) -> None:
        self.of = {whole: nn.Parameter(whole.data[slice(*own)]) for whole, own in rows.items()}
        self._rows = dict(rows)
        self._add = add

    def in_place(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters, with strips in the place of those that are cut."""
        return [self.of.get(each, each) for each in parameters]

    @torch.no_grad()
    def forget_others(self) -> None:
        """Overwrite the rows of other workers."""
        for whole, (start, stop) in self._rows.items():
            whole.data[:start].fill_(math.nan)
            whole.data[stop:].fill_(math.nan)

    def tensors(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """The parameters that are cut, and the optimizer's state that is cut like them, whole.

        Args:
            optimizer: it may have taken no step yet.

        Yields:
            The parameter, and its values or a tensor of its state.
        """
        for whole in self.of:
            yield whole, whole.data
            state = optimizer.state.get(whole, {})
            for key in sorted(state, key=str):
                if _is_like(state[key], whole):
                    yield whole, state[key]

    @contextmanager
    def stepped(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Have an optimizer step the strips, with views of its state, while in this context."""
        wholes = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = self.in_place(group["params"])
        before = {}
        for whole, strip in self.of.items():
            if known := optimizer.state.pop(whole, None):
                before[whole] = known
                optimizer.state[strip] = self._cut(known, whole)
        try:
            yield
        finally:
            for group, parameters in zip(optimizer.param_groups, wholes, strict=True):
                group["params"] = parameters
            for whole, strip in self.of.items():
                if found := optimizer.state.pop(strip, None):
                    optimizer.state[whole] = self._join(found, before.get(whole, {}), whole)

    def _cut(self, state: Mapping[str, Any], whole: nn.Parameter) -> dict[str, Any]:
        own = slice(*self._rows[whole])
        return {key: v[own] if _is_like(v, whole) else v for key, v in state.items()}

    def _join(
        self, state: Mapping[str, Any], before: Mapping[str, Any], whole: nn.Parameter
    ) -> dict[str, Any]:
        own, strip = slice(*self._rows[whole]), self.of[whole]
        joined = {}
        for key, value in state.items():
            joined[key] = value
            if not _is_like(value, strip):
                continue
            known = before.get(key)
            if known is None or not _is_like(known, whole):
                known = torch.zeros_like(whole, dtype=value.dtype, device=value.device)
            if known[own].data_ptr() != value.data_ptr():
                known[own] = value
            joined[key] = known
        return joined

    def clip(self, parameters: Iterable[nn.Parameter], limit: float) -> None:
        """Scale all gradients down if their norm is larger than a limit.

        Args:
            parameters: all that are trained; every worker has to call it.
            limit: the largest norm of all gradients together.
        """
        strips = {id(each) for each in self.of.values()}
        stepped = [each for each in self.in_place(parameters) if each.grad is not None]
        own: list[Tensor] = []
        others: list[Tensor] = []
        for each in stepped:
            assert each.grad is not None
            (own if id(each) in strips else others).append(each.grad)
        device = next(iter(self.of)).device
        squares = [get_total_norm(each).to(device, torch.float64) ** 2 for each in (own, others)]
        total = self._add(squares[0]) + squares[1]
        clip_grads_with_norm_(stepped, limit, total.sqrt())


def _is_like(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape
