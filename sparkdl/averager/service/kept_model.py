"""What the driver keeps of the center, to return at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass
class KeptModel:
    """A copy of the center at some time, without the optimizer's state; not written to.

    Attributes:
        epoch: the epoch after which it was the center.
        values: a tensor of ``center_dtype`` for each segment of the layout except the optimizer's.
        saved: whether a checkpoint has it.
    """

    epoch: int
    values: Sequence[Tensor]
    saved: bool = False
