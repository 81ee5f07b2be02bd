"""One replica: model + optimizer + device, its state laid out in a few flat buffers.

What trains, and the buffers, are views into one flat tensor per dtype, so a contribution to a round
is the flat tensor itself and an update is one write in place; nothing is gathered or scattered per
round. Parameters that require no gradient stay where they are; see ``frozen``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparkdl.errors import ModelError, TrainingError
from sparkdl.frozen import FrozenParameters
from sparkdl.lazy_compiler import defer_compiler
from sparkdl.losses import ModelLoss, loss_of_rows, weighted_mean
from sparkdl.optimizers import NamedParameters, build_optimizer
from sparkdl.protocols import (
    Batch,
    Features,
    Layout,
    LossFunction,
    OptimizerBuilder,
    SchedulerBuilder,
    Segment,
    Targets,
)
from sparkdl.schedule import Schedule, Unit

Precision = Literal["float32", "bf16"]
"""In which forward and loss are computed."""

StatePlace = tuple[dict[str, Tensor], str]
"""Where an optimizer keeps one tensor: (the state of a parameter, the key in it)."""


class FlatGroup:
    """Tensors of one kind and dtype, all views into one flat tensor.

    A tensor's values lie in the order in which they lay before, so that a model in channels_last
    stays so; every replica has to be built the same way.

    Args:
        kind: ``parameters``, ``buffers`` or ``optimizer``.
        tensors: the tensors to move into the flat buffer; same dtype and device.
    """

    def __init__(self, kind: str, tensors: Sequence[Tensor]) -> None:
        self.kind = kind
        self.flat = torch.empty(
            sum(t.numel() for t in tensors), dtype=tensors[0].dtype, device=tensors[0].device
        )
        self.views: list[Tensor] = []
        start = 0
        for tensor in tensors:
            # Of a tensor without gaps or overlaps these are its own strides.
            strides = torch.empty_like(tensor, device="meta").stride()
            view = self.flat.as_strided(tensor.shape, strides, start)
            view.copy_(tensor.detach())
            self.views.append(view)
            start += tensor.numel()

    @property
    def segment(self) -> Segment:
        """What this group is called on the wire."""
        return Segment(self.kind, self.flat.dtype, self.flat.numel())


class Replica:
    """A model with its optimizer on one device.

    Args:
        module: the model; moved to the device, its buffers and the parameters that require a
            gradient become flat views.
        optimizer: builds the optimizer from the module's trainable parameters.
        loss: (outputs, targets) -> mean over the minibatch, or the model's own.
        device: where the replica lives.
        clip_norm: the largest norm of all gradients together, to which a larger one is scaled
            down before each optimizer step; None for no limit.
        precision: ``bf16`` runs forward and loss under torch's autocast to bfloat16, parameters
            and gradients staying what they are.
        scheduler: builds the schedule of the optimizer's learning rate; None for none.
        scheduler_every: after what the schedule takes a step, an optimizer step or an epoch.
        features_as_kwargs: whether features by name are arguments by those names, not one dict.

    Raises:
        ModelError: no parameter requires a gradient.

    Attributes:
        frozen: the parameters that require none, of which the segments hold nothing.
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
        self._clip_norm = clip_norm
        self._precision = precision
        self.device = torch.device(device)
        self.module = module.to(self.device)
        self.loss = loss.to(self.device) if isinstance(loss, nn.Module) else loss
        self._loss_of_rows = loss_of_rows(self.loss)
        self._named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self._trainable = [parameter for _, parameter in self._named]
        if not self._trainable:
            raise ModelError(
                f"{type(module).__name__} has no parameter that requires a gradient: there is "
                "nothing to train"
            )
        self.take_as_frozen()
        self._module_groups = flatten(module)
        self._homes = [parameter.data for parameter in self._trainable]
        self._optimizer_groups: list[FlatGroup] = []
        defer_compiler()
        self._build_optimizer = optimizer
        self.optimizer = build_optimizer(optimizer, self._named)
        self._build_schedule = partial(Schedule, build=scheduler, every=scheduler_every)
        self.schedule = self._build_schedule(self.optimizer)
        self._forget_optimizer_state()

    def _forget_optimizer_state(self) -> None:
        self._reserved: dict[Tensor, dict[str, Any]] = {}
        """The state that parameters without a gradient until now will have, all zero."""
        self._stateless: set[Tensor] = set()
        self._lent = False
        """Whether others may have written to that since the last step."""
        self._counted: dict[str, int] | None = None
        """How many values of each kind of state there are; None until someone has asked."""

    def take_as_frozen(self) -> None:
        """Have what requires no gradient stay as it is now; for whoever has overwritten it."""
        self.frozen = FrozenParameters(self.module)

    def trainable(self) -> list[nn.Parameter]:
        """The parameters that the optimizer works on: what required a gradient when built."""
        return self._trainable

    def named_trainable(self) -> NamedParameters:
        """The same with their names in the module."""
        return self._named

    def rebuild_optimizer(
        self,
        build: Callable[
            [OptimizerBuilder, NamedParameters], torch.optim.Optimizer
        ] = build_optimizer,
    ) -> None:
        """Replace the optimizer by one that has not taken a step.

        Args:
            build: given the builder of the first one, and the parameters with their names; by
                default it is built as that was.
        """
        self.optimizer = build(self._build_optimizer, self._named)
        self.schedule = self._build_schedule(self.optimizer)
        self._forget_optimizer_state()

    def reset_optimizer_state(self) -> None:
        """Have the optimizer go on as if it had taken no step, at the learning rate that it has.

        What it keeps elsewhere than in its ``state`` stays.
        """
        # Some have state before their first step, which only they know how to make.
        self.optimizer.state = build_optimizer(self._build_optimizer, self._named).state
        self._forget_optimizer_state()

    @property
    def clips_gradients(self) -> bool:
        """Whether gradients are scaled down before an optimizer step if their norm is large."""
        return self._clip_norm is not None

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
        """Take an optimizer step on the gradients that are there.

        Args:
            gain: by what the learning rates are multiplied for this step.
        """
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.trainable(), self._clip_norm)
        self.take_over_state()
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
            with_labels: whether a model that computes its own loss is given them.
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
        """The loss of a minibatch, a scalar: the mean, or the mean of the weighted rows."""
        targets = align_targets(outputs, batch.targets)
        if batch.weights is None:
            return self.loss(outputs, targets)
        return weighted_mean(self._loss_of_rows(outputs, targets), batch.weights)

    def evaluate(
        self, batches: Iterable[Batch], watch: Callable[[Any, Targets], None] | None = None
    ) -> tuple[float, float]:
        """Sum up the loss without training, the module in evaluation mode meanwhile.

        Args:
            batches: minibatches.
            watch: given the outputs and the targets of each, on the replica's device: what the
                model returns when it predicts, without labels.

        Returns:
            The sum of the (weighted) loss over the rows, and that of the weights: 1 a row if there
            are none.
        """
        total = weight = torch.zeros((), dtype=torch.float64, device=self.device)
        training = self.module.training
        self.module.eval()
        with torch.no_grad():  # as in transform
            for batch in batches:
                batch = batch.to(self.device)
                with self._autocast():
                    outputs = self.outputs(batch)
                    loss = self.loss_of(outputs, batch)
                    if watch is not None and isinstance(self.loss, ModelLoss):
                        outputs = self.outputs(batch, with_labels=False)
                if watch is not None:
                    watch(outputs, batch.targets)
                total = total + loss.double() * batch.examples
                rows = batch.examples if batch.weights is None else batch.weights.double().sum()
                weight = weight + rows
        self.module.train(training)
        return float(total), float(weight)

    def segments(self, *, with_optimizer: bool) -> list[Tensor]:
        """The flat state, in the order of ``layout``; writing to it changes the replica.

        Args:
            with_optimizer: whether the optimizer's state is part of it.

        Raises:
            TrainingError: something that is no part of it has changed, or is about to.
        """
        self.frozen.glance()
        self._reclaim_parameters()
        for group in self._module_groups:
            if group.kind == "buffers":
                _reclaim_buffers(self.module, group)
        groups = list(self._module_groups)
        if with_optimizer:
            self._flatten_optimizer_state()
            groups += self._optimizer_groups
        return [group.flat for group in groups]

    def layout(self, *, with_optimizer: bool) -> Layout:
        """Kinds, dtypes and sizes of ``segments``."""
        groups = list(self._module_groups)
        if with_optimizer:
            self._flatten_optimizer_state()
            groups += self._optimizer_groups
        return tuple(group.segment for group in groups)

    def count_optimizer_state(self) -> None:
        """Find out what ``segments`` will hold of the optimizer, for one that has taken no step."""
        self._flatten_optimizer_state()
        counted, stateless, self._optimizer_groups = self._counted, self._stateless, []
        # Anew, for some count the steps themselves, also one on zero gradients.
        self.rebuild_optimizer()
        self._counted, self._stateless = counted, stateless

    def release(self) -> nn.Module:
        """Give the module away: on the CPU, in evaluation mode, each tensor in memory of its own.

        A view would be pickled together with its whole flat buffer, once for each parameter.
        """
        for group in self._module_groups:
            if group.kind == "buffers":
                _reclaim_buffers(self.module, group)
                _rebind_buffers(self.module, {id(view): view.clone() for view in group.views})
        for parameter in self.module.parameters():
            parameter.data = parameter.data.clone()
            parameter.grad = None
        return self.module.cpu().eval()

    def _reclaim_parameters(self) -> None:
        """Copy back parameters that were given other memory (``parameter.data = ...``)."""
        for parameter, home in zip(self._trainable, self._homes, strict=True):
            if parameter.data_ptr() != home.data_ptr():
                home.copy_(parameter.data)
                parameter.data = home

    def take_over_state(self) -> None:
        """Give the optimizer state that the segments hold of parameters which it has not stepped.

        Other replicas, or the training of which this one is continued, may have had gradients for
        them. Where nobody had, the segments hold zeros, and the optimizer begins as it would have
        begun without us: with a step counter of 0, or a momentum that it takes from the gradient.
        """
        lent, self._lent = self._lent, False
        for parameter, state in list(self._reserved.items()):
            # Of its own, or what of a checkpoint is not in the segments.
            known = self.optimizer.state.get(parameter, {})
            if known or (lent and any(bool(values.any()) for values in _floats(state).values())):
                self.optimizer.state[parameter] = {**self._reserved.pop(parameter), **known}

    def _flatten_optimizer_state(self) -> None:
        """Give the optimizer's floating-point state a flat home.

        Optimizers create their state in the first step and some replace a tensor instead of
        writing to it, so the places are compared each time.
        """
        self.take_over_state()
        self._reserve_missing_state()
        self._lent = bool(self._reserved)
        families: dict[tuple[torch.dtype, torch.device], list[StatePlace]] = {}
        for state, key in self._optimizer_tensors():
            tensor = state[key]
            families.setdefault((tensor.dtype, tensor.device), []).append((state, key))
        places = [place for family in families.values() for place in family]
        views = [view for group in self._optimizer_groups for view in group.views]
        unmoved = len(places) == len(views) and all(
            state[key] is view for (state, key), view in zip(places, views, strict=True)
        )
        if unmoved and self._counted is not None:
            return
        self._require_state_as_counted(places)
        self._optimizer_groups = []
        for family in families.values():
            group = FlatGroup("optimizer", [state[key] for state, key in family])
            for (state, key), view in zip(family, group.views, strict=True):
                state[key] = view
            self._optimizer_groups.append(group)

    def _require_state_as_counted(self, places: Sequence[StatePlace]) -> None:
        """Check that there is neither more nor less state than when it was counted first."""
        now: dict[str, int] = {}
        for state, key in places:
            now[key] = now.get(key, 0) + state[key].numel()
        if self._counted is None:
            self._counted = now
        before = self._counted
        other = [key for key in before | now if before.get(key) != now.get(key)]
        if other:
            changes = ", ".join(
                f"{before.get(key, 0)} values of {key!r} before, {now.get(key, 0)} now"
                for key in other
            )
            raise TrainingError(
                f"the state of {type(self.optimizer).__name__} has grown or shrunk since its first "
                f"step: {changes}. Replicas exchange what there was then. Use an optimizer that "
                "makes all of its state in its first step, or leave each replica its own: "
                "ParameterAveraging(average_optimizer_state=False)"
            )

    def _reserve_missing_state(self) -> None:
        """Find out what the state of parameters will look like that the optimizer has not stepped.

        Every replica must have the same layout, also one without rows and one whose model leaves
        a parameter unused, and only the optimizer knows what its state looks like: it steps those
        parameters once on zero gradients, and they and their state are put back.
        """
        optimizer = self.optimizer
        trainable = [p for group in optimizer.param_groups for p in group["params"]]
        missing = [
            p
            for p in trainable
            if not optimizer.state.get(p) and p not in self._reserved and p not in self._stateless
        ]
        if not missing:
            return
        saved = [parameter.detach().clone() for parameter in missing]
        optimizer.zero_grad()
        for parameter in missing:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter, values in zip(missing, saved, strict=True):
                parameter.copy_(values)
                state = optimizer.state.pop(parameter, {})
                for tensor in _floats(state).values():
                    tensor.zero_()
                if _floats(state):
                    self._reserved[parameter] = state
                else:
                    self._stateless.add(parameter)

    def _optimizer_tensors(self) -> list[StatePlace]:
        """Where floating-point state of the optimizer is or will be, in a fixed order."""
        return [
            (state, key)
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            for state in [self.optimizer.state.get(parameter) or self._reserved.get(parameter, {})]
            for key in sorted(_floats(state), key=str)
        ]


