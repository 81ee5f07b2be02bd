"""What of a worker's state is not part of the center: saved in checkpoints, and for restarts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from sparkdl.checkpoint.worker_state import pack_worker_state
from sparkdl.errors import CheckpointError
from sparkdl.replica import Replica
from sparkdl.strategies.base import Strategy


def checkpointed_state(
    replica: Replica, strategy: Strategy[Any], saved: Mapping[str, Any]
) -> bytes:
    """What of a worker is not part of the center, for a checkpoint.

    Args:
        replica: the worker's.
        strategy: by which it trains.
        saved: what the strategy saves of its state there.
    """
    return pack_worker_state(
        replica.optimizer,
        replica.device,
        center_has_optimizer=strategy.needs.exchanges_optimizer_state,
        schedule_steps=replica.schedule.steps,
        of_strategy=saved,
    )


def restart_state(replica: Replica, strategy: Strategy[Any], saved: Mapping[str, Any]) -> bytes:
    """What the driver keeps of a worker, to restart all of them from a commit.

    The random numbers, the strategy's state, and of the optimizer what the center does not hold.
    State that replicas do not exchange is left out, for the driver's memory must not grow with the
    workers.

    Args:
        replica: the worker's.
        strategy: by which it trains.
        saved: what the strategy saves of its state there.
    """
    pack = partial(
        pack_worker_state,
        device=replica.device,
        center_has_optimizer=True,
        schedule_steps=replica.schedule.steps,
        of_strategy=saved,
    )
    optimizer = replica.optimizer if strategy.needs.exchanges_optimizer_state else None
    try:
        return pack(optimizer)
    except CheckpointError:  # of an optimizer of the user's, which nobody asked to be saved
        return pack(None)
