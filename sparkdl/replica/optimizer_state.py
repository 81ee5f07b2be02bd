"""How an optimizer is built, and its floating-point state in a few flat buffers.

torch's optimizers count the steps of a parameter on the CPU, also if it is on a GPU. The driver has
everything on the CPU and knows no difference, so such a count has its place among the moments; a
GPU's flat tensor has a copy of it there.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparkdl.errors import TrainingError
from sparkdl.process.torch_settings import give_back_freed_memory
from sparkdl.protocols import OptimizerBuilder
from sparkdl.replica.flat import FlatGroup

FREED_BYTES = 64 << 20
"""The most state that is in memory twice while it moves."""

StateEntry = tuple[dict[str, Tensor], str]
"""Where an optimizer keeps one tensor: (a parameter's state, the key in it)."""


@dataclass(frozen=True)
class Mirror:
    """State that an optimizer keeps on another device than its parameters.

    Attributes:
        values: 1-D, on that device; the optimizer's tensors are views of it.
        flat: what replicas exchange.
        places: where those values are in ``flat``, shape of ``values``, int64, on its device.
    """

    values: Tensor
    flat: Tensor
    places: Tensor

    def show(self) -> None:
        """Copy the optimizer's values to where they are exchanged."""
        self.flat.index_copy_(0, self.places, self.values.to(self.flat.device))

    def take(self) -> None:
        """Copy what may have come of them back."""
        self.values.copy_(self.flat.index_select(0, self.places))


class OptimizerState:
    """Keeps one optimizer's state in flat tensors, even for parameters it has not stepped yet.

    Args:
        optimizer: an optimizer that has not taken a step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._device = next(p.device for group in optimizer.param_groups for p in group["params"])
        self._groups: list[FlatGroup] = []
        self._homes: list[Tensor] = []
        """Where each tensor of the optimizer's is: a view of a flat tensor or of a mirror."""
        self._mirrors: list[Mirror] = []
        self._reserved: dict[Tensor, dict[str, Any]] = {}
        """The state that parameters without a gradient so far will have, all zero."""
        self._stateless: set[Tensor] = set()
        self._lent = False
        """Whether others may have written to the flat tensors since the last step."""
        self._counted: dict[str, int] | None = None
        """How many values of each kind of state there are; None until someone asks."""

    def count(self) -> list[tuple[nn.Parameter, dict[str, Tensor], str]]:
        """Find out how much state there will be, without moving it; returns where it is."""
        self._reserve_missing()
        entries = self._entries()
        self._require_as_counted([(state, key) for _, state, key in entries])
        return entries

    def expect_as(self, counted: OptimizerState) -> None:
        """Expect as much state as another optimizer had that was built in the same way."""
        self._counted, self._stateless = counted._counted, counted._stateless

    def flatten(self) -> list[FlatGroup]:
        """Move the optimizer's floating-point state into flat tensors.

        Optimizers create their state in their first step, and some replace a tensor instead of
        writing to it, so the entries are compared each time.
        """
        self.take_over()
        self._reserve_missing()
        families: dict[torch.dtype, list[StateEntry]] = {}
        for _, state, key in self._entries():
            families.setdefault(state[key].dtype, []).append((state, key))
        entries = [entry for family in families.values() for entry in family]
        unmoved = len(entries) == len(self._homes) and all(
            state[key] is home for (state, key), home in zip(entries, self._homes, strict=True)
        )
        if not unmoved or self._counted is None:
            self._require_as_counted(entries)
            self._groups, self._mirrors, self._homes = [], [], []
            for family in families.values():
                self._move(family)
        for mirror in self._mirrors:
            mirror.show()
        self._lent = bool(self._reserved or self._mirrors)
        return self._groups

    def lend(self) -> list[tuple[nn.Parameter, dict[str, Tensor], str]]:
        """The same state where it is: (parameter, its state, a key in it), in the same order.

        Who writes to it calls ``adopt``.
        """
        self.take_over()
        return self.count()

    def adopt(self, parameter: Tensor) -> None:
        """Give the optimizer what was written to the state of a parameter that it has not stepped.

        Args:
            parameter: any; whose state is in use already stays as it is.
        """
        reserved = self._reserved.pop(parameter, None)
        if reserved is not None:
            known = self._optimizer.state.get(parameter, {})
            self._optimizer.state[parameter] = {**reserved, **known}

    def _move(self, family: Sequence[StateEntry]) -> None:
        """Move state of one dtype into a flat tensor, or into mirrors of its other devices."""
        tensors = [state[key] for state, key in family]
        group = FlatGroup("optimizer", tensors, self._device)
        homes, away = list(group.views), dict[torch.device, list[int]]()
        for index, tensor in enumerate(tensors):
            if is_away(tensor, self._device):
                away.setdefault(tensor.device, []).append(index)
        for indices in away.values():
            members = FlatGroup("optimizer", [tensors[index] for index in indices])
            places = []
            for index, view in zip(indices, members.views, strict=True):
                start = int(group.views[index].storage_offset())
                places.append(torch.arange(start, start + view.numel(), device=self._device))
                homes[index] = view
            self._mirrors.append(Mirror(members.flat, group.flat, torch.cat(places)))
        del tensors  # or none would be freed before all are copied
        freed = 0
        for (state, key), view, home in zip(family, group.views, homes, strict=True):
            values, state[key] = state[key].detach(), home
            view.copy_(values)
            if home is not view:
                home.copy_(values)
            freed += values.nbytes
            if freed > FREED_BYTES:
                del values
                give_back_freed_memory()
                freed = 0
        self._groups.append(group)
        self._homes += homes

    def take_over(self) -> None:
        """Give the optimizer what came of state in the segments that it does not use from there.

        Counts that it keeps on another device are copied back. Parameters that it has not stepped
        get the segments' state: other replicas, or the training that this one resumes, may have had
        gradients for them. Where nobody had any, the segments hold zeros, and the optimizer begins
        as it would by itself: with a step counter of 0, or with momentum initialized from the
        gradient.
        """
        lent, self._lent = self._lent, False
        if lent:
            for mirror in self._mirrors:
                mirror.take()
        for parameter, state in list(self._reserved.items()):
            # The optimizer's own, or the part of a checkpoint that is not in the segments.
            known = self._optimizer.state.get(parameter, {})
            if known or (lent and any(bool(values.any()) for values in floats_of(state).values())):
                self.adopt(parameter)

    def _require_as_counted(self, entries: Sequence[StateEntry]) -> None:
        """Check that there is exactly as much state as when it was first counted."""
        now: dict[str, int] = {}
        for state, key in entries:
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
                f"the state of {type(self._optimizer).__name__} has grown or shrunk since its "
                f"first step: {changes}. Replicas exchange the state of that step. Use an "
                "optimizer that creates all of its state in its first step, or let each replica "
                "keep its own: ParameterAveraging(average_optimizer_state=False)"
            )

    def _reserve_missing(self) -> None:
        """Find out what the state of parameters not yet stepped will look like.

        Every replica must have the same layout, even one without rows or one whose model leaves a
        parameter unused, and only the optimizer knows what its state looks like. So it steps those
        parameters once on zero gradients, after which they, their state and what the optimizer
        itself and its groups hold are restored: some optimizers count their steps there. Hooks on
        its steps are not called.
        """
        optimizer = self._optimizer
        trainable = [p for group in optimizer.param_groups for p in group["params"]]
        missing = [
            p
            for p in trainable
            if not optimizer.state.get(p) and p not in self._reserved and p not in self._stateless
        ]
        if not missing:
            return
        saved = [parameter.detach().clone() for parameter in missing]
        own = dict(vars(optimizer))
        # Hooks may count steps, or average parameters, where it could not be undone.
        optimizer._optimizer_step_pre_hooks = OrderedDict()
        optimizer._optimizer_step_post_hooks = OrderedDict()
        settings = copy.deepcopy([hyperparameters(group) for group in optimizer.param_groups])
        optimizer.zero_grad()
        for parameter in missing:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter, values in zip(missing, saved, strict=True):
                parameter.copy_(values)
                state = optimizer.state.pop(parameter, {})
                for tensor in floats_of(state).values():
                    tensor.zero_()
                if floats_of(state):
                    self._reserved[parameter] = state
                else:
                    self._stateless.add(parameter)
        put_back(vars(optimizer), own)
        for group, before in zip(optimizer.param_groups, settings, strict=True):
            put_back(group, before)

    def _entries(self) -> list[tuple[nn.Parameter, dict[str, Tensor], str]]:
        """Where the optimizer's floating-point state is or will be, in a fixed order."""
        return [
            (parameter, state, key)
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            for state in [self._optimizer.state.get(parameter) or self._reserved.get(parameter, {})]
            for key in sorted(floats_of(state), key=str)
        ]


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """What a parameter group holds besides its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def put_back(group: dict[str, Any], before: dict[str, Any]) -> None:
    """Give a group, or an optimizer's attributes, what was there before, and nothing else."""
    for key in hyperparameters(group).keys() - before.keys():
        del group[key]
    group.update(before)