def forward(
    module: nn.Module,
    features: Features,
    *,
    as_kwargs: bool = False,
    labels: Mapping[str, Tensor] | None = None,
) -> Any:
    """What a module returns for features as separate arguments, or as one dict.

    Args:
        module: the model.
        features: its inputs.
        as_kwargs: whether features by name are arguments by those names.
        labels: further arguments by name.
    """
    named = labels or {}
    if not isinstance(features, dict):
        return module(*features, **named)
    return module(**features, **named) if as_kwargs else module(features, **named)


def align_targets(outputs: Any, targets: Targets) -> Targets:
    """Shape floating-point targets (examples,) like outputs (examples, 1).

    torch's regression losses would broadcast the two to (examples, examples) and train on
    nonsense with no more than a warning.
    """
    if (
        isinstance(outputs, Tensor)
        and isinstance(targets, Tensor)
        and targets.is_floating_point()
        and outputs.dim() == targets.dim() + 1
        and outputs.shape[-1] == 1
    ):
        return targets.unsqueeze(-1)
    return targets


def flatten(module: nn.Module) -> list[FlatGroup]:
    """Give a module's trained parameters and its buffers flat homes."""
    trained = [each for each in module.parameters() if each.requires_grad]
    return [*_flatten_parameters(trained), *_flatten_buffers(module)]


