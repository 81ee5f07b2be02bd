"""How a block of a model runs: its activations kept or computed again, in either precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

KEEP = "keep float32"
_CONTAINERS = (nn.Sequential, nn.ModuleList)


def run_as(block: nn.Module, way: str) -> None:
    """Have a block run in the way that an option names."""
    how, precision = way.split()
    block.__dict__.pop("forward", None)
    if way != KEEP:
        block.forward = _Run(block, how == "recompute", precision == "bf16")


class _Run:
    """A block's ``forward``, with its activations kept or recomputed."""

    def __init__(self, block: nn.Module, recompute: bool, half: bool) -> None:
        self._block, self._recompute, self._half = block, recompute, half

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._recompute and torch.is_grad_enabled()):
            return self._run(*args, **kwargs)
        return checkpoint(
            self._run, *args, use_reentrant=False, context_fn=self._contexts, **kwargs
        )

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        forward = type(self._block).forward
        if not self._half:
            return forward(self._block, *args, **kwargs)
        device = next((each.device for each in tensors_in((args, kwargs))), torch.device("cpu"))
        with torch.autocast(device.type, dtype=torch.bfloat16):
            outputs = forward(self._block, *args, **kwargs)
        return tree_map(_as_float32, outputs)  # what the next block expects

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), self._again()

    @contextmanager
    def _again(self) -> Iterator[None]:
        """Compute again, but leave running means and the like as one forward pass leaves them."""
        owners = [(each, dict(each._buffers)) for each in self._block.modules()]
        for owner, buffers in owners:
            for name, buffer in buffers.items():
                owner._buffers[name] = None if buffer is None else buffer.clone()
        try:
            yield
        finally:
            for owner, buffers in owners:
                owner._buffers.update(buffers)


def _as_float32(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype is torch.bfloat16
    return value.float() if is_half else value


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors among nested values."""
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def blocks_of(model: nn.Module) -> list[str]:
    """The elements of the outermost lists and sequences of modules; without any, the children."""
    found: list[str] = []

    def descend(path: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            if isinstance(module, _CONTAINERS) and not isinstance(child, _CONTAINERS):
                found.append(path + name)
            else:
                descend(f"{path}{name}.", child)

    descend("", model)
    return found or [name for name, _ in model.named_children()]