def is_away(tensor: Tensor, device: torch.device) -> bool:
    """Whether an optimizer's tensor is not on the device of its parameters."""
    return tensor.device != device


def floats_of(state: dict[str, Any]) -> dict[str, Tensor]:
    """The floating-point part of a parameter's optimizer state, real or complex."""
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    }


NamedParameters = Iterable[tuple[str, nn.Parameter]]
"""(name in the module, parameter), as ``nn.Module.named_parameters`` yields them."""

NAMED = "named_parameters"
"""The name of a builder's first argument if it wants the parameters' names."""


def takes_names(build: OptimizerBuilder) -> bool:
    """Whether a builder takes parameters with their names: its first argument says so."""
    try:
        arguments = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):  # a built-in has no signature
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first = next(iter(arguments), None)
    return first is not None and first.kind in positional and first.name == NAMED


def build_optimizer(build: OptimizerBuilder, named: NamedParameters) -> torch.optim.Optimizer:
    """Build the optimizer for a module's parameters.

    Args:
        build: the user's function, or optimizer class.
        named: the parameters to train, in the module's order.
    """
    pairs = list(named)
    optimizer = build(pairs if takes_names(build) else [parameter for _, parameter in pairs])
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer  # who asked for it refuses it in words
    # Schedules write to a learning rate that is a tensor: here it would be the builder's own, from
    # which the next optimizer is built, on the workers too.
    clones: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        if isinstance(rate := group.get("lr"), Tensor):
            group["lr"] = clones.setdefault(rate, rate.clone())
    return optimizer
