"""One replica: model + optimizer + device, with its state in a few flat buffers.

Trained parameters and buffers are views into one flat tensor per dtype; see ``flat``. So is the
optimizer's state, if replicas exchange it; see ``optimizer_state``. Parameters that require no
gradient stay where they are; see ``frozen``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparkdl.errors import ModelError
from sparkdl.protocols import (
    Batch,
    Features,
    Layout,
    LossFunction,
    OptimizerBuilder,
    SchedulerBuilder,
    Targets,
)
from sparkdl.replica.buffers import Buffers, left_as_it_was
from sparkdl.replica.flat import FlatGroup, apart_from, flatten
from sparkdl.replica.frozen import FrozenParameters
from sparkdl.replica.losses import LossUse, MinibatchLoss, ModelLoss
from sparkdl.replica.optimizer_state import NamedParameters, OptimizerState, build_optimizer
from sparkdl.replica.schedule import Schedule, Unit
from sparkdl.replica.shards import (
    ShardedSegment,
    Shards,
    require_rows,
    require_same_groups,
    state_cut_with_parameters,
)
from sparkdl.replica.strips import Strips

Precision = Literal["float32", "bf16"]
"""The precision in which forward pass and loss are computed."""


class Replica:
    """A model with its optimizer on one device.

    Args:
        module: the model; it is moved to the device, and its buffers and the parameters that
            require a gradient become flat views.
        optimizer: builds the optimizer from the module's trainable parameters.
        loss: (outputs, targets) -> mean over the minibatch, or (sum, weight), or the model's own.
        device: where the replica lives.
        clip_norm: the largest norm of all gradients together; before each optimizer step, larger
            gradients are scaled down to it. None for no limit.
        precision: ``bf16`` runs forward pass and loss under torch's autocast to bfloat16;
            parameters and gradients keep their dtypes.
        scheduler: builds the learning rate schedule; None for none.
        scheduler_every: what the schedule takes a step after, an optimizer step or an epoch.
        features_as_kwargs: whether features with names are passed as keyword arguments, not one
            dict.

    Raises:
        ModelError: no parameter requires a gradient.

    Attributes:
        clip_norm: as given.
        frozen: the parameters that require no gradient; they are not in the segments.
        optimizer_state: the optimizer's, in the segments.
        divisor: what the loss of the last minibatch was divided by, a float64 scalar; None where
            that was its number of rows.
        shards: what this worker has of the trained parameters; None while that is all.
        strips: the parameters of which this worker trains some rows only; None for none.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerBuilder,
        loss: LossFunction,
        device: torch.device | str = "cpu",
        *,
        clip_norm: float | None = None,
        precision: Precision = "float32",
        scheduler: SchedulerBuilder | None = None,
        scheduler_every: Unit = "epoch",
        features_as_kwargs: bool = False,
    ) -> None:
        self.features_as_kwargs = features_as_kwargs
        self.clip_norm = clip_norm
        self._precision = precision
        self.device = torch.device(device)
        self.module = module.to(self.device)
        self.loss = loss.to(self.device) if isinstance(loss, nn.Module) else loss
        self.use_loss(None)
        self.divisor: Tensor | None = None
        self.shards: Shards | None = None
        self.strips: Strips | None = None
        self._named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self._trainable = [parameter for _, parameter in self._named]
        if not self._trainable:
            raise ModelError(
                f"{type(module).__name__} has no parameter that requires a gradient: there is "
                "nothing to train"
            )
        self._module_groups = flatten(module)
        self.frozen = FrozenParameters(module)
        self._buffers = Buffers(module)
        self._homes = [parameter.data for parameter in self._trainable]
        self._build_optimizer = optimizer
        self.optimizer = build_optimizer(optimizer, self._named)
        self._build_schedule = partial(Schedule, build=scheduler, unit=scheduler_every)
        self.schedule = self._build_schedule(self.optimizer)
        self.optimizer_state = OptimizerState(self.optimizer)

    def shard(self, index: int, count: int) -> None:
        """Keep only a part of the trained parameters, and so of gradients and optimizer state.

        The module cannot be run until the ``shards`` have become its parameters. The state is then
        that of ``whole_state``; ``segments`` and ``layout`` have the buffers alone.

        Args:
            index: this worker's rank.
            count: number of workers.

        Raises:
            ConfigError: parameters or optimizer cannot be divided among workers.
        """
        self.shards = Shards(index, count, self.cut_state())
        self._homes.clear()
        self._module_groups = [each for each in self._module_groups if each.kind == "buffers"]
        whole = self.optimizer
        self.shards.take(self.module, self._trainable)
        self.rebuild_optimizer()
        require_same_groups(whole, self.optimizer)

    def cut_state(self) -> frozenset[str]:
        """The keys of the optimizer's state of which each worker would have its rows.

        Raises:
            ConfigError: parameters or optimizer cannot be divided among workers.
        """
        require_rows(self._named)
        return state_cut_with_parameters(self._build_optimizer, self._named)

    def use_loss(self, use: LossUse) -> None:
        """Use the loss as the driver has found out."""
        self._minibatch_loss = MinibatchLoss(self.loss, use)

    @property
    def adds_losses(self) -> bool:
        """Whether the loss is a sum over the minibatch's rows: gradients add up, too."""
        return self._minibatch_loss.is_sum

    @property
    def may_divide(self) -> bool:
        """Whether losses may have divisors of their own; on all workers alike."""
        return self._minibatch_loss.may_divide

    @property
    def has_own_module(self) -> bool:
        """Whether no other replica has been made of the same module since."""
        pairs = zip(self._trainable, self._homes, strict=True)
        return all(parameter.data_ptr() == home.data_ptr() for parameter, home in pairs)

    def trainable(self) -> list[nn.Parameter]:
        """The parameters that the optimizer updates: those that required a gradient when built."""
        return self._trainable

    def stepped(self) -> list[nn.Parameter]:
        """The same, with this worker's strips in the place of parameters that it has rows of."""
        return self._trainable if self.strips is None else self.strips.in_place(self._trainable)

    def require_strips(self) -> None:
        """Check that the optimizer may step some rows of a parameter by themselves.

        Raises:
            ConfigError: it may not.
        """
        instead = "drop hybrid"
        state_cut_with_parameters(self._build_optimizer, self._named, "hybrid", instead)

    def named_trainable(self) -> NamedParameters:
        """The same with their names in the module."""
        return self._named

    def rebuild_optimizer(
        self,
        build: Callable[
            [OptimizerBuilder, NamedParameters], torch.optim.Optimizer
        ] = build_optimizer,
    ) -> None:
        """Replace the optimizer with one that has not taken a step.

        Args:
            build: called with the first optimizer's builder and the named parameters; by default
                builds it the way the first one was.
        """
        self.optimizer = build(self._build_optimizer, self._named)
        self.schedule = self._build_schedule(self.optimizer)
        self.optimizer_state = OptimizerState(self.optimizer)

    def reset_optimizer_state(self) -> None:
        """Make the optimizer go on as if it had taken no step, at its present learning rate.

        What it keeps outside its ``state`` stays.
        """
        # Some optimizers have state before their first step that only they can create.
        self.optimizer.state = build_optimizer(self._build_optimizer, self._named).state
        self.optimizer_state = OptimizerState(self.optimizer)

    def step(self, batch: Batch) -> Tensor:
        """Train on one minibatch.

        Args:
            batch: features and targets on any device.

        Returns:
            The minibatch's mean loss as a detached scalar on the replica's device.
        """
        loss = self.forward_backward(batch)
        self.update()
        return loss

    def update(self, gain: float = 1.0) -> None:
        """Take an optimizer step on the present gradients.

        Args:
            gain: factor on the learning rates for this step.
        """
        if self.clip_norm is not None:
            cut = self.shards or self.strips
            if cut is None:
                torch.nn.utils.clip_grad_norm_(self.trainable(), self.clip_norm)
            else:
                cut.clip(self.trainable(), self.clip_norm)
        self.optimizer_state.take_over()
        with nullcontext() if self.strips is None else self.strips.stepped(self.optimizer):
            if gain == 1.0:
                self.optimizer.step()
            else:
                self._step_at(gain)
        self.schedule.after_step()

    def _step_at(self, gain: float) -> None:
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * gain
        self.optimizer.step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def forward_backward(self, batch: Batch) -> Tensor:
        """Compute the loss and leave its gradients on the parameters; returns the detached loss."""
        self.optimizer.zero_grad()
        loss = self.forward(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def forward(self, batch: Batch) -> Tensor:
        """The minibatch's mean loss, a scalar on the replica's device with its graph."""
        batch = batch.to(self.device)
        with self._autocast():
            return self.loss_of(self.outputs(batch), batch)

    def outputs(self, batch: Batch, *, with_labels: bool = True) -> Any:
        """What the model returns for a minibatch on the replica's device.

        Args:
            batch: the minibatch.
            with_labels: whether to pass the labels to a model that computes its own loss.
        """
        labels = {}
        if with_labels and isinstance(self.loss, ModelLoss):
            labels = self.loss.labels(batch.targets)
        return forward(
            self.module, batch.features, as_kwargs=self.features_as_kwargs, labels=labels
        )

    def _autocast(self) -> AbstractContextManager[object]:
        if self._precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def loss_of(self, outputs: Any, batch: Batch) -> Tensor:
        """The loss of a minibatch, a scalar; see ``MinibatchLoss``."""
        loss, self.divisor = self._minibatch_loss(outputs, batch)
        return loss

    def evaluate(
        self,
        batches: Iterable[Batch],
        watch: Callable[[Any, Targets, Tensor | None], None] | None = None,
    ) -> tuple[float, float]:
        """Sum the loss without training, with the module in evaluation mode.

        Args:
            batches: the minibatches.
            watch: called with each minibatch's outputs, targets and weights, on the replica's
                device; the outputs are those of prediction, without labels.

        Returns:
            The sum of the (weighted) loss over the rows, and what to divide it by: the sum of the
            weights, which are 1 per row if there are none, or what the minibatches were divided by.
        """
        total = weight = torch.zeros((), dtype=torch.float64, device=self.device)
        # Layers that the user keeps in evaluation mode stay in it afterwards.
        with left_as_it_was(self.module, values=False), torch.no_grad():  # as in transform
            self.module.eval()
            for batch, counts in self._in_step(batches):
                batch = batch.to(self.device)
                with self._autocast():
                    outputs = self.outputs(batch)
                    loss = self.loss_of(outputs, batch)
                    if watch is not None and isinstance(self.loss, ModelLoss):
                        outputs = self.outputs(batch, with_labels=False)
                if not counts:
                    continue
                if watch is not None:
                    watch(outputs, batch.targets, batch.weights)
                if self.divisor is not None:
                    total, weight = total + loss.double() * self.divisor, weight + self.divisor
                    continue
                total = total + loss.double() * batch.examples
                rows = batch.examples if batch.weights is None else batch.weights.double().sum()
                weight = weight + rows
        return float(total), float(weight)

    def _in_step(self, batches: Iterable[Batch]) -> Iterable[tuple[Batch, bool]]:
        """Minibatches, and whether they count: all, and those that the other workers need."""
        if self.shards is None:
            return ((batch, True) for batch in batches)
        return self.shards.in_step(batches, self.device)

    def segments(self, *, with_optimizer: bool) -> list[Tensor]:
        """The flat state, in the order of ``layout``; writing to it changes the replica.

        Args:
            with_optimizer: whether the optimizer's state is part of it.

        Raises:
            TrainingError: something that is not part of it has changed, or is about to.
        """
        self.frozen.glance()
        self._reclaim_parameters()
        self._buffers.reclaim()
        return [group.flat for group in self._groups(with_optimizer)]

    def layout(self, *, with_optimizer: bool) -> Layout:
        """Kinds, dtypes and sizes of ``segments``."""
        return tuple(group.segment for group in self._groups(with_optimizer))

    def _groups(self, with_optimizer: bool) -> list[FlatGroup]:
        of_optimizer = self.optimizer_state.flatten() if with_optimizer else []
        return [*self._module_groups, *of_optimizer]

    def whole_state(self, *, with_optimizer: bool) -> list[Tensor | ShardedSegment]:
        """The segments of all workers' parts together, and those that every worker has.

        Args:
            with_optimizer: whether the optimizer's state is part of it.

        Raises:
            TrainingError: as in ``segments``.
        """
        shards, own = self.shards, self.segments(with_optimizer=with_optimizer and not self.shards)
        if shards is None:
            return [*own]
        of_optimizer = shards.optimizer_segments(self.optimizer_state) if with_optimizer else []
        return [*shards.parameter_segments(), *own, *of_optimizer]

    def count_optimizer_state(self) -> None:
        """Find out what ``segments`` will hold of an optimizer that has taken no step yet."""
        self.optimizer_state.count()
        counted = self.optimizer_state
        # Rebuilt, because some optimizers count their steps, even one on zero gradients.
        self.rebuild_optimizer()
        self.optimizer_state.expect_as(counted)

    def release(self) -> nn.Module:
        """Give up the module: on the CPU, in evaluation mode, each tensor in its own memory.

        Otherwise every parameter, as a view, would be pickled along with its whole flat buffer.
        """
        self._buffers.release()
        for parameter in self.module.parameters():
            parameter.data = parameter.data.clone()
            parameter.grad = None
        return self.module.cpu().eval()

    def _reclaim_parameters(self) -> None:
        """Copy back parameters that were reassigned to other memory (``parameter.data = ...``)."""
        moved = [
            (parameter, home, apart_from(home, parameter.data))
            for parameter, home in zip(self._trainable, self._homes, strict=self.shards is None)
            if parameter.data_ptr() != home.data_ptr()
        ]
        for parameter, home, values in moved:
            home.copy_(values)
            parameter.data = home


def forward(
    module: nn.Module,
    features: Features,
    *,
    as_kwargs: bool = False,
    labels: Mapping[str, Tensor] | None = None,
) -> Any:
    """Call a module with its features as separate arguments, or as one dict.

    Args:
        module: the model.
        features: its inputs.
        as_kwargs: whether features with names are passed as keyword arguments.
        labels: further keyword arguments.
    """
    named = labels or {}
    if not isinstance(features, dict):
        return module(*features, **named)
    return module(**features, **named) if as_kwargs else module(features, **named)
