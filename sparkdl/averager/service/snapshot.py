"""What an averager begins with, and leaves for another one that goes on from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from sparkdl.averager.coordination.run_state import Restart
from sparkdl.averager.values.center_update import Memory


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


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """How far a training has come, with its values; an averager owns them from then on.

    Attributes:
        center: a tensor of ``center_dtype`` for each segment of the layout.
        memory: what the center's update remembers; None if it starts fresh.
        restart: how far the training of ``center`` has come.
        kept_model: the copy of the center kept up to then, if any.
    """

    center: Sequence[Tensor]
    memory: Memory | None = None
    restart: Restart = field(default_factory=Restart)
    kept_model: KeptModel | None = None
