"""Malformed input for the project's ports and files: one target per file.

``fuzz.py`` is the command. A target makes one input from a seed and has it read; ``loop.py`` is
what all of them share, ``shards.py`` spreads the inputs over processes that may be killed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # so that a process can begin to measure coverage before it imports anything
    from fuzzing.loop import Target

TARGETS = {
    "handshake": "fuzzing.handshake:Handshake",
    "trainings": "fuzzing.trainings:Trainings",
    "averager": "fuzzing.averager:AveragerTarget",
    "run": "fuzzing.run_service:RunTarget",
    "console": "fuzzing.console:ConsoleTarget",
    "stacks": "fuzzing.console:StacksTarget",
    "reshuffle": "fuzzing.reshuffle:ReshuffleTarget",
    "object_spec": "fuzzing.object_spec:ObjectSpecTarget",
    "model": "fuzzing.model:ModelTarget",
    "manifest": "fuzzing.checkpoint:ManifestTarget",
    "checkpoint": "fuzzing.checkpoint:CheckpointTarget",
    "state": "fuzzing.checkpoint:StateTarget",
    "tensors": "fuzzing.tensors:TensorsTarget",
    "columns": "fuzzing.columns:ColumnsTarget",
    "images": "fuzzing.images:ImagesTarget",
}
"""Where each target's class is; imported only when it is run."""


def target_of(name: str) -> Target:
    """The target with this name."""
    module, _, kind = TARGETS[name].partition(":")
    target: Target = getattr(importlib.import_module(module), kind)()
    return target
