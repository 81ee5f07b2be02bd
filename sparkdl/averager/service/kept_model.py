"""What the driver keeps of the center, to return it in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass
class KeptModel:
    """A copy of the center of some time, without the optimizer's state; not written to.

    Attributes:
        epoch: after which it was the center.
        values: a tensor of ``center_dtype`` for each segment of the layout that is none of the
            optimizer's.
        saved: whether a checkpoint has it.
    """

    epoch: int
    values: Sequence[Tensor]
    saved: bool = False
