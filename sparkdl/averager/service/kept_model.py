"""The copy of the center that the driver keeps, to return it in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass
class KeptModel:
    """A copy of an earlier center, without the optimizer's state; not written to.

    Attributes:
        epoch: the epoch after which it was the center.
        values: a tensor of ``center_dtype`` for each segment of the layout except the optimizer's.
        saved: whether a checkpoint holds it.
    """

    epoch: int
    values: Sequence[Tensor]
    saved: bool = False
