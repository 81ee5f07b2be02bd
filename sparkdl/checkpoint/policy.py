"""Whether a training is checkpointed, and whether a checkpoint that is found belongs to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sparkdl.checkpoint.storage import OpenElsewhere
from sparkdl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CheckpointPolicy:
    """What the user asks of checkpoints.

    Attributes:
        path: the directory; see ``storage.CheckpointStore``.
        every: epochs between two.
        every_rounds: rounds between two, besides those at the ends of epochs; None for no others.
        keep_last: how many are kept.
        resume: ``auto`` goes on from the newest checkpoint if there is one; ``never`` starts anew.
        open_elsewhere: see ``storage.CheckpointStore``.
        application: what the driver belongs to, for another that is refused the same directory.
    """

    path: str
    every: int = 1
    every_rounds: int | None = None
    keep_last: int = 2
    resume: Literal["auto", "never"] = "auto"
    open_elsewhere: OpenElsewhere | None = None
    application: str | None = None


def require_same(what: str, saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Check that a checkpoint is of the training that wants to go on from it.

    Args:
        what: what is compared, for the message.
        saved: as it was when the checkpoint was written; JSON.
        present: as it is now; JSON.

    Raises:
        ConfigError: they differ; the message says in what.
    """
    for key in present:
        # As text, because NaN differs from itself and JSON makes lists of tuples.
        before, now = json.dumps(saved.get(key)), json.dumps(present[key])
        if before != now:
            raise ConfigError(
                f"the checkpoint is of another training: its {what} has {key} {before}, this one "
                f"{now}. Train as before, give another checkpointPath, or set resume='never'"
            )
