"""A replica of which this worker keeps its part: parameters, gradients and optimizer state.

Each trained parameter is cut along its first dimension, as torch's ``fully_shard`` cuts it: of n
rows and R workers, each has ceil(n / R), the last ones fewer or none. State of the optimizer that
has a parameter's shape is cut like the parameter; the rest, such as a count of steps, is the same
on all workers. In the order in which a replica's whole state travels, a worker's part of a tensor
is one stretch.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sparkdl.errors import ConfigError
from sparkdl.protocols import Batch
from sparkdl.replica.flat import has_gradient_hook
from sparkdl.replica.optimizer_state import (
    NamedParameters,
    OptimizerState,
    build_optimizer,
    floats_of,
)

PIECE_BYTES = 4 << 20
"""The most that is sent at a time between two workers, in bytes."""
_ROWS, _OTHERS, _STEPS = 6, 3, 3
"""Sizes of the parameters on which an optimizer is tried, and its steps on them."""
_TOLERANCE = 1e-5
"""Relative; an optimizer may compute in float32 whatever its parameters are."""


@dataclass(frozen=True, eq=False)
class Part:
    """This worker's part of one tensor of the whole state.

    Attributes:
        local: what this worker has, contiguous; all of the tensor if it is not cut.
        shape: of the whole tensor.
        cut: whether each worker has other rows of it.
        written: called when the whole tensor was overwritten by values that are not all zero.
    """

    local: Tensor
    shape: torch.Size
    cut: bool
    written: Callable[[], None] = lambda: None

    def own(self, rank: int, count: int) -> tuple[int, int]:
        """Where the values that a worker has begin and end in the whole tensor."""
        if not self.cut:
            return 0, self.shape.numel()
        rows = self.shape[0]
        a_row = self.shape.numel() // max(1, rows)
        return rows_before(rows, rank, count) * a_row, rows_before(rows, rank + 1, count) * a_row


def rows_before(rows: int, rank: int, count: int) -> int:
    """How many of a tensor's rows belong to workers before ``rank``, of ``count`` in all."""
    return min(rows, -(-rows // count) * rank)


class ShardedSegment:
    """One flat stretch of the whole state, in the place of its tensor.

    Args:
        parts: this worker's parts, in the order of the whole state; same dtype.
        index: this worker's rank.
        count: number of workers.

    Attributes:
        dtype: of the values.
        receive: returns the next values that a rank sends, given their number; to be set by who
            reads the segment.
    """

    def __init__(self, parts: Sequence[Part], index: int, count: int) -> None:
        self.dtype = parts[0].local.dtype
        self.receive: Callable[[int, int], Tensor] | None = None
        self._parts = parts
        sizes = [part.shape.numel() for part in parts]
        self._begins = list(itertools.accumulate(sizes, initial=0))[:-1]
        self._numel = sum(sizes)
        self._index = index
        self._count = count
        self._incoming: Iterator[Tensor] | None = None
        self._rest = torch.empty(0, dtype=self.dtype)

    def numel(self) -> int:
        """Number of values in the whole stretch."""
        return self._numel

    def _pieces(self) -> Iterator[tuple[int, int, Tensor | None]]:
        """Who has it, how many values, and the values if it is this worker; in order."""
        most = max(1, PIECE_BYTES // self.dtype.itemsize)
        for part in self._parts:
            for rank in range(self._count if part.cut else 1):
                first, last = part.own(rank, self._count)
                mine = part.local.detach().view(-1) if rank == self._index else None
                for start in range(0, last - first, most):
                    stop = min(start + most, last - first)
                    yield rank, stop - start, None if mine is None else mine[start:stop]

    def mine(self) -> Iterator[Tensor]:
        """The values that this worker has of it, in pieces, in the order in which they are read."""
        for _, _, values in self._pieces():
            if values is not None:
                yield values

    def read_on(self, into: Tensor) -> None:
        """Read the next values of the whole stretch, from wherever they are.

        Args:
            into: on the CPU, as many values as to read.
        """
        if self._incoming is None:
            self._incoming = self._all_pieces()
        filled = 0
        while filled < len(into):
            if not len(self._rest):
                self._rest = next(self._incoming)
            taken = self._rest[: len(into) - filled]
            into[filled : filled + len(taken)].copy_(taken)
            self._rest = self._rest[len(taken) :]
            filled += len(taken)

    def _all_pieces(self) -> Iterator[Tensor]:
        assert self.receive is not None
        for rank, numel, values in self._pieces():
            yield self.receive(rank, numel) if values is None else values

    def write(self, start: int, values: Tensor) -> None:
        """Overwrite this worker's part of some values of the whole stretch.

        Args:
            start: where they begin in it.
            values: shape (values,), on the CPU.
        """
        stop = start + len(values)
        for place in range(bisect_right(self._begins, start) - 1, len(self._parts)):
            part, begin = self._parts[place], self._begins[place]
            if begin >= stop:
                return
            if values[max(0, begin - start) : begin + part.shape.numel() - start].any():
                part.written()
            first, last = (begin + each for each in part.own(self._index, self._count))
            low, high = max(start, first), min(stop, last)
            if low < high:
                own = part.local.detach().view(-1)
                own[low - first : high - first].copy_(values[low - start : high - start])


@dataclass(eq=False)
class Shards:
    """What this worker has of the trained parameters, and how it acts together with the others.

    While it is without a process group, the module has stand-ins on the ``meta`` device in place of
    its parameters.

    Attributes:
        index: this worker's rank.
        count: number of workers.
        shapes: of the whole parameters.
        stand_ins: what the module has in place of each parameter.
        owners: the modules of which each is a parameter, with its name there.
        cut_state: keys of the optimizer's state that is cut like its parameter.
        all_reduce: overwrites a tensor with the sum over all workers and returns it.
        example: any minibatch of this worker, for forward passes that only others need.
    """

    index: int
    count: int
    cut_state: frozenset[str]
    shapes: dict[nn.Parameter, torch.Size] = field(default_factory=dict)
    stand_ins: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = field(default_factory=dict)
    all_reduce: Callable[[Tensor], Tensor] = lambda tensor: tensor
    example: Batch | None = None

    def take(self, module: nn.Module, trained: Iterable[nn.Parameter]) -> None:
        """Cut a module's parameters, so that each becomes this worker's part of it.

        Args:
            module: its parameters become stand-ins.
            trained: the parameters to cut; they become parts, and are the module's no longer.
        """
        owners: dict[int, list[tuple[nn.Module, str]]] = {}
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    owners.setdefault(id(parameter), []).append((owner, name))
        for parameter in trained:
            rows = parameter.shape[0]
            start, stop = (rows_before(rows, self.index + i, self.count) for i in (0, 1))
            self.shapes[parameter] = parameter.shape
            self.owners[parameter] = owners[id(parameter)]
            stand_in = nn.Parameter(torch.empty_like(parameter, device="meta"))
            self.stand_ins[parameter] = stand_in
            self.put(parameter, stand_in)
            parameter.data = parameter.data[start:stop].clone()

    def put(self, parameter: nn.Parameter, in_module: nn.Parameter) -> None:
        """Give the module something in the place of a parameter."""
        for owner, name in self.owners[parameter]:
            setattr(owner, name, in_module)

    def parameter_segments(self) -> list[ShardedSegment]:
        """The whole parameters, as they travel."""
        families: dict[torch.dtype, list[Part]] = {}
        for parameter, shape in self.shapes.items():
            part = Part(parameter, shape, cut=True)
            families.setdefault(parameter.dtype, []).append(part)
        return self._segments(families)

    def optimizer_segments(self, state: OptimizerState) -> list[ShardedSegment]:
        """The optimizer's whole state, as it travels."""
        families: dict[torch.dtype, list[Part]] = {}
        for parameter, of_parameter, key in state.lend():
            values = of_parameter[key]
            cut = key in self.cut_state
            if not values.is_contiguous():
                values = of_parameter[key] = values.contiguous()
            shape = self.shapes[parameter] if cut else values.shape

            def written(parameter: nn.Parameter = parameter) -> None:
                state.adopt(parameter)

            families.setdefault(values.dtype, []).append(Part(values, shape, cut, written))
        return self._segments(families)

    def _segments(self, families: dict[torch.dtype, list[Part]]) -> list[ShardedSegment]:
        return [ShardedSegment(parts, self.index, self.count) for parts in families.values()]

    def clip(self, parameters: Sequence[nn.Parameter], norm: float) -> None:
        """Scale the gradients down if the norm of all workers' parts together is larger.

        Args:
            parameters: this worker's parts.
            norm: the largest that is allowed.
        """
        gradients = [each.grad for each in parameters if each.grad is not None]
        own = torch.nn.utils.get_total_norm(gradients)
        device = gradients[0].device if gradients else own.device
        total = self.all_reduce(own.to(device, torch.float64).square()).sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters, norm, total)

    def in_step(
        self, batches: Iterable[Batch], device: torch.device
    ) -> Iterator[tuple[Batch, bool]]:
        """The worker's minibatches, and as many more as the worker with the most has.

        Args:
            batches: the worker's.
            device: where the workers exchange numbers.

        Yields:
            A minibatch, and whether it counts.
        """
        remaining, example = iter(batches), self.example
        while True:
            batch = next(remaining, None)
            going_on = torch.tensor(float(batch is not None), device=device)
            if not self.all_reduce(going_on).item():
                return
            example = batch or example
            assert example is not None
            yield example, batch is not None


def require_rows(named: NamedParameters) -> None:
    """Check that parameters can be cut into rows that are stretches of memory.

    Raises:
        ConfigError: one cannot, or they have several dtypes.
    """
    pairs = list(named)
    dtypes = {parameter.dtype for _, parameter in pairs}
    if len(dtypes) > 1:
        raise ConfigError(
            "shard_parameters takes trained parameters of one dtype, but this model has "
            f"{', '.join(sorted(map(str, dtypes)))}: convert it with .to(), or drop it"
        )
    for name, parameter in pairs:
        found = None
        if parameter.ndim == 0:
            found = "is a scalar: give it the shape (1,)"
        elif parameter.is_complex():
            found = "is complex: keep its real and imaginary parts"
        elif not parameter.is_contiguous():
            found = f"has the strides {parameter.stride()}: make it .contiguous()"
        elif has_gradient_hook(parameter):
            found = "has a hook on its gradient, which no part of it has: do without the hook"
        if found is not None:
            raise ConfigError(
                f"shard_parameters cuts parameters into rows, but '{name}' {found}, or drop it"
            )


def require_same_groups(whole: torch.optim.Optimizer, parts: torch.optim.Optimizer) -> None:
    """Check that an optimizer treats parts of parameters as it would treat the whole ones.

    Args:
        whole: built for the whole parameters.
        parts: built for the parts, in the same way.

    Raises:
        ConfigError: its groups of parameters, or their settings, are others.
    """
    if _groups_of(whole) != _groups_of(parts):
        raise ConfigError(
            "shard_parameters leaves each worker some rows of each parameter, and the optimizer "
            "sorts these into other groups than the whole parameters. Sort by name or by number "
            "of dimensions instead (let the builder's argument be named_parameters)"
        )


def _groups_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    place = {
        parameter: number
        for number, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"])
    }
    return [
        (
            [(place[p], p.ndim) for p in group["params"]],
            {key: repr(value) for key, value in group.items() if key != "params"},
        )
        for group in optimizer.param_groups
    ]


def state_cut_with_parameters(
    build: Any,
    named: NamedParameters,
    setting: str = "shard_parameters",
    instead: str = "GradientAllReduce(shard_optimizer=True), which shards whole parameters",
) -> frozenset[str]:
    """Find out whether an optimizer may step each part of a parameter by itself.

    It is tried on small parameters, whole and in two parts, with the same gradients.

    Args:
        build: the user's function, or optimizer class.
        named: the parameters to train.
        setting: what cuts them, for the message.
        instead: what else to use, likewise.

    Returns:
        The keys of its state that has a parameter's shape, and so is cut like it.

    Raises:
        ConfigError: the parts do not become what the whole would.
    """
    pairs = list(named)
    numbers = torch.Generator().manual_seed(0)
    shapes = [(_ROWS, *(_OTHERS,) * (p.ndim - 1)) for _, p in pairs]
    values, *gradients = (
        [torch.randn(shape, generator=numbers, dtype=torch.float64) for shape in shapes]
        for _ in range(1 + _STEPS)
    )
    results = []
    for rows in (slice(None), slice(0, _ROWS // 2), slice(_ROWS // 2, None)):
        parameters = [nn.Parameter(each[rows].clone()) for each in values]
        names = [name for name, _ in pairs]
        optimizer = build_optimizer(build, zip(names, parameters, strict=True))
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient[rows].clone()
            optimizer.step()
        results.append((optimizer, parameters))
    cut: set[str] = set()
    common: set[str] = set()
    for whole, *halves in zip(*(parameters for _, parameters in results), strict=True):
        states = [
            floats_of(optimizer.state.get(each, {}))
            for (optimizer, _), each in zip(results, (whole, *halves), strict=True)
        ]
        mine = {key for key, value in states[0].items() if value.shape == whole.shape}
        rest = states[0].keys() - mine
        alike = (
            all(state.keys() == states[0].keys() for state in states)
            and _close(whole.detach(), torch.cat([each.detach() for each in halves]))
            and all(_close(states[0][k], torch.cat([s[k] for s in states[1:]])) for k in mine)
            and all(_close(states[0][k], state[k]) for k in rest for state in states[1:])
        )
        cut |= mine
        common |= rest
        if not alike or cut & common:
            raise ConfigError(
                f"{setting} leaves each worker some rows of a parameter, and "
                f"{type(results[0][0]).__name__} steps those otherwise than it would step the "
                "whole. Use an optimizer that steps each value by itself, such as SGD or AdamW, "
                f"or {instead}"
            )
    return frozenset(cut)


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=_TOLERANCE, atol=1e-12)
