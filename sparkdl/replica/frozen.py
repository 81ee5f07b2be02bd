"""The part of a model that is never trained, sent, averaged or saved, but is the same everywhere.

Parameters that require no gradient when a replica is built (a pretrained backbone below a new head
or low-rank adapters) are built by every worker and by the driver, and stay unchanged. A fingerprint
of their values tells whether all have built the same ones. A check at every exchange tells whether
one has begun to change, which the other replicas would never learn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
from torch import Tensor, nn

from sparkdl.checkpoint.tensor_file import octets_of
from sparkdl.errors import ModelError, TrainingError
from sparkdl.feed.fingerprint import odd_factors, weighted_sums

BLOCK_BYTES = 1 << 18
"""How much is summed into each word that is hashed; takes a third of the time of hashing it all."""
AT_A_GLANCE = 32
"""Checking this many tensors takes some 20 us, a hundredth of a small round."""


class FrozenParameters:
    """The parameters of a module that currently require no gradient.

    Args:
        module: the module, just built and on the device where it will stay.

    Raises:
        ModelError: one of them shares memory with one that requires a gradient.

    Attributes:
        numel: how many values they have in total.
        fingerprint: identifies them by name, dtype, shape and every bit of their values,
            independent of the device; empty if there are none.
    """

    def __init__(self, module: nn.Module) -> None:
        named = dict(module.named_parameters())
        frozen = {name: each for name, each in named.items() if not each.requires_grad}
        _require_apart(frozen, {k: each for k, each in named.items() if each.requires_grad})
        self._members = [_Frozen(name, each) for name, each in frozen.items()]
        self._next = 0
        self.numel = sum(each.numel() for each in frozen.values())
        together = "".join(f"{each.name} {each.digest} " for each in self._members)
        self.fingerprint = together and hashlib.sha256(together.encode()).hexdigest()[:16]

    def glance(self) -> None:
        """Check some of them, different ones each time, by what torch itself records of them.

        Raises:
            TrainingError: one now requires a gradient, or was written to and has other values.
        """
        some = self._members[self._next : self._next + AT_A_GLANCE]
        self._next = (self._next + AT_A_GLANCE) if len(some) == AT_A_GLANCE else 0
        for each in some:
            each.glance()

    def require_unchanged(self) -> None:
        """Check all of them, value by value: writing to ``parameter.data`` leaves no trace.

        Raises:
            TrainingError: one now requires a gradient, or has other values.
        """
        for each in self._members:
            each.glance()
            each.look()


class _Frozen:
    """One parameter."""

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name = name
        self.digest = _digest(parameter)
        self._parameter = parameter
        self._writes = _writes_to(parameter)

    def glance(self) -> None:
        """Check its values only if torch knows that they were written to."""
        if self._parameter.requires_grad:
            raise TrainingError(
                f"the parameter '{self.name}' required no gradient when the model was built, "
                "but does now. Only parameters that required one then are optimized and "
                "averaged. Build the model with requires_grad=True for every parameter that "
                "will ever be trained, and run the part not trained yet under torch.no_grad()"
            )
        writes = _writes_to(self._parameter)
        if writes != self._writes:
            self.look()
            self._writes = writes

    def look(self) -> None:
        """Check every value."""
        if _digest(self._parameter) != self.digest:
            raise TrainingError(
                f"the parameter '{self.name}' required no gradient when the model was built, "
                "and its values have changed since. Such parameters are not averaged. Make "
                "values that the model itself changes, such as a moving average of other "
                "parameters, a buffer (register_buffer): buffers are averaged"
            )


def _writes_to(parameter: nn.Parameter) -> int:
    """How often a parameter's values were written to, as far as torch counts."""
    # Torch does not count for a tensor made under torch.inference_mode.
    return 0 if parameter.is_inference() else parameter._version


def _digest(values: Tensor) -> str:
    """A digest of a tensor's dtype, shape and every bit."""
    found = hashlib.sha256(f"{values.dtype} {tuple(values.shape)}".encode())
    for plain in _plain(values.detach()):
        octets = np.asarray(octets_of(plain))
        whole = len(octets) - len(octets) % BLOCK_BYTES
        blocks = octets[:whole].reshape(-1, BLOCK_BYTES)
        found.update(weighted_sums(blocks, odd_factors(0, BLOCK_BYTES // 8)).tobytes())
        found.update(octets[whole:].tobytes())
    return found.hexdigest()


def _plain(values: Tensor) -> Iterator[Tensor]:
    """The tensors that own memory: for a quantized tensor its codes, scales and so on."""
    if not _is_wrapper(values):
        yield values
        return
    for name in values.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from _plain(getattr(values, name))


def _is_wrapper(values: Tensor) -> bool:
    """Whether a tensor's class keeps its values in other tensors."""
    return hasattr(values, "__tensor_flatten__")


def _require_apart(frozen: dict[str, nn.Parameter], trained: dict[str, nn.Parameter]) -> None:
    """Check that no frozen parameter shares memory with a trained one.

    Raises:
        ModelError: one does.
    """
    owners = {each.data_ptr(): name for name, each in trained.items() if each.numel()}
    for name, parameter in frozen.items():
        other = None if _is_wrapper(parameter) else owners.get(parameter.data_ptr())
        if other is not None and parameter.numel():
            raise ModelError(
                f"the parameter '{name}' requires no gradient, but shares memory with "
                f"'{other}', which does: training one would change the other. Put the same "
                "nn.Parameter in both places, or give one of them a clone() of the values"
            )
