"""The checkpoint that a training resumes from, and the one that is written on SIGTERM."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sparkdl.averager.service.saving import CheckpointPlan, Resumed
from sparkdl.averager.service.server import Averager
from sparkdl.checkpoint.policy import CheckpointPolicy, require_same
from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.driver.identity import has_ended, require_progress
from sparkdl.errors import PreemptedError

logger = logging.getLogger(__name__)

SIGTERM_S = 4.0
"""Seconds to wait for the next commit after SIGTERM; whoever sent it may kill us after ten."""


def plan_of(policy: CheckpointPolicy, epochs: int, config: Mapping[str, Any]) -> CheckpointPlan:
    """When and where checkpoints are written, and which training they belong to."""
    return CheckpointPlan(
        store=CheckpointStore(
            policy.path, keep_last=policy.keep_last, open_elsewhere=policy.open_elsewhere
        ),
        every_epochs=policy.every_epochs,
        every_rounds=policy.every_rounds,
        last_epoch=epochs,
        config=config,
    )


def newest_checkpoint(
    policy: CheckpointPolicy, plan: CheckpointPlan, epochs: int, world_size: int
) -> Resumed | None:
    """The newest checkpoint, if it is to be used and fits; its rows are not checked here."""
    saved = plan.store.newest() if policy.resume == "auto" else None
    if saved is None:
        return None
    resumed = Resumed.of(saved)
    require_same(saved.directory, saved.description["config"], plan.config)
    require_progress(resumed, epochs, world_size)
    if not has_ended(resumed, epochs):
        logger.info("training resumes from %s", saved.directory)
    return resumed


@contextmanager
def saved_on_sigterm(averager: Averager, plan: CheckpointPlan | None) -> Iterator[None]:
    """On SIGTERM, write a checkpoint, then exit as a terminated process does.

    It waits for the next commit, because there the workers' states match the center; if none comes
    in time, the last one is written without them. A handler set by the user stays in place.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if plan is None or not in_main_thread or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    told_to_end = PreemptedError("the driver received SIGTERM")
    timer = threading.Timer(SIGTERM_S, averager.fail, [told_to_end])
    timer.name, timer.daemon = "sparkdl-sigterm", True

    def on_sigterm(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        averager.save_and_fail(told_to_end)
        timer.start()

    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    except PreemptedError:
        if not averager.progress.all_rounds:
            logger.warning("received SIGTERM before anything was committed")
        elif averager.save_center():
            logger.warning("received SIGTERM; the training can resume from %s", plan.store.path)
        else:
            logger.warning(
                "received SIGTERM; progress since the last checkpoint in %s is lost, because no "
                "other could be written there",
                plan.store.path,
            )
        sys.exit(128 + signal.SIGTERM)
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