def _flatten_parameters(parameters: Sequence[nn.Parameter]) -> list[FlatGroup]:
    groups = []
    for dtype in _in_order(p.dtype for p in parameters):
        members = [p for p in parameters if p.dtype == dtype]
        group = FlatGroup("parameters", members)
        for parameter, view in zip(members, group.views, strict=True):
            parameter.data = view
        groups.append(group)
    return groups


def _flatten_buffers(module: nn.Module) -> list[FlatGroup]:
    buffers = list(module.buffers())
    groups = []
    for dtype in _in_order(b.dtype for b in buffers):
        members = [b for b in buffers if b.dtype == dtype]
        group = FlatGroup("buffers", members)
        _rebind_buffers(module, dict(zip(map(id, members), group.views, strict=True)))
        groups.append(group)
    return groups


def _rebind_buffers(module: nn.Module, views: dict[int, Tensor]) -> None:
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and id(buffer) in views:
                owner._buffers[name] = views[id(buffer)]


def _reclaim_buffers(module: nn.Module, group: FlatGroup) -> None:
    """Copy back buffers that the model assigned anew instead of writing to (``self.b = ...``)."""
    current = [b for b in module.buffers() if b.dtype == group.flat.dtype]
    if all(mine is view for mine, view in zip(current, group.views, strict=True)):
        return
    for mine, view in zip(current, group.views, strict=True):
        if mine is not view:
            view.copy_(mine)
    _rebind_buffers(module, dict(zip(map(id, current), group.views, strict=True)))


def _floats(state: dict[str, Any]) -> dict[str, Tensor]:
    """What of a parameter's optimizer state is floating-point."""
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }


def _in_order(dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
    """Distinct dtypes, first seen first."""
    return list(dict.fromkeys(dtypes))
