"""The ways to run a block of a model, and what each takes.

A block keeps its activations or computes them again, in either precision. What that takes are its
seconds, and its bytes between and during the passes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from sparkdl.planner.step.knapsack import Option
from sparkdl.planner.step.layers import seconds_of
from sparkdl.planner.step.memory import Live, bytes_of, rows_of, tensors_of
from sparkdl.protocols import Batch
from sparkdl.replica.replica import Replica

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


def called_once(
    replica: Replica, batch: Batch, parts: Mapping[str, nn.Module]
) -> dict[str, list[bool]]:
    """Of the blocks that are called once, whether each tensor that they get needs a gradient."""
    found: dict[str, list[list[bool]]] = {}

    def called(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        needs = [each.requires_grad for each in tensors_in((args, kwargs))]
        found.setdefault(name, []).append(needs)

    with _hooks(parts, called):
        replica.forward(batch)
    trained = {n for n, part in parts.items() if any(p.requires_grad for p in part.parameters())}
    return {n: c[0] for n, c in found.items() if len(c) == 1 and (any(c[0]) or n in trained)}


@contextmanager
def _hooks(parts: Mapping[str, nn.Module], called: Any) -> Iterator[None]:
    handles = [
        part.register_forward_pre_hook(partial(called, name), with_kwargs=True)
        for name, part in parts.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class _Measured:
    """A block's option, with what it holds at the border to its neighbours.

    Attributes:
        option: it holds the block's inputs as far as it needs them, and none of its outputs.
        unheld: bytes of inputs that it does not hold.
        outputs: bytes of outputs that it holds.
    """

    option: Option
    unheld: int
    outputs: int


def measured(
    replica: Replica,
    batch: Batch,
    parts: Mapping[str, nn.Module],
    needs: dict[str, list[bool]],
    ways: Sequence[str],
) -> dict[str, tuple[Option, ...]]:
    """Each block's options, in the order of the forward pass, which stops for measuring."""
    found: dict[str, list[_Measured]] = {}
    given: dict[str, set[int]] = {}
    made: dict[str, set[int]] = {}

    def measure(name: str, block: nn.Module, args: Any, kwargs: Any) -> None:
        with torch.enable_grad():
            alone = _Alone(block, args, kwargs, needs[name])
            options: list[_Measured] = []
            for way in ways:
                kept_s = 1.01 * options[-1].option.seconds if way.startswith("recompute") else 0.0
                options += filter(None, [alone.option(way, kept_s)])
        found[name] = options
        given[name] = _addresses((args, kwargs))

    def after(name: str, _: nn.Module, args: Any, outputs: Any) -> None:
        made[name] = _addresses(outputs)

    handles = [parts[name].register_forward_hook(partial(after, name)) for name in needs]
    with torch.no_grad(), _hooks({name: parts[name] for name in needs}, measure):
        replica.outputs(batch)
    for handle in handles:
        handle.remove()

    options: dict[str, tuple[Option, ...]] = {}
    from_below = 0
    for name, above in itertools.zip_longest(found, list(found)[1:]):
        passed = above is not None and bool(made[name] & given[above])
        options[name] = tuple(
            replace(
                each.option,
                held=each.option.held
                + min(each.unheld, from_below)
                + (0 if passed else each.outputs),
            )
            for each in found[name]
        )
        from_below = max(each.outputs for each in found[name]) if passed else 0
    return options


class _Alone:
    """A block with the inputs that it gets in the model."""

    def __init__(self, block: nn.Module, args: Any, kwargs: Any, needs: list[bool]) -> None:
        self._block = block
        flags = iter(needs)

        def leaf(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.detach().requires_grad_(next(flags))

        self._inputs = tree_map(leaf, (args, kwargs))

    def option(self, way: str, least_s: float) -> _Measured | None:
        """Measure it; None if it cannot be computed again, because it changes its inputs."""
        buffers = {id(each): each.clone() for each in self._block.buffers()}
        run_as(self._block, way)
        try:
            inputs = self._copied()
            before = [each._version for each in tensors_in(inputs)]
            self._block.forward(*inputs[0], **inputs[1])
            if way.startswith("recompute") and before != [e._version for e in tensors_in(inputs)]:
                return None
            device = next((e.device for e in tensors_of(self._block)), torch.device("cpu"))
            # Where it was measured to take no more than keeping, that was the machine.
            seconds = max(seconds_of(self._forward_backward, device), least_s)
            held, working, unheld, outputs = self._bytes()
            return _Measured(Option(way, seconds, max(0, held), working), unheld, outputs)
        finally:
            run_as(self._block, KEEP)
            self._forget()
            for each in self._block.buffers():
                each.copy_(buffers[id(each)])

    def _copied(self) -> Any:
        return tree_map(lambda e: e.clone() if isinstance(e, Tensor) else e, self._inputs)

    def _forget(self) -> None:
        for each in (*self._block.parameters(), *tensors_in(self._inputs)):
            each.grad = None

    def _outputs(self, given: list[int] | None = None) -> list[Tensor]:
        args, kwargs = self._copied()
        if given is not None:
            given.extend(_addresses((args, kwargs)))
        return [e for e in tensors_in(self._block.forward(*args, **kwargs)) if e.requires_grad]

    def _forward_backward(self) -> None:
        outputs = self._outputs()
        torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])

    def _bytes(self) -> tuple[int, int, int, int]:
        """What is held between the passes, and what is needed besides in the backward pass.

        Returns:
            These, then what of the inputs is not held, and what of the outputs is.
        """
        self._forget()
        live = Live([*tensors_of(self._block), *tensors_in(self._inputs)])
        before = live.bytes
        with live:
            outputs = self._outputs()
            made, nodes = _addresses(outputs), [each.grad_fn for each in outputs]
            del outputs
            kept = sum(live.known.get(each, 0) for each in made)
            del nodes
            given: list[int] = []
            outputs = self._outputs(given)
            unheld = bytes_of(tensors_in(self._inputs)) - sum(live.known.get(e, 0) for e in given)
            after = live.bytes
            live.timeline.clear()
            torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
        return after - before - bytes_of(outputs), max(live.timeline) - after, unheld, kept


def _addresses(values: Any) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in tensors_in(values)}


def peaks_of(replica: Replica, batch: Batch, last: nn.Module) -> tuple[list[int], float]:
    """The most bytes of a step, and its seconds.

    Returns:
        The bytes until the last block's backward pass begins, from then on, and while the optimizer
        works; and the seconds.
    """
    begins: list[int] = []

    def mark(_: nn.Module, args: Any, outputs: Any) -> None:
        for each in tensors_in(outputs):
            if each.requires_grad:
                each.register_hook(  # type: ignore[no-untyped-call]
                    lambda _: begins.append(len(live.timeline))
                )

    live = Live(tensors_of(replica.module, replica.loss))
    with live:
        replica.step(batch)  # the optimizer makes its state
        live.timeline.clear()
        handle = last.register_forward_hook(mark)
        replica.forward_backward(rows_of(batch, batch.examples))
        handle.remove()
        done = len(live.timeline)
        replica.update()
    ends = (slice(begins[0]), slice(begins[0], done), slice(done, None))
    seconds = seconds_of(lambda: replica.step(batch), replica.device)
    return [max(live.timeline[end], default=0) for end in ends], seconds
