"""Threshold encoding: the large entries of a change are sent, and the rest is kept for later.

Strom 2015, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing". With d a change
of the parameters, t the threshold and r the residual, initially 0:

    r  <-  r + d          q  <-  sign(r) * t where |r| >= t, else 0          r  <-  r - q

and q is sent. Large entries are sent more than once; only what is clipped is lost. A threshold has
8 significant bits, so that r - q is exact while r < 65,536 * t: all q and the residual then add up,
to the bit, to what has gone in.

What goes beyond Strom is Deeplearning4j's (``AdaptiveThresholdAlgorithm``,
``ResidualClippingPostProcessor``, ``EncodingHandler``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from sparkdl.strategies.threshold.threshold_gradient_sharing import ThresholdGradientSharing

DECAY = 0.5 ** (1 / 20)
"""The factor by which a threshold changes from one message to the next: it doubles in 20."""
CLIP_EVERY = 5
"""Messages between two clippings of the residual."""
SHAKE = 3
"""The divisor for the threshold of a shake-up message."""
_BLOCK = 1 << 15
"""Values encoded together: three stretches of this size fit in the cache."""
_MANY = 1 / 32
"""If more of a block is sent, whole blocks are faster than positions in them."""


class ThresholdEncoder:
    """One worker's residual, and the threshold of its next message.

    Args:
        encoding: says how changes are encoded.
        center: what the first change is measured from; a float32 or float64 tensor for each that is
            encoded, 1-D, on the CPU.

    Attributes:
        threshold: of the next message.
        messages: how many there have been.
        residuals: what was not sent, in tensors like the center's.
    """

    def __init__(self, encoding: ThresholdGradientSharing, center: Sequence[Tensor]) -> None:
        self.threshold = short(encoding.threshold)
        self.messages = 0
        self.residuals = [torch.zeros_like(values) for values in center]
        self._encoding = encoding
        self._values = max(1, sum(len(values) for values in center))

    def encode(
        self, values: Sequence[Tensor], center: Sequence[Tensor], out: Sequence[Tensor]
    ) -> None:
        """Find out what to send.

        Args:
            values: what the worker has trained, 1-D, on any device.
            center: what it began with.
            out: overwritten with what to send; may be ``center``.
        """
        encoding = self._encoding
        self.messages += 1
        shake = bool(encoding.shake_every) and self.messages % (encoding.shake_every or 1) == 0
        threshold = short(self.threshold / SHAKE) if shake else self.threshold
        sent = 0
        for mine, held, residual, share in zip(values, center, self.residuals, out, strict=True):
            here = mine.detach().to("cpu", residual.dtype)
            arrays = (here.numpy(), held.numpy(), residual.numpy(), share.numpy())
            sent += _encode(*arrays, residual.numpy().dtype.type(threshold))
        if encoding.clip is not None and self.messages % CLIP_EVERY == 0 and threshold:
            most = encoding.clip * self.threshold
            for residual in self.residuals:
                residual.clamp_(-most, most)
        if encoding.sparsity is not None and not shake:
            self._adapt(sent / self._values, *encoding.sparsity)

    def _adapt(self, part: float, least: float, most: float) -> None:
        """Change the threshold after a message with this part of the entries."""
        if part > most:
            self.threshold = short(self.threshold / DECAY)
        elif part < least:
            self.threshold = short(self.threshold * DECAY)

    def saved(self) -> dict[str, Any]:
        """For ``restore``."""
        residuals = {f"residual.{index}": values for index, values in enumerate(self.residuals)}
        return {**residuals, "threshold": self.threshold, "messages": self.messages}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what was ``saved``."""
        for index, residual in enumerate(self.residuals):
            residual.copy_(saved[f"residual.{index}"])
        self.threshold, self.messages = saved["threshold"], saved["messages"]


def short(threshold: float) -> float:
    """The nearest threshold with 8 significant bits; no less than float32's smallest."""
    least = float(torch.finfo(torch.bfloat16).tiny)
    rounded = float(torch.tensor(threshold, dtype=torch.float64).bfloat16())
    return max(rounded, least) if threshold else 0.0


def _encode(
    values: np.ndarray,
    center: np.ndarray,
    residual: np.ndarray,
    out: np.ndarray,
    threshold: np.floating[Any],
) -> int:
    """Encode a stretch; returns how many entries to send.

    It takes three reads and two writes of each value, with no other pass over memory.
    """
    sent = 0
    magnitude = np.empty(min(_BLOCK, len(values)), residual.dtype)
    large = np.empty(len(magnitude), bool)
    for start in range(0, len(values), _BLOCK):
        part = slice(start, start + _BLOCK)
        share, rest = out[part], residual[part]
        np.subtract(values[part], center[part], out=share)
        rest += share
        if not threshold:
            share[:], rest[:] = rest, 0
            sent += len(share)
            continue
        sizes, is_large = magnitude[: len(rest)], large[: len(rest)]
        np.greater_equal(np.abs(rest, out=sizes), threshold, out=is_large)
        count = int(np.count_nonzero(is_large))
        sent += count
        if count > len(rest) * _MANY:
            np.copysign(np.multiply(is_large, threshold, out=sizes), rest, out=share)
            rest -= share
            continue
        places = is_large.nonzero()[0]
        signed = np.copysign(threshold, rest[places])
        share.fill(0)
        share[places] = signed
        rest[places] -= signed
    return sent
