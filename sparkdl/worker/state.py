"""The part of a worker's state outside the center: saved in checkpoints, and for restarts."""

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
    """The part of a worker's state outside the center, for a checkpoint.

    Args:
        replica: the worker's.
        strategy: the one by which it trains.
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

    That is the random numbers, the strategy's state, and the part of the optimizer that the center
    does not hold. State that replicas do not exchange is left out, as the driver's memory must not
    grow with the number of workers.

    Args:
        replica: the worker's.
        strategy: the one by which it trains.
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
    except CheckpointError:  # the state of a user's optimizer, which nobody asked to save
        return pack(None)
