"""Linear layers that a group of workers computes together, each a strip of the outputs.

The workers stand in a grid: a group is a row of it, and those with the same strip are a column.
When the model calls such a layer with this worker's rows,

    all rows of the group         <-  everyone's rows, sent to everyone
    strip of their outputs        <-  linear(all rows, strip of weight and bias)
    outputs of this worker's rows <-  strips of them, sent back by everyone

and in backward the same in reverse: every worker has the gradients of its strip for all rows of the
group, and of its own rows by all strips. Those of the strip are then summed over its column.

Before each call the members tell each other which layer comes, and with how many rows. So
minibatches may be unequal, a worker without rows does its part with none, and a model that calls
other layers on some rows than on others ends in an error, not in wrong numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from sparkdl.collective import Collective
from sparkdl.errors import ConfigError
from sparkdl.replica.strips import Rows, Strips
from sparkdl.strategies.all_reduce.chain import Step, Transform
from sparkdl.strategies.base import Run
from sparkdl.strategies.worker_group import Grid

NO_ROWS, END = -1, -2
"""What is told in the place of a layer: this worker has no rows; or it has its loss."""
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
IDLE, FORWARD, BACKWARD = "idle", "forward", "backward"


class SplitLayers(Transform):
    """The layers on one worker; every worker has to make one at the same time.

    The layers' ``forward`` is replaced until the worker leaves. Outside of a training step they
    are ordinary layers.

    Args:
        layers: by name.
        grid: the workers, with a group in each row.
        run: this worker's.
        everyone: the group of all workers.

    Attributes:
        row: this worker's group.
    """

    def __init__(
        self, layers: Mapping[str, nn.Linear], grid: Grid, run: Run, everyone: Collective
    ) -> None:
        self._names, self._layers = list(layers), list(layers.values())
        self.row, self._column = everyone.within(grid.rows), everyone.within(grid.columns)
        self._workers = everyone.world_size
        self._replica = run.replica
        own = {
            parameter: self._cut(len(parameter))[self.row.index]
            for layer in self._layers
            for parameter in layer.parameters()
        }
        self._strips = run.replica.strips = Strips(own, self.row.all_reduce)
        run.cleanup.callback(setattr, run.replica, "strips", None)
        # The last layers' gradients are there first.
        self._order = [each for each in reversed(self._strips.of.values()) if each.numel()]
        for place, strip in enumerate(self._order):
            hook = strip.register_post_accumulate_grad_hook(partial(self._filled, place))  # type: ignore[no-untyped-call]
            run.cleanup.callback(hook.remove)
        for index, layer in enumerate(self._layers):
            layer.forward = partial(self._forward, index)  # type: ignore[method-assign]
            run.cleanup.callback(delattr, layer, "forward")
        self._phase, self._last, self._whole = IDLE, False, True
        self._saw_rows = False
        self._awaited: list[str] = []
        self._there: set[int] = set()
        self._sums: list[Any] = []

    @property
    def parameters(self) -> set[nn.Parameter]:
        """The parameters, all of them, that workers have strips of."""
        return set(self._strips.of)

    def _cut(self, outputs: int) -> list[Rows]:
        """Where each member's strip begins and ends; some are empty if there are few outputs."""
        members = self.row.world_size
        ends = [outputs * place // members for place in range(members + 1)]
        return list(itertools.pairwise(ends))

    def before_forward(self, step: Step) -> None:
        """Begin with a minibatch; with a step's first, forget the gradients of the last step.

        Raises:
            ConfigError: a layer took no part in the loss before.
        """
        if not step.passes:
            if self._whole:
                self._strips.forget_others()
                self._whole = False
            for whole, strip in self._strips.of.items():
                whole.grad = strip.grad = None
            self._saw_rows = False
            self._there, self._sums = set(), []
        self._require_none_awaited()
        self._phase, self._last = FORWARD, step.last

    def _require_none_awaited(self) -> None:
        if self._awaited:
            raise self._unused(self._awaited[0])

    def _forward(self, index: int, input: Tensor) -> Tensor:
        """The layer's ``forward``."""
        layer = self._layers[index]
        if self._phase == IDLE:
            return functional.linear(input, layer.weight, layer.bias)
        if self._phase == BACKWARD:
            raise ConfigError(
                f"hybrid: the backward pass calls '{self._names[index]}' again, as with "
                "torch.utils.checkpoint. Leave the layer out of either"
            )
        rows = input.reshape(-1, layer.in_features)
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            rows = rows.to(torch.get_autocast_dtype(kind))
        elif rows.dtype != layer.weight.dtype:
            return functional.linear(input, layer.weight, layer.bias)  # raises torch's own error
        gradients = 1 + rows.requires_grad if torch.is_grad_enabled() else 0
        heads = self._tell(index, len(rows), DTYPES.index(rows.dtype), gradients)
        self._agreed(heads)
        outputs = self._compute(index, rows, [head[1] for head in heads])
        return outputs.view(*input.shape[:-1], layer.out_features)

    def end_forward(self) -> None:
        """Tell the others that this worker has its loss."""
        if self._phase == FORWARD:
            self._agreed(self._tell(END))
            self._phase = BACKWARD

    def serve(self, loss: Tensor) -> Tensor:
        """Do a worker's part that has no rows.

        Args:
            loss: its own, a scalar.

        Returns:
            The same, by whose backward pass it does its part there.
        """
        while self._phase == FORWARD:
            heads = self._tell(NO_ROWS)
            index, dtype, gradients = self._agreed(heads)
            if index in (NO_ROWS, END):
                self._phase = BACKWARD
                break
            layer = self._layers[index]
            rows = layer.weight.new_zeros(0, layer.in_features, dtype=DTYPES[dtype])
            with torch.set_grad_enabled(gradients > 0):
                rows.requires_grad_(gradients > 1)
                outputs = self._compute(index, rows, [head[1] for head in heads])
            if outputs.requires_grad:
                loss = loss + outputs.sum().to(loss.dtype)
        return loss

    def _tell(
        self, what: int, rows: int = 0, dtype: int = 0, gradients: int = 0
    ) -> list[list[int]]:
        """Tell the group what comes next; returns what every member tells."""
        head = torch.tensor([what, rows, dtype, gradients], device=self.row.device)
        return [each.tolist() for each in self.row.all_gather(head)]

    def _agreed(self, heads: list[list[int]]) -> tuple[int, int, int]:
        """The layer, dtype and gradients of those that have rows.

        Raises:
            ConfigError: they do not say the same.
        """
        told = {
            member: (what, dtype, gradients)
            for member, (what, _, dtype, gradients) in zip(self.row.members, heads, strict=True)
            if what != NO_ROWS
        }
        if not told:
            return NO_ROWS, 0, 0
        self._saw_rows = True
        first = min(told)
        other = next((member for member in told if told[member] != told[first]), None)
        if other is not None:
            raise ConfigError(
                f"hybrid: rank {first} {self._in_words(*told[first])} where rank {other} "
                f"{self._in_words(*told[other])}. All workers have to call the layers in the same "
                "order and in the same way, whatever their rows are"
            )
        return told[first]

    def _in_words(self, what: int, dtype: int, gradients: int) -> str:
        if what == END:
            return "has its loss"
        found = ("without gradients", "with inputs that need none", "with inputs that need some")
        return f"calls '{self._names[what]}' in {DTYPES[dtype]} {found[gradients]}"

    def _compute(self, index: int, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """The outputs of this worker's rows, shape (rows, outputs), computed by all.

        Args:
            index: of the layer.
            rows: shape (rows, inputs).
            counts: how many rows each member has.
        """
        layer, width = self._layers[index], rows.shape[1]
        # They have another dtype in autocast.
        weight, bias = (self._strip(each, rows.dtype) for each in (layer.weight, layer.bias))
        everyones = _Exchange.apply(  # type: ignore[no-untyped-call]
            rows.repeat(len(counts), 1).flatten(),
            self,
            [rows.numel()] * len(counts),
            [each * width for each in counts],
            None,
        ).view(sum(counts), width)
        part: Tensor = functional.linear(everyones, weight, bias)
        if part.requires_grad:
            self._awaited.append(self._names[index])
        widths = [stop - start for start, stop in self._cut(layer.out_features)]
        back = [len(rows) * each for each in widths]
        outputs = _Exchange.apply(  # type: ignore[no-untyped-call]
            part.flatten(), self, [each * part.shape[1] for each in counts], back, index
        )
        pieces = zip(outputs.split(back), widths, strict=True)
        return torch.cat([piece.view(len(rows), each) for piece, each in pieces], dim=1)

    def _strip(self, parameter: Any, dtype: torch.dtype) -> Any:
        return None if parameter is None else self._strips.of[parameter].to(dtype)

    def begin_back(self, index: int | None) -> None:
        """Called before gradients are exchanged.

        Args:
            index: of the layer whose outputs' gradients they are; None for the inputs'.

        Raises:
            ConfigError: this is no backward pass of the loss.
        """
        if self._phase != BACKWARD:
            raise ConfigError(
                "hybrid: the model or its loss takes gradients itself, through a layer that groups "
                "compute together. Leave the layer out"
            )
        if index is not None:
            self._awaited.remove(self._names[index])

    def _filled(self, place: int, strip: nn.Parameter) -> None:
        """Sum a strip's gradient over its column as soon as those before it are on their way."""
        if self._last:
            self._there.add(place)
            self._send()

    def _send(self) -> None:
        while (place := len(self._sums)) in self._there:
            gradient = self._order[place].grad
            assert gradient is not None
            if not gradient.is_contiguous():
                gradient = self._order[place].grad = gradient.contiguous()
            self._sums.append(self._column.begin_all_reduce(gradient))

    def after_reduction(self, step: Step) -> None:
        """Finish the sums of the strips' gradients.

        Raises:
            ConfigError: the model reads a weight without calling its layer, or leaves one out.
        """
        self._phase = IDLE
        self._require_none_awaited()
        names = {
            parameter: name
            for name, layer in zip(self._names, self._layers, strict=True)
            for parameter in layer.parameters()
        }
        for whole, strip in self._strips.of.items():
            if whole.grad is not None:
                raise ConfigError(
                    f"hybrid: the model reads the parameters of '{names[whole]}', of which each "
                    "worker has only a part, without calling the layer. Leave the layer out"
                )
            if strip.grad is None:
                if self._saw_rows and strip.numel():
                    raise self._unused(names[whole])
                strip.grad = torch.zeros_like(strip)
        self._there = set(range(len(self._order)))
        self._send()
        for arrive in self._sums:
            arrive()
        for each in self._order:
            if each.grad is not None:
                each.grad.div_(self._workers)  # as DistributedDataParallel does

    def _unused(self, name: str) -> ConfigError:
        return ConfigError(
            f"hybrid: '{name}' takes no part in a loss, but has to in each. Leave the layer out"
        )

    @torch.no_grad()
    def gather(self) -> None:
        """Put the strips together, of parameters and optimizer state; every worker has to."""
        for whole, values in self._strips.tensors(self._replica.optimizer):
            bounds = self._cut(len(whole))
            start, stop = bounds[self.row.index]
            most = max(stop - start for start, stop in bounds)
            mine = values.new_zeros(most, *values.shape[1:])
            mine[: stop - start] = values[start:stop]
            for (start, stop), strip in zip(bounds, self.row.all_gather(mine), strict=True):
                values[start:stop] = strip[: stop - start]
        self._whole = True


class _Exchange(torch.autograd.Function):
    """An exchange within the group, whose gradients go back where the values came from."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        layers: SplitLayers,
        sent: list[int],
        received: list[int],
        index: int | None,
    ) -> Tensor:
        """What was received."""
        ctx.layers, ctx.sizes, ctx.index = layers, (received, sent), index
        return layers.row.all_to_all(values, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of what was sent."""
        ctx.layers.begin_back(ctx.index)
        back = ctx.layers.row.all_to_all(gradient.contiguous(), *ctx.sizes)
        return back, None, None, None, None
