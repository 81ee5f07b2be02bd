"""A module's trained parameters and its buffers as views into one flat tensor per dtype.

So a contribution to a round is the flat tensor itself, and an update is one in-place write; nothing
is gathered or scattered per round.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from sparkdl.errors import ModelError
from sparkdl.protocols import Segment


class FlatGroup:
    """Tensors of one kind and dtype, all views into one flat tensor.

    A tensor's values keep their memory order, so a channels_last model stays one; every replica has
    to be built the same way. Complex numbers become two real ones each, which can be averaged like
    all others.

    Args:
        kind: ``parameters``, ``buffers`` or ``optimizer``.
        tensors: what the views are to be like; same dtype. They are not copied here, so that each
            can be replaced by its view, and freed, before the next one is.
        device: where the flat buffer is; None for the first tensor's.

    Attributes:
        flat: the values, shape (elements,), not initialized.
        views: one for each tensor, into ``flat``.
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
            self.views.append(self.flat.as_strided(tensor.shape, strides, start).data)
            start += tensor.numel()
        if self.flat.is_complex():
            self.flat = torch.view_as_real(self.flat).view(-1)

    @property
    def segment(self) -> Segment:
        """This group as it is described on the wire."""
        return Segment(self.kind, self.flat.dtype, self.flat.numel())


def flatten(module: nn.Module) -> list[FlatGroup]:
    """Move a module's trained parameters and its persistent buffers into flat tensors.

    Raises:
        ModelError: one is not dense, or of a type that cannot be sent.
    """
    _require_plain(module)
    trained = [each for each in module.parameters() if each.requires_grad]
    return [*_flatten_parameters(trained), *_flatten_buffers(module)]


def _require_plain(module: nn.Module) -> None:
    kinds = {"parameter": module.named_parameters(), "buffer": module.named_buffers()}
    for kind, tensors in kinds.items():
        for name, tensor in tensors:
            if tensor.layout is not torch.strided:
                raise ModelError(
                    f"the {kind} '{name}' has the layout {tensor.layout}; only dense tensors are "
                    "sent, averaged and saved. Register it dense and convert it in forward, or "
                    "keep it as a plain attribute if it never changes"
                )
            if not _can_be_pickled(tensor.dtype):
                raise ModelError(
                    f"the {kind} '{name}' is of {tensor.dtype}, and torch cannot load pickled "
                    "tensors of that type, so no executor could load the model. Register its "
                    "bytes, tensor.view(torch.uint8), and view them as that type in forward"
                )


@cache
def _can_be_pickled(dtype: torch.dtype) -> bool:
    try:
        pickle.loads(pickle.dumps(torch.empty(0, dtype=dtype)))
    except (AttributeError, RuntimeError):  # it has no storage class of its own
        return False
    return True


def _flatten_parameters(parameters: Sequence[nn.Parameter]) -> list[FlatGroup]:
    groups = []
    for dtype in _in_order(p.dtype for p in parameters):
        members = [p for p in parameters if p.dtype == dtype]
        group = FlatGroup("parameters", members)
        for parameter, view in zip(members, group.views, strict=True):
            parameter.data = view.copy_(parameter.detach())
        groups.append(group)
    return groups


def _flatten_buffers(module: nn.Module) -> list[FlatGroup]:
    buffers = list({id(b): b for b in persistent_buffers(module).values()}.values())
    groups = []
    for dtype in _in_order(b.dtype for b in buffers):
        members = [b for b in buffers if b.dtype == dtype]
        group = FlatGroup("buffers", members)
        for buffer, view in zip(members, group.views, strict=True):
            view.copy_(buffer.detach())
        rebind_buffers(module, dict(zip(map(id, members), group.views, strict=True)))
        groups.append(group)
    return groups


def has_gradient_hook(parameter: nn.Parameter) -> bool:
    """Whether code of the user's sees or changes a parameter's gradient; no copy of it has that."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that are part of a module's state, under each of their names.

    The others, registered with ``persistent=False``, are caches: what they hold depends on what a
    replica has seen, so a mean of them may be worth nothing.
    """
    return {
        f"{path}.{name}" if path else name: buffer
        for path, owner in module.named_modules(remove_duplicate=False)
        for name, buffer in owner._buffers.items()
        if buffer is not None and name not in owner._non_persistent_buffers_set
    }


def rebind_buffers(module: nn.Module, views: dict[int, Tensor]) -> None:
    """Replace buffers of a module, given by their ``id``."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and id(buffer) in views:
                owner._buffers[name] = views[id(buffer)]


def apart_from(home: Tensor, values: Tensor) -> Tensor:
    """The values, copied if they lie in the same flat tensor: two members may swap their places.

    Args:
        home: a member's place in a flat tensor.
        values: what the member now is.
    """
    in_flat = values.untyped_storage().data_ptr() == home.untyped_storage().data_ptr()
    return values.clone() if in_flat else values


def _in_order(dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
    """Distinct dtypes, in order of first appearance."""
    return list(dict.fromkeys(dtypes))
