"""A module's trained parameters and its buffers as views into one flat tensor per dtype.

So a contribution to a round is the flat tensor itself, and an update is one in-place write; nothing
is gathered or scattered per round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from sparkdl.protocols import Segment


class FlatGroup:
    """Tensors of one kind and dtype, all views into one flat tensor.

    A tensor's values keep their memory order, so a channels_last model stays one; every replica has
    to be built the same way. Complex numbers, except in buffers, become two real ones each, which
    can be averaged like all others.

    Args:
        kind: ``parameters``, ``buffers`` or ``optimizer``.
        tensors: the tensors to move into the flat buffer; same dtype.
        device: where the flat buffer is; None for the first tensor's.
    """

    def __init__(
        self, kind: str, tensors: Sequence[Tensor], device: torch.device | None = None
    ) -> None:
        self.kind = kind
        first, numel = tensors[0], sum(t.numel() for t in tensors)
        self.flat = torch.empty(numel, dtype=first.dtype, device=device or first.device)
        self.views: list[Tensor] = []
        start = 0
        for tensor in tensors:
            # These are the tensor's own strides, if it has no gaps or overlaps.
            strides = torch.empty_like(tensor, device="meta").stride()
            # By ``data`` each has a version counter of its own: a model may write to one buffer in
            # its forward pass after autograd has saved another.
            view = self.flat.as_strided(tensor.shape, strides, start).data
            view.copy_(tensor.detach())
            self.views.append(view)
            start += tensor.numel()
        if self.flat.is_complex() and kind != "buffers":
            self.flat = torch.view_as_real(self.flat).view(-1)

    @property
    def segment(self) -> Segment:
        """This group as it is described on the wire."""
        return Segment(self.kind, self.flat.dtype, self.flat.numel())


def flatten(module: nn.Module) -> list[FlatGroup]:
    """Move a module's trained parameters and its buffers into flat tensors."""
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
        rebind_buffers(module, dict(zip(map(id, members), group.views, strict=True)))
        groups.append(group)
    return groups


def rebind_buffers(module: nn.Module, views: dict[int, Tensor]) -> None:
    """Replace buffers of a module, given by their ``id``."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and id(buffer) in views:
                owner._buffers[name] = views[id(buffer)]


def reclaim_buffers(module: nn.Module, group: FlatGroup) -> None:
    """Copy back buffers that the model reassigned instead of writing to (``self.b = ...``)."""
    current = [b for b in module.buffers() if b.dtype == group.flat.dtype]
    if all(mine is view for mine, view in zip(current, group.views, strict=True)):
        return
    for mine, view in zip(current, group.views, strict=True):
        if mine is not view:
            view.copy_(mine)
    rebind_buffers(module, dict(zip(map(id, current), group.views, strict=True)))


def _in_order(dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
    """Distinct dtypes, in order of first appearance."""
    return list(dict.fromkeys(dtypes))
